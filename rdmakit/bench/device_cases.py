"""The cases of each layer on GPU arrays. Every timed call is waited for, on all ranks."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import numpy as np

from rdmakit.baseline import mpi_call, why_not_mpi
from rdmakit.bench import values
from rdmakit.bench.options import Options
from rdmakit.bench.session import Case, Session
from rdmakit.buffer import Buffer, as_buffer
from rdmakit.collectives import Collectives
from rdmakit.communicator import Communicator
from rdmakit.datatypes import MemoryKind, dtype_of
from rdmakit.drivers import cuda
from rdmakit.errors import InvalidArgument, UnsupportedError
from rdmakit.plan.shape import Kind
from rdmakit.report.schema import Row

__all__ = [
    "choose_device",
    "device_allreduce",
    "device_facts",
    "device_intra",
    "device_memory",
    "device_rail",
    "warm_up",
]

_PIECE = 4 << 20
"""Bytes of a piece of the pipelined way over MPI."""
STAGED_MPI = ("host-staged MPI", "pipelined MPI")


def choose_device(comm: Communicator, wanted: str) -> str:
    """Return ``gpu`` or ``cpu`` and make this rank's GPU current. Collective, blocking.

    Ranks of a host take its visible GPUs in turn.

    Raises:
        InvalidArgument: on every rank: ``gpu`` is wanted and some rank cannot use one.
    """
    if wanted == "cpu":
        return wanted
    reasons = [text.decode() for text in comm.bootstrap.allgather(cuda.why_not().encode())]
    for rank, reason in enumerate(reasons):
        if reason and wanted == "gpu":
            raise InvalidArgument(f"--device gpu: rank {rank}: {reason}")
    if any(reasons):
        return "cpu"
    cupy = importlib.import_module("cupy")
    before = comm.hosts[: comm.rank].count(comm.host)
    cuda.activate(before % int(cupy.cuda.runtime.getDeviceCount()))
    return "gpu"


def warm_up(comm: Communicator, options: Options) -> None:
    """Make windows and compile kernels, which is not what is measured. Collective, blocking."""
    cupy, dtype = importlib.import_module("cupy"), dtype_of(options.dtype)
    for group in (comm.node, comm):
        for count in (1, 64):  # elements of one size alone, and in packs
            x, y = cupy.ones(count, dtype), cupy.ones(count * group.size, dtype)
            group.Allreduce(x, x, options.op)
            group.Allgather(x, y)
            group.Reduce_scatter_block(y, x, options.op)
    comm.synchronize()


def _array(session: Session, count: int) -> Any:
    """Return zeroed memory of CuPy's pool, as users have it."""
    cupy = importlib.import_module("cupy")
    return cupy.zeros(count, session.dtype)


def _waited(session: Session, call: Callable[[], object]) -> Callable[[], object]:
    comm = session.comm

    def run() -> None:
        call()
        comm.synchronize()

    return run


# -- memory -----------------------------------------------------------------------------------


def device_memory(session: Session) -> Iterator[Case]:
    """Yield the copies of one GPU."""
    for name, way in (
        ("device copy", "device"), ("H2D", "pinned"), ("D2H", "pinned"), ("H2D", "pageable"),
        ("D2H", "pageable"),
    ):  # fmt: skip
        for size in session.options.sizes():
            yield Case("memory", name, way, size, _copy)


