"""Messages between two ranks of different nodes: one pair alone, and all local pairs at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

import msgspec

from rdmakit.bench import values
from rdmakit.bench.session import Case, Session
from rdmakit.inter.tags import TagKind, pack
from rdmakit.protocols import Channel, Request
from rdmakit.report.schema import Row
from rdmakit.waiting import settle

__all__ = ["pair_cases"]

WINDOW_BYTES = 16 << 20
WINDOW_MESSAGES = 32
"""Messages under way at once in the bandwidth cases, and their bytes together at most."""
RATE_MESSAGES = 64
_RECEIVE_AT_BOTH = ("pair latency", "pair both-way")


class _End:
    """One end of a pair. ``role`` is 0 at the sender of one-way cases, 1 at its peer."""

    def __init__(self, session: Session, peer: int, role: int, nbytes: int) -> None:
        comm = session.comm
        assert comm.channel is not None
        self.channel: Channel = comm.channel
        self.peer, self.role = peer, role
        self.window = max(1, min(WINDOW_MESSAGES, WINDOW_BYTES // max(1, nbytes)))
        self._numbers = count()
        count_ = nbytes // session.dtype.itemsize
        self.out, self.into = session.array(count_), session.array(count_)
        values.fill(self.out, comm.rank)
        self._out, self._into = (self.channel.wrap(a.view("u1")) for a in (self.out, self.into))
        self._word = session.array(8 // session.dtype.itemsize)
        self._ack = self.channel.wrap(self._word.view("u1"))
        self._waiter = comm.waiter

    def _tag(self) -> int:
        return pack(0, TagKind.BENCH, 0, next(self._numbers) % (1 << 16))

    def wait(self, requests: list[Request]) -> None:
        pending = requests

        def ready() -> bool:
            nonlocal pending
            pending = [request for request in pending if not request.done()]
            return not pending

        self._waiter.until(
            ready, (self.channel.progress,), lambda: f"bench: pair with rank {self.peer}"
        )
        settle(self.channel.flush, self.channel.progress)

    def send(self, handle: Any = None) -> Request:
        return self.channel.send(self.peer, self._out if handle is None else handle, self._tag())

    def recv(self, handle: Any = None) -> Request:
        return self.channel.recv(self.peer, self._into if handle is None else handle, self._tag())

    def ping_pong(self) -> None:
        """One message there and back."""
        if self.role == 0:
            self.wait([self.send()])
            self.wait([self.recv()])
        else:
            self.wait([self.recv()])
            self.wait([self.send()])

    def one_way(self, messages: int = 0) -> None:
        """A window of messages, then a word back."""
        many = messages or self.window
        if self.role == 0:
            requests = [self.send() for _ in range(many)]
            self.wait([*requests, self.recv(self._ack)])
        else:
            self.wait([self.recv() for _ in range(many)])
            self.wait([self.send(self._ack)])

    def both_ways(self) -> None:
        """A window of messages each way at once."""
        requests = []
        for _ in range(self.window):
            tag = self._tag()
            requests.append(self.channel.recv(self.peer, self._into, tag))
            requests.append(self.channel.send(self.peer, self._out, tag))
        self.wait(requests)


Pairs = list[tuple[int, int]]
Shape = Callable[[_End], tuple[Callable[[], None], int, int]]
"""From an end: what to time, messages in it, and how often it is what is shown."""


def pair_cases(session: Session) -> Iterator[Case]:
    """Yield the cases on single pairs and on all pairs between the first two nodes."""
    nodes = session.comm.layout.nodes
    alone = [(nodes[0][0], nodes[1][0])]
    every = list(zip(nodes[0], nodes[1], strict=False))

    def add(name: str, pairs: Pairs, sizes: list[int], shape: Shape) -> Iterator[Case]:
        run = partial(_run, pairs=pairs, shape=shape)
        return (Case("inter", name, "", size, run) for size in sizes)

    sizes = session.options.sizes()
    yield from add("pair latency", alone, sizes, lambda end: (end.ping_pong, 1, 2))
    yield from add("pair one-way", alone, sizes, lambda end: (end.one_way, end.window, 1))
    yield from add("pair both-way", alone, sizes, lambda end: (end.both_ways, end.window, 1))
    yield from add(
        "message rate",
        alone,
        sizes[:1],
        lambda end: (partial(end.one_way, RATE_MESSAGES), RATE_MESSAGES, 1),
    )
    if len(every) > 1:
        yield from add("pairs one-way", every, sizes, lambda end: (end.one_way, end.window, 1))


def _run(
    session: Session,
    case: Case,
    pairs: Pairs,
    shape: Shape,
) -> Row:
    rank = session.comm.rank
    end: _End | None = None
    call: Callable[[], None] = _idle
    messages = divide = 1
    for first, second in pairs:
        if rank in (first, second):
            peer = second if rank == first else first
            end = _End(session, peer, int(rank == second), case.nbytes)
            call, messages, divide = shape(end)
    # Of a rank that takes part:
    messages, divide = session.group.share([messages, divide])[pairs[0][0]]
    samples = session.timed(call)
    transport = ""
    wrong: int | None = None
    if end is not None:
        lanes = end.channel.transports(end.peer)
        transport = "+".join(dict.fromkeys(f"{t}/{d}" for t, d in lanes)) or end.channel.name
    transport = str(session.group.share(transport)[pairs[0][0]])
    if session.options.check:
        mine = 0
        if end is not None:
            end.into.view("u1").fill(0xA5)
        session.group.barrier()
        call()
        if end is not None and (end.role == 1 or case.name in _RECEIVE_AT_BOTH):
            mine = values.count_wrong(end.into, values.block(end.peer, session.dtype))
        wrong = session.wrong(mine)
    payload = case.nbytes * messages * divide
    row = session.row(
        case,
        samples=samples,
        payload=payload,
        ranks=2 * len(pairs),
        divide=divide,
        sent=case.nbytes * messages,
        wrong=wrong,
        transport=transport,
    )
    if row.time_us is None:
        return row
    note = f"each of {len(pairs)} pairs" if len(pairs) > 1 else ""
    if case.name == "message rate":
        note = f"{messages / row.time_us.median:.3f} M messages/s"
    elif messages > 1:
        note = ", ".join(filter(None, (note, f"{messages} messages a call")))
    return msgspec.structs.replace(row, note=", ".join(filter(None, (note, row.note))))


def _idle() -> None:
    """What ranks do that are no end of a pair."""
