"""Node phase, rail phase, node phase: schedules for any ranks on any nodes.

Inside a node the window is used (direct reads of the peers' areas, sums in rank order), between
nodes messages on the rails. With one node only the node phases are left ("direct"), with one
rank on each node only the rail phase. Chunks go through the phases one behind the other: while
one chunk is on the rails, the next is reduced in the node.

Elements leaving a node with R shards, N nodes, S elements: all-reduce 2(N-1)/N * S (by doubling,
for small vectors, log2(N) * S); reduce-scatter and all-gather (N-1)/N * S with equal nodes;
broadcast S, and nothing out of the last node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rdmakit.plan.doubling import doubling_allreduce, doubling_rounds
from rdmakit.plan.links import Link
from rdmakit.plan.pieces import SLOTS, cut, joined, split
from rdmakit.plan.ring import ring_allreduce
from rdmakit.plan.shape import Call
from rdmakit.plan.slots import Slots, chunk_elements
from rdmakit.plan.steps import DONE, Builder, Program, Ref, Space

__all__ = ["hierarchical_allreduce", "one_shot_allreduce"]


_TAG_TURNS = 64
"""Chunks after which tags come round again: far more than are under way at once."""


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


def hierarchical_allreduce(call: Call, rank: int) -> Program:
    """Reduce-scatter in the node, all-reduce of each shard on its rail, all-gather in the node."""
    b, layout = Builder(rank), call.layout
    node = layout.node_of(rank)
    peers = layout.nodes[node]
    shards = layout.shards
    owners = [layout.owner(node, shard) for shard in range(shards)]
    mine = [shard for shard in range(shards) if owners[shard] == rank]
    chunks = cut(call.count, chunk_elements(call))
    alone, lone_node = len(peers) == 1, len(layout.nodes) == 1
    slots = Slots(b, peers, chunks[0][1] if chunks else 1)
    most = -(-slots.elements // shards)
    rails = {} if lone_node else {shard: Rail(b, call, shard, most) for shard in mine}
    done: list[list[int]] = []  # of each chunk: when its slot may be used again here
    open_: dict[int, tuple[list[int], list[int]]] = {}  # chunk: staged, shards ready

    def pieces(turn: int, wanted: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return (shard, offset in the chunk, count) of ``wanted`` shards."""
        parts = split(chunks[turn][1], shards)
        return [(shard, *parts[shard]) for shard in wanted]

    def work(turn: int, offset: int, count: int) -> Ref:
        if alone:
            return Ref(Space.RECV, chunks[turn][0] + offset, count)
        return slots.place(rank, turn % SLOTS, offset, count)

    def stage(turn: int) -> None:
        start, size = chunks[turn]
        before = done[turn - SLOTS] if turn >= SLOTS else []
        if alone:
            open_[turn] = (
                b.copy(Ref(Space.RECV, start, size), Ref(Space.SEND, start, size), before),
                [],
            )
            return
        waits = [*before, *slots.writable(turn, before)]
        others = [shard for shard in range(shards) if owners[shard] != rank]
        copied: list[int] = []
        for run in joined(
            [Ref(Space.SEND, start + at, size) for _, at, size in pieces(turn, others)]
        ):
            copied += b.copy(work(turn, run.offset - start, run.count), run, waits)
        copied = copied or waits
        slots.filled(turn, copied)
        open_[turn] = (copied, [])

    def reduce(turn: int) -> None:
        start = chunks[turn][0]
        staged, ready = open_[turn]
        waits = [] if alone or not mine else slots.await_filled(turn, staged)
        for shard, offset, size in pieces(turn, mine):
            target = work(turn, offset, size)
            steps = list(staged)
            if not alone:
                terms = [
                    Ref(Space.SEND, start + offset, size)
                    if peer == rank
                    else slots.place(peer, turn % SLOTS, offset, size)
                    for peer in peers
                ]
                steps = b.reduce(target, terms, [*staged, *waits])
            if not lone_node:
                tag = (turn % _TAG_TURNS * shards + shard) * Rail.tags(len(layout.nodes))
                steps = rails[shard].allreduce(target, tag, steps)
            ready += steps
        if mine and not alone:
            slots.announce(turn, [*ready, *staged])

    def copy_out(turn: int) -> None:
        start, size = chunks[turn]
        staged, ready = open_.pop(turn)
        ends = [*staged, *ready] if alone else []
        if not alone:
            parts = pieces(turn, range(shards))
            for owner in sorted(set(owners), key=owners.index):
                waits = slots.await_announced(turn, [owner], staged)
                held = [part for part in parts if owners[part[0]] == owner]
                at, size = held[0][1], sum(part[2] for part in held)
                # Behind this rank's own reads of the same elements: the arrays may be one.
                ends += b.copy(
                    Ref(Space.RECV, start + at, size),
                    slots.place(owner, turn % SLOTS, at, size),
                    [*waits, *(ready if owner == rank else staged)],
                )
            slots.finish(turn, len(chunks), ends)
        done.append(ends)

    for turn in range(len(chunks) + 2):
        if turn >= 2:
            copy_out(turn - 2)
        if turn < len(chunks):
            stage(turn)
        if 1 <= turn <= len(chunks):
            reduce(turn - 1)
    if not alone and chunks:
        b.post(DONE, len(chunks), [step for ends in done[-SLOTS:] for step in ends])
    turns = min(len(chunks), _TAG_TURNS)
    return b.build(len(chunks), turns * shards * Rail.tags(len(layout.nodes)))


def one_shot_allreduce(call: Call, rank: int) -> Program:
    """One node, small vector: every rank reads and reduces all areas itself, in rank order."""
    b, peers = Builder(rank), call.layout.nodes[0]
    slots = Slots(b, peers, max(1, call.count))
    vector = Ref(Space.SEND, 0, call.count)
    if call.count and len(peers) > 1:
        copied = b.copy(slots.place(rank, 0, 0, call.count), vector, slots.writable(0))
        slots.filled(0, copied)
        terms = [slots.place(peer, 0, 0, call.count) for peer in peers]
        ends = b.reduce(Ref(Space.RECV, 0, call.count), terms, [*slots.await_filled(0), *copied])
        b.post(DONE, 1, ends)
        return b.build(1)
    b.copy(Ref(Space.RECV, 0, call.count), vector)
    return b.build()
