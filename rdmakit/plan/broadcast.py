"""Hierarchical broadcast: each shard along its own chain of nodes, shared out in each node.

Elements leaving a node: S, divided among its rails, and nothing out of the last node of a chain.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rdmakit.plan.pieces import SLOTS, cut, split
from rdmakit.plan.shape import Call
from rdmakit.plan.slots import Slots, chunk_elements, closed
from rdmakit.plan.steps import Builder, Program, Ref, Space
from rdmakit.plan.trees import binomial, chain, pass_down

__all__ = ["hierarchical_broadcast"]


def hierarchical_broadcast(call: Call, rank: int) -> Program:
    """The root's node passes each shard along its own chain of nodes; small ones down a tree."""
    plan = _Broadcast(call, rank)
    for chunk in plan.chunks:
        plan.pass_through(chunk)
    turns = len(plan.chunks)
    return closed(plan.b, call.layout, turns, turns * call.layout.shards)


@dataclass
class _Chunk:
    turn: int
    whole: Ref
    reads: list[int] = field(default_factory=list)
    """Behind these this rank reads the peers' areas no more."""
    ends: list[int] = field(default_factory=list)
    """Behind these the slot may be used again here."""


class _Broadcast:
    def __init__(self, call: Call, rank: int) -> None:
        self.call, self.rank, self.layout, self.b = call, rank, call.layout, Builder(rank)
        self.node, self.nodes = self.layout.node_of(rank), len(self.layout.nodes)
        self.peers = self.layout.nodes[self.node]
        home = self.layout.node_of(call.root)
        self.order = [(home + i) % self.nodes for i in range(self.nodes)]
        at = self.order.index(self.node)
        self.branch = (binomial if call.few_rounds else chain)(self.nodes, at)
        self.at_home, self.alone = self.node == home, len(self.peers) == 1
        shards = self.layout.shards
        self.owners = [self.layout.owner(self.node, shard) for shard in range(shards)]
        pieces = cut(call.count, chunk_elements(call.limits, self.layout))
        self.chunks = [
            _Chunk(turn, Ref(Space.RECV, start, size)) for turn, (start, size) in enumerate(pieces)
        ]
        self.slots = Slots(self.b, self.peers, pieces[0][1] if pieces else 1)

    def pass_through(self, chunk: _Chunk) -> None:
        """Append the steps of one chunk."""
        before = self.chunks[chunk.turn - SLOTS].ends if chunk.turn >= SLOTS else []
        if self.alone:
            self._pass_on(chunk, chunk.whole, before)
        elif self.rank == self.call.root:
            waits = [*before, *self.slots.writable(chunk.turn, before)]
            place = self.slots.place(self.rank, chunk.turn % SLOTS, 0, chunk.whole.count)
            chunk.ends += self.b.copy(place, chunk.whole, waits)
            self.slots.filled(chunk.turn, chunk.ends)
            self._pass_on(chunk, chunk.whole, before)
        elif self.at_home:
            self._take_from_root(chunk)
        else:
            self._share_out(chunk, before)
        if not self.alone and self.rank != self.call.root:
            self.slots.finish(chunk.turn, len(self.chunks), chunk.reads)

    def _pass_on(self, chunk: _Chunk, buffer: Ref, after: list[int]) -> list[int]:
        """Pass this rank's shards on their way, from or into ``buffer``; return when it is there.

        Sends and receives are among ``chunk.ends``.
        """
        there: list[int] = []
        if self.nodes == 1:
            return there
        parts = split(chunk.whole.count, len(self.owners))
        for shard, (at, count) in enumerate(parts):
            if count and self.owners[shard] == self.rank:
                group = [self.layout.owner(node, shard) for node in self.order]
                tag = chunk.turn * len(parts) + shard
                part = buffer.part(at, count)
                ready, ends = pass_down(self.b, group, self.branch, part, tag, after)
                there += ready
                chunk.ends += ends
        return there

    def _previous(self, chunk: _Chunk) -> list[int]:
        """Return the last read of the chunk before: no wait for a peer begins earlier."""
        return self.chunks[chunk.turn - 1].reads[-1:] if chunk.turn else []

    def _take_from_root(self, chunk: _Chunk) -> None:
        root, slot = self.call.root, chunk.turn % SLOTS
        waits = self.slots.await_filled(chunk.turn, [root], self._previous(chunk))
        place = self.slots.place(root, slot, 0, chunk.whole.count)
        chunk.reads = self.b.copy(chunk.whole, place, waits)
        chunk.ends += chunk.reads
        self._pass_on(chunk, chunk.whole, chunk.reads)

    def _share_out(self, chunk: _Chunk, before: list[int]) -> None:
        """Receive the own shards into the window, and all shards from there."""
        turn, slot = chunk.turn, chunk.turn % SLOTS
        parts = split(chunk.whole.count, len(self.owners))
        waits = [*before, *self.slots.writable(turn, before)]
        place = self.slots.place(self.rank, slot, 0, chunk.whole.count)
        came = self._pass_on(chunk, place, waits)
        if self.rank in self.owners:
            self.slots.announce(turn, came)
        last = self._previous(chunk)
        for owner in dict.fromkeys(self.owners):
            own = owner == self.rank
            waits = came if own else self.slots.await_announced(turn, [owner], last)
            held = [part for part, o in zip(parts, self.owners, strict=True) if o == owner]
            at, count = held[0][0], sum(count for _, count in held)
            src = self.slots.place(owner, slot, at, count)
            chunk.reads += self.b.copy(chunk.whole.part(at, count), src, waits)
        chunk.ends += chunk.reads
