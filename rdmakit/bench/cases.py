"""The cases of each layer, in the order in which they are run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from rdmakit.bench.broadcast import broadcast_cases
from rdmakit.bench.collective import Way, lanes, measure_collective
from rdmakit.bench.gpu_cases import gpu_allreduce, gpu_inter, gpu_intra, gpu_memory
from rdmakit.bench.pair import pair_cases
from rdmakit.bench.session import Case, Session, nothing
from rdmakit.operation import Operation
from rdmakit.plan.shape import Kind
from rdmakit.report.schema import Row

__all__ = ["all_cases"]


def all_cases(session: Session) -> Iterator[Case]:
    """Yield every case of the run; equal on all ranks. Collective."""
    makers: dict[str, Callable[[Session], Iterator[Case]]] = {
        "memory": _memory,
        "intra": _intra,
        "inter": _inter,
        "allreduce": _allreduce,
        "broadcast": broadcast_cases,
    }
    if session.options.device == "gpu":
        makers = {
            "memory": gpu_memory,
            "intra": gpu_intra,
            "inter": gpu_inter,
            "allreduce": gpu_allreduce,
            "broadcast": broadcast_cases,
        }
    for layer in makers:
        if layer in session.options.layers:
            yield from makers[layer](session)


def _or_mpi(done: Operation, own: str) -> str:
    return "mpi" if done.algorithm == "mpi" else own


# -- memory -----------------------------------------------------------------------------------


def _memory(session: Session) -> Iterator[Case]:
    for name in ("copy", "add"):
        for size in session.options.sizes():
            yield Case("memory", name, "numpy", size, _copy_or_add)


def _copy_or_add(session: Session, case: Case) -> Row:
    count = case.nbytes // session.dtype.itemsize
    x, y = session.array(count), session.array(count)
    call = partial(np.copyto, y, x) if case.name == "copy" else partial(np.add, x, y, y)
    return session.row(case, samples=session.timed(call), ranks=1, transport="memory")


# -- intra ------------------------------------------------------------------------------------


def _intra(session: Session) -> Iterator[Case]:
    comm = session.comm
    if max(comm.layout.ranks_per_node) == 1:
        yield nothing("intra", "allreduce", "every node has one rank")
        return
    chosen = session.options.algorithms

    def transport(done: Operation) -> str:
        window = comm.node.window
        return _or_mpi(done, window.kind if window else "memory")

    def run(session: Session, case: Case, kind: Kind) -> Row:
        return measure_collective(session, case, comm.node, kind, Way(transport))

    for kind in (Kind.REDUCE_SCATTER, Kind.ALLGATHER, Kind.ALLREDUCE):
        names = ["hierarchical"]
        if kind is Kind.ALLREDUCE:
            names = [name for name in comm.node.algorithms(kind) if name not in ("ring", "tree")]
            names.insert(0, "auto")
        if chosen:
            names = [name for name in names if name in chosen] or ["auto"]
        for name in names:
            for size in session.options.sizes():
                if name == "one-shot" and size > _ONE_SHOT_SHOWN:
                    continue
                yield Case("intra", kind.value, name, size, partial(run, kind=kind))


_ONE_SHOT_SHOWN = 64 << 10


# -- inter ------------------------------------------------------------------------------------


def _inter(session: Session) -> Iterator[Case]:
    comm = session.comm
    if comm.channel is None:
        yield nothing("inter", "pair latency", "all ranks are on one node (try --ranks-per-node)")
        return
    yield from pair_cases(session)
    way = Way(lambda done: _or_mpi(done, lanes(session)))

    def run(session: Session, case: Case) -> Row:
        return measure_collective(session, case, comm.rail, Kind.ALLREDUCE, way)

    for size in session.options.sizes():
        yield Case("inter", "rail allreduce", "hierarchical", size, run)


# -- allreduce --------------------------------------------------------------------------------


def _allreduce(session: Session) -> Iterator[Case]:
    comm, chosen = session.comm, session.options.algorithms
    several = len(comm.layout.nodes) > 1
    names = ["auto", *(name for name in comm.algorithms(Kind.ALLREDUCE) if name != "one-shot")]
    if comm.size == 1:
        names = ["auto"]
    if chosen:
        names = list(chosen)

    def transport(done: Operation) -> str:
        inside = comm.window.kind if comm.window else ""
        between = lanes(session) if several else ""
        return _or_mpi(done, "+".join(filter(None, (inside, between))))

    def run(session: Session, case: Case) -> Row:
        note = ""
        if case.algorithm == "mpi" and comm.virtual:
            note = "not confined to the virtual nodes"
        return measure_collective(session, case, comm, Kind.ALLREDUCE, Way(transport, note=note))

    for name in names:
        for size in session.options.sizes():
            yield Case("allreduce", "allreduce", name, size, run)
