"""What groups with a common window and channel share: the order of their calls, and their end.

Collectives of a family run one at a time, in the order of the calls: window counters and MPI's
communicators demand it. So groups of one family (a communicator, its node and its rail) are
called in the same order on all of their ranks; other communicators have families of their own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from rdmakit.engine import Engine, Pending
from rdmakit.errors import CommunicatorClosed, PeerLost, TransportError
from rdmakit.mailbox import Mailbox
from rdmakit.packing import HostScratch
from rdmakit.protocols import Channel
from rdmakit.waiting import settle

__all__ = ["Family", "Poll", "Run", "Work", "quarantine"]

_FLUSH_SECONDS = 1.0


class Run(Protocol):
    """Something that is done step by step."""

    moved: bool
    """Whether the last ``advance`` did anything."""

    def advance(self) -> bool:
        """Do a little of what can be done without waiting; return whether it is complete."""
        ...

    def waits_for(self) -> str:
        """Return what it is and whom it waits for."""
        ...

    def abandon(self) -> None:
        """Give it up; its memory stays as long as somebody may write to it."""
        ...


class Poll:
    """A run that only needs to be asked."""

    def __init__(self, ready: Callable[[], object], label: str) -> None:
        """Make it; ``ready`` is asked until it returns something true."""
        self._ready, self._label = ready, label
        self.moved = False

    def advance(self) -> bool:
        """Ask."""
        self.moved = bool(self._ready())
        return self.moved

    def waits_for(self) -> str:
        """Return the label."""
        return f"{self._label}: waiting for the other ranks"

    def abandon(self) -> None:
        """Nothing can be taken back: MPI's request stays."""
        quarantine(self._ready)


_QUARANTINE: list[object] = []


def quarantine(*held: object) -> None:
    """Keep requests and arrays until the process ends: a transfer given up may still write."""
    _QUARANTINE.append(held)


class Work:
    """A collective in the order of the calls."""

    def __init__(self, pending: Pending, *steps: Callable[[], Run | None]) -> None:
        """Describe it.

        Args:
            pending: told when it is done.
            steps: begin its parts, one after the other; None is a part that is nothing.
        """
        self.pending = pending
        self._steps, self._run = deque(steps), None

    def advance(self) -> bool:
        """Do a little; return whether it is complete. ``pending`` counts what moves."""
        while True:
            if self._run is None:
                if not self._steps:
                    return True
                self._run = self._steps.popleft()()
                self.pending.moves += 1
                continue
            complete = self._run.advance()
            if self._run.moved:
                self.pending.moves += 1
            if not complete:
                return False
            self._run = None

    def waits_for(self) -> str:
        """Return what it waits for now."""
        return self._run.waits_for() if self._run is not None else self.pending.label

    def abandon(self) -> None:
        """Give it up; its arrays stay where a part has begun, which may still write to them."""
        if self._run is not None:
            quarantine(self._run, self.pending.keep, *self._steps)
            self._run.abandon()

    _run: Run | None


