"""Element-wise reductions on host memory: what a Reduce step does, and what stands around a plan.

float16 and bfloat16 are accumulated in float32 and rounded once for each step, so each node's
partial and each hop round once. For EXACT_SUM and AVG, where partial results go between ranks,
their input is widened once, everything on the way is float32, and the result is rounded once: the
bytes on the wire double (4(N-1)/N of the array's leave each of N nodes), and no sum overflows on
the way that would fit at the end. Other types are reduced in their own type.

AVG is a SUM that is divided once: by the Reduce step where that takes the inputs of all ranks, else
by every rank when its result is complete. Either way the same sum is divided by the same number, so
all ranks still have the same bits.

Infinities and NaNs are results like others, as in MPI: no warning in the middle of a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from rdmakit.buffer import Buffer, array_at
from rdmakit.datatypes import HALVES, ReduceOp
from rdmakit.errors import RdmaKitError
from rdmakit.layout import RankLayout
from rdmakit.plan.planner import reduces_at_once
from rdmakit.plan.shape import Kind

__all__ = ["REDUCES", "Frame", "Reducer", "average", "frame", "no_reduce", "on_the_way", "reducer"]

Array = npt.NDArray[Any]
Reducer = Callable[[Array, Sequence[Array]], None]
Combine = Callable[..., object]
"""``combine(first, second, out=...)``; ``out`` may be one of them."""

_UFUNC: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.PROD: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.AVG: np.add,
    ReduceOp.EXACT_SUM: np.add,
    ReduceOp.LAND: np.logical_and,
    ReduceOp.LOR: np.logical_or,
    ReduceOp.LXOR: np.logical_xor,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}
REDUCES = (Kind.ALLREDUCE, Kind.REDUCE_SCATTER, Kind.REDUCE, Kind.SCAN, Kind.EXSCAN)
"""Kinds that reduce."""
_WIDE = np.dtype(np.float32)
_BLOCK = 128 << 10
"""Bytes of the result that are finished before the next, so that they stay in the L2 cache."""


def reducer(dtype: np.dtype[Any], op: ReduceOp, divide_by: int = 0) -> Reducer:
    """Return ``reduce(dst, srcs)``: srcs in order, into dst, which may be one of them.

    Args:
        dtype: element type; one that :data:`rdmakit.datatypes.TABLE` serves with ``op``.
        op: the operation; AVG only adds, unless ``divide_by`` is given.
        divide_by: number of ranks; then each step must take the inputs of all of them.
    """
    if dtype.name in HALVES:
        reduce = _wide(_UFUNC[op], divide_by)
    elif op is ReduceOp.PROD and dtype.kind == "c":
        reduce = _plain(_complex_product, dtype.itemsize, 0)
    else:
        reduce = _plain(_UFUNC[op], dtype.itemsize, divide_by)
    if divide_by:
        reduce = _of_all(reduce, divide_by)
    if dtype.kind in "biu":
        return reduce

    def quiet(dst: Array, srcs: Sequence[Array]) -> None:
        with np.errstate(all="ignore"):
            reduce(dst, srcs)

    return quiet


def _plain(combine: Combine, itemsize: int, divide_by: int) -> Reducer:
    block = _BLOCK // itemsize
    at_once = isinstance(combine, np.ufunc) and not divide_by

    def reduce(dst: Array, srcs: Sequence[Array]) -> None:
        if at_once and len(srcs) == 2:
            combine(srcs[0], srcs[1], out=dst)
            return
        aliased = any(np.may_share_memory(dst, src) for src in srcs[2:])
        for start in range(0, len(dst), block):
            part = slice(start, start + block)
            out = dst[part]
            into = np.empty_like(out) if aliased else out
            total = srcs[0][part]
            for src in srcs[1:-1]:
                combine(total, src[part], out=into)
                total = into
            combine(total, srcs[-1][part], out=out)
            if divide_by:
                average(out, divide_by)

    return reduce


def _wide(ufunc: np.ufunc, divide_by: int) -> Reducer:
    block = _BLOCK // _WIDE.itemsize

    def reduce(dst: Array, srcs: Sequence[Array]) -> None:
        for start in range(0, len(dst), block):
            part = slice(start, start + block)
            total = srcs[0][part].astype(_WIDE)
            for src in srcs[1:]:
                ufunc(total, src[part], out=total)
            if divide_by:
                average(total, divide_by)
            dst[part] = total

    return reduce


def _of_all(reduce: Reducer, ranks: int) -> Reducer:
    def of_all(dst: Array, srcs: Sequence[Array]) -> None:
        if len(srcs) != ranks:
            raise RdmaKitError(f"a mean of {ranks} ranks was to be divided after {len(srcs)}")
        reduce(dst, srcs)

    return of_all


def _complex_product(a: Array, b: Array, out: Array) -> None:
    """Multiply part by part: NumPy fuses multiply and add in some places and not in others."""
    real = a.real * b.real
    real -= a.imag * b.imag
    imag = a.real * b.imag
    imag += a.imag * b.real
    out.real, out.imag = real, imag


def average(array: Array, ranks: int) -> None:
    """Divide the sums in ``array``, floats or complex numbers, by ``ranks``. Local.

    Each part of a complex number is divided and rounded like a float.
    """
    with np.errstate(all="ignore"):
        parts = array.view(array.real.dtype) if array.dtype.kind == "c" else array
        np.divide(parts, parts.dtype.type(ranks), out=parts)


def no_reduce(dst: object, srcs: object) -> None:
    """Stand where a plan has nothing to reduce."""
    raise RdmaKitError("a plan that moves data has a Reduce step")


@dataclass(frozen=True)
class Frame:
    """What a reduction's plan works on, and what is done on this rank before and after it.

    ``prepare`` and ``finish`` are local, write only ``send``'s and the caller's output, and hold
    the memory that ``send`` and ``recv`` are in where that is not the caller's.
    """

    send: Buffer
    recv: Buffer
    reduce: Reducer
    op: ReduceOp
    """What remains to be done between the ranks: SUM for AVG and EXACT_SUM."""
    prepare: Callable[[], None] | None = None
    finish: Callable[[], None] | None = None
    held: int = 0
    """Bytes of memory that it holds."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the elements on the way."""
        return self.recv.dtype

    def around(self, call: Callable[[], object]) -> Callable[[], object]:
        """Return ``call`` between ``prepare`` and ``finish``."""
        prepare, finish = self.prepare, self.finish
        if finish is None and prepare is None:
            return call

        def run() -> None:
            if prepare is not None:
                prepare()
            call()
            if finish is not None:
                finish()

        return run


