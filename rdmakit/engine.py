"""Moves what is under way while the program does other things.

One :class:`Engine` serves a process. Whatever is not complete when a call returns is a *source* of
it: the collectives of a family of groups, the messages of a communicator. All of them are moved,
one after the other, by whoever holds the lock: a call that waits, a test, or the progress thread,
which starts with the first call that does not block and sleeps while there is nothing to do.
UCX's worker, MPI's requests and window counters are touched under the lock only.

While something is under way the thread naps between polls, also where only UCX has any: waiting on
UCX's event descriptor needs its wakeup feature in every context and cannot see counters and MPI's
requests. For a message over TCP that comes after 50 ms the naps take 1.4 ms of processor time, the
descriptor 0.1 ms; it is complete 0.5 to 0.65 ms after it was sent, with the descriptor 0.3 to 1.2
(medians on two busy cores).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from itertools import starmap
from threading import get_ident
from typing import Protocol

from rdmakit.process import switching
from rdmakit.waiting import Waiter, rest

__all__ = ["Engine", "Pending", "Source", "process_engine"]

_LEAST_NAP, _MOST_NAP, _GROWTH = 5e-5, 1e-3, 1.3
"""Seconds the thread sleeps between polls that find nothing; the program has the core meanwhile."""
_LOOK_EVERY = 0.5
"""Seconds between two questions to the transport about dead peers."""
_STOP_SECONDS = 5.0
_ONCE: tuple[tuple[()]] = ((),)
"""For starmap: one call without arguments."""


class Pending:
    """Something under way that somebody may wait for.

    Attributes:
        done: whether it is complete, well or not. Reading it moves nothing.
        error: what went wrong.
        keep: its arrays, until it is done.
    """

    def __init__(self, label: str | Callable[[], str], keep: object) -> None:
        self._label, self.keep = label, keep
        self.done = False
        self.error: BaseException | None = None
        self.moves = 0
        """Counts what moves it, so that a wait sees that its time begins anew."""

    @property
    def label(self) -> str:
        """What names it in errors."""
        return self._label if isinstance(self._label, str) else self._label()

    def end(self, error: BaseException | None = None) -> None:
        """Complete it. The arrays are let go."""
        if self.done:
            return
        self.error, self.keep = error, None
        self.done = True  # last: other threads look at it


class Source(Protocol):
    """What the engine moves. Called with the engine's lock held; raises nothing on its own."""

    @property
    def busy(self) -> bool:
        """Whether it has anything under way."""
        ...

    def advance(self) -> bool:
        """Do a little of what can be done without waiting; return whether anything moved."""
        ...

    def look(self) -> None:
        """See whether the peers are alive; fail if not."""
        ...


