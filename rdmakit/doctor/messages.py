"""What the processes of one run tell each other, as lines of JSON."""

from __future__ import annotations

from typing import Any

import msgspec

from rdmakit.doctor.context import RankView
from rdmakit.doctor.model import Finding
from rdmakit.topology.model import Machine

__all__ = ["NodeReport", "Order", "Word"]


class Order(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a worker is to do."""

    checks: list[str]
    """Identifiers, in the order in which they run."""
    ranks: list[RankView] = []
    job_size: int = 1
    profile: str = ""
    """Path of a site's profile; nothing: the packaged ones."""
    source: str = ""
    """Directory or file that describes a machine; nothing: this one."""


class Word(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a worker says: that it begins something, or what came of it."""

    doing: str = ""
    """Check that begins; ``look`` while the machine is looked at."""
    check: str = ""
    """Check that has ended."""
    findings: list[Finding] = []
    machine: Machine | None = None
    environ: dict[str, str] = {}
    """Settings of the worker's environment, or collected ones."""
    facts: dict[str, Any] = {}
    """What the node tells the others of itself, for comparisons; see ``serve``."""


class NodeReport(msgspec.Struct, kw_only=True):
    """All that is known of one node. Filled in place by who listens."""

    host: str
    ranks: list[int] = []
    findings: list[Finding] = []
    complete: bool = False
    """Whether every check of it has answered or was ended by its own supervisor."""
    machine: Machine | None = None
    environ: dict[str, str] = {}
    facts: dict[str, Any] = {}
    """See :class:`Word`."""
    views: list[RankView] = []
    doing: str = ""
    """Check that was last heard to begin."""

    def hear(self, word: Word) -> None:
        """Take over what a word tells."""
        self.doing = word.doing
        self.findings += word.findings
        if word.machine is not None:
            self.machine = word.machine
            self.environ = dict(word.environ)
        self.facts = self.facts or word.facts
