"""The cases of each layer on GPU arrays. Every timed call is waited for, on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from rdmakit.bench.arrays import PoolArrays, RegisteredArrays
from rdmakit.bench.collective import Way, lanes, measure_collective
from rdmakit.bench.mpi_ways import STAGED_MPI, over_mpi, why_no_mpi
from rdmakit.bench.nccl_ways import over_nccl, why_no_nccl
from rdmakit.bench.p2p import p2p_cases
from rdmakit.bench.pair import pair_cases
from rdmakit.bench.pair_memory import DirectMemory, StagedMemory, why_not_direct
from rdmakit.bench.session import Case, Session, nothing
from rdmakit.bench.ucx_pair import ucx_pair_cases
from rdmakit.buffer import as_buffer
from rdmakit.collectives import Collectives
from rdmakit.errors import CudaError
from rdmakit.plan.shape import Kind
from rdmakit.report.schema import Row

__all__ = ["gpu_allreduce", "gpu_inter", "gpu_intra", "gpu_memory", "way_of"]


_INSIDE = (
    Kind.REDUCE_SCATTER, Kind.ALLGATHER, Kind.ALLREDUCE, Kind.BROADCAST, Kind.ALLTOALL,
)  # fmt: skip
"""Collectives that are measured inside a node."""


# -- memory -----------------------------------------------------------------------------------


def gpu_memory(session: Session) -> Iterator[Case]:
    """Yield the copies of one GPU, made by all ranks at once."""
    for name, way in (
        ("device copy", "device"), ("H2D", "pinned"), ("D2H", "pinned"), ("H2D", "pageable"),
        ("D2H", "pageable"),
    ):  # fmt: skip
        for size in session.options.sizes():
            yield Case("memory", name, way, size, _copy, 0.0 if way == "device" else 1.0, 2.0)


def _copy(session: Session, case: Case) -> Row:
    nbytes, doors = case.nbytes, session.gpu.doors
    count = nbytes // session.dtype.itemsize
    held: list[object] = []
    pinned, problem = None, ""
    try:
        held = [doors.tools.zeros(count, session.dtype) for _ in range(2)]
        if case.algorithm == "pinned":
            pinned = doors.cuda.PinnedMemory(nbytes)
    except (MemoryError, CudaError) as exc:
        problem = f"no room: {exc}"
    problem = session.agreed(problem)
    if problem:
        row = session.row(case, skipped=problem, ranks=1)
    else:
        x, y = (as_buffer(array, "array").address for array in held)
        host = session.array(count if case.algorithm == "pageable" else 0)
        where = host.ctypes.data if pinned is None else pinned.address
        to, of = {"device copy": (y, x), "H2D": (x, where), "D2H": (where, x)}[case.name]
        stream = doors.cuda.current_stream().ptr
        call = session.waited(partial(doors.cuda.copy_async, to, of, nbytes, stream))
        row = session.row(case, samples=session.timed(call), ranks=1, transport="cuda")
    if pinned is not None:
        pinned.close()
    held.clear()
    doors.tools.trim()
    return row


# -- collectives ------------------------------------------------------------------------------


def way_of(comm: Collectives) -> str:
    """Return what carries GPU arrays in this group, as its device side has decided. Local."""
    return comm.device_way.replace("device", "cuda_ipc") or "cuda"


def _transport(session: Session, comm: Collectives) -> str:
    found = way_of(comm)
    return f"{found}+{lanes(session)}" if len(comm.layout.nodes) > 1 else found


def _ways(
    session: Session, comm: Collectives, layer: str, name: str, *, mpi: bool, nccl: bool
) -> Iterator[tuple[str, Way | None, str]]:
    """Yield the ways to do a collective: algorithm, how, or why not. Collective in the job."""
    chosen = session.options.algorithms

    def own(_: object) -> str:
        return _transport(session, comm)

    if not chosen or "registered" in chosen:
        reason = session.why_not_mapped()
        yield "registered", None if reason else Way(own, RegisteredArrays), reason
    if not chosen or "staged" in chosen:
        yield "staged", Way(own, PoolArrays), ""
    beside = "not confined to the virtual nodes" if session.comm.virtual and not comm.label else ""
    if nccl and (not chosen or "nccl" in chosen):
        reason = why_no_nccl(session, comm)
        way = Way(lambda _: "nccl", PoolArrays, over_nccl, beside)
        yield "nccl", None if reason else way, reason
    if mpi and (not chosen or "mpi" in chosen):
        reason = why_no_mpi(session, comm)
        for text in STAGED_MPI:
            way = Way(lambda _: "mpi", PoolArrays, over_mpi, beside)
            yield text, None if reason else way, reason


def _collective_cases(
    session: Session, comm: Collectives, layer: str, kind: Kind, *, mpi: bool, nccl: bool
) -> Iterator[Case]:
    for name, way, reason in _ways(session, comm, layer, kind.value, mpi=mpi, nccl=nccl):
        if way is None:
            yield nothing(layer, kind.value, reason, name)
            continue
        run = _runner(comm, kind, way)
        # Pinned memory of whole arrays; else pieces of it at most.
        whole = comm.device_way == "host-staged" and kind is not Kind.ALLREDUCE
        host = 2.0 if whole or name in STAGED_MPI else 0.0
        for size in session.options.sizes():
            yield Case(layer, kind.value, name, size, run, host, 2.0)


def _runner(comm: Collectives, kind: Kind, way: Way) -> Callable[[Session, Case], Row]:
    def run(session: Session, case: Case) -> Row:
        return measure_collective(session, case, comm, kind, way)

    return run


def gpu_intra(session: Session) -> Iterator[Case]:
    """Yield the node's links, its collectives, and UCX between two of its ranks."""
    comm = session.comm
    if max(comm.layout.ranks_per_node) == 1:
        yield nothing("intra", "allreduce", "every node has one rank")
        return
    if not session.options.algorithms:
        yield from p2p_cases(session)
    for kind in _INSIDE:
        yield from _collective_cases(session, comm.node, "intra", kind, mpi=False, nccl=True)
    if not session.options.algorithms and len(comm.layout.nodes[0]) > 1:
        yield from ucx_pair_cases(session)


def gpu_inter(session: Session) -> Iterator[Case]:
    """Yield messages of GPU memory through the host and direct, and the rails' all-reduce."""
    comm = session.comm
    if comm.channel is None:
        yield nothing("inter", "pair latency", "all ranks are on one node (try --ranks-per-node)")
        return
    yield from pair_cases(session, StagedMemory, "host-staged")
    reason = session.agreed(why_not_direct(comm.channel))
    if comm.config.gpu_direct == "off":
        reason = "gpu_direct=off"
    if reason:
        yield nothing("inter", "pair latency", reason, "gpu-direct")
    else:
        yield from pair_cases(session, DirectMemory, "gpu-direct")
    way = Way(lambda _: _transport(session, comm.rail), PoolArrays)
    for size in session.options.sizes():
        run = _runner(comm.rail, Kind.ALLREDUCE, way)
        yield Case("inter", "rail allreduce", "staged", size, run, 0.0, 2.0)


def gpu_allreduce(session: Session) -> Iterator[Case]:
    """Yield the whole all-reduce, and the ways beside it that a user has."""
    comm = session.comm
    several = len(comm.layout.nodes) > 1  # on one node NCCL is shown with the node's collectives
    yield from _collective_cases(session, comm, "allreduce", Kind.ALLREDUCE, mpi=True, nccl=several)
