"""Messages between two ranks of different nodes: one pair alone, and all local pairs at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

import msgspec
import numpy as np

from rdmakit.bench import values
from rdmakit.bench.pair_memory import HostMemory, PairMemory
from rdmakit.bench.session import Case, Session
from rdmakit.errors import CudaError
from rdmakit.inter.tags import TagKind, pack
from rdmakit.protocols import Channel, Request
from rdmakit.report.schema import Row
from rdmakit.waiting import Waiter, settle

__all__ = ["PairEnd", "Shape", "measure_pair", "pair_cases", "window_of"]

WINDOW_BYTES = 16 << 20
WINDOW_MESSAGES = 32
"""Messages under way at once in the bandwidth cases, and their bytes together at most."""
RATE_MESSAGES = 64
_RECEIVE_AT_BOTH = ("pair latency", "pair both-way")


Maker = Callable[[Session, Any, int, int, int], PairMemory]
"""Makes the memory of an end: session, channel, peer, bytes, and whose values are sent."""


class PairEnd:
    """One end of a pair. ``role`` is 0 at the sender of one-way cases, 1 at its peer."""

    def __init__(
        self,
        channel: Channel,
        waiter: Waiter,
        memory: PairMemory,
        peer: int,
        role: int,
        window: int,
        theirs: int | None = None,
    ) -> None:
        """Describe it. Local.

        Args:
            channel: carries the messages.
            waiter: deadline of waits.
            memory: of the messages.
            peer: the other end, as the channel numbers it.
            role: see the class.
            window: messages under way at once in the bandwidth cases.
            theirs: whose values come from there; default ``peer``.
        """
        self.channel, self.memory = channel, memory
        self.peer, self.role, self.window = peer, role, window
        self.theirs = peer if theirs is None else theirs
        self._numbers = count()
        self._word = np.zeros(8, np.uint8)
        self._ack = channel.wrap(self._word)
        self._waiter = waiter

    def _tag(self) -> int:
        return pack(0, TagKind.BENCH, 0, next(self._numbers) % (1 << 16))

    def wait(self, requests: list[Request]) -> None:
        """Move messages until ``requests`` are done. Blocking; raises as Waiter.until."""
        pending = requests

        def ready() -> bool:
            nonlocal pending
            pending = [request for request in pending if not request.done()]
            return not pending

        self._waiter.until(
            ready, (self.memory.progress,), lambda: f"bench: pair with rank {self.peer}"
        )
        settle(self.channel.flush, self.memory.progress)

    def ping_pong(self) -> None:
        """One message there and back."""
        if self.role == 0:
            self.wait([self.memory.send(self._tag())])
            self.wait([self.memory.recv(self._tag())])
        else:
            self.wait([self.memory.recv(self._tag())])
            self.wait([self.memory.send(self._tag())])

    def one_way(self, messages: int = 0) -> None:
        """A window of messages, then a word back."""
        many = messages or self.window
        if self.role == 0:
            requests = [self.memory.send(self._tag()) for _ in range(many)]
            back = self.channel.recv(self.peer, self._ack, self._tag())
            self.wait([*requests, back])
        else:
            self.wait([self.memory.recv(self._tag()) for _ in range(many)])
            self.wait([self.channel.send(self.peer, self._ack, self._tag())])

    def stream(self, messages: int) -> None:
        """``messages``, one begun whenever the oldest of a window is through; then a word back."""
        move = self.memory.send if self.role == 0 else self.memory.recv
        begun = min(self.window, messages)
        under_way = deque(move(self._tag()) for _ in range(begun))

        def ready() -> bool:
            nonlocal begun
            while under_way and under_way[0].done():
                under_way.popleft()
                if begun < messages:
                    under_way.append(move(self._tag()))
                    begun += 1
            return not under_way

        self._waiter.until(
            ready, (self.memory.progress,), lambda: f"bench: pair with rank {self.peer}"
        )
        answer = self.channel.recv if self.role == 0 else self.channel.send
        self.wait([answer(self.peer, self._ack, self._tag())])

    def both_ways(self) -> None:
        """A window of messages each way at once."""
        requests = []
        for _ in range(self.window):
            tag = self._tag()
            requests.append(self.memory.recv(tag))
            requests.append(self.memory.send(tag))
        self.wait(requests)

    def close(self) -> None:
        """Release the memory. Blocking until its last messages are out."""
        self.memory.close(self._waiter)


Pairs = list[tuple[int, int]]
Shape = Callable[[PairEnd], tuple[Callable[[], None], int, int]]
"""From an end: what to time, messages in it, and how often it is what is shown."""


def window_of(nbytes: int) -> int:
    """Return how many messages are under way at once. Pure."""
    return max(1, min(WINDOW_MESSAGES, WINDOW_BYTES // max(1, nbytes)))


def pair_cases(session: Session, memory: Maker = HostMemory, algorithm: str = "") -> Iterator[Case]:
    """Yield the cases on single pairs and on all pairs between the first two nodes.

    Args:
        session: the run.
        memory: where the messages lie.
        algorithm: the rows' word for that.
    """
    nodes = session.comm.layout.nodes
    alone = [(nodes[0][0], nodes[1][0])]
    every = list(zip(nodes[0], nodes[1], strict=False))

    def add(name: str, pairs: Pairs, sizes: list[int], shape: Shape) -> Iterator[Case]:
        run = partial(_run, pairs=pairs, shape=shape, memory=memory)
        host = 2.0 if memory is HostMemory else 0.0
        return (Case("inter", name, algorithm, size, run, host, 2.0) for size in sizes)

    sizes = session.options.sizes()
    yield from add("pair latency", alone, sizes, lambda end: (end.ping_pong, 1, 2))
    yield from add("pair one-way", alone, sizes, lambda end: (end.one_way, end.window, 1))
    yield from add("pair both-way", alone, sizes, lambda end: (end.both_ways, end.window, 1))
    if memory is HostMemory:
        yield from add(
            "message rate",
            alone,
            sizes[:1],
            lambda end: (partial(end.one_way, RATE_MESSAGES), RATE_MESSAGES, 1),
        )
    if len(every) > 1:
        yield from add("pairs one-way", every, sizes, lambda end: (end.one_way, end.window, 1))


def _run(session: Session, case: Case, pairs: Pairs, shape: Shape, memory: Maker) -> Row:
    rank, channel, waiter = session.comm.rank, session.comm.channel, session.comm.waiter
    assert channel is not None

    def make() -> PairEnd | None:
        for first, second in pairs:
            if rank in (first, second):
                peer, role = (second, 0) if rank == first else (first, 1)
                made = memory(session, channel, peer, case.nbytes, rank)
                return PairEnd(channel, waiter, made, peer, role, window_of(case.nbytes))
        return None

    return measure_pair(session, case, make, shape, pairs[0][0], len(pairs))


def measure_pair(
    session: Session,
    case: Case,
    make: Callable[[], PairEnd | None],
    shape: Shape,
    lead: int,
    pairs: int = 1,
) -> Row:
    """Measure a case on pairs of ranks and check what arrives. Collective in the job.

    Args:
        session: the run.
        case: which.
        make: makes this rank's end, if it is in a pair. Local.
        shape: what is timed.
        lead: a rank that is in a pair.
        pairs: how many there are.
    """
    end, problem = None, ""
    try:
        end = make()
    except (MemoryError, CudaError) as exc:
        problem = f"no room: {exc}"
    call: Callable[[], None] = _idle
    messages = divide = 1
    if end is not None:
        call, messages, divide = shape(end)
    told = session.group.share([problem, messages, divide])
    reasons = [str(entry[0]) for entry in told if entry[0]]
    if reasons:
        if end is not None:
            end.close()
        return session.row(case, skipped=reasons[0], ranks=2 * pairs)
    messages, divide = told[lead][1:]
    samples = session.timed(call)
    transport = ""
    wrong: int | None = None
    if end is not None:
        transport = end.memory.transport(end.channel.transports(end.peer), end.channel.name)
    transport = str(session.group.share(transport)[lead])
    if session.options.check:
        wrong = _checked(session, case, end, call)
    if end is not None:
        end.close()  # all ranks have told their transport: nothing is under way
    row = session.row(
        case,
        samples=samples,
        payload=case.nbytes * messages * divide,
        ranks=2 * pairs,
        divide=divide,
        sent=case.nbytes * messages if case.layer == "inter" else None,
        wrong=wrong,
        transport=transport,
    )
    return _noted(row, messages, pairs)


def _checked(session: Session, case: Case, end: PairEnd | None, call: Callable[[], None]) -> int:
    """Do it once more; return the wrong elements of all ranks."""
    if end is not None:
        end.memory.spoil()
    session.group.barrier()
    call()
    mine = 0
    if end is not None and (end.role == 1 or case.name in _RECEIVE_AT_BOTH):
        mine = end.memory.count_wrong(values.block(end.theirs, session.dtype))
    return session.wrong(mine)


def _noted(row: Row, messages: int, pairs: int) -> Row:
    if row.time_us is None:
        return row
    note = f"each of {pairs} pairs" if pairs > 1 else ""
    if row.case == "message rate":
        note = f"{messages / row.time_us.median:.3f} M messages/s"
    elif messages > 1:
        note = ", ".join(filter(None, (note, f"{messages} messages a call")))
    return msgspec.structs.replace(row, note=", ".join(filter(None, (note, row.note))))


def _idle() -> None:
    """What ranks do that are no end of a pair."""
