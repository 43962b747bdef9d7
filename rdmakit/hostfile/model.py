"""What a hostfile says, whatever launcher it is for."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field

__all__ = ["DIALECTS", "Entry", "Host", "Hostfile", "Problem", "is_address", "short_name"]

DIALECTS = {
    "openmpi": "Open MPI: node01 slots=8 (DeepSpeed and Horovod read that too)",
    "hydra": "MPICH and Intel MPI (hydra): node01:8",
    "intelmpi": "Intel MPI's -machinefile: node01:8",
    "mvapich": "MVAPICH's mpirun_rsh: node01:8:mlx5_0",
    "deepspeed": "DeepSpeed: node01 slots=8, on every line",
    "slurm": "Slurm's node lists: node[001-016,020]",
    "plain": "names only, one a line",
}


@dataclass(frozen=True)
class Entry:
    """A line that names a host."""

    line: int
    host: str
    slots: int | None = None
    """As given; None where the line does not say."""
    max_slots: int | None = None
    user: str | None = None
    hca: str | None = None


@dataclass(frozen=True)
class Problem:
    """Something wrong, or worth knowing, in a file."""

    severity: str
    """error or warning."""
    text: str
    line: int | None = None
    """None: the file as a whole."""

    def __str__(self) -> str:
        place = f"line {self.line}: " if self.line is not None else ""
        return f"{self.severity}: {place}{self.text}"


@dataclass(frozen=True)
class Host:
    """A host with all that its lines say together."""

    name: str
    slots: int | None
    """Ranks that it takes; None: left to the launcher."""
    slots_from: str
    """Where that number comes from."""
    lines: tuple[int, ...]
    max_slots: int | None = None
    user: str | None = None
    hcas: tuple[str, ...] = ()


@dataclass(frozen=True)
class Hostfile:
    """A whole file."""

    dialect: str
    entries: tuple[Entry, ...] = ()
    problems: tuple[Problem, ...] = ()
    hosts: tuple[Host, ...] = ()
    """In the order of their first lines."""
    expressions: tuple[tuple[int, str, tuple[str, ...]], ...] = field(default=())
    """Slurm's node lists: (line, text, names)."""

    @property
    def errors(self) -> tuple[Problem, ...]:
        """Problems that make the file unusable."""
        return tuple(problem for problem in self.problems if problem.severity == "error")

    @property
    def total(self) -> int | None:
        """Slots of all hosts; None where some are left to the launcher or the file has errors."""
        slots = [host.slots for host in self.hosts]
        if not slots or None in slots or self.errors:
            return None
        return sum(count for count in slots if count is not None)


def is_address(name: str) -> bool:
    """Return whether a host is given by IP address."""
    try:
        ipaddress.ip_address(name.strip("[]").partition("%")[0])
    except ValueError:
        return False
    return True


def short_name(name: str) -> str:
    """Return the name by which Open MPI knows a host: without its domain."""
    return name if is_address(name) else re.split(r"\.", name, maxsplit=1)[0]
