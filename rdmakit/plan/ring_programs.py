"""One ring or chain through all ranks: schedules that know no hierarchy.

The ring visits ranks node by node, so one link of it leaves each node: an all-reduce sends
2(n-1)/n * S out of every node of n ranks in all, however many rails there are. Broadcast and
reduce are chains along it and send S, in short pieces, so that their time does not grow with the
ranks; scans are a chain in the order of ranks, and send S from a rank to the next wherever that
is on another node.
"""

from __future__ import annotations

from collections.abc import Sequence

from rdmakit.plan.flow import Buffers
from rdmakit.plan.links import PLACES, Link
from rdmakit.plan.pieces import piece, split
from rdmakit.plan.ring import (
    ring_allgather,
    ring_allreduce,
    ring_broadcast,
    ring_reduce_scatter,
)
from rdmakit.plan.shape import Call, Kind
from rdmakit.plan.slots import closed
from rdmakit.plan.steps import Builder, Program, Ref, Space

__all__ = ["ring"]

_CHAINS = (Kind.BROADCAST, Kind.REDUCE, Kind.SCAN, Kind.EXSCAN)
_BLOCKS = (Kind.ALLGATHER, Kind.REDUCE_SCATTER)


def ring(call: Call, rank: int) -> Program:
    """Return the flat ring or chain of any collective that has one."""
    return _Ring(call, rank).program()


class _Ring:
    def __init__(self, call: Call, rank: int) -> None:
        self.call, self.rank, self.b = call, rank, Builder(rank)
        layout = call.layout
        scan = call.kind in (Kind.SCAN, Kind.EXSCAN)
        self.order: Sequence[int] = range(layout.size) if scan else layout.rank_order()
        self.n, self.me = layout.size, self.order.index(rank)
        windows = max(layout.ranks_per_node) > 1
        most = max(1, call.limits.window // PLACES if windows else call.limits.chunk)
        if call.kind in _CHAINS:  # short pieces: the last rank starts early
            most = max(1, min(most, call.limits.chunk // 4))
        count = max(call.blocks) if call.kind in _BLOCKS else call.count
        whole = call.kind is Kind.ALLREDUCE
        self.turns = -(-count // (most * self.n if whole else most))
        self.largest = piece(count, self.turns, 0)[1] if self.turns else 0
        link_piece = -(-self.largest // self.n) if whole else self.largest
        self.link = Link(self.b, layout, self.order, max(1, link_piece))
        self.given = call.send_offsets(rank) if call.kind is Kind.REDUCE_SCATTER else ()
        self.taken = call.recv_offsets(rank) if call.kind is Kind.ALLGATHER else ()
        sums = 2 if call.kind is Kind.REDUCE_SCATTER else 0
        self.partial = [self.b.private(self.n * self.largest) for _ in range(sums)]
        self.apart = Buffers(self.b, self.largest)
        self.ends: list[list[int]] = []

    def program(self) -> Program:
        step = {
            Kind.ALLREDUCE: self._allreduce,
            Kind.BROADCAST: self._broadcast,
            Kind.ALLGATHER: self._allgather,
            Kind.REDUCE_SCATTER: self._reduce_scatter,
            Kind.REDUCE: self._reduce,
            Kind.SCAN: self._scan,
            Kind.EXSCAN: self._scan,
        }[self.call.kind]
        for turn in range(self.turns):
            self.ends.append(step(turn, turn * 2 * self.n))
        tags = self.turns * 2 * self.n  # links count what passes, at most twice around for a chunk
        return closed(self.b, self.call.layout, tags, tags)

    def _vector(self, space: Space, turn: int) -> Ref:
        return Ref(space, *piece(self.call.count, self.turns, turn))

    def _blocks(self, space: Space, offsets: Sequence[int], turn: int) -> list[Ref]:
        """Return this chunk's piece of the block of each rank, in the order of the ring."""
        found = []
        for q in self.order:
            at, count = piece(self.call.blocks[q], self.turns, turn)
            found.append(Ref(space, offsets[q] + at, count))
        return found

    def _allreduce(self, turn: int, tag: int) -> list[int]:
        spaces = (Space.SEND, Space.RECV)
        vectors = [self._vector(space, turn) for space in spaces]
        src, dst = ([v.part(*part) for part in split(v.count, self.n)] for v in vectors)
        return ring_allreduce(self.link, src, dst, self.me, tag, [])

    def _broadcast(self, turn: int, tag: int) -> list[int]:
        buffer = self._vector(Space.RECV, turn)
        return ring_broadcast(self.link, buffer, self.call.root, tag, [])

    def _allgather(self, turn: int, tag: int) -> list[int]:
        blocks = self._blocks(Space.RECV, self.taken, turn)
        own = piece(self.call.blocks[self.rank], self.turns, turn)
        ready = self.b.copy(blocks[self.me], Ref(Space.SEND, *own))
        return [*ready, *ring_allgather(self.link, blocks, self.me, tag, ready)]

    def _reduce_scatter(self, turn: int, tag: int) -> list[int]:
        src = self._blocks(Space.SEND, self.given, turn)
        partial = self.partial[turn % 2]
        dst = [partial.part(i * self.largest, ref.count) for i, ref in enumerate(src)]
        own = piece(self.call.blocks[self.rank], self.turns, turn)
        dst[self.me] = Ref(Space.RECV, *own)
        before = self.ends[turn - 2] if turn >= 2 else []
        first = (self.me - 1) % self.n
        ready, sent = ring_reduce_scatter(self.link, src, dst, first, tag, before)
        return [*ready, *(step for steps in sent.values() for step in steps)]

    def _reduce(self, turn: int, tag: int) -> list[int]:
        """Pass sums along the ring from the rank behind the root to the root."""
        own = self._vector(Space.SEND, turn)
        if self.link.left == self.call.root:
            return self.link.push(own, tag, [])
        got, arrived, release = self.link.pull(own.count, tag)
        if self.rank == self.call.root:
            ready = self.b.reduce(self._vector(Space.RECV, turn), [got, own], arrived)
            release(ready)
            return ready
        total, free = self.apart.take(own.count)
        ready = self.b.reduce(total, [got, own], [*arrived, *free])
        release(ready)
        sent = self.link.push(total, tag, ready)
        self.apart.release(sent)
        return sent

    def _scan(self, turn: int, tag: int) -> list[int]:
        own, result = self._vector(Space.SEND, turn), self._vector(Space.RECV, turn)
        inclusive, last = self.call.kind is Kind.SCAN, self.me == self.n - 1
        if not self.me:
            ends = self.b.copy(result, own) if inclusive else []
            return [*ends, *self.link.push(own, tag, [])]
        got, arrived, release = self.link.pull(own.count, tag)
        if inclusive:
            ready = self.b.reduce(result, [got, own], arrived)
            release(ready)
            return [*ready, *([] if last else self.link.push(result, tag, ready))]
        ready, sent = arrived, list[int]()
        if not last:
            total, free = self.apart.take(own.count)
            ready = self.b.reduce(total, [got, own], [*arrived, *free])
            sent = self.link.push(total, tag, ready)
            self.apart.release(sent)
        # Behind the read of the own input: the arrays may be one.
        ready = self.b.copy(result, got, ready)
        release(ready)
        return [*ready, *sent]
