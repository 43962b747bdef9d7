"""The MPI library's own collectives on the same buffers: baseline, and best for small arrays.

``auto`` may take them only where MPI's operation means the same as ours. Seen to differ: MIN and
MAX of floats with a NaN (MPI says nothing of it; Open MPI 5.0 and MPICH 5.0 lose it, and MPICH even
gives ranks different results), and sums of 8- and 16-bit integers (Open MPI 5.0 saturates, where
other types and MPICH wrap). Products of complex numbers follow C's rules for infinities, and a
compiler may fuse multiply and add, which would give ranks other bits. Who names ``mpi`` gets the
library's, but for those integers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np

from rdmakit.bootstrap import load_mpi
from rdmakit.buffer import Buffer, array_at
from rdmakit.datatypes import AVG, MAX, MIN, PROD, SUM, ReduceOp
from rdmakit.plan.shape import Kind

__all__ = ["mpi_call", "mpi_start", "why_not_mpi"]

_TYPES = {
    "bool": "C_BOOL",
    "int8": "INT8_T",
    "int16": "INT16_T",
    "int32": "INT32_T",
    "int64": "INT64_T",
    "uint8": "UINT8_T",
    "uint16": "UINT16_T",
    "uint32": "UINT32_T",
    "uint64": "UINT64_T",
    "float32": "FLOAT",
    "float64": "DOUBLE",
    "complex64": "C_FLOAT_COMPLEX",
    "complex128": "C_DOUBLE_COMPLEX",
}
"""MPI's name of each type that it has in common with us; there is no half precision."""
_OF_BOOL = {
    ReduceOp.SUM: "LOR", ReduceOp.MAX: "LOR", ReduceOp.BOR: "LOR",
    ReduceOp.PROD: "LAND", ReduceOp.MIN: "LAND", ReduceOp.BAND: "LAND",
    ReduceOp.BXOR: "LXOR",
}  # fmt: skip
"""MPI has only logical operations of bool; these are the same."""
_REDUCES = (Kind.ALLREDUCE, Kind.REDUCE_SCATTER)


@cache
def why_not_mpi(kind: Kind, dtype: np.dtype[Any], op: ReduceOp, *, alike: bool) -> str:
    """Return why the MPI library cannot do it; nothing if it can.

    Args:
        kind: which collective.
        dtype: elements between the ranks.
        op: the reduction; one that the type has.
        alike: whether its results must be the same as ours, NaN included.
    """
    if kind not in _REDUCES:
        return ""  # bytes
    if dtype.name not in _TYPES:
        return f"MPI has no type for {dtype.name}"
    if op is SUM and dtype.kind in "iu" and dtype.itemsize < 4:
        return f"Open MPI's sums of {dtype.name} saturate"
    if op is AVG:
        return "MPI has no operation that makes a mean"
    if alike and op in (MIN, MAX) and dtype.kind == "f":
        return f"MPI does not say what {op.name} of a NaN is"
    if alike and op is PROD and dtype.kind == "c":
        return "products of complex numbers with infinities are others in C"
    return ""


class _NonBlocking:
    """An MPI communicator whose calls return at once, with a request."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, f"I{name[0].lower()}{name[1:]}")


def mpi_start(
    comm: Any, kind: Kind, send: Buffer, recv: Buffer, op: ReduceOp, root: int
) -> tuple[Callable[[], Any], type[Exception]]:
    """As :func:`mpi_call`, of a call that does not block: it returns MPI's request."""
    return mpi_call(_NonBlocking(comm), kind, send, recv, op, root)


def mpi_call(
    comm: Any, kind: Kind, send: Buffer, recv: Buffer, op: ReduceOp, root: int
) -> tuple[Callable[[], object], type[Exception]]:
    """Return the call of ``comm`` for these buffers, and what it raises. Local.

    The buffers must outlive the call; it is blocking and collective over ``comm``. Type and
    operation are such that :func:`why_not_mpi` has no objection.
    """
    mpi = load_mpi()
    of, to = _typed(mpi, send), _typed(mpi, recv)
    operation = getattr(mpi, _OF_BOOL.get(op, op.name) if recv.dtype.kind == "b" else op.name)
    if kind is Kind.REDUCE_SCATTER:
        if not send.overlaps(recv):
            return partial(comm.Reduce_scatter_block, of, to, operation), mpi.Exception
        source, copy = of[0], [np.empty_like(of[0]), of[1]]  # MPI forbids the overlap

        def staged() -> object:
            np.copyto(copy[0], source)
            return comm.Reduce_scatter_block(copy, to, operation)

        return staged, mpi.Exception
    if kind is Kind.BROADCAST:
        return partial(comm.Bcast, to, root), mpi.Exception
    in_place = send.overlaps(recv) if kind is Kind.ALLGATHER else send.address == recv.address
    first: Any = mpi.IN_PLACE if in_place else of
    if kind is Kind.ALLGATHER:
        return partial(comm.Allgather, first, to), mpi.Exception
    return partial(comm.Allreduce, first, to, operation), mpi.Exception


def _typed(mpi: Any, buffer: Buffer) -> list[Any]:
    name = _TYPES.get(buffer.dtype.name, "")
    if name and buffer.dtype.isnative:
        return [array_at(buffer.address, buffer.count, buffer.dtype), getattr(mpi, name)]
    return [array_at(buffer.address, buffer.nbytes, np.dtype(np.uint8)), mpi.BYTE]
