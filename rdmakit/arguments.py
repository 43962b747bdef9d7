"""What one rank can check of a call alone: arrays, counts, types, in place."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np

from rdmakit.buffer import Buffer, Strided, strided_at
from rdmakit.datatypes import MemoryKind, why_not_moved
from rdmakit.errors import InvalidArgument, UnsupportedError
from rdmakit.intra.device_kernels import MAX_DIMS
from rdmakit.intra.device_local import merge_dims
from rdmakit.plan.shape import Kind
from rdmakit.specs import array_of

__all__ = [
    "IN_PLACE",
    "check_apart",
    "check_dims",
    "fortran",
    "is_in_place",
    "laid",
    "resolve",
]

_OVERLAP_WORK = 100_000
"""Candidates looked at before two views of the same stretch are taken to overlap."""


class _InPlace:
    def __repr__(self) -> str:
        return "rdmakit.IN_PLACE"


IN_PLACE = _InPlace()
"""In place of ``sendbuf``: the input is in ``recvbuf``. mpi4py's MPI.IN_PLACE serves as well."""


def resolve(
    kind: Kind, sendbuf: object, recvbuf: object, rank: int, size: int, *, writes: bool
) -> tuple[Buffer, Buffer]:
    """Return the buffers of a call of ``size`` ranks. Local.

    Elements are counted in C order, so that views with any strides fit each other and those of
    other ranks. Arrays that are both in Fortran order are counted as they lie in memory, as MPI
    does: nothing need be moved. Of a buffer that must be gathered first ``strided`` is set.

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
    blocks = size if kind is Kind.ALLGATHER else 1
    recv = array_of(recvbuf, "recvbuf", writable=writes, blocks=blocks)
    if is_in_place(sendbuf):
        recv = _as_it_lies(recv)
        send = _in_place(kind, recv, rank, size)
    else:
        send = recv if sendbuf is recvbuf else array_of(sendbuf, "sendbuf")
        send, recv = laid(send, recv)
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
    if send.strided is None and recv.strided is None:
        _check_overlap(kind, send, recv, rank)
    else:
        _check_strided(kind, send, recv, rank, size)
    return send, recv


_LIE = ("F", "")
"""Orders that are Fortran's."""


def laid(send: Buffer, recv: Buffer) -> tuple[Buffer, Buffer]:
    """Return two arrays, counted as they lie in memory if both are in Fortran order. Local."""
    if "F" in (send.order, recv.order) and send.order in _LIE and recv.order in _LIE:
        return _as_it_lies(send), _as_it_lies(recv)
    return send, recv


def fortran(send: Buffer, recv: Buffer) -> bool:
    """Return whether the elements of a resolved call are counted in Fortran order. Local."""
    gathered = send.strided is not None or recv.strided is not None
    return not gathered and "F" in (send.order, recv.order)


def _as_it_lies(buffer: Buffer) -> Buffer:
    """Return it with a Fortran-ordered array counted as it lies in memory."""
    if buffer.order != "F":
        return buffer
    return replace(buffer, strided=None)


def is_in_place(sendbuf: object) -> bool:
    """Return whether it is IN_PLACE, ours or mpi4py's. Local."""
    if sendbuf is IN_PLACE:
        return True
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and sendbuf is mpi.IN_PLACE


def _in_place(kind: Kind, recv: Buffer, rank: int, size: int) -> Buffer:
    if kind is not Kind.ALLGATHER:
        return recv
    count = recv.count // size
    if recv.strided is not None:
        return replace(recv, count=count, strided=replace(recv.strided, first=rank * count))
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


def _check_strided(kind: Kind, send: Buffer, recv: Buffer, rank: int, size: int) -> None:
    """Check the dimensions and the overlap of arrays of which one at least is gathered."""
    check_dims(send, recv)
    if not recv.nbytes or not send.overlaps(recv) or _is_block(send, recv, rank, kind, size):
        return
    check_apart(send, recv)


def check_dims(send: Buffer, recv: Buffer) -> None:
    """See that the GPU can gather the arrays. Local; raises UnsupportedError."""
    for name, buffer in (("sendbuf", send), ("recvbuf", recv)):
        if buffer.strided is None or buffer.kind is MemoryKind.HOST:
            continue
        shape, strides = buffer.strided.shape, buffer.strided.strides
        dims = len(merge_dims((*shape, buffer.dtype.itemsize), (*strides, 1))[0])
        if dims > MAX_DIMS:
            raise UnsupportedError(
                f"{name} has {dims} strided dimensions (shape {shape}, strides {strides}); the GPU "
                f"gathers {MAX_DIMS}: pass cupy.ascontiguousarray of it"
            )


def check_apart(send: Buffer, recv: Buffer) -> None:
    """See that two arrays share no byte. Local; raises InvalidArgument."""
    if not send.nbytes or not recv.nbytes or not send.overlaps(recv):
        return
    work: Any = _OVERLAP_WORK  # NumPy's stubs know two numbers only
    try:
        shared = np.shares_memory(_untouched(send), _untouched(recv), max_work=work)
    except np.exceptions.TooHardError:
        shared = True
    if shared:
        raise InvalidArgument("sendbuf and recvbuf overlap; only exactly in place is allowed")


def _is_block(send: Buffer, recv: Buffer, rank: int, kind: Kind, size: int) -> bool:
    """Return whether the smaller one is the part of the larger that in place means."""
    whole, part = (send, recv) if kind is Kind.REDUCE_SCATTER else (recv, send)
    all_, own = _strided(whole), _strided(part)
    if own == replace(all_, first=own.first):
        return part.address == whole.address  # the same array, or its block by IN_PLACE
    shape, strides, address = all_.shape, all_.strides, whole.address
    if kind in (Kind.ALLGATHER, Kind.REDUCE_SCATTER):
        if shape[0] % size:
            return False
        rows = shape[0] // size
        shape, address = (rows, *shape[1:]), address + rank * rows * strides[0]
    mine = merge_dims(own.shape, own.strides)
    return part.address == address and mine == merge_dims(shape, strides)


def _strided(buffer: Buffer) -> Strided:
    return buffer.strided or Strided((buffer.count,), (buffer.dtype.itemsize,))


def _untouched(buffer: Buffer) -> np.ndarray[Any, Any]:
    return strided_at(buffer.address, _strided(buffer), buffer.dtype, touched=False)
