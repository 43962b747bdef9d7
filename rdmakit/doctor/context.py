"""What a check may look at: files, commands, settings and ranks of one node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from rdmakit.discovery.machine import COMMANDS
from rdmakit.discovery.settings import PREFIXES, settings
from rdmakit.doctor.profile import Profile
from rdmakit.drivers.host import HostTree, Runner, run
from rdmakit.topology.fabric import Fabric, classify
from rdmakit.topology.model import Machine
from rdmakit.topology.texts import Texts

__all__ = ["PREFIXES", "Context", "RankView", "missing", "settings"]


class RankView(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank's own process tells of itself; a child of it could not know."""

    rank: int
    local_rank: int
    host: str
    pid: int
    environ: dict[str, str]
    """Settings by :data:`PREFIXES`."""
    facts: dict[str, str]
    """``mpi`` (library), ``mpi_cuda`` (yes, no or unknown), ``ucx`` (release and file) and what
    else the rank's process knows. A fact that is not known is not there."""


@dataclass(frozen=True)
class Context:
    """One node, of which a directory of its files may be all there is."""

    tree: HostTree
    machine: Machine
    texts: Texts
    environ: Mapping[str, str]
    """Settings of the node's first rank, or of the shell; collected ones with ``--from``."""
    live: bool
    """Whether this is the machine itself."""
    ranks: tuple[RankView, ...] = ()
    """Ranks on this node; none offline, and one without a launcher."""
    job_size: int = 1
    profile: Profile = field(default_factory=Profile)
    """Values expected of this type of machine."""
    runner: Runner = run
    outputs: Mapping[str, str] = field(default_factory=dict)
    """Outputs of commands by :data:`COMMANDS`' file names, where there are only files."""

    told: dict[str, str | None] = field(default_factory=dict, repr=False, compare=False)
    """What commands printed when they ran here: each runs once."""

    @cached_property
    def fabric(self) -> Fabric:
        """Which RDMA ports carry the job."""
        return classify(self.machine)

    def read(self, path: str) -> str | None:
        """Return a file's text without spaces at its ends, None where it cannot be read."""
        text = self.tree.read_text(path)
        return None if text is None else text.strip()

    def output(self, name: str, seconds: float = 20.0) -> str | None:
        """Return what a command of :data:`COMMANDS` prints, by its file's name; None: not here."""
        if name in self.outputs:
            return self.outputs[name]
        if not self.live:
            return None
        if name not in self.told:
            result = self.runner(COMMANDS[name], seconds)
            nothing = result.error or not (result.stdout or result.ok)
            self.told[name] = None if nothing else result.stdout + result.stderr
        return self.told[name]

    def has(self, need: str) -> str:
        """Return why ``need`` (see :class:`Check`) is not met, or nothing."""
        if need == "gpu":
            return "" if self.machine.gpus else "no NVIDIA GPU is visible here"
        if need == "rdma":
            return "" if self.machine.nics else "no RDMA device (InfiniBand, RoCE) is here"
        if need == "live":
            return "" if self.live else "needs the machine itself, not its files"
        if need == "job":
            return "" if self.job_size > 1 else "needs several ranks: start it with mpirun"
        raise AssertionError(f"unknown need {need!r}")


def missing(context: Context, needs: Sequence[str]) -> str:
    """Return the first reason why a check with these needs has nothing to do, or nothing."""
    return next((why for need in needs if (why := context.has(need))), "")