@cache
def on_the_way(dtype: np.dtype[Any], op: ReduceOp) -> tuple[np.dtype[Any], ReduceOp]:
    """Return type and operation of partial results between the ranks."""
    if op not in (ReduceOp.AVG, ReduceOp.EXACT_SUM):
        return dtype, op
    return _WIDE if dtype.name in HALVES else dtype, ReduceOp.SUM


def frame(
    kind: Kind,
    algorithm: str,
    layout: RankLayout,
    send: Buffer,
    recv: Buffer,
    op: ReduceOp,
    *,
    writes: bool = True,
) -> Frame:
    """Return how a collective on host memory is done. Local; the same choice on all ranks.

    Args:
        kind: which; those that only move data have no frame around them.
        algorithm: a planned one, or ``mpi``.
        layout: the ranks.
        send: this rank's input.
        recv: its output; may be the input, or a part of it.
        op: the operation.
        writes: whether this rank has a result (not beside the root of a reduce, not at the first
            rank of an exscan).
    """
    ranks = layout.size
    if ranks == 1 or kind not in REDUCES:
        return Frame(send, recv, no_reduce, op)
    if reduces_at_once(algorithm, kind, layout):
        divide_by = ranks if op is ReduceOp.AVG else 0
        return Frame(send, recv, reducer(recv.dtype, op, divide_by), op)
    dtype, inner = on_the_way(recv.dtype, op)
    if dtype is not recv.dtype:
        return _widened(send, recv, inner, ranks if op is ReduceOp.AVG else 0, writes=writes)
    if inner is op:
        return Frame(send, recv, reducer(dtype, op), op)
    if not writes:
        return Frame(send, recv, reducer(dtype, inner), inner)
    result = array_at(recv.address, recv.count, dtype)
    return Frame(send, recv, reducer(dtype, inner), inner, finish=lambda: average(result, ranks))


def _widened(send: Buffer, recv: Buffer, op: ReduceOp, divide_by: int, *, writes: bool) -> Frame:
    source = array_at(send.address, send.count, send.dtype)
    result = array_at(recv.address, recv.count, recv.dtype)
    work = np.empty(send.count, _WIDE)
    total = work if send.count == recv.count else np.empty(recv.count, _WIDE)

    def prepare() -> None:
        np.copyto(work, source)

    def finish() -> None:
        with np.errstate(all="ignore"):
            if divide_by:
                average(total, divide_by)
            np.copyto(result, total, casting="unsafe")

    return Frame(
        replace(send, address=work.ctypes.data, dtype=_WIDE),
        replace(recv, address=total.ctypes.data, dtype=_WIDE),
        reducer(_WIDE, op),
        op,
        prepare,
        finish if writes else None,
        held=work.nbytes + (0 if total is work else total.nbytes),
    )
