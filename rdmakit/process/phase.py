"""What this rank is doing now: written on every call, read when something goes wrong.

Each thread that communicates has a record of its own, a tuple that is replaced as a whole, so that
the watchdog thread reads a consistent state without a lock on the writer's side.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from time import monotonic

from rdmakit.config import format_size

__all__ = ["Phase", "Snapshot", "current"]

Snapshot = tuple[str, tuple[int, ...], int, float, float | None]
"""Name, peers waited for, bytes, monotonic start, monotonic deadline of a blocking MPI call."""

_SHOWN_PEERS = 8
_OUTSIDE: Snapshot = ("", (), 0, 0.0, None)


class Phase:
    """The phase of one process; use the module's ``current``.

    ``enter`` and ``restore`` are for threads that communicate; any thread may read.
    """

    __slots__ = ("_threads",)

    def __init__(self) -> None:
        self._threads: dict[int, Snapshot] = {}
        """Of each thread that is in a call."""

    @property
    def now(self) -> Snapshot:
        """The present state; a name of '' is outside of any call.

        Where several threads are in calls: that whose deadline is the first, or without deadlines
        the one that has been so longest.
        """
        last = float("inf")
        return min(
            tuple(self._threads.values()),  # at once, as threads come and go
            key=lambda one: (last if one[4] is None else one[4], one[3]),
            default=_OUTSIDE,
        )

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
        thread = get_ident()
        before = self._threads.get(thread, _OUTSIDE)
        if not start:
            start = monotonic()
        deadline = None if timeout is None else start + timeout
        self._threads[thread] = (name, peers, nbytes, start, deadline)
        return before

    @property
    def watched(self) -> bool:
        """Whether this thread's phase has a deadline that the watchdog looks at."""
        return self._threads.get(get_ident(), _OUTSIDE)[4] is not None

    def restore(self, before: Snapshot) -> None:
        """End a phase of this thread: return to what ``enter`` returned."""
        if before is _OUTSIDE:
            self._threads.pop(get_ident(), None)
        else:
            self._threads[get_ident()] = before

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
            self.restore(before)

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
