"""Hierarchical reduce-scatter, all-gather and broadcast: window in the node, messages between.

For a block that crosses between nodes each node has one rank that stands in for it, its
*proxy*: the one of equal local rank, or that modulo the node's size where nodes are unequal.
Every rail is used at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from rdmakit.layout import RankLayout
from rdmakit.plan.doubling import binomial_broadcast
from rdmakit.plan.pieces import SLOTS, cut, split
from rdmakit.plan.shape import Call
from rdmakit.plan.slots import Slots, chunk_elements
from rdmakit.plan.steps import DONE, Builder, Program, Ref, Space

__all__ = [
    "hierarchical_allgather",
    "hierarchical_broadcast",
    "hierarchical_reduce_scatter",
    "partners",
]


def proxy(layout: RankLayout, node: int, rank: int) -> int:
    """Return the rank of ``node`` that handles the block of ``rank`` there."""
    ranks = layout.nodes[node]
    return ranks[layout.local_rank(rank) % len(ranks)]


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


def _block_chunks(call: Call) -> list[tuple[int, int]]:
    return cut(call.count, max(1, chunk_elements(call) // call.layout.size))


def hierarchical_reduce_scatter(call: Call, rank: int) -> Program:
    """Each node reduces every block at its proxy; proxies send to the block's rank, which sums.

    The final sum is in the order of nodes, each node's partial in the order of local ranks.
    """
    b, layout, k = Builder(rank), call.layout, call.count
    node = layout.node_of(rank)
    peers = layout.nodes[node]
    alone = len(peers) == 1
    chunks = _block_chunks(call)
    largest = chunks[0][1] if chunks else 1
    slots = Slots(b, peers, layout.size * largest)
    mine = [q for q in range(layout.size) if proxy(layout, node, q) == rank]
    abroad = [i for i in range(len(layout.nodes)) if i != node]
    tmp = [[b.private(largest) for _ in abroad] for _ in range(2)]
    done: list[list[int]] = []
    staged: list[list[int]] = []

    def given(q: int, start: int, size: int) -> Ref:
        return Ref(Space.SEND, q * k + start, size)

    def stage(turn: int) -> None:
        start, size = chunks[turn]
        if alone:
            staged.append([])
            return
        before = done[turn - SLOTS] if turn >= SLOTS else []
        waits = [*before, *slots.writable(turn, before)]
        copied: list[int] = []
        for q in range(layout.size):
            if q not in mine:
                place = slots.place(rank, turn % SLOTS, q * size, size)
                copied += b.copy(place, given(q, start, size), waits)
        copied = copied or waits
        slots.filled(turn, copied)
        staged.append(copied)

    def reduce(turn: int) -> None:
        start, size = chunks[turn]
        waits = [] if alone else [*slots.await_filled(turn, staged[turn]), *staged[turn]]
        before = done[turn - 2] if turn >= 2 else []
        reads: list[int] = []
        ends: list[int] = []
        result = Ref(Space.RECV, start, size)
        partial: Ref = given(rank, start, size)
        ready: list[int] = []
        for q in sorted(mine, key=lambda q: q == rank):  # what others wait for goes first
            target = partial if q == rank else given(q, start, size)
            steps: list[int] = list(waits)
            if not alone:
                terms = [
                    given(q, start, size)
                    if peer == rank
                    else slots.place(peer, turn % SLOTS, q * size, size)
                    for peer in peers
                ]
                target = result if q == rank else slots.place(rank, turn % SLOTS, q * size, size)
                steps = b.reduce(target, terms, waits)
                reads += steps
            if q == rank:
                partial, ready = target, steps
            else:
                ends += b.send(q, target, turn, steps)
        if not alone:
            slots.finish(turn, len(chunks), [*reads, *waits])
        terms = []
        for i in range(len(layout.nodes)):
            if i == node:
                terms.append(partial)
                continue
            place = tmp[turn % 2][abroad.index(i)].part(0, size)
            ready = [*ready, *b.recv(proxy(layout, i, rank), place, turn, before)]
            terms.append(place)
        if terms != [result]:
            ready = b.reduce(result, terms, ready)
        done.append([*ends, *reads, *ready])

    for turn in range(len(chunks) + 1):
        if turn < len(chunks):
            stage(turn)
        if turn:
            reduce(turn - 1)
    return _finished(b, alone, chunks, done)


def hierarchical_allgather(call: Call, rank: int) -> Program:
    """Each rank gives its block to its node's window and to its proxy on every other node."""
    b, layout, k = Builder(rank), call.layout, call.count
    node = layout.node_of(rank)
    peers = layout.nodes[node]
    alone = len(peers) == 1
    chunks = _block_chunks(call)
    largest = chunks[0][1] if chunks else 1
    slots = Slots(b, peers, layout.size * largest)
    strangers = [q for q in range(layout.size) if layout.node_of(q) != node]
    handled = {p: [q for q in strangers if proxy(layout, node, q) == p] for p in peers}
    done: list[list[int]] = []

    def taken(q: int, start: int, size: int) -> Ref:
        return Ref(Space.RECV, q * k + start, size)

    def stage(turn: int) -> None:
        start, size = chunks[turn]
        own = Ref(Space.SEND, start, size)
        waits = list(done[turn - SLOTS]) if turn >= SLOTS else []
        if not alone:
            waits += slots.writable(turn, waits)
        ends = b.copy(taken(rank, start, size), own, waits)
        if not alone:
            place = slots.place(rank, turn % SLOTS, rank * size, size)
            copied = b.copy(place, own, waits)
            slots.filled(turn, copied)
            ends += copied
        for i in range(len(layout.nodes)):
            if i != node:
                # Not all at once: a peer has room for as many chunks as there are slots.
                ends += b.send(proxy(layout, i, rank), own, turn, waits)
        came: list[int] = []
        for q in handled[rank]:
            place = (
                taken(q, start, size) if alone else slots.place(rank, turn % SLOTS, q * size, size)
            )
            came += b.recv(q, place, turn, waits)
        if handled[rank] and not alone:
            slots.announce(turn, came)
        done.append([*ends, *came])

    def copy_out(turn: int) -> None:
        start, size = chunks[turn]
        reads: list[int] = list(done[turn])
        before = done[turn - 1] if turn else []
        for peer in peers:
            if peer != rank:
                place = slots.place(peer, turn % SLOTS, peer * size, size)
                reads += b.copy(
                    taken(peer, start, size), place, slots.await_filled(turn, before, [peer])
                )
            if handled[peer]:
                waits = done[turn] if peer == rank else slots.await_announced(turn, [peer], before)
                for q in handled[peer]:
                    place = slots.place(peer, turn % SLOTS, q * size, size)
                    reads += b.copy(taken(q, start, size), place, waits)
        slots.finish(turn, len(chunks), reads)
        done[turn] = reads

    for turn in range(len(chunks) + 1):
        if turn < len(chunks):
            stage(turn)
        if turn and not alone:
            copy_out(turn - 1)
    return _finished(b, alone, chunks, done)


