"""Schedules of fewest rounds for all ranks on nodes of their own: doubling, halving, binomial."""

from __future__ import annotations

from rdmakit.plan.doubling import (
    doubling_allgather,
    doubling_allreduce,
    doubling_rounds,
    halving_reduce_scatter,
)
from rdmakit.plan.shape import Call, Kind
from rdmakit.plan.steps import Builder, Program, Ref, Space
from rdmakit.plan.trees import binomial, pass_down, reduce_up

__all__ = ["tree"]


def tree(call: Call, rank: int) -> Program:
    """Return the schedule of fewest rounds; blocks must be equal and without holes."""
    b, n = Builder(rank), call.layout.size
    make = {
        Kind.ALLREDUCE: _allreduce,
        Kind.BROADCAST: _broadcast,
        Kind.REDUCE: _reduce,
        Kind.ALLGATHER: _allgather,
        Kind.REDUCE_SCATTER: _reduce_scatter,
    }[call.kind]
    make(b, call)
    return b.build(tags=doubling_rounds(n) + 1)


def _allreduce(b: Builder, call: Call) -> None:
    recv = Ref(Space.RECV, 0, call.count)
    ready = b.copy(recv, Ref(Space.SEND, 0, call.count))
    tmp = [b.private(call.count) for _ in range(doubling_rounds(call.layout.size))]
    doubling_allreduce(b, call.layout.rank_order(), recv, lambda turn: (tmp[turn], []), 0, ready)


def _from_root(b: Builder, call: Call) -> tuple[list[int], int]:
    """Return the ranks from the root on, and this rank's index."""
    order = call.layout.rank_order()
    at = order.index(call.root)
    group = [*order[at:], *order[:at]]
    return group, group.index(b.rank)


def _broadcast(b: Builder, call: Call) -> None:
    group, me = _from_root(b, call)
    pass_down(b, group, binomial(len(group), me), Ref(Space.RECV, 0, call.count), 0, [])


def _reduce(b: Builder, call: Call) -> None:
    group, me = _from_root(b, call)
    branch, own = binomial(len(group), me), Ref(Space.SEND, 0, call.count)
    into = b.private(call.count) if me else Ref(Space.RECV, 0, call.count)
    tmp = [b.private(call.count) for _ in branch.children]
    reduce_up(b, group, branch, own, into, tmp, 0, [])


def _allgather(b: Builder, call: Call) -> None:
    n, k = call.layout.size, call.count
    blocks = [Ref(Space.RECV, q * k, k) for q in range(n)]
    ready = b.copy(blocks[b.rank], Ref(Space.SEND, 0, k))
    doubling_allgather(b, range(n), blocks, 0, ready)


def _reduce_scatter(b: Builder, call: Call) -> None:
    n, k = call.layout.size, call.count
    work = b.private(n * k)
    ready = b.copy(work, Ref(Space.SEND, 0, n * k))
    blocks = [work.part(q * k, k) for q in range(n)]
    ready = halving_reduce_scatter(b, range(n), blocks, b.private(-(-n // 2) * k), 0, ready)
    b.copy(Ref(Space.RECV, 0, k), blocks[b.rank], ready)