def _copy(session: Session, case: Case) -> Row:
    nbytes = case.nbytes
    x, y = (_array(session, nbytes // session.dtype.itemsize) for _ in range(2))
    pinned = cuda.PinnedMemory(nbytes if case.algorithm == "pinned" else 1)
    host = session.array(nbytes // session.dtype.itemsize)
    where = pinned.address if case.algorithm == "pinned" else host.ctypes.data
    to, of = {
        "device copy": (y.data.ptr, x.data.ptr),
        "H2D": (x.data.ptr, where),
        "D2H": (where, x.data.ptr),
    }[case.name]
    call = _waited(session, partial(cuda.copy_async, to, of, nbytes, cuda.current_stream().ptr))
    row = session.row(case, samples=session.timed(call), ranks=1, transport="cuda")
    pinned.close()
    return row


# -- collectives ------------------------------------------------------------------------------


def _collective(
    session: Session,
    case: Case,
    comm: Collectives,
    kind: Kind,
    transport: str,
    *,
    register: bool = False,
) -> Row:
    """Measure one collective on GPU arrays and check every element of its result."""
    n, rank, dtype, op = comm.size, comm.rank, session.dtype, session.op
    total = case.nbytes // dtype.itemsize
    part = -(-total // n)
    counts = {
        Kind.ALLREDUCE: (total, total),
        Kind.REDUCE_SCATTER: (part * n, part),
        Kind.ALLGATHER: (part, part * n),
    }[kind]
    entries = []
    if register:
        arrays = [cuda.DeviceMemory(count * dtype.itemsize) for count in counts]
        send, recv = (m.array(c, dtype) for m, c in zip(arrays, counts, strict=True))
        entries = [comm.register(array) for array in (send, recv)]
    else:
        arrays = []
        send, recv = (_array(session, count) for count in counts)
    mine = np.empty(counts[0], dtype)
    values.fill(mine, rank, op)
    send.set(mine)
    refused = ""
    try:
        call = _call_of(session, case, comm, kind, send, recv)
    except UnsupportedError as exc:
        refused = str(exc)
    reasons = [reason for reason in session.group.share(refused) if reason]
    if reasons:
        return session.row(case, skipped=reasons[0], ranks=n)
    samples = session.timed(_waited(session, call))
    wrong: int | None = None
    if session.options.check:
        recv.view(np.uint8).fill(0xA5)
        call()
        session.comm.synchronize()
        got = recv.get()
        if kind is Kind.ALLGATHER:
            bad = sum(
                values.count_wrong(got[r * part : (r + 1) * part], values.block(r, dtype, op))
                for r in range(n)
            )
        else:
            start = rank * part if kind is Kind.REDUCE_SCATTER else 0
            bad = values.count_wrong(got, values.expected(n, dtype, op), start)
        wrong = session.wrong(bad)
    for entry in entries:
        comm.unregister(entry)
    del call, send, recv
    session.group.barrier()
    for memory in arrays:
        memory.close()
    widest = max(session.group.share(n))
    moved = case.nbytes if kind is Kind.ALLREDUCE else part * n * dtype.itemsize
    row = session.row(
        case, samples=samples, payload=moved, ranks=widest, wrong=wrong, transport=transport
    )
    return msgspec.structs.replace(row, nbytes=moved, count=moved // dtype.itemsize)


def _call_of(
    session: Session, case: Case, comm: Collectives, kind: Kind, send: Any, recv: Any
) -> Callable[[], object]:
    if case.algorithm not in STAGED_MPI:
        return comm.bind(kind, send, recv, session.op).call
    return _over_mpi(session, send, recv, pipelined=case.algorithm == "pipelined MPI")


def _over_mpi(session: Session, send: Any, recv: Any, *, pipelined: bool) -> Callable[[], object]:
    """Return what a user would do: copy to pinned memory, MPI_Allreduce, copy back."""
    dtype, count = session.dtype, send.size
    itemsize = dtype.itemsize
    pinned = [cuda.PinnedMemory(send.nbytes) for _ in range(2)]
    step = _PIECE // itemsize if pipelined else count
    event_of, calls = [], []
    to, of = as_buffer(recv, "recvbuf"), as_buffer(send, "sendbuf")
    for first in range(0, count, step):
        size = min(step, count - first)
        host = [
            Buffer(p.address + first * itemsize, size, dtype, MemoryKind.HOST, False)
            for p in pinned
        ]
        why_not = why_not_mpi(Kind.ALLREDUCE, dtype, session.op, alike=False)
        if why_not:
            raise UnsupportedError(why_not)
        comm = session.comm
        call, _ = mpi_call(comm._mpi, Kind.ALLREDUCE, host[0], host[1], session.op, 0)
        calls.append((first * itemsize, size * itemsize, host, call))
        event_of.append(cuda.Event())

    def run(keep: object = pinned) -> None:
        stream = cuda.current_stream().ptr
        waiter = session.comm.waiter
        for (at, nbytes, host, _), event in zip(calls, event_of, strict=True):
            cuda.copy_async(host[0].address, of.address + at, nbytes, stream)
            event.record(stream)
        for (at, nbytes, host, call), event in zip(calls, event_of, strict=True):
            waiter.until(event.done, (), lambda: "waiting for a copy")
            call()
            cuda.copy_async(to.address + at, host[1].address, nbytes, stream)

    return run


def device_intra(session: Session) -> Iterator[Case]:
    """Yield the node's collectives on registered arrays, and on any."""
    for kind in (Kind.REDUCE_SCATTER, Kind.ALLGATHER, Kind.ALLREDUCE):
        for way in ("registered", "staged"):
            run = partial(_run, part="node", kind=kind, register=way == "registered")
            for size in session.options.sizes():
                yield Case("intra", kind.value, way, size, run)


def device_rail(session: Session) -> Iterator[Case]:
    """Yield the rail's all-reduce on GPU arrays."""
    run = partial(_run, part="rail", kind=Kind.ALLREDUCE, register=False)
    for size in session.options.sizes():
        yield Case("inter", "rail allreduce", "device", size, run)


def device_allreduce(session: Session) -> Iterator[Case]:
    """Yield the whole all-reduce, and the ways over MPI that a user has."""
    several = len(session.comm.layout.nodes) > 1
    ways = ("auto",) if several else ("registered", "auto")
    for way in (*ways, *STAGED_MPI):
        run = partial(_run, part="job", kind=Kind.ALLREDUCE, register=way == "registered")
        for size in session.options.sizes():
            yield Case("allreduce", "allreduce", way, size, run)


def _run(session: Session, case: Case, *, part: str, kind: Kind, register: bool) -> Row:
    comm = {"node": session.comm.node, "rail": session.comm.rail, "job": session.comm}[part]
    several = len(comm.layout.nodes) > 1
    transport = "host-staged" if several else "cuda_ipc"
    if case.algorithm in STAGED_MPI:
        transport = "mpi"
    return _collective(session, case, comm, kind, transport, register=register)


def device_facts(comm: Communicator) -> dict[str, Any]:
    """Return this rank's GPU for the environment of a result. Local."""
    facts = cuda.device_facts(cuda.current_device())
    return {"name": facts.name, "uuid": facts.uuid, "pci": facts.pci, "mps": facts.mps,
            "notes": list(comm.notes)}  # fmt: skip
