"""Which algorithms serve a call, and the program of one rank: the planners behind one function.

Everything here is a function of values equal on all ranks, so all choose alike without talking.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from rdmakit.errors import InvalidArgument, UnsupportedError
from rdmakit.layout import RankLayout
from rdmakit.plan.blocks import hierarchical_reduce_scatter
from rdmakit.plan.broadcast import hierarchical_broadcast
from rdmakit.plan.formulas import bytes_out_of_node
from rdmakit.plan.hierarchical import hierarchical_allreduce, hierarchical_reduce, one_shot
from rdmakit.plan.moves import direct_moves, hierarchical_moves
from rdmakit.plan.ring_programs import ring
from rdmakit.plan.scan import hierarchical_scan
from rdmakit.plan.shape import Call, Kind
from rdmakit.plan.slots import slot_elements
from rdmakit.plan.steps import Builder, Copy, Program, Recv, Reduce, Ref, Send, Space, Step
from rdmakit.plan.tree_programs import tree

__all__ = [
    "ALGORITHMS",
    "algorithms",
    "bytes_out_of_node",
    "program",
    "reduces_at_once",
    "why_not",
]

ALGORITHMS = ("hierarchical", "one-shot", "ring", "tree", "flat")
"""Every planned algorithm. ``mpi`` is the communicator's own and has no program.

hierarchical: node phase, rail phase, node phase; in one node it is direct, with single ranks
per node it is the rail alone. one-shot: small all-reduce or reduce in one node. ring: flat ring
of all ranks, or a chain along it. tree: recursive doubling or halving, binomial; single ranks
per node. flat: every block straight from its source to its target; a broadcast of one sender.
"""

_HIERARCHICAL: dict[Kind, Callable[[Call, int], Program]] = {
    Kind.ALLREDUCE: hierarchical_allreduce,
    Kind.REDUCE_SCATTER: hierarchical_reduce_scatter,
    Kind.ALLGATHER: hierarchical_moves,
    Kind.BROADCAST: hierarchical_broadcast,
    Kind.REDUCE: hierarchical_reduce,
    Kind.GATHER: hierarchical_moves,
    Kind.SCATTER: hierarchical_moves,
    Kind.ALLTOALL: hierarchical_moves,
    Kind.SCAN: hierarchical_scan,
    Kind.EXSCAN: hierarchical_scan,
}
_ONE_SHOT = (Kind.ALLREDUCE, Kind.REDUCE)
_NO_RING = (Kind.GATHER, Kind.SCATTER, Kind.ALLTOALL)
_TREE = (Kind.ALLREDUCE, Kind.BROADCAST, Kind.REDUCE, Kind.ALLGATHER, Kind.REDUCE_SCATTER)
_FLAT = (Kind.BROADCAST, Kind.GATHER, Kind.SCATTER, Kind.ALLGATHER, Kind.ALLTOALL)


def why_not(algorithm: str, kind: Kind, layout: RankLayout) -> str:
    """Return why ``algorithm`` cannot serve ``kind`` on ``layout``; empty if it can.

    Raises:
        InvalidArgument: no such algorithm.
    """
    if algorithm not in ALGORITHMS:
        raise InvalidArgument(f"unknown algorithm {algorithm!r}; one of {', '.join(ALGORITHMS)}")
    if algorithm == "one-shot":
        if kind not in _ONE_SHOT:
            return "one-shot is an all-reduce or reduce"
        if len(layout.nodes) > 1:
            return "one-shot needs all ranks in one node"
    if algorithm == "ring" and kind in _NO_RING:
        return "a ring would pass every block through ranks that do not want it"
    if algorithm == "flat" and kind not in _FLAT:
        return "flat sends blocks from source to target and reduces nothing"
    return _why_no_tree(kind, layout) if algorithm == "tree" else ""


def _why_no_tree(kind: Kind, layout: RankLayout) -> str:
    if kind not in _TREE:
        names = ", ".join(served.value for served in _TREE)
        return f"tree serves {names}"
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
    reduces = kind in (Kind.ALLREDUCE, Kind.REDUCE_SCATTER, Kind.REDUCE)
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
    _check_size(algorithm, call)
    if call.layout.size == 1:
        return _alone(call)
    make = {"ring": ring, "tree": tree, "one-shot": one_shot, "flat": direct_moves}
    steps = make.get(algorithm, _HIERARCHICAL[call.kind])(call, rank)
    if call.in_place and call.kind is Kind.REDUCE_SCATTER:
        return _result_last(steps, call.blocks[rank])
    return steps


def _check_size(algorithm: str, call: Call) -> None:
    room = slot_elements(call.limits)
    if algorithm == "one-shot" and call.layout.size > 1 and call.count > room:
        name = "all-reduce" if call.kind is Kind.ALLREDUCE else call.kind.value
        raise UnsupportedError(f"one-shot {name} holds {room} elements, not {call.count}")
    if algorithm == "tree" and (call.counts or call.recv_at):
        raise UnsupportedError(
            f"tree {call.kind.value} needs equal blocks one behind the other: hierarchical or ring"
        )


def _alone(call: Call) -> Program:
    b, blocks = Builder(0), call.kind in (Kind.GATHER, Kind.ALLGATHER, Kind.ALLTOALL)
    source = call.send_offsets(0)[0] if call.kind in (Kind.SCATTER, Kind.ALLTOALL) else 0
    target = call.recv_offsets(0)[0] if blocks else 0
    if not call.in_place and call.kind not in (Kind.BROADCAST, Kind.EXSCAN):
        count = call.longest
        b.copy(Ref(Space.RECV, target, count), Ref(Space.SEND, source, count))
    return b.build()


def _result_last(steps: Program, count: int) -> Program:
    """Return ``steps`` with the result kept apart until no input is needed any more.

    For a RECV that is the front of SEND.
    """

    def moved(ref: Ref) -> Ref:
        if ref.space is not Space.RECV:
            return ref
        return Ref(Space.SCRATCH, steps.scratch + ref.offset, ref.count)

    def kept(step: Step) -> Step:
        match step:
            case Copy(dst, src):
                return Copy(moved(dst), moved(src))
            case Reduce(dst, srcs):
                return Reduce(moved(dst), tuple(map(moved, srcs)))
            case Send(peer, src, tag):
                return Send(peer, moved(src), tag)
            case Recv(peer, dst, tag):
                return Recv(peer, moved(dst), tag)
        return step

    if not count:
        return steps
    waited = {step for after in steps.after for step in after}
    last = tuple(step for step in range(len(steps.steps)) if step not in waited)
    copy = Copy(Ref(Space.RECV, 0, count), Ref(Space.SCRATCH, steps.scratch, count))
    return replace(
        steps,
        steps=(*map(kept, steps.steps), copy),
        after=(*steps.after, last),
        scratch=steps.scratch + count,
    )
