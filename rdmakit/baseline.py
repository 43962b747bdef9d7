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
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from rdmakit.bootstrap import load_mpi
from rdmakit.buffer import Buffer, array_at
from rdmakit.datatypes import AVG, MAX, MIN, PROD, SUM, ReduceOp
from rdmakit.layout import RankLayout
from rdmakit.plan.shape import Call, Form, Kind, Limits
from rdmakit.reduction import REDUCES

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


@cache
def why_not_mpi(kind: Kind, dtype: np.dtype[Any], op: ReduceOp, *, alike: bool) -> str:
    """Return why the MPI library cannot do it; nothing if it can.

    Args:
        kind: which collective.
        dtype: elements between the ranks.
        op: the reduction; one that the type has.
        alike: whether its results must be the same as ours, NaN included.
    """
    if kind not in REDUCES:
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
    comm: Any,
    kind: Kind,
    send: Buffer,
    recv: Buffer,
    op: ReduceOp,
    root: int,
    rank: int = 0,
    form: Form | None = None,
) -> tuple[Callable[[], Any], type[Exception]]:
    """As :func:`mpi_call`, of a call that does not block: it returns MPI's request."""
    return mpi_call(_NonBlocking(comm), kind, send, recv, op, root, rank, form, comm.Get_size())


def mpi_call(
    comm: Any,
    kind: Kind,
    send: Buffer,
    recv: Buffer,
    op: ReduceOp,
    root: int,
    rank: int = 0,
    form: Form | None = None,
    size: int = 0,
) -> tuple[Callable[[], object], type[Exception]]:
    """Return the call of ``comm`` for these buffers, and what it raises. Local.

    The buffers must outlive the call; it is blocking and collective over ``comm``. Type and
    operation are such that :func:`why_not_mpi` has no objection. ``form`` and ``rank`` are for
    the kinds that have one.
    """
    mpi = load_mpi()
    of, to = _typed(mpi, send), _typed(mpi, recv)
    operation = getattr(mpi, _OF_BOOL.get(op, op.name) if recv.dtype.kind == "b" else op.name)
    if form is not None:
        given = _Given(comm, mpi, kind, send, recv, of, to, operation, root, rank)
        return given.call(form, size or comm.Get_size()), mpi.Exception
    if kind is Kind.REDUCE_SCATTER:
        if not send.overlaps(recv):
            return partial(comm.Reduce_scatter_block, of, to, operation), mpi.Exception
        return _staged(partial(comm.Reduce_scatter_block), of, to, operation), mpi.Exception
    if kind is Kind.BROADCAST:
        return partial(comm.Bcast, to, root), mpi.Exception
    in_place = send.overlaps(recv) if kind is Kind.ALLGATHER else send.address == recv.address
    first: Any = mpi.IN_PLACE if in_place else of
    if kind is Kind.ALLGATHER:
        return partial(comm.Allgather, first, to), mpi.Exception
    return partial(comm.Allreduce, first, to, operation), mpi.Exception


def _staged(call: Any, of: list[Any], *others: Any) -> Callable[[], object]:
    """Return the call on a copy of its input: MPI forbids arrays that overlap."""
    source, copy = of[0], [np.empty_like(of[0]), of[1]]

    def staged() -> object:
        np.copyto(copy[0], source)
        return call(copy, *others)

    return staged