class Engine:
    """See the module. Safe to use from several threads.

    Attributes:
        active: the sources with something under way; an empty list is false.
        threaded: whether a progress thread may run; it calls MPI, so MPI must allow it.
    """

    def __init__(self, *, threaded: bool = True) -> None:
        self.threaded = threaded
        self.active: list[Source] = []
        self._polls: list[Callable[[], None]] = []
        self._users = 0
        self._renew()

    def _renew(self) -> None:
        lock = threading.Lock()
        self._acquire, self._release = lock.acquire, lock.release
        self._owner, self._depth = 0, 0
        self._wanted: set[int] = set()
        self._waits = 0
        self._thread: threading.Thread | None = None
        self._wake, self._parked, self._stopping = threading.Event(), False, False

    # -- the lock -----------------------------------------------------------------------------

    def enter(self) -> None:
        """Take the lock; a thread may take it again."""
        me = get_ident()
        if self._owner == me:
            self._depth += 1
            return
        if not self._acquire(False):
            self._wanted.add(me)  # a set: it is changed without the lock
            try:
                self._acquire()
            finally:
                self._wanted.discard(me)
        self._owner = me

    def leave(self) -> None:
        """Give back what ``enter`` took."""
        if self._depth:
            self._depth -= 1
        else:
            self._owner = 0
            self._release()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock for a with block; slower than ``enter`` and ``leave``."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def rest(self, seconds: float) -> None:
        """Give the core away (0: to whoever is ready), the lock too, and then move all others.

        What a :class:`Waiter` does between polls.
        """
        me = get_ident()
        if self._owner != me:
            rest(seconds)
            if self.active:
                self.poke()
            return
        depth, self._depth, self._owner = self._depth, 0, 0
        given: list[None] = []
        taken: list[bool] = []
        raised: BaseException | None = None
        # Given or taken, and noted, with nothing in between where an interrupt could come. It
        # waits until the lock is held again: the caller gives back what it took.
        try:
            given.extend(starmap(self._release, _ONCE))
            rest(seconds)
        except BaseException as exc:
            raised = exc
        while given and not taken:
            try:
                taken.extend(starmap(self._acquire, _ONCE))
            except BaseException as exc:
                raised = exc
        self._owner, self._depth = me, depth
        if raised is not None:
            raise raised
        if self.active:
            self.step()

    # -- what is under way --------------------------------------------------------------------

    def add(self, source: Source, *, background: bool) -> None:
        """Move ``source`` until it is no longer busy. With the lock held.

        Args:
            source: what has something under way now.
            background: also while nobody waits.
        """
        if source not in self.active:
            self.active.append(source)
        if background and self.threaded and not self._stopping:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._serve, name="rdmakit-progress", daemon=True
                )
                self._thread.start()
            elif self._parked:
                self._wake.set()

    def step(self) -> None:
        """Move everything once. With the lock held."""
        for poll in self._polls:
            poll()
        for source in tuple(self.active):
            source.advance()
            if not source.busy and source in self.active:
                self.active.remove(source)

    def poke(self) -> None:
        """Move everything once. From any thread."""
        self.enter()
        try:
            self.step()
        finally:
            self.leave()

    def wait(
        self,
        ready: Callable[[], bool],
        waiter: Waiter,
        describe: Callable[[], str],
        moves: Callable[[], object] = lambda: 0,
        timeout: float | None = None,
    ) -> None:
        """Move everything until ``ready()``.

        Args:
            ready: what is waited for.
            waiter: deadline and yielding.
            describe: says in an error what was waited for.
            moves: something that differs when the deadline should begin anew.
            timeout: seconds; default the waiter's.

        Raises:
            TransferTimeout: the deadline has passed.
            PeerLost: the transport reports a dead peer.
        """
        self.enter()
        self._waits += 1  # the thread keeps out of the way
        try:
            seen = moves()
            waiter.start(timeout)
            while True:
                self.step()
                if ready():
                    return
                if moves() != seen:
                    seen = moves()
                    waiter.start(timeout)
                else:
                    waiter.idle(describe)
        finally:
            self._waits -= 1
            self.leave()

    # -- channels and users -------------------------------------------------------------------

    def join(self, poll: Callable[[], None] | None = None) -> None:
        """Count a user, whose messages ``poll`` moves. Local."""
        with self.held():
            self._users += 1
            if poll is not None:
                self._polls.append(poll)

    def part(self, poll: Callable[[], None] | None = None) -> None:
        """Undo ``join``; the thread ends with the last user. Local."""
        with self.held():
            self._users -= 1
            if poll in self._polls:
                self._polls.remove(poll)
            last = self._users <= 0
        if last:
            self.stop()

    def stop(self) -> None:
        """End the thread, if there is one. Local, blocking; a later call may start another."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        self._stopping = True
        self._wake.set()
        thread.join(_STOP_SECONDS)
        self._thread, self._stopping = None, False
        self._wake.clear()

    def forget(self) -> None:
        """In a forked child, which has no other threads: nothing is under way here."""
        self._renew()
        switching.forked()
        self.threaded = False
        self.active.clear()
        self._polls.clear()

    def _serve(self) -> None:
        """Be the progress thread."""
        hurry = switching.Hurry()
        try:
            self._move_all(hurry)
        finally:
            hurry.end()

    def _move_all(self, hurry: switching.Hurry) -> None:
        nap, looked = _LEAST_NAP, time.monotonic()
        while not self._stopping:
            if not self.active:
                self._parked = True
                if not self.active and not self._stopping:
                    hurry.end()
                    self._wake.wait()
                self._parked = False
                self._wake.clear()
                nap, looked = _LEAST_NAP, time.monotonic()
                continue
            hurry.begin()
            if self._wanted or self._waits or not self._acquire(False):
                time.sleep(nap)  # somebody else moves things
                nap = min(nap * _GROWTH, _MOST_NAP)
                continue
            self._owner = get_ident()
            try:
                moved = self._step_and_look(looked)
            finally:
                self._owner = 0
                self._release()
            if time.monotonic() - looked > _LOOK_EVERY:
                looked = time.monotonic()
            if moved:
                nap = _LEAST_NAP
                time.sleep(0)
            else:
                time.sleep(nap)
                nap = min(nap * _GROWTH, _MOST_NAP)

    def _step_and_look(self, looked: float) -> bool:
        for poll in self._polls:
            poll()
        moved = False
        look = time.monotonic() - looked > _LOOK_EVERY
        for source in tuple(self.active):
            moved = source.advance() or moved
            if look:
                source.look()
            if not source.busy and source in self.active:
                self.active.remove(source)
        return moved


_process: Engine | None = None


def process_engine() -> Engine:
    """Return the engine of this process, made at the first call."""
    global _process
    if _process is None:
        _process = Engine()
        os.register_at_fork(after_in_child=_process.forget)
    return _process
