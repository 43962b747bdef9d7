"""What is run inside the emulated machines: named steps, declared by the test modules.

Each module that is collected adds its steps here, and one boot of the machines runs them all, in
the order of their declaration. A step is one command on node0, mostly an mpirun over both machines.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    "AGENT",
    "LINK_DOWN",
    "LINK_UP",
    "MTU",
    "PYTHON",
    "Step",
    "add",
    "as_json",
    "declared",
    "mtu",
]

PYTHON = sys.executable
AGENT = "/run/rdma-hosts/agent"
MTU = 4200
"""Of the fabric: the least that lets RoCE use its largest, 4096."""
WAIT_SECONDS = 120
"""Deadline of the product's waits: emulation is slow, and slower on a busy machine."""

# eth0 joins the machines besides the fabric. MPI keeps to it, so that the RDMA devices' counters
# count the product's packets alone and a fault of eth1 leaves mpirun alive.
_MPIRUN = (
    "--host", "node0:{slots},node1:{slots}", "--map-by", "ppr:{slots}:node", "--bind-to", "none",
    "--prtemca", "plm_ssh_agent", AGENT, "--prtemca", "prte_if_include", "eth0",
    "--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp", "--mca", "btl_tcp_if_include", "eth0",
    "--mca", "mpi_yield_when_idle", "1",
)  # fmt: skip

LINK_DOWN = "ip link set eth1 down"
LINK_UP = """ip link set eth1 up
for i in $(seq 100); do
  grep -q ACTIVE /sys/class/infiniband/rxe0/ports/1/state && exit 0
  sleep 0.1
done
echo 'rxe0 did not become active again'
exit 1"""


def mtu(nbytes: int) -> str:
    """Return the commands that give a machine's fabric another MTU."""
    return f"ip link set eth1 mtu {nbytes}"


@dataclass(frozen=True)
class Step:
    """One command and what belongs to it."""

    name: str
    command: tuple[str, ...]
    """Arguments of the Python under test, or with ``ranks=0`` a whole command. ``{folder}`` stands
    for the folder that both machines and the tests see, ``{name}`` for the step's name."""
    ranks: int = 1
    """Ranks on each machine, by mpirun; 0: the command itself, on node0."""
    env: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 300.0
    """Limit; then the command and its children are killed and the next step is run."""
    before: tuple[tuple[int, str], ...] = ()
    """(machine, shell commands); the step is not run if one fails."""
    after: tuple[tuple[int, str], ...] = ()
    """The same, run whatever became of the step: takes a fault back."""

    def variables(self) -> dict[str, str]:
        """Return what is set for it."""
        return {"RDMAKIT_TIMEOUT": str(WAIT_SECONDS), **self.env}

    def words(self, folder: Path) -> list[str]:
        """Return the whole command."""
        command = [
            word.replace("{folder}", str(folder)).replace("{name}", self.name)
            for word in self.command
        ]
        if not self.ranks:
            return command
        options = [word.format(slots=self.ranks) for word in _MPIRUN]
        forward = [word for name in ("PYTHONPATH", *self.variables()) for word in ("-x", name)]
        mpirun = str(Path(PYTHON).parent / "mpirun")
        return [mpirun, *options, *forward, "-n", str(2 * self.ranks), PYTHON, *command]


_STEPS: dict[str, Step] = {}


def add(step: Step) -> Step:
    """Declare a step; called when a test module is imported."""
    if _STEPS.setdefault(step.name, step) is not step:
        raise ValueError(f"two steps of the name {step.name!r}")
    return step


def declared() -> tuple[Step, ...]:
    """Return the steps of all test modules that were imported."""
    return tuple(_STEPS.values())


def as_json(step: Step, folder: Path) -> dict[str, Any]:
    """Return the step as the driver reads it."""
    return {**asdict(step), "env": step.variables(), "words": step.words(folder)}
