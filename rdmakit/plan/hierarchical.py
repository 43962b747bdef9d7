"""Node phase, rail phase, node phase: all-reduce and reduce for any ranks on any nodes.

Inside a node the window is used (direct reads of the peers' areas, sums in rank order), between
nodes messages on the rails. With one node only the node phases are left ("direct"), with one
rank on each node only the rail phase.

Elements leaving a node with N nodes, S elements: all-reduce 2(N-1)/N * S (by doubling, for small
vectors, log2(N) * S); reduce S, and nothing out of the root's node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rdmakit.plan.doubling import doubling_allreduce, doubling_rounds
from rdmakit.plan.flow import Buffers
from rdmakit.plan.links import Link
from rdmakit.plan.pieces import split
from rdmakit.plan.ring import ring_allreduce
from rdmakit.plan.shape import Call, Kind
from rdmakit.plan.shards import Chunk, Sharded
from rdmakit.plan.slots import Slots, chunk_elements, closed
from rdmakit.plan.steps import Builder, Program, Ref, Space
from rdmakit.plan.trees import binomial, chain, reduce_up

__all__ = ["hierarchical_allreduce", "hierarchical_reduce", "one_shot"]


_TAG_TURNS = 64
"""Chunks after which tags come round again: far more than are under way at once."""


def hierarchical_allreduce(call: Call, rank: int) -> Program:
    """Reduce-scatter in the node, all-reduce of each shard on its rail, all-gather in the node."""
    plan = _Allreduce(call, rank)
    turns = min(len(plan.chunks), _TAG_TURNS)
    return plan.program(turns * plan.shards * Rail.tags(len(call.layout.nodes)))


def hierarchical_reduce(call: Call, rank: int) -> Program:
    """Reduce in the node, each shard on its rail towards the root's node, gather there."""
    plan = _Reduce(call, rank)
    return plan.program(len(plan.chunks) * plan.shards)