@dataclass(frozen=True)
class _Given:
    """The arguments of a call that has a form.

    MPI's call with counts is taken if and only if ours has counts, so that all ranks take the same.
    """

    comm: Any
    mpi: Any
    kind: Kind
    send: Buffer
    recv: Buffer
    of: Any
    to: Any
    operation: Any
    root: int
    rank: int

    def call(self, form: Form, size: int) -> Callable[[], object]:
        """Return MPI's call."""
        call = form.call(self.kind, RankLayout.of_sizes([size]), Limits(1, 1, 1), self.root)
        make = {
            Kind.REDUCE_SCATTER: self._reduce_scatter,
            Kind.ALLTOALL: self._alltoall,
            Kind.SCATTER: self._scatter,
            Kind.GATHER: self._gather,
            Kind.ALLGATHER: self._gather,
        }
        return make[self.kind](call) if self.kind in make else self._whole()

    def _whole(self) -> Callable[[], object]:
        comm, op = self.comm, self.operation
        in_place = bool(self.recv.count) and self.send.address == self.recv.address
        first = self.mpi.IN_PLACE if in_place else self.of
        if self.kind is Kind.SCAN:
            return partial(comm.Scan, first, self.to, op)
        if self.kind is Kind.EXSCAN:
            return partial(comm.Exscan, first, self.to, op)
        if self.rank != self.root:
            return partial(comm.Reduce, self.of, None, op, self.root)
        return partial(comm.Reduce, first, self.to, op, self.root)

    def _gather(self, call: Call) -> Callable[[], object]:
        comm, root = self.comm, self.root
        gather = comm.Gatherv if call.counts else comm.Gather
        if self.kind is Kind.GATHER and self.rank != root:
            return partial(gather, self.of, None, root)
        at = call.recv_offsets(self.rank)
        first = self.mpi.IN_PLACE if self._is_own(call, self.send, self.recv, at) else self.of
        into = self._counted(self.to, call.blocks, at) if call.counts else self.to
        if self.kind is Kind.GATHER:
            return partial(gather, first, into, root)
        return partial(comm.Allgatherv if call.counts else comm.Allgather, first, into)

    def _scatter(self, call: Call) -> Callable[[], object]:
        comm, root = self.comm, self.root
        scatter = comm.Scatterv if call.counts else comm.Scatter
        if self.rank != root:
            return partial(scatter, None, self.to, root)
        at = call.send_offsets(self.rank)
        of = self._counted(self.of, call.blocks, at) if call.counts else self.of
        own = self._is_own(call, self.recv, self.send, at)
        return partial(scatter, of, self.mpi.IN_PLACE if own else self.to, root)

    def _reduce_scatter(self, call: Call) -> Callable[[], object]:
        comm, counts = self.comm, [list(call.blocks)] if call.counts else []
        reduce = comm.Reduce_scatter if call.counts else comm.Reduce_scatter_block
        if call.in_place:  # all of SEND, whose front is the result's place
            return partial(reduce, self.mpi.IN_PLACE, self.of, *counts, self.operation)
        if self.send.overlaps(self.recv):
            return _staged(reduce, self.of, self.to, *counts, self.operation)
        return partial(reduce, self.of, self.to, *counts, self.operation)

    def _alltoall(self, call: Call) -> Callable[[], object]:
        exchange = self.comm.Alltoallv if call.counts else self.comm.Alltoall
        of, to, rank, ranks = self.of, self.to, self.rank, range(call.layout.size)
        if call.counts:
            gives = tuple(call.elements(rank, q) for q in ranks)
            takes = tuple(call.elements(q, rank) for q in ranks)
            of = self._counted(of, gives, call.send_offsets(rank))
            to = self._counted(to, takes, call.recv_offsets(rank))
        return partial(exchange, self.mpi.IN_PLACE if call.in_place else of, to)

    def _counted(self, typed: list[Any], counts: tuple[int, ...], at: tuple[int, ...]) -> list[Any]:
        """Return what mpi4py takes; where elements are bytes to MPI, counted in bytes."""
        each = self.recv.dtype.itemsize if typed[1] == self.mpi.BYTE else 1
        return [typed[0], ([n * each for n in counts], [n * each for n in at]), typed[1]]

    def _is_own(self, call: Call, own: Buffer, whole: Buffer, at: tuple[int, ...]) -> bool:
        """Return whether it is this rank's block in the array of all."""
        place = whole.address + at[self.rank] * whole.dtype.itemsize
        return bool(call.blocks[self.rank]) and own.address == place


def _typed(mpi: Any, buffer: Buffer) -> list[Any]:
    name = _TYPES.get(buffer.dtype.name, "")
    if name and buffer.dtype.isnative:
        return [array_at(buffer.address, buffer.count, buffer.dtype), getattr(mpi, name)]
    return [array_at(buffer.address, buffer.nbytes, np.dtype(np.uint8)), mpi.BYTE]
