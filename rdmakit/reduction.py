"""Element-wise reductions on host memory: what a Reduce step does.

float16 (and bfloat16, which comes from GPU arrays) is accumulated in float32 and rounded once for
each step, as in DESIGN's hierarchy each node's partial and each hop round once. Other types are
reduced in their own type. Infinities and NaNs are results like others, as in MPI: no warning in the
middle of a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rdmakit.datatypes import ReduceOp
from rdmakit.errors import RdmaKitError

__all__ = ["Reducer", "no_reduce", "reducer"]

Array = npt.NDArray[Any]
Reducer = Callable[[Array, Sequence[Array]], None]

_UFUNC = {
    ReduceOp.SUM: np.add,
    ReduceOp.PROD: np.multiply,
    ReduceOp.MAX: np.maximum,
    ReduceOp.MIN: np.minimum,
}
_BLOCK = 128 << 10
"""Bytes of the result that are finished before the next, so that they stay in the L2 cache."""


def reducer(dtype: np.dtype[Any], op: ReduceOp) -> Reducer:
    """Return ``reduce(dst, srcs)``: srcs in order, into dst, which may be one of them."""
    ufunc = _UFUNC[op]
    if dtype.name in ("float16", "bfloat16"):
        return _wide(ufunc, np.dtype(np.float32))

    block = _BLOCK // dtype.itemsize

    def reduce(dst: Array, srcs: Sequence[Array]) -> None:
        if len(srcs) == 2:
            ufunc(srcs[0], srcs[1], out=dst)
            return
        aliased = any(np.may_share_memory(dst, src) for src in srcs[2:])
        for start in range(0, len(dst), block):
            part = slice(start, start + block)
            out = dst[part]
            into = np.empty_like(out) if aliased else out
            ufunc(srcs[0][part], srcs[1][part], out=into)
            for src in srcs[2:-1]:
                ufunc(into, src[part], out=into)
            ufunc(into, srcs[-1][part], out=out)

    if dtype.kind != "f":
        return reduce

    def quiet(dst: Array, srcs: Sequence[Array]) -> None:
        with np.errstate(all="ignore"):
            reduce(dst, srcs)

    return quiet


def _wide(ufunc: np.ufunc, wide: np.dtype[Any]) -> Reducer:
    block = _BLOCK // wide.itemsize

    def reduce(dst: Array, srcs: Sequence[Array]) -> None:
        with np.errstate(all="ignore"):
            for start in range(0, len(dst), block):
                part = slice(start, start + block)
                total = srcs[0][part].astype(wide)
                for src in srcs[1:]:
                    ufunc(total, src[part], out=total)
                dst[part] = total

    return reduce


def no_reduce(dst: object, srcs: object) -> None:
    """Stand where a plan has nothing to reduce."""
    raise RdmaKitError("a plan that moves data has a Reduce step")
