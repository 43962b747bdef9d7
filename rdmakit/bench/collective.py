"""The one timed body of all collective rows: any group, any arrays, any way to do it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from rdmakit.bench import values
from rdmakit.bench.arrays import Arrays, HostArrays
from rdmakit.bench.session import Case, Session
from rdmakit.collectives import Collectives
from rdmakit.errors import CudaError, SetupError, UnsupportedError
from rdmakit.operation import Operation
from rdmakit.plan.shape import Kind
from rdmakit.report.schema import Row

__all__ = ["ROOT", "Way", "bound", "lanes", "measure_collective"]

ROOT = 0
"""Of broadcasts."""

Maker = Callable[[Session, Collectives, Sequence[int]], Arrays]
Binder = Callable[[Session, Case, Collectives, Kind, Arrays], Operation]


def bound(session: Session, case: Case, comm: Collectives, kind: Kind, arrays: Arrays) -> Operation:
    """Return this package's own operation on the arrays. Local."""
    on_host = isinstance(arrays, HostArrays)
    name = case.algorithm if on_host and case.algorithm else "auto"
    send = arrays.recv if kind is Kind.BROADCAST else arrays.send
    return comm.bind(kind, send, arrays.recv, session.op, algorithm=name, root=ROOT)


@dataclass(frozen=True)
class Way:
    """How a collective row is done."""

    transport: Callable[[Operation], str]
    """What carried the bytes; asked after the calls."""
    arrays: Maker = HostArrays
    bind: Binder = bound
    """Makes the operation; local or collective in the group. May raise UnsupportedError."""
    note: str = ""


def measure_collective(
    session: Session, case: Case, comm: Collectives, kind: Kind, way: Way
) -> Row:
    """Measure one collective of ``comm`` and check every element. Collective in the job."""
    n, itemsize = comm.size, session.dtype.itemsize
    total = case.nbytes // itemsize
    part = -(-total // n)  # whole blocks: at least the bytes that were asked for
    counts = {
        Kind.ALLREDUCE: (total, total),
        Kind.REDUCE_SCATTER: (part * n, part),
        Kind.ALLGATHER: (part, part * n),
        Kind.BROADCAST: (1, total),  # in the output: the root's is the input
        Kind.ALLTOALL: (part * n, part * n),
    }[kind]
    arrays, operation, problem = _prepared(session, case, comm, kind, way, counts)
    if arrays is None or operation is None or problem:
        row = session.row(case, skipped=problem, ranks=n)
    else:
        row = _measured(session, case, comm, kind, way, arrays, operation, counts)
    del operation  # it holds the arrays
    if arrays is not None:
        arrays.close()
    elif way.arrays is not HostArrays:
        session.group.barrier()  # as close has
    return row


def _prepared(
    session: Session,
    case: Case,
    comm: Collectives,
    kind: Kind,
    way: Way,
    counts: Sequence[int],
) -> tuple[Arrays | None, Operation | None, str]:
    """Return arrays and operation, and why it cannot be done, on all ranks. Collective.

    Nothing of host arrays is made together, so there is one agreement at the end.
    """
    arrays: Arrays | None = None
    operation: Operation | None = None
    alone = way.arrays is HostArrays
    problem = ""
    try:
        arrays = way.arrays(session, comm, counts)
    except (MemoryError, CudaError) as exc:
        problem = f"no room: {exc}"
    try:
        if not alone:
            problem = session.agreed(problem)
            if arrays is not None and not problem:
                arrays.begin()
    except (UnsupportedError, SetupError) as exc:
        problem = str(exc)
    if not alone:
        problem = session.agreed(problem)
    if arrays is not None and not problem:
        _fill(session, comm, kind, arrays)
        try:
            operation = way.bind(session, case, comm, kind, arrays)
        except (UnsupportedError, SetupError) as exc:
            problem = str(exc)
    return arrays, operation, session.agreed(problem)


def _measured(
    session: Session,
    case: Case,
    comm: Collectives,
    kind: Kind,
    way: Way,
    arrays: Arrays,
    operation: Operation,
    counts: tuple[int, int],
) -> Row:
    samples = session.timed(arrays.waited(operation.call))
    wrong: int | None = None
    if session.options.check:
        arrays.spoil()
        if kind is Kind.BROADCAST:
            _fill(session, comm, kind, arrays)  # the root's input was there
        arrays.waited(operation.call)()
        wrong = session.wrong(_count_wrong(session, comm, kind, arrays, counts[1]))
    # MPI's own routes are its secret; inside a node nothing is sent to others.
    own = operation.sent_bytes
    most = session.group.largest(np.array([-1.0 if own is None else float(own)]))[0]
    sent = int(most) if most >= 0 and len(comm.layout.nodes) > 1 else None
    planned = operation.algorithm if case.algorithm == "auto" else ""
    note = ", ".join(filter(None, (way.note, "" if planned == "device" else planned)))
    # Of the largest group: nodes may be unequal.
    told = session.group.share([comm.size, max(counts), way.transport(operation)])
    ranks, count, transport = max(told, key=lambda entry: int(entry[0]))
    # Blocks of equal size may be a little more than was asked for.
    moved = count * session.dtype.itemsize
    row = session.row(
        case,
        samples=samples,
        payload=moved,
        ranks=ranks,
        sent=sent,
        wrong=wrong,
        transport=transport,
        note=note,
    )
    wire = operation.wire_dtype or session.dtype.name
    return msgspec.structs.replace(row, nbytes=moved, count=count, wire_dtype=wire)


def _fill(session: Session, comm: Collectives, kind: Kind, arrays: Arrays) -> None:
    """Give the arrays what this rank puts in. Local."""
    n, rank, dtype = comm.size, comm.rank, session.dtype
    if kind is Kind.ALLTOALL:
        arrays.fill([values.sent(rank, target, n, dtype) for target in range(n)])
    elif kind is not Kind.BROADCAST:
        arrays.fill([values.block(rank, dtype, session.op)])
    elif rank == ROOT:
        arrays.fill([values.block(rank, dtype, session.op)], result=True)


def _count_wrong(
    session: Session, comm: Collectives, kind: Kind, arrays: Arrays, count: int
) -> int:
    """Return how many of the ``count`` elements of this rank's result are wrong."""
    dtype, op = session.dtype, session.op
    if kind is Kind.ALLGATHER:
        part = count // comm.size
        blocks = [values.block(r, dtype, op) for r in range(comm.size)]
        return sum(arrays.count_wrong(r * part, part, block) for r, block in enumerate(blocks))
    if kind is Kind.ALLTOALL:
        part = count // comm.size
        blocks = [values.sent(r, comm.rank, comm.size, dtype) for r in range(comm.size)]
        return sum(arrays.count_wrong(r * part, part, block) for r, block in enumerate(blocks))
    if kind is Kind.BROADCAST:
        return arrays.count_wrong(0, count, values.block(ROOT, dtype, op))
    start = comm.rank * count if kind is Kind.REDUCE_SCATTER else 0
    return arrays.count_wrong(0, count, values.expected(comm.size, dtype, op), start)


def lanes(session: Session) -> str:
    """Return what the channel says carries messages between this rank and another node. Local."""
    comm = session.comm
    assert comm.channel is not None
    mine = comm.layout.node_of(comm.rank)
    for peer in range(comm.size):
        if comm.layout.node_of(peer) != mine and (found := comm.channel.transports(peer)):
            return "+".join(dict.fromkeys(f"{name}/{device}" for name, device in found))
    return comm.channel.name
