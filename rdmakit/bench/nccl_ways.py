"""NCCL on the same arrays, where it can run: every rank has a GPU of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from rdmakit.bench.arrays import Arrays
from rdmakit.bench.gpus import RankGpu
from rdmakit.bench.session import Case, Session
from rdmakit.buffer import as_buffer
from rdmakit.collectives import Collectives
from rdmakit.errors import SetupError, UnsupportedError
from rdmakit.operation import Operation
from rdmakit.plan.shape import Kind

__all__ = ["over_nccl", "shared_gpu", "why_no_nccl"]


def shared_gpu(ranks: Sequence[RankGpu]) -> str:
    """Return why NCCL refuses a group of these ranks, or nothing. Pure."""
    seen: dict[str, RankGpu] = {}
    for gpu in ranks:
        if gpu.uuid in seen:
            first = seen[gpu.uuid]
            return (
                f"NCCL refuses two ranks on one GPU (ranks {first.rank} and {gpu.rank} on "
                f"{gpu.pci} of {gpu.host})"
            )
        seen[gpu.uuid] = gpu
    return ""


def why_no_nccl(session: Session, comm: Collectives) -> str:
    """Return why NCCL cannot run in the groups of ``comm``, or nothing. Collective in the job."""
    nccl, gpus = session.gpu.doors.nccl, session.gpu.ranks
    members = [int(text) for text in comm.bootstrap.allgather(str(session.comm.rank).encode())]
    reason = shared_gpu([gpus[rank] for rank in members]) or nccl.why_not()
    if not reason and session.dtype.name not in nccl.DTYPES:
        reason = f"NCCL through CuPy has no {session.dtype.name}"
    if not reason and session.op.name not in nccl.OPERATIONS:
        reason = f"NCCL through CuPy has no {session.op.name}"
    return session.agreed(reason)


class _Joined:
    """A group that was joined once for all its rows, or why it was not; equal on all ranks."""

    def __init__(self, group: Any, reason: str) -> None:
        self.group, self.reason = group, reason

    def close(self) -> None:
        if self.group is not None:
            self.group.close()


def _join(session: Session, comm: Collectives) -> _Joined:
    """Join NCCL's group of ``comm``. Collective in the job, blocking."""
    nccl = session.gpu.doors.nccl
    versions = session.group.share(nccl.version())
    if len(set(versions)) > 1:
        return _Joined(None, f"NCCL differs between ranks: {', '.join(sorted(set(versions)))}")
    offer = {"id": "", "problem": ""}
    if comm.rank == 0:
        try:
            offer["id"] = nccl.unique_id().hex()
        except SetupError as exc:
            offer["problem"] = str(exc)
    first = msgspec.json.decode(comm.bootstrap.allgather(msgspec.json.encode(offer))[0])
    # Agreed before anybody joins: joining waits for all.
    reason = session.agreed(first["problem"])
    if reason:
        return _Joined(None, reason)
    group, problem = None, ""
    try:
        group = nccl.NcclGroup(comm.size, bytes.fromhex(first["id"]), comm.rank)
    except SetupError as exc:
        problem = str(exc)
    reason = session.agreed(problem)
    if reason and group is not None:
        group.close()
        group = None
    return _Joined(group, reason)


def over_nccl(
    session: Session, case: Case, comm: Collectives, kind: Kind, arrays: Arrays
) -> Operation:
    """Return NCCL's collective on the arrays. Collective in the job, blocking at the first call.

    Where :func:`why_no_nccl` gives no reason.

    Raises:
        UnsupportedError: on every rank: its ranks could not join.
    """
    joined: _Joined = session.once(f"nccl {comm.label}", lambda: _join(session, comm))
    if joined.reason:
        raise UnsupportedError(joined.reason)
    doors, dtype, op = session.gpu.doors, session.dtype, session.op
    send, recv = as_buffer(arrays.send, "sendbuf"), as_buffer(arrays.recv, "recvbuf")
    count = recv.count if kind in (Kind.REDUCE_SCATTER, Kind.BROADCAST) else send.count
    if kind is Kind.ALLTOALL:
        count //= comm.size
    if kind is Kind.BROADCAST:
        send = recv
    run = joined.group.run

    def call() -> None:
        stream = doors.cuda.current_stream().ptr
        run(kind, send.address, recv.address, count, dtype, op, stream)

    return Operation("nccl", (), call)
