"""Which algorithms serve a call, and the program of one rank: the planners behind one function.

Everything here is a function of values equal on all ranks, so all choose alike without talking.
"""

from __future__ import annotations

from functools import lru_cache

from rdmakit.errors import InvalidArgument, UnsupportedError
from rdmakit.layout import RankLayout
from rdmakit.plan.blocks import (
    hierarchical_allgather,
    hierarchical_broadcast,
    hierarchical_reduce_scatter,
)
from rdmakit.plan.flat import ring, tree
from rdmakit.plan.hierarchical import hierarchical_allreduce, one_shot_allreduce
from rdmakit.plan.pieces import SLOTS
from rdmakit.plan.shape import Call, Kind
from rdmakit.plan.steps import Builder, Program, Ref, Space

__all__ = [
    "ALGORITHMS",
    "algorithms",
    "bytes_out_of_node",
    "program",
    "reduces_at_once",
    "why_not",
]

ALGORITHMS = ("hierarchical", "one-shot", "ring", "tree")
"""Every planned algorithm. ``mpi`` is the communicator's own and has no program.

hierarchical: node phase, rail phase, node phase; in one node it is direct, with single ranks
per node it is the rail alone. one-shot: small all-reduce in one node. ring: flat ring of all
ranks. tree: recursive doubling or halving, binomial; single ranks per node.
"""


def why_not(algorithm: str, kind: Kind, layout: RankLayout) -> str:
    """Return why ``algorithm`` cannot serve ``kind`` on ``layout``; empty if it can.

    Raises:
        InvalidArgument: no such algorithm.
    """
    if algorithm not in ALGORITHMS:
        raise InvalidArgument(f"unknown algorithm {algorithm!r}; one of {', '.join(ALGORITHMS)}")
    if algorithm == "one-shot":
        if kind is not Kind.ALLREDUCE:
            return "one-shot is an all-reduce"
        if len(layout.nodes) > 1:
            return "one-shot needs all ranks in one node"
    if algorithm == "tree":
        if max(layout.ranks_per_node) > 1:
            return "tree sends messages between all ranks and needs each on a node of its own"
        if kind in (Kind.ALLGATHER, Kind.REDUCE_SCATTER) and layout.size & (layout.size - 1):
            return f"recursive doubling needs a power of two ranks, not {layout.size}"
    return ""


def algorithms(kind: Kind, layout: RankLayout) -> tuple[str, ...]:
    """Return the planned algorithms that can serve ``kind`` on ``layout``."""
    return tuple(name for name in ALGORITHMS if not why_not(name, kind, layout))


def reduces_at_once(algorithm: str, kind: Kind, layout: RankLayout) -> bool:
    """Return whether every Reduce step takes the inputs of all ranks: no partial results.

    Such a step can round, or divide a mean, for good.
    """
    reduces = kind in (Kind.ALLREDUCE, Kind.REDUCE_SCATTER)
    return reduces and len(layout.nodes) == 1 and algorithm in ("hierarchical", "one-shot")


@lru_cache(maxsize=256)
def program(algorithm: str, call: Call, rank: int) -> Program:
    """Return what ``rank`` does in ``call``. Pure and cached.

    Raises:
        UnsupportedError: the algorithm cannot serve this call; the text says why.
        InvalidArgument: no such algorithm.
    """
    reason = why_not(algorithm, call.kind, call.layout)
    if reason:
        raise UnsupportedError(f"{algorithm} {call.kind.value}: {reason}")
    if call.layout.size == 1:
        return _alone(call)
    if algorithm == "one-shot" and call.count > call.limits.window // SLOTS:
        raise UnsupportedError(
            f"one-shot all-reduce holds {call.limits.window // SLOTS} elements, not {call.count}"
        )
    if algorithm == "ring":
        return ring(call, rank)
    if algorithm == "tree":
        return tree(call, rank)
    if algorithm == "one-shot":
        return one_shot_allreduce(call, rank)
    return {
        Kind.ALLREDUCE: hierarchical_allreduce,
        Kind.REDUCE_SCATTER: hierarchical_reduce_scatter,
        Kind.ALLGATHER: hierarchical_allgather,
        Kind.BROADCAST: hierarchical_broadcast,
    }[call.kind](call, rank)


def _alone(call: Call) -> Program:
    b = Builder(0)
    b.copy(Ref(Space.RECV, 0, call.count), Ref(Space.SEND, 0, call.count))
    return b.build()


def bytes_out_of_node(algorithm: str, call: Call, itemsize: int) -> int | None:
    """Return the bytes that the busiest node sends to others, by formula, for long vectors.

    Exact up to one element for each shard and chunk. None for schedules of few rounds, which
    send more bytes to save time (recursive doubling: log2(N) * S).
    """
    nodes, n, total = len(call.layout.nodes), call.layout.size, call.total * itemsize
    if nodes == 1:
        return 0
    if algorithm == "tree" or (call.few_rounds and algorithm != "ring"):
        return None
    if call.kind is Kind.BROADCAST:
        return total
    if algorithm == "ring":
        return total * (n - 1) * (2 if call.kind is Kind.ALLREDUCE else 1) // n
    if call.kind is Kind.ALLREDUCE:
        return 2 * total * (nodes - 1) // nodes
    sizes = call.layout.ranks_per_node
    if call.kind is Kind.ALLGATHER:
        return max(sizes) * call.count * itemsize * (nodes - 1)
    return (n - min(sizes)) * call.count * itemsize
