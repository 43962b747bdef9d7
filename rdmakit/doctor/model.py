"""What a check is, and what it finds. Pure."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from rdmakit.doctor.context import Context

__all__ = ["Check", "Finding", "Status", "worst"]


class Status(enum.StrEnum):
    """How a check ended, the worst first."""

    FAIL = "fail"
    """A job fails, or is many times slower than the machine allows."""
    WARN = "warn"
    """Slower than need be, or a trap that is not sprung yet."""
    UNKNOWN = "unknown"
    """It should be known and could not be found out; the text says why."""
    OK = "ok"
    SKIPPED = "skipped"
    """There is nothing here to check; the text says what is not here."""

    @property
    def badness(self) -> int:
        """Number to sort by, the worst lowest."""
        return list(Status).index(self)


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that a check found."""

    check: str
    """Identifier of the check, which never changes: ``host.memlock``."""
    status: Status
    found: str
    """What is there, in words with numbers: ``64 KiB``."""
    subject: str = ""
    """Device, port, rank or pair it is about; nothing for the whole node."""
    expected: str = ""
    why: str = ""
    """Why it matters; the check's own sentence where empty."""
    cure: str = ""
    """A command or setting that puts it right; required with fail and warn."""
    urgency: int = 50
    """Which cure to do first, 0 to 99: what blocks other things is lower."""


@dataclass(frozen=True)
class Check:
    """A check of one node. Looks through the context only, so that it runs on fake machines."""

    id: str
    """``group.name`` in lower case; scripts depend on it, so it never changes."""
    title: str
    why: str
    """Why it matters, one sentence."""
    run: Callable[[Context], Iterable[Finding]]
    """Yields findings; at least one, and ``skipped`` where there is nothing to check."""
    needs: Sequence[str] = ()
    """What must be there, else the check is skipped with this reason: ``gpu``, ``rdma``,
    ``live`` (the machine itself, not a directory of its files), ``job`` (more than one rank)."""
    seconds: float = 20.0
    """After which it is ended and unknown."""

    def finding(self, status: Status, found: str, **more: object) -> Finding:
        """Return a finding of this check."""
        return Finding(check=self.id, status=status, found=found, **more)  # type: ignore[arg-type]


def worst(findings: Iterable[Finding]) -> Status:
    """Return the worst status; ``ok`` of none."""
    return min((f.status for f in findings), key=lambda s: s.badness, default=Status.OK)
