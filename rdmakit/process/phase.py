"""What this rank is doing now: written on every call, read when something goes wrong.

The record is one tuple in one attribute, replaced as a whole, so that the watchdog thread reads
a consistent state without a lock on the writer's side.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from rdmakit.config import format_size

__all__ = ["Phase", "Snapshot", "current"]

Snapshot = tuple[str, tuple[int, ...], int, float, float | None]
"""Name, peers waited for, bytes, monotonic start, monotonic deadline of a blocking MPI call."""

_SHOWN_PEERS = 8


class Phase:
    """The phase of one process; use the module's ``current``.

    ``enter`` and ``restore`` are for the thread that communicates; any thread may read.
    """

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now: Snapshot = ("", (), 0, monotonic(), None)
        """The present state; a name of '' is outside of any call."""

    def enter(
        self,
        name: str,
        peers: tuple[int, ...] = (),
        nbytes: int = 0,
        timeout: float | None = None,
        start: float = 0.0,
    ) -> Snapshot:
        """Begin a phase and return the one before it, to be given to ``restore``.

        Args:
            name: What is done, such as ``allreduce/hierarchical``.
            peers: Ranks that are waited for, as far as they are known.
            nbytes: Bytes that the call moves.
            timeout: Seconds after which the watchdog ends the job. Only for calls that block
                inside MPI; waits of our own have their own deadline.
            start: ``time.monotonic()`` where the caller has just read it: half of the cost.
        """
        before = self.now
        if not start:
            start = monotonic()
        self.now = (name, peers, nbytes, start, None if timeout is None else start + timeout)
        return before

    @property
    def watched(self) -> bool:
        """Whether the present phase has a deadline that the watchdog looks at."""
        return self.now[4] is not None

    def restore(self, before: Snapshot) -> None:
        """End a phase: return to what ``enter`` returned."""
        self.now = before

    @contextmanager
    def during(
        self,
        name: str,
        peers: tuple[int, ...] = (),
        nbytes: int = 0,
        timeout: float | None = None,
    ) -> Iterator[None]:
        """Hold a phase for a with block; slower than ``enter`` and ``restore``."""
        before = self.enter(name, peers, nbytes, timeout)
        try:
            yield
        finally:
            self.now = before

    def describe(self, rank: int, host: str) -> str:
        """Return ``rank 3 (host n1): in allreduce 1M, waiting for rank 2 for 4.2 s``."""
        name, peers, nbytes, start, _ = self.now
        size = f" {format_size(nbytes)}" if nbytes else ""
        doing = f"in {name}{size}" if name else "outside of any call"
        if peers:
            shown = ", ".join(map(str, peers[:_SHOWN_PEERS]))
            rest = len(peers) - _SHOWN_PEERS
            more = f" and {rest} more" if rest > 0 else ""
            doing += f", waiting for rank{'s' if len(peers) > 1 else ''} {shown}{more}"
        since = f" for {monotonic() - start:.1f} s" if name else ""
        return f"rank {rank} (host {host}): {doing}{since}"


current = Phase()
"""The phase of this process."""
