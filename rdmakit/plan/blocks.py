"""Hierarchical reduce-scatter: blocks are reduced in each node and summed by their ranks.

For a block that crosses between nodes each node has one rank that stands in for it, its
*proxy* (:func:`~rdmakit.plan.routes.proxy`). Every rail is used at once. Elements leaving a
node: the blocks of the ranks elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

from rdmakit.layout import RankLayout
from rdmakit.plan.flow import Throttle, exchange_round
from rdmakit.plan.pieces import SLOTS, piece, turns_for
from rdmakit.plan.routes import clients, proxy
from rdmakit.plan.shape import Call
from rdmakit.plan.slots import Slots, chunk_elements, closed, slot_elements
from rdmakit.plan.steps import Builder, Program, Ref, Space

__all__ = ["hierarchical_reduce_scatter", "partners"]


def partners(layout: RankLayout, rank: int) -> list[int]:
    """Return the ranks of the nodes before and after that ``rank`` exchanges messages with.

    Symmetric: whom a rank has as partner has it too.
    """
    nodes, node = layout.nodes, layout.node_of(rank)
    found: set[int] = set()
    for i in {(node - 1) % len(nodes), (node + 1) % len(nodes)} - {node}:
        shards = [s for s in range(layout.shards) if layout.owner(node, s) == rank]
        found |= {layout.owner(i, shard) for shard in shards}
        found.add(proxy(layout, i, rank))
        found |= {q for q in nodes[i] if proxy(layout, node, q) == rank}
    return sorted(found)


def hierarchical_reduce_scatter(call: Call, rank: int) -> Program:
    """Each node reduces every block at its proxy; proxies send to the block's rank, which sums.

    The final sum is in the order of nodes, each node's partial in the order of local ranks.
    """
    return _ReduceScatter(call, rank).program()


@dataclass
class _Chunk:
    staged: list[int] = field(default_factory=list)
    """Behind these the own part is in the window."""
    ends: list[int] = field(default_factory=list)
    """Behind these the slot may be used again here."""
    summed: list[int] = field(default_factory=list)
    """Behind these the own block is complete."""


class _ReduceScatter:
    def __init__(self, call: Call, rank: int) -> None:
        self.call, self.rank, self.layout, self.b = call, rank, call.layout, Builder(rank)
        layout, wish = call.layout, chunk_elements(call.limits, call.layout)
        self.node = layout.node_of(rank)
        self.peers = layout.nodes[self.node]
        self.alone = len(self.peers) == 1
        windows = max(layout.ranks_per_node) > 1
        slot = slot_elements(call.limits) if windows else wish + 4 * layout.size
        counts = [count for count in call.blocks if count]
        longest = max(counts, default=0)
        self.turns = turns_for(len(counts), sum(counts), longest, wish, slot)
        sizes = [piece(count, max(1, self.turns), 0)[1] for count in call.blocks]
        self.starts = tuple(accumulate(sizes, initial=0))
        self.slots = Slots(self.b, self.peers, max(1, self.starts[-1]))
        handled = {rank, *clients(layout, self.node)[rank]}
        # In the order in which all exchange messages; what others wait for goes first.
        self.mine = sorted(handled, key=lambda q: (q == rank, self._order(q)))
        nodes = range(len(layout.nodes))
        others = [i for i in nodes if i != self.node]
        self.abroad = sorted(others, key=lambda i: exchange_round(i, self.node, len(nodes)))
        self.tmp = [{i: self.b.private(sizes[rank]) for i in self.abroad} for _ in range(2)]
        self.given = call.send_offsets(rank)
        self._sent = Throttle()
        self._chunks: list[_Chunk] = []

    def program(self) -> Program:
        for turn in range(self.turns + 1):
            if turn < self.turns:
                self._stage(turn)
            if turn:
                self._reduce(turn - 1)
        return closed(self.b, self.layout, self.turns, self.turns)

    def _order(self, target: int) -> tuple[int, int]:
        nodes = len(self.layout.nodes)
        return exchange_round(self.node, self.layout.node_of(target), nodes), target

    def _input(self, q: int, turn: int) -> Ref:
        at, count = piece(self.call.blocks[q], self.turns, turn)
        return Ref(Space.SEND, self.given[q] + at, count)

    def _place(self, owner: int, q: int, turn: int) -> Ref:
        count = piece(self.call.blocks[q], self.turns, turn)[1]
        return self.slots.place(owner, turn % SLOTS, self.starts[q], count)

    def _stage(self, turn: int) -> None:
        """Put the blocks that others stand in for into the window."""
        chunk = _Chunk()
        self._chunks.append(chunk)
        if self.alone:
            return
        before = self._chunks[turn - SLOTS].ends if turn >= SLOTS else []
        waits = [*before, *self.slots.writable(turn, before)]
        for q in range(self.layout.size):
            given = self._input(q, turn)
            if q not in self.mine and given.count:
                # One behind the other, as they are done anyway: saves dependencies.
                waits = self.b.copy(self._place(self.rank, q, turn), given, waits)
                chunk.staged = waits
        chunk.staged = self.slots.filled(turn, chunk.staged or waits)

    def _reduce(self, turn: int) -> None:
        """Reduce the blocks that this rank stands in for, send them, and sum the own one."""
        chunk, waits = self._chunks[turn], list[int]()
        if not self.alone:
            waits = self.slots.await_filled(turn, self.peers, chunk.staged)
        reads: list[int] = []
        for q in self.mine:
            part, steps = self._in_node(q, turn, waits)
            reads += steps
            waits = steps if part.count else waits  # as in _stage
            if q == self.rank:
                self._sum(turn, part, steps)
            elif part.count:
                sent = self.b.send(q, part, turn, [*steps, *self._sent.waits()])
                self._sent.began(sent)
                chunk.ends += sent
        if not self.alone:
            self.slots.finish(turn, self.turns, reads)
        chunk.ends += reads

    def _in_node(self, q: int, turn: int, waits: list[int]) -> tuple[Ref, list[int]]:
        """Reduce a block in the node; return where it is and what to wait for."""
        own = self._input(q, turn)
        if self.alone:
            return own, []
        terms = [own if peer == self.rank else self._place(peer, q, turn) for peer in self.peers]
        part = self._result(turn) if q == self.rank else self._place(self.rank, q, turn)
        return part, self.b.reduce(part, terms, waits)

    def _result(self, turn: int) -> Ref:
        return Ref(Space.RECV, *piece(self.call.blocks[self.rank], self.turns, turn))

    def _sum(self, turn: int, part: Ref, after: list[int]) -> None:
        """Receive the other nodes' parts of the own block and add all in the order of nodes."""
        free = self._chunks[turn - 2].summed if turn >= 2 else []
        terms, ready = {self.node: part}, list(after)
        for i in self.abroad:
            terms[i] = self.tmp[turn % 2][i].part(0, part.count)
            ready += self.b.recv(proxy(self.layout, i, self.rank), terms[i], turn, free)
        if self.abroad or self.alone:
            ready = self.b.reduce(self._result(turn), [terms[i] for i in sorted(terms)], ready)
        self._chunks[turn].summed = ready
