"""What one rank can check of a call alone: arrays, counts, types, in place."""

from __future__ import annotations

import sys
from dataclasses import replace

from rdmakit.buffer import Buffer, as_buffer
from rdmakit.datatypes import MemoryKind, why_not_moved
from rdmakit.errors import InvalidArgument, UnsupportedError
from rdmakit.plan.shape import Kind

__all__ = ["IN_PLACE", "resolve"]


class _InPlace:
    def __repr__(self) -> str:
        return "rdmakit.IN_PLACE"


IN_PLACE = _InPlace()
"""In place of ``sendbuf``: the input is in ``recvbuf``. mpi4py's MPI.IN_PLACE serves as well."""


def resolve(
    kind: Kind, sendbuf: object, recvbuf: object, rank: int, size: int, *, writes: bool
) -> tuple[Buffer, Buffer]:
    """Return the buffers of a call of ``size`` ranks. Local.

    Args:
        kind: which collective.
        sendbuf: array, or in place.
        recvbuf: array.
        rank: this rank.
        size: ranks of the group.
        writes: whether ``recvbuf`` is written here (not at the root of a broadcast).

    Raises:
        InvalidArgument: arrays that do not fit each other.
        UnsupportedError: memory or type that cannot be served.
    """
    recv = as_buffer(recvbuf, "recvbuf", writable=writes)
    if _is_in_place(sendbuf):
        send = _in_place(kind, recv, rank, size)
    else:
        send = recv if sendbuf is recvbuf else as_buffer(sendbuf, "sendbuf")
    if send.kind is not recv.kind:
        places = {MemoryKind.HOST: "host memory", MemoryKind.DEVICE: "GPU memory"}
        raise InvalidArgument(
            f"sendbuf is {places[send.kind]} and recvbuf {places[recv.kind]}: both must be the same"
        )
    if send.dtype != recv.dtype:
        raise InvalidArgument(f"sendbuf is {send.dtype} and recvbuf {recv.dtype}")
    problem = why_not_moved(recv.dtype)
    if problem:
        raise UnsupportedError(problem)
    _check_counts(kind, send, recv, size)
    _check_overlap(kind, send, recv, rank)
    return send, recv


def _is_in_place(sendbuf: object) -> bool:
    if sendbuf is IN_PLACE:
        return True
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and sendbuf is mpi.IN_PLACE


def _in_place(kind: Kind, recv: Buffer, rank: int, size: int) -> Buffer:
    if kind is Kind.REDUCE_SCATTER:
        raise UnsupportedError(
            "IN_PLACE of Reduce_scatter_block: pass the whole array as sendbuf and this rank's "
            "block of it as recvbuf"
        )
    if kind is not Kind.ALLGATHER:
        return recv
    count = recv.count // size
    offset = rank * count * recv.dtype.itemsize
    return replace(recv, address=recv.address + offset, count=count)


def _check_counts(kind: Kind, send: Buffer, recv: Buffer, n: int) -> None:
    want = {
        Kind.ALLREDUCE: send.count,
        Kind.BROADCAST: send.count,
        Kind.ALLGATHER: send.count * n,
        Kind.REDUCE_SCATTER: send.count // n if send.count % n == 0 else -1,
    }[kind]
    if want < 0:
        raise InvalidArgument(f"sendbuf has {send.count} elements, no multiple of {n} ranks")
    if recv.count != want:
        raise InvalidArgument(
            f"recvbuf has {recv.count} elements; expected {want} for {send.count} in sendbuf "
            f"({kind.value} of {n} ranks)"
        )


def _check_overlap(kind: Kind, send: Buffer, recv: Buffer, rank: int) -> None:
    if not send.overlaps(recv) or not recv.nbytes:
        return
    offset = {
        Kind.ALLREDUCE: 0,
        Kind.BROADCAST: 0,
        Kind.ALLGATHER: rank * send.nbytes,
        Kind.REDUCE_SCATTER: -rank * recv.nbytes,
    }[kind]
    if send.address - recv.address != offset:
        raise InvalidArgument("sendbuf and recvbuf overlap; only exactly in place is allowed")