def hierarchical_broadcast(call: Call, rank: int) -> Program:
    """The root's node passes each shard along its own chain of nodes; small ones down a tree."""
    b, layout = Builder(rank), call.layout
    node = layout.node_of(rank)
    peers = layout.nodes[node]
    alone = len(peers) == 1
    home = layout.node_of(call.root)
    n = len(layout.nodes)
    order = [(home + i) % n for i in range(n)]
    chunks = cut(call.count, chunk_elements(call))
    slots = Slots(b, peers, chunks[0][1] if chunks else 1)
    owners = [layout.owner(node, shard) for shard in range(layout.shards)]
    done: list[list[int]] = []

    def pass_on(shard: int, place: Ref, tag: int, after: Sequence[int]) -> list[int]:
        """Receive (unless at home) and send on; the root's own copy of a shard is ready."""
        group = [layout.owner(i, shard) for i in order]
        if call.few_rounds:
            return binomial_broadcast(b, group, 0, place, tag, after)
        at = group.index(rank)
        if at == 0:
            return b.send(group[1], place, tag, after)
        ready = b.recv(group[at - 1], place, tag, after)
        return [*ready, *(b.send(group[at + 1], place, tag, ready) if at + 1 < n else [])]

    for turn, (start, size) in enumerate(chunks):
        parts = split(size, layout.shards)
        whole = Ref(Space.RECV, start, size)
        mine = [(shard, *parts[shard]) for shard in range(layout.shards) if owners[shard] == rank]
        before = done[turn - SLOTS] if turn >= SLOTS else []
        previous = done[turn - 1] if turn else []
        ends: list[int] = []
        if node == home:
            ready: list[int] = list(before)
            if not alone and rank == call.root:
                waits = [*before, *slots.writable(turn, before)]
                ends += b.copy(slots.place(rank, turn % SLOTS, 0, size), whole, waits)
                slots.filled(turn, ends)
            elif not alone:
                place = slots.place(call.root, turn % SLOTS, 0, size)
                ready = b.copy(whole, place, slots.await_filled(turn, previous, [call.root]))
                slots.finish(turn, len(chunks), ready)
                ends += ready
            if n > 1:
                for shard, at, part in mine:
                    place = whole.part(at, part)
                    ends += pass_on(shard, place, turn * layout.shards + shard, ready)
            if not alone and rank == call.root:
                slots.finish(turn, len(chunks), ends)
        elif alone:
            for shard, at, part in mine:
                ends += pass_on(shard, whole.part(at, part), turn * layout.shards + shard, before)
        else:
            waits = [*before, *slots.writable(turn, before)]
            came: list[int] = []
            for shard, at, part in mine:
                place = slots.place(rank, turn % SLOTS, at, part)
                came += pass_on(shard, place, turn * layout.shards + shard, waits)
            if mine:
                slots.announce(turn, came)
            ends += came
            for owner in sorted(set(owners), key=owners.index):
                waits = came if owner == rank else slots.await_announced(turn, [owner], previous)
                for shard, (at, part) in enumerate(parts):
                    if owners[shard] == owner:
                        place = slots.place(owner, turn % SLOTS, at, part)
                        ends += b.copy(whole.part(at, part), place, waits)
            slots.finish(turn, len(chunks), ends)
        done.append(ends)
    return _finished(b, alone, chunks, done, layout.shards)


def _finished(
    b: Builder,
    alone: bool,
    chunks: Sequence[object],
    done: Sequence[Sequence[int]],
    tags: int = 1,
) -> Program:
    if not alone and chunks:
        b.post(DONE, len(chunks), [step for ends in done[-SLOTS:] for step in ends])
    return b.build(len(chunks), len(chunks) * tags)