class Family:
    """See the module. A source of the engine.

    Attributes:
        failure: why its groups are unusable; empty while they are not.
        works: collectives that are not complete, in the order of the calls.
        taken: whether a blocking call has the turn.
        mailbox: messages between two ranks, if there can be any.
        scratch: for arrays with gaps, in one blocking call after another.
    """

    def __init__(
        self,
        engine: Engine | None = None,
        channel: Channel | None = None,
        relatives: list[Family] | None = None,
    ) -> None:
        """Make it. Local.

        Args:
            engine: what moves it.
            channel: what its messages go through.
            relatives: families on the same channel, to which this one is added.
        """
        self.engine = engine if engine is not None else Engine()
        self.failure = ""
        self.works: deque[Work] = deque()
        self.taken = False
        self.mailbox: Mailbox | None = None
        self.scratch = HostScratch()
        self._channel, self._flush_until = channel, 0.0
        self._relatives = relatives if relatives is not None else []
        self._relatives.append(self)

    # -- as a source of the engine ------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        mailbox = self.mailbox
        return bool(self.works or self._flush_until or (mailbox is not None and mailbox.busy))

    def advance(self) -> bool:
        """Move the first collective and all messages; return whether anything moved."""
        moved = False
        try:
            if self.works and not self.taken:
                moved = self._advance_works()
            if self.mailbox is not None and self.mailbox.busy:
                moved = self.mailbox.advance() or moved
            if moved and self._channel is not None:
                self._flush_until = time.monotonic() + _FLUSH_SECONDS
            elif self._flush_until and not self.works:
                self._flush()
        except Exception as exc:
            self.fail(exc)
            return True
        except BaseException as exc:  # an interrupt of the thread that moves it
            self.fail(exc)
            raise
        return moved

    def _flush(self) -> None:
        """Let bytes go that the channel still holds: nobody else would."""
        assert self._channel is not None
        if self._channel.flush() or time.monotonic() > self._flush_until:
            self._flush_until = 0.0

    def _advance_works(self) -> bool:
        moved = False
        while self.works:
            work = self.works[0]
            before = work.pending.moves
            complete = work.advance()
            moved = moved or work.pending.moves != before
            if not complete:
                break
            self.works.popleft()
            work.pending.end()
        return moved

    def look(self) -> None:
        """See whether the peers are alive."""
        if self._channel is not None and not self.failure:
            try:
                self._channel.check_peers()
            except PeerLost as exc:
                self.fail(exc)

    # -- calls --------------------------------------------------------------------------------

    def submit(self, work: Work, *, background: bool = True) -> None:
        """Put a collective behind those that were called before, and begin what can be.

        ``background``: it moves on while nobody waits.
        """
        engine = self.engine
        with engine.held():
            self.works.append(work)
            engine.add(self, background=background)
            if len(self.works) == 1:
                self.advance()

    def stir(self, *, background: bool) -> None:
        """Let the mailbox be moved, where it has something. With the lock held."""
        if background and self._channel is not None:
            self._flush_until = time.monotonic() + _FLUSH_SECONDS
        if self.busy:
            self.engine.add(self, background=background)

    def settle(self) -> None:
        """Give bytes that the channel still holds a moment to leave. Local."""
        channel = self._channel
        if channel is not None and not self.failure:
            with self.engine.held():
                settle(channel.flush, channel.progress)

    def pending(self) -> list[Pending]:
        """Return what is not complete."""
        found: list[Pending] = [work.pending for work in self.works]
        if self.mailbox is not None:
            found += self.mailbox.waiting()
        return found

    def waits_for(self) -> str:
        """Return what the collective that has the turn waits for."""
        return self.works[0].waits_for() if self.works else "an earlier call"

    def fail(self, exc: BaseException) -> None:
        """Make its groups unusable, and those of its relatives where the channel is at fault."""
        with self.engine.held():
            text = f"{type(exc).__name__}: {exc}"
            if isinstance(exc, KeyboardInterrupt):
                text = (
                    "KeyboardInterrupt: a call was interrupted half-way, so that this rank may be "
                    "out of step with the others; end the program"
                )
            self._end(text, exc)
            if isinstance(exc, TransportError) and self._channel is not None:
                for other in list(self._relatives):
                    if other is not self:
                        other._end(text, exc)

    def forbid(self, reason: str) -> None:
        """Make its groups unusable in a forked child. Local.

        Nothing is abandoned: what is under way is the parent's, and its libraries must not be
        called here.
        """
        self.failure = reason
        closed = CommunicatorClosed(f"this communicator is unusable: {reason}")
        for pending in self.pending():
            pending.end(closed)

    def _end(self, text: str, exc: BaseException) -> None:
        self.failure = self.failure or text
        works, self.works = self.works, deque()
        closed = CommunicatorClosed(f"this communicator is unusable: {text}")
        closed.__cause__ = exc
        for index, work in enumerate(works):
            work.abandon()
            work.pending.end(exc if index == 0 else closed)
        if self.mailbox is not None:
            self.mailbox.abandon(exc)
        self._flush_until = 0.0

    def leave(self) -> None:
        """Be no relative any more and no source, after the communicator was closed."""
        if self in self._relatives:
            self._relatives.remove(self)
        with self.engine.held():
            self._flush_until = 0.0  # the channel sends what it still holds as it is closed
            if self in self.engine.active:
                self.engine.active.remove(self)
