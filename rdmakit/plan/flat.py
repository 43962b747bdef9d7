"""Schedules that know no hierarchy: one ring through all ranks, or trees of messages.

The ring visits ranks node by node, so one link of it leaves each node: an all-reduce sends
2(n-1)/n * S out of every node of n ranks in all, however many rails there are.
"""

from __future__ import annotations

from rdmakit.plan.doubling import (
    binomial_broadcast,
    doubling_allgather,
    doubling_allreduce,
    doubling_rounds,
    halving_reduce_scatter,
)
from rdmakit.plan.links import PLACES, Link
from rdmakit.plan.pieces import cut, split
from rdmakit.plan.ring import (
    ring_allgather,
    ring_allreduce,
    ring_broadcast,
    ring_reduce_scatter,
)
from rdmakit.plan.shape import Call, Kind
from rdmakit.plan.steps import DONE, Builder, Program, Ref, Space

__all__ = ["ring", "tree"]


def ring(call: Call, rank: int) -> Program:
    """Return the flat ring of any collective."""
    b, layout = Builder(rank), call.layout
    order = layout.rank_order()
    n, me = len(order), order.index(rank)
    windows = max(layout.ranks_per_node) > 1
    piece = max(1, call.limits.window // PLACES if windows else call.limits.chunk)
    if call.kind is Kind.BROADCAST:  # a chain of short pieces: the last rank starts early
        piece = max(1, min(piece, call.limits.chunk // 4))
    whole = call.kind is Kind.ALLREDUCE
    chunks = cut(call.count, piece * n if whole else piece)
    largest = chunks[0][1] if chunks else 0
    link = Link(b, layout, order, max(1, -(-largest // n) if whole else largest))
    k = call.count
    ends: list[list[int]] = []
    partial = [b.private(n * largest) for _ in range(2)] if call.kind is Kind.REDUCE_SCATTER else []
    for turn, (start, size) in enumerate(chunks):
        tag = turn * 2 * n
        if whole:
            src, dst = (
                [Ref(space, start + at, part) for at, part in split(size, n)]
                for space in (Space.SEND, Space.RECV)
            )
            ends.append(ring_allreduce(link, src, dst, me, tag, []))
        elif call.kind is Kind.BROADCAST:
            buffer = Ref(Space.RECV, start, size)
            ends.append(ring_broadcast(link, buffer, call.root, tag, []))
        elif call.kind is Kind.ALLGATHER:
            blocks = [Ref(Space.RECV, q * k + start, size) for q in order]
            ready = b.copy(blocks[me], Ref(Space.SEND, start, size))
            ends.append([*ready, *ring_allgather(link, blocks, me, tag, ready)])
        else:
            src = [Ref(Space.SEND, q * k + start, size) for q in order]
            dst = [partial[turn % 2].part(i * largest, size) for i in range(n)]
            dst[me] = Ref(Space.RECV, start, size)
            before = ends[turn - 2] if turn >= 2 else []
            if n == 1:
                ends.append(b.copy(dst[0], src[0]))
                continue
            ready, sent = ring_reduce_scatter(link, src, dst, (me - 1) % n, tag, before)
            ends.append([*ready, *(step for steps in sent.values() for step in steps)])
    if chunks and len(layout.nodes[layout.node_of(rank)]) > 1:
        b.post(DONE, _ring_span(call, len(chunks)), [step for steps in ends for step in steps])
    return b.build(_ring_span(call, len(chunks)), len(chunks) * 2 * n)


def _ring_span(call: Call, chunks: int) -> int:
    rounds = 1 if call.kind is Kind.BROADCAST else call.layout.size - 1
    return chunks * rounds * (2 if call.kind is Kind.ALLREDUCE else 1) + 1 if chunks else 0


def tree(call: Call, rank: int) -> Program:
    """Return the schedule of fewest rounds; all ranks on nodes of their own."""
    b, layout, k = Builder(rank), call.layout, call.count
    order = layout.rank_order()
    n, me = len(order), order.index(rank)
    recv = Ref(Space.RECV, 0, call.total if call.kind is not Kind.REDUCE_SCATTER else k)
    if call.kind is Kind.ALLREDUCE:
        ready = b.copy(recv, Ref(Space.SEND, 0, k))
        tmp = [b.private(k) for _ in range(doubling_rounds(n))]
        doubling_allreduce(b, order, recv, lambda turn: (tmp[turn], []), 0, ready)
    elif call.kind is Kind.BROADCAST:
        binomial_broadcast(b, order, order.index(call.root), recv, 0, [])
    elif call.kind is Kind.ALLGATHER:
        blocks = [recv.part(q * k, k) for q in range(n)]
        ready = b.copy(blocks[rank], Ref(Space.SEND, 0, k))
        doubling_allgather(b, range(n), blocks, 0, ready)
    else:
        work = b.private(n * k)
        ready = b.copy(work, Ref(Space.SEND, 0, n * k))
        blocks = [work.part(q * k, k) for q in range(n)]
        ready = halving_reduce_scatter(b, range(n), blocks, b.private(-(-n // 2) * k), 0, ready)
        b.copy(recv, blocks[me], ready)
    return b.build(tags=doubling_rounds(n) + 1)
