"""Hierarchical scan and exscan: each shard from run to run of ranks, a prefix for each in a run.

A *run* is ranks next to each other in rank order and on one node; where nodes have consecutive
ranks there is one for each node. The owner of a shard takes the sum of all ranks before the run,
adds its ranks' inputs one by one and passes the last sum on. Every result is the sum in the order
of ranks, whatever the layout; S elements leave a node for each of its runs but the last rank's.
"""

from __future__ import annotations

from functools import lru_cache

from rdmakit.errors import UnsupportedError
from rdmakit.layout import RankLayout
from rdmakit.plan.flow import Buffers
from rdmakit.plan.pieces import split
from rdmakit.plan.shape import Call, Kind, Limits
from rdmakit.plan.shards import Chunk, Sharded
from rdmakit.plan.slots import chunk_elements, slot_elements
from rdmakit.plan.steps import Program, Ref, Space

__all__ = ["hierarchical_scan", "runs"]


def hierarchical_scan(call: Call, rank: int) -> Program:
    """Return the program of a scan or exscan."""
    plan = _Scan(call, rank)
    return plan.program(len(plan.chunks) * plan.shards)


@lru_cache(maxsize=16)
def runs(layout: RankLayout) -> RankLayout:
    """Return the layout whose nodes are the runs, in rank order."""
    found: list[list[int]] = []
    for rank in range(layout.size):
        if found and layout.node_of(rank) == layout.node_of(rank - 1):
            found[-1].append(rank)
        else:
            found.append([rank])
    return RankLayout(tuple(map(tuple, found)))


def _sums(layout: RankLayout, elements: int) -> int:
    """Return the most elements of sums that an owner keeps of a chunk of ``elements``."""
    shards = layout.shards
    shard = -(-elements // shards)
    return max(
        ((size + 1) * -(-shards // size) * shard for size in layout.ranks_per_node if size > 1),
        default=0,
    )


def _elements(limits: Limits, layout: RankLayout) -> int:
    """Return the longest chunk that fits a slot together with its sums."""
    chunk, room = chunk_elements(limits, layout), slot_elements(limits)
    if max(layout.ranks_per_node) == 1:
        return chunk
    step = layout.shards
    while chunk > 1 and chunk + _sums(layout, chunk) > room:
        fits = chunk * room // (chunk + _sums(layout, chunk))
        chunk = max(1, min(fits - fits % step if fits > step else fits, chunk - 1))
    if chunk + _sums(layout, chunk) > room:
        raise UnsupportedError(
            f"a window slot of {room} elements is too small for the sums of "
            f"{max(layout.ranks_per_node)} ranks: make the window larger"
        )
    return chunk


class _Scan(Sharded):
    """Sum 0 is that of the ranks before the run, sum i that behind the run's rank i - 1."""

    def __init__(self, call: Call, rank: int) -> None:
        layout = runs(call.layout)
        elements = _elements(call.limits, layout)
        super().__init__(call, rank, layout, elements, _sums(layout, elements))
        self.inclusive = call.kind is Kind.SCAN
        self.first, self.last = self.node == 0, self.node == len(layout.nodes) - 1
        self._came = Buffers(self.b, self.longest)
        self._passed = Buffers(self.b, self.longest)

    def reduce(self, chunk: Chunk) -> None:
        at, count = self.held(chunk, self.rank)
        if not count:
            return
        waits = [*chunk.staged, *self.await_parts(chunk)]
        if self.alone:
            self._alone(chunk, waits)
            return
        steps, place = waits, self._sum(chunk, self.rank, 0)
        if not self.first:
            steps = [*waits, *self._receive(chunk, place, waits)]
        chunk.ready += steps
        for i, peer in enumerate(self.peers):
            if i + 1 == len(self.peers) and self.last and not self.inclusive:
                break
            term, total = self.term(chunk, peer, at, count), self._sum(chunk, self.rank, i + 1)
            begins = self.first and not i
            steps = self.b.reduce(total, [term] if begins else [place, term], steps)
            place = total
        chunk.ready += steps
        if not self.last:
            chunk.ends += self._send(chunk, place, steps)
        self.slots.announce(chunk.turn, chunk.ready)

    def _alone(self, chunk: Chunk, waits: list[int]) -> None:
        """Do the whole chunk by messages: this rank is a run of its own."""
        own = Ref(Space.SEND, chunk.start, chunk.size)
        result = Ref(Space.RECV, chunk.start, chunk.size)
        if self.first:
            chunk.ends += self.b.copy(result, own, waits) if self.inclusive else []
            chunk.ends += self._send(chunk, own, waits)
            return
        came, free = self._came.take(chunk.size)
        ready = self._receive(chunk, came, free)
        if self.inclusive:
            ready = self.b.reduce(result, [came, own], ready)
            self._came.release(ready)
            chunk.ends += [*ready, *([] if self.last else self._send(chunk, result, ready))]
            return
        if not self.last:
            total, free = self._passed.take(chunk.size)
            ready = self.b.reduce(total, [came, own], [*ready, *free])
            sent = self._send(chunk, total, ready)
            self._passed.release(sent)
            chunk.ends += sent
        # Behind the read of the own input: the arrays may be one.
        ready = self.b.copy(result, came, ready)
        self._came.release(ready)
        chunk.ends += ready

    def deliver(self, chunk: Chunk) -> None:
        if self.alone:
            return
        i = self.peers.index(self.rank) + self.inclusive
        for owner in self.sources:
            at, count = self.held(chunk, owner)
            if not count or (self.first and not i):
                continue
            waits = list(chunk.ready)
            if owner != self.rank:
                waits = self.slots.await_announced(chunk.turn, [owner], chunk.staged)
            # Behind the own reads of the same elements: the arrays may be one.
            result = Ref(Space.RECV, chunk.start + at, count)
            waits = [*waits, *chunk.staged]
            chunk.reads += self.b.copy(result, self._sum(chunk, owner, i), waits)
        chunk.reads += chunk.ready
        chunk.ends += [*chunk.reads, *chunk.staged]
        self.slots.finish(chunk.turn, len(self.chunks), chunk.reads)

    def _sum(self, chunk: Chunk, owner: int, i: int) -> Ref:
        """Return where ``owner`` keeps a sum of its shards."""
        count = self.held(chunk, owner)[1]
        return self.place(chunk, owner, self.longest + i * count, count)

    def _receive(self, chunk: Chunk, into: Ref, after: list[int]) -> list[int]:
        """Receive the sums of the run before this one."""
        steps: list[int] = []
        for shard, ref in self._by_shard(chunk, into):
            source = self.layout.owner(self.node - 1, shard)
            steps += self.b.recv(source, ref, chunk.turn * self.shards + shard, after)
        return steps

    def _send(self, chunk: Chunk, src: Ref, after: list[int]) -> list[int]:
        """Send the sums of this run to the next."""
        steps: list[int] = []
        for shard, ref in self._by_shard(chunk, src):
            target = self.layout.owner(self.node + 1, shard)
            steps += self.b.send(target, ref, chunk.turn * self.shards + shard, after)
        return steps

    def _by_shard(self, chunk: Chunk, ref: Ref) -> list[tuple[int, Ref]]:
        parts, start = split(chunk.size, self.shards), self.held(chunk, self.rank)[0]
        return [
            (shard, ref.part(parts[shard][0] - start, parts[shard][1]))
            for shard in self.mine
            if parts[shard][1]
        ]
