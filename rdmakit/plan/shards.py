"""A vector that a node divides among its ranks: the phases that all its programs have.

Chunk by chunk every rank puts the shards of the others into its window area (stage), the owner
of a shard reduces it, over its rail too (reduce), and ranks copy what they want from the owners'
areas (deliver). The phases of three chunks overlap: while one is on the rails, the next is
reduced in the node.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from rdmakit.layout import RankLayout
from rdmakit.plan.pieces import SLOTS, cut, joined, split
from rdmakit.plan.shape import Call
from rdmakit.plan.slots import Slots, closed
from rdmakit.plan.steps import Builder, Program, Ref, Space

__all__ = ["Chunk", "Sharded"]


@dataclass
class Chunk:
    """One chunk on its way, and this rank's steps that later ones wait for."""

    turn: int
    start: int
    size: int
    staged: list[int] = field(default_factory=list)
    """Behind these this rank's part is in the window."""
    ready: list[int] = field(default_factory=list)
    """Behind these the own shards are complete."""
    reads: list[int] = field(default_factory=list)
    """Behind these this rank reads the peers' areas no more."""
    ends: list[int] = field(default_factory=list)
    """Behind these the slot may be used again here."""


class Sharded(ABC):
    """Makes the program of one rank; subclasses say what is reduced and delivered.

    ``layout`` divides the ranks into those that work as one node; ``elements`` is the longest
    chunk; ``slot`` what a slot holds beside its chunk.
    """

    def __init__(
        self, call: Call, rank: int, layout: RankLayout, elements: int, extra: int = 0
    ) -> None:
        self.call, self.rank, self.layout, self.b = call, rank, layout, Builder(rank)
        self.node = layout.node_of(rank)
        self.peers: Sequence[int] = layout.nodes[self.node]
        self.alone, self.lone_node = len(self.peers) == 1, len(layout.nodes) == 1
        self.shards = layout.shards
        self.owners = [layout.owner(self.node, shard) for shard in range(self.shards)]
        self.mine = [shard for shard, owner in enumerate(self.owners) if owner == rank]
        pieces = cut(call.count, elements)
        self.chunks = [Chunk(turn, *piece) for turn, piece in enumerate(pieces)]
        self.longest = pieces[0][1] if pieces else 1
        """Elements of the longest chunk."""
        everyone = call.layout.nodes[call.layout.node_of(rank)]
        self.slots = Slots(self.b, self.peers, self.longest + extra, everyone)

    def program(self, tags: int) -> Program:
        """Return the finished program."""
        chunks = self.chunks
        for turn in range(len(chunks) + 2):
            if turn >= 2:
                self.deliver(chunks[turn - 2])
            if turn < len(chunks):
                self.stage(chunks[turn])
            if 1 <= turn <= len(chunks):
                self.reduce(chunks[turn - 1])
        return closed(self.b, self.call.layout, len(chunks), tags)

    @abstractmethod
    def reduce(self, chunk: Chunk) -> None:
        """Reduce the own shards."""

    @abstractmethod
    def deliver(self, chunk: Chunk) -> None:
        """Copy out what this rank wants; set ``chunk.ends``."""

    def before(self, chunk: Chunk) -> list[int]:
        """Return the steps of this rank that had the slot before."""
        return self.chunks[chunk.turn - SLOTS].ends if chunk.turn >= SLOTS else []

    def stage(self, chunk: Chunk) -> None:
        """Put the other owners' shards into the window."""
        before = self.before(chunk)
        if self.alone:
            chunk.staged = before
            return
        waits = [*before, *self.slots.writable(chunk.turn, before)]
        parts = split(chunk.size, self.shards)
        runs = [
            Ref(Space.SEND, chunk.start + at, size)
            for (at, size), owner in zip(parts, self.owners, strict=True)
            if owner != self.rank
        ]
        copied: list[int] = []
        for run in joined(runs):
            place = self.place(chunk, self.rank, run.offset - chunk.start, run.count)
            copied += self.b.copy(place, run, waits)
        chunk.staged = copied or waits
        self.slots.filled(chunk.turn, chunk.staged)

    def place(self, chunk: Chunk, owner: int, at: int, count: int) -> Ref:
        """Return elements of the chunk in the area of ``owner``."""
        return self.slots.place(owner, chunk.turn % SLOTS, at, count)

    def await_parts(self, chunk: Chunk) -> list[int]:
        """Wait until all peers have staged, if this rank reads what they did."""
        if self.alone or not self.mine:
            return []
        return self.slots.await_filled(chunk.turn, self.peers, chunk.staged)

    def term(self, chunk: Chunk, peer: int, at: int, count: int) -> Ref:
        """Return the input of ``peer`` to an own shard."""
        if peer == self.rank:
            return Ref(Space.SEND, chunk.start + at, count)
        return self.place(chunk, peer, at, count)

    def terms(self, chunk: Chunk, at: int, count: int) -> list[Ref]:
        """Return all inputs to an own shard, in the order of local ranks."""
        return [self.term(chunk, peer, at, count) for peer in self.peers]

    def held(self, chunk: Chunk, owner: int) -> tuple[int, int]:
        """Return (offset in the chunk, count) of the shards of ``owner``, which touch."""
        parts = split(chunk.size, self.shards)
        own = [part for part, o in zip(parts, self.owners, strict=True) if o == owner]
        return (own[0][0], sum(count for _, count in own)) if own else (0, 0)

    @property
    def sources(self) -> list[int]:
        """Return the owners of shards, each once, in the order of their shards."""
        return list(dict.fromkeys(self.owners))
