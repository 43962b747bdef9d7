"""The MPI library's own collectives on the same buffers: baseline, and best for small arrays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from rdmakit.bootstrap import load_mpi
from rdmakit.buffer import Buffer, array_at
from rdmakit.datatypes import ReduceOp
from rdmakit.plan.shape import Kind

__all__ = ["MPI_TYPES", "mpi_call", "mpi_start"]

MPI_TYPES = {
    "float32": "FLOAT",
    "float64": "DOUBLE",
    "int8": "INT8_T",
    "uint8": "UINT8_T",
    "int32": "INT32_T",
    "int64": "INT64_T",
}
"""MPI's name of each type that it has in common with us; there is no half precision."""


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

    The buffers must outlive the call; it is blocking and collective over ``comm``.
    """
    mpi = load_mpi()
    of = [array_at(send.address, send.count, send.dtype), _type_of(mpi, send)]
    to = [array_at(recv.address, recv.count, recv.dtype), _type_of(mpi, recv)]
    operation = getattr(mpi, op.name)
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


def _type_of(mpi: Any, buffer: Buffer) -> Any:
    return getattr(mpi, MPI_TYPES[buffer.dtype.name])