@dataclass
class Rail:
    """The rail phase of one shard: all-reduce among its owners, in place."""

    b: Builder
    call: Call
    shard: int
    largest: int
    """Most elements this shard has in any chunk."""
    link: Link | None = None
    _tmp: list[Ref] = field(default_factory=list)
    _consumed: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        layout = self.call.layout
        self.group = [layout.owner(node, self.shard) for node in range(len(layout.nodes))]
        n = len(self.group)
        if self.call.few_rounds:
            self._tmp = [self.b.private(self.largest) for _ in range(doubling_rounds(n))]
        else:
            self.link = Link(self.b, layout, self.group, -(-self.largest // n))

    @staticmethod
    def tags(n: int) -> int:
        """Return how many tags one chunk of one shard uses at most."""
        return 2 * n + 2

    def allreduce(self, work: Ref, tag: int, after: Sequence[int]) -> list[int]:
        """Reduce ``work`` over the rail; return what to wait for."""
        if self.link is not None:
            blocks = [work.part(*piece) for piece in split(work.count, len(self.group))]
            me = self.group.index(self.b.rank)
            return ring_allreduce(self.link, blocks, blocks, me, tag, after)

        def tmp(turn: int) -> tuple[Ref, list[int]]:
            return self._tmp[turn].part(0, work.count), self._consumed.get(turn, [])

        ready, consumed = doubling_allreduce(self.b, self.group, work, tmp, tag, after)
        self._consumed = dict.fromkeys(range(len(self._tmp)), consumed)
        return ready


class _Allreduce(Sharded):
    def __init__(self, call: Call, rank: int) -> None:
        super().__init__(call, rank, call.layout, chunk_elements(call.limits, call.layout))
        most = -(-self.longest // self.shards)
        rails = [] if self.lone_node else self.mine
        self.rails = {shard: Rail(self.b, call, shard, most) for shard in rails}

    def stage(self, chunk: Chunk) -> None:
        if not self.alone:
            super().stage(chunk)
            return
        send = Ref(Space.SEND, chunk.start, chunk.size)
        chunk.staged = self.b.copy(Ref(Space.RECV, chunk.start, chunk.size), send, [])

    def reduce(self, chunk: Chunk) -> None:
        waits = self.await_parts(chunk)
        parts = split(chunk.size, self.shards)
        for shard in self.mine:
            at, count = parts[shard]
            if not count:
                continue
            steps = list(chunk.staged)
            if self.alone:
                target = Ref(Space.RECV, chunk.start + at, count)
            else:
                target = self.place(chunk, self.rank, at, count)
                steps = self.b.reduce(target, self.terms(chunk, at, count), [*steps, *waits])
            if not self.lone_node:
                tags = Rail.tags(len(self.layout.nodes))
                tag = (chunk.turn % _TAG_TURNS * self.shards + shard) * tags
                steps = self.rails[shard].allreduce(target, tag, steps)
            chunk.ready += steps
        if self.mine and not self.alone:
            self.slots.announce(chunk.turn, [*chunk.ready, *chunk.staged])

    def deliver(self, chunk: Chunk) -> None:
        if self.alone:
            chunk.ends = [*chunk.staged, *chunk.ready]
            return
        for owner in self.sources:
            at, count = self.held(chunk, owner)
            waits = self.slots.await_announced(chunk.turn, [owner], chunk.staged)
            # Behind this rank's own reads of the same elements: the arrays may be one.
            waits += chunk.ready if owner == self.rank else chunk.staged
            result = Ref(Space.RECV, chunk.start + at, count)
            chunk.ends += self.b.copy(result, self.place(chunk, owner, at, count), waits)
        self.slots.finish(chunk.turn, len(self.chunks), chunk.ends)


class _Reduce(Sharded):
    """Sums go in the order of nodes from the root's on, by a chain or, small ones, a tree."""

    def __init__(self, call: Call, rank: int) -> None:
        super().__init__(call, rank, call.layout, chunk_elements(call.limits, call.layout))
        nodes = len(self.layout.nodes)
        self.home = self.layout.node_of(call.root)
        self.order = [(self.home + i) % nodes for i in range(nodes)]
        at = self.order.index(self.node)
        self.branch = (binomial if call.few_rounds else chain)(nodes, at)
        most = -(-self.longest // self.shards)
        self._tmp = {
            (shard, parity): [self.b.private(most) for _ in self.branch.children]
            for shard in self.mine
            for parity in range(2)
        }
        self._sums = Buffers(self.b, most)

    def reduce(self, chunk: Chunk) -> None:
        waits = [*chunk.staged, *self.await_parts(chunk)]
        parts = split(chunk.size, self.shards)
        for shard in self.mine:
            if not parts[shard][1]:
                continue
            part, result, steps = self._in_node(chunk, *parts[shard], waits)
            chunk.reads += steps
            if self.lone_node:
                chunk.ready += steps
            elif self.alone and self.rank != self.call.root and self.branch.children:
                result, free = self._sums.take(part.count)
                self._sums.release(self._on_rail(chunk, shard, part, result, [*steps, *free]))
            else:
                self._on_rail(chunk, shard, part, result, steps)
        if not self.alone:
            chunk.ends += [*chunk.reads, *chunk.staged]
            if self.mine and self.node == self.home and self.rank != self.call.root:
                self.slots.announce(chunk.turn, [*chunk.ready, *chunk.staged])

    def _in_node(
        self, chunk: Chunk, at: int, count: int, waits: list[int]
    ) -> tuple[Ref, Ref, list[int]]:
        """Reduce a shard in the node; return it, where its total goes, and what to wait for."""
        result = Ref(Space.RECV, chunk.start + at, count)
        if self.alone:
            return Ref(Space.SEND, chunk.start + at, count), result, waits
        part = self.place(chunk, self.rank, at, count)
        if self.rank != self.call.root:
            result = part
        elif self.lone_node:
            part = result
        return part, result, self.b.reduce(part, self.terms(chunk, at, count), waits)

    def _on_rail(
        self, chunk: Chunk, shard: int, part: Ref, into: Ref, after: list[int]
    ) -> list[int]:
        group = [self.layout.owner(node, shard) for node in self.order]
        tag = chunk.turn * self.shards + shard
        tmp = self._tmp[shard, chunk.turn % 2]
        free = self.chunks[chunk.turn - 2].ready if chunk.turn >= 2 else []
        ready, ends = reduce_up(self.b, group, self.branch, part, into, tmp, tag, after, free)
        chunk.ready += ready
        chunk.ends += ends
        return ends

    def deliver(self, chunk: Chunk) -> None:
        if self.alone:
            return
        if self.rank == self.call.root:
            for owner in self.sources:
                if owner == self.rank:
                    continue
                at, count = self.held(chunk, owner)
                waits = self.slots.await_announced(chunk.turn, [owner], chunk.staged)
                # Behind the own reads of the same elements: the arrays may be one.
                result, waits = Ref(Space.RECV, chunk.start + at, count), [*waits, *chunk.staged]
                place = self.place(chunk, owner, at, count)
                chunk.reads += self.b.copy(result, place, waits)
            chunk.ends += chunk.reads
        self.slots.finish(chunk.turn, len(self.chunks), chunk.reads or chunk.staged)


def one_shot(call: Call, rank: int) -> Program:
    """One node, small vector: who wants the result reads and reduces all areas, in rank order."""
    b, peers = Builder(rank), call.layout.nodes[0]
    slots = Slots(b, peers, max(1, call.count))
    if not call.count:
        return closed(b, call.layout, 0, 0)
    vector = Ref(Space.SEND, 0, call.count)
    copied = b.copy(slots.place(rank, 0, 0, call.count), vector, slots.writable(0))
    slots.filled(0, copied)
    if call.kind is Kind.ALLREDUCE or rank == call.root:
        terms = [slots.place(peer, 0, 0, call.count) for peer in peers]
        waits = [*slots.await_filled(0, peers), *copied]
        b.reduce(Ref(Space.RECV, 0, call.count), terms, waits)
    return closed(b, call.layout, 1, 0)
