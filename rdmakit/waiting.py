"""How this package waits: poll, yield the core, look at the deadline and at the peers.

Every wait of the data plane goes through :class:`Waiter`. It never blocks in the kernel while
messages are open, since only polling moves them; it gives the core away when nothing happens,
since there may be more ranks than cores. Other sources of progress (CUDA events) are added to
``polls``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from threading import get_ident

from rdmakit.errors import TransferTimeout

__all__ = ["Waiter", "greet_seconds", "rest", "settle", "spins_for"]

_CHECK_EVERY = 64
"""Idle rounds between two looks at the clock."""
_PEERS_EVERY = 1024
"""Idle rounds between two questions to the transport about dead peers."""
_NAP_AFTER = 0.02
"""Idle seconds after which the wait sleeps between polls."""
_NAP = 1e-4
_SETTLE = 0.005
_GREET_SECONDS = 10.0


def greet_seconds(timeout: float) -> float:
    """Return how long a new peer's first word is waited for, where a wait may take ``timeout``.

    Both in seconds. Less than a wait, since where no word comes through other ways are tried; but
    a user who gives waits more time, as on an overloaded machine, means this one too.
    """
    return max(min(_GREET_SECONDS, timeout / 3), timeout / 6)


def spins_for(ranks_on_host: int) -> int:
    """Return idle polls before the core is yielded: more where each rank has its own."""
    mine, all_ = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    bound = mine * ranks_on_host <= all_  # each rank may have been given its own
    return 200 if bound or ranks_on_host <= mine else 2


def settle(flush: Callable[[], bool], progress: Callable[[], None]) -> None:
    """Give sent bytes that a transport still holds a moment to leave.

    The peer that needs them is reading. No certainty: what must be certain polls ``progress``
    until the peers have answered.
    """
    if flush():
        return
    end = time.monotonic() + _SETTLE
    while not flush() and time.monotonic() < end:
        progress()
        os.sched_yield()


def rest(seconds: float) -> None:
    """Sleep, or for 0 let whoever is ready have the core."""
    if seconds:
        time.sleep(seconds)
    else:
        os.sched_yield()


class _Clock:
    """The wait of one thread."""

    __slots__ = ("deadline", "idle", "limit", "since", "timeout")

    def __init__(self, timeout: float) -> None:
        self.timeout = self.limit = timeout
        self.idle = 0
        self.since = self.deadline = 0.0


class Waiter:
    """The waits of one communicator on this rank; each thread that waits has a clock of its own."""

    def __init__(
        self,
        rank: int,
        host: str,
        timeout: float,
        spins: int,
        check_peers: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank, self.host, self.spins = rank, host, spins
        self.who = f"rank {rank} (host {host})"
        """This rank in errors."""
        self.check_peers = check_peers
        self.progress: Callable[[], None] = lambda: None
        """Moves messages of earlier operations, in waits that look at none themselves."""
        self.rest: Callable[[float], None] = rest
        """Gives the core away: for so many seconds, or for 0 to whoever is ready."""
        self._usual = timeout
        self._clocks: dict[int, _Clock] = {}
        """By thread; as many as there were threads at once, since their numbers come again."""

    def _clock(self) -> _Clock:
        thread = get_ident()
        clock = self._clocks.get(thread)
        if clock is None:
            clock = self._clocks[thread] = _Clock(self._usual)
        return clock

    @property
    def timeout(self) -> float:
        """Seconds that a wait may take; set, it holds for the waits of this thread."""
        return self._clock().timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._clock().timeout = seconds

    def start(self, timeout: float | None = None) -> None:
        """Begin a wait: its deadline counts from the first idle poll after this."""
        clock = self._clock()
        clock.idle = 0
        clock.since = 0.0
        clock.limit = clock.timeout if timeout is None else timeout

    def moved(self) -> None:
        """Note progress: the core is not yielded for a while."""
        self._clock().idle = 0

    def idle(self, describe: Callable[[], str]) -> None:
        """Note a poll that found nothing.

        Raises:
            TransferTimeout: the deadline has passed; the text has ``describe()``.
            PeerLost: the transport reports a dead peer.
        """
        clock = self._clock()
        clock.idle += 1
        if clock.idle <= self.spins:
            return
        self.rest(0)
        if clock.idle % _CHECK_EVERY:
            return
        self.progress()
        now = time.monotonic()
        if not clock.since:
            clock.since = now
            clock.deadline = now + clock.limit
        elif now > clock.deadline:
            raise TransferTimeout(
                f"{self.who}: {describe()} after {now - clock.since:.1f} s "
                f"(limit {clock.limit:g} s)"
            )
        if clock.idle % _PEERS_EVERY == 0:
            self.check_peers()
        if now - clock.since > _NAP_AFTER:
            self.rest(_NAP)

    def until(
        self,
        ready: Callable[[], bool],
        polls: Sequence[Callable[[], None]],
        describe: Callable[[], str],
        timeout: float | None = None,
    ) -> None:
        """Poll until ``ready()``.

        Raises:
            TransferTimeout: the deadline has passed.
            PeerLost: the transport reports a dead peer.
        """
        self.start(timeout)
        while not ready():
            for poll in polls:
                poll()
            self.idle(describe)
