"""The cases of each layer, in the order in which they are run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import msgspec
import numpy as np

from rdmakit.bench import values
from rdmakit.bench.device_cases import (
    device_allreduce,
    device_intra,
    device_memory,
    device_rail,
)
from rdmakit.bench.pair import pair_cases
from rdmakit.bench.session import Case, Session
from rdmakit.collectives import Collectives
from rdmakit.errors import UnsupportedError
from rdmakit.plan.shape import Kind
from rdmakit.report.schema import Row

__all__ = ["all_cases"]


def all_cases(session: Session) -> Iterator[Case]:
    """Yield every case of the run; equal on all ranks."""
    makers: dict[str, Callable[[Session], Iterator[Case]]] = {
        "memory": _memory,
        "intra": _intra,
        "inter": _inter,
        "allreduce": _allreduce,
    }
    if session.options.device == "gpu":
        makers |= {"memory": device_memory, "intra": device_intra, "allreduce": device_allreduce}
    for layer in makers:
        if layer in session.options.layers:
            yield from makers[layer](session)


def nothing(layer: str, name: str, reason: str) -> Case:
    """Return a case that cannot be run here."""

    def run(session: Session, case: Case) -> Row:
        return session.row(case, skipped=reason)

    return Case(layer, name, "", 0, run)


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


# -- collectives of any group -----------------------------------------------------------------


def _collective(
    session: Session,
    case: Case,
    comm: Collectives,
    kind: Kind,
    transport: Callable[[], str],
    note: str = "",
) -> Row:
    """Measure one collective of ``comm`` and check every element of its result."""
    n, rank, dtype, op = comm.size, comm.rank, session.dtype, session.op
    total = case.nbytes // dtype.itemsize
    part = -(-total // n)  # whole blocks: at least the bytes that were asked for
    counts = {
        Kind.ALLREDUCE: (total, total),
        Kind.REDUCE_SCATTER: (part * n, part),
        Kind.ALLGATHER: (part, part * n),
    }[kind]
    send, recv = session.array(counts[0]), session.array(counts[1])
    values.fill(send, rank, op)
    refused = ""
    try:
        operation = comm.bind(kind, send, recv, op, algorithm=case.algorithm or "auto")
    except UnsupportedError as exc:
        refused = str(exc)
    reasons = [reason for reason in session.group.share(refused) if reason]
    if reasons:
        return session.row(case, skipped=reasons[0], ranks=n)
    samples = session.timed(operation.call)
    wrong: int | None = None
    if session.options.check:
        values.fill(send, rank, op)
        recv.view(np.uint8).fill(0xA5)
        operation()
        if kind is Kind.ALLGATHER:
            mine = sum(
                values.count_wrong(recv[r * part : (r + 1) * part], values.block(r, dtype, op))
                for r in range(n)
            )
        else:
            start = rank * part if kind is Kind.REDUCE_SCATTER else 0
            mine = values.count_wrong(recv, values.expected(n, dtype, op), start)
        wrong = session.wrong(mine)
    # MPI's own routes are its secret; inside a node nothing is sent to others.
    own = operation.sent_bytes
    most = session.group.largest(np.array([-1.0 if own is None else float(own)]))[0]
    sent = int(most) if most >= 0 and len(comm.layout.nodes) > 1 else None
    if case.algorithm == "auto":
        note = f"{note}, {operation.algorithm}" if note else operation.algorithm
    # Of the largest group: nodes may be unequal.
    shared = session.group.share([n, transport()])
    widest = max(shared, key=lambda entry: int(entry[0]))
    moved = case.nbytes if kind is Kind.ALLREDUCE else part * n * dtype.itemsize
    row = session.row(
        case,
        samples=samples,
        payload=moved,
        ranks=widest[0],
        sent=sent,
        wrong=wrong,
        transport="mpi" if operation.algorithm == "mpi" else widest[1],
        note=note,
    )
    return msgspec.structs.replace(
        row,
        nbytes=moved,
        count=moved // dtype.itemsize,
        wire_dtype=operation.wire_dtype or dtype.name,
    )


# -- intra ------------------------------------------------------------------------------------


def _intra(session: Session) -> Iterator[Case]:
    comm = session.comm
    if max(comm.layout.ranks_per_node) == 1:
        yield nothing("intra", "allreduce", "every node has one rank")
        return
    chosen = session.options.algorithms

    def run(session: Session, case: Case, kind: Kind) -> Row:
        window = comm.node.window
        return _collective(
            session, case, comm.node, kind, lambda: window.kind if window else "memory"
        )

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
    if session.options.device == "gpu":
        yield from device_rail(session)
        return

    def run(session: Session, case: Case) -> Row:
        return _collective(session, case, comm.rail, Kind.ALLREDUCE, lambda: lanes(session))

    for size in session.options.sizes():
        yield Case("inter", "rail allreduce", "hierarchical", size, run)


def lanes(session: Session) -> str:
    """Return what UCX says carries messages between this rank and another node."""
    channel = session.comm.channel
    assert channel is not None
    for peer in range(session.comm.size):
        found = channel.transports(peer) if peer != session.comm.rank else ()
        if found and session.comm.layout.node_of(peer) != session.comm.layout.node_of(
            session.comm.rank
        ):
            return "+".join(dict.fromkeys(f"{name}/{device}" for name, device in found))
    return channel.name


# -- allreduce --------------------------------------------------------------------------------


def _allreduce(session: Session) -> Iterator[Case]:
    comm, chosen = session.comm, session.options.algorithms
    several = len(comm.layout.nodes) > 1
    names = ["auto", *(name for name in comm.algorithms(Kind.ALLREDUCE) if name != "one-shot")]
    if comm.size == 1:
        names = ["auto"]
    if chosen:
        names = list(chosen)

    def transport() -> str:
        inside = comm.window.kind if comm.window else ""
        return "+".join(filter(None, (inside, lanes(session) if several else "")))

    def run(session: Session, case: Case) -> Row:
        note = ""
        if case.algorithm == "mpi" and comm.virtual:
            note = "not confined to the virtual nodes"
        return _collective(session, case, comm, Kind.ALLREDUCE, transport, note)

    for name in names:
        for size in session.options.sizes():
            yield Case("allreduce", "allreduce", name, size, run)
