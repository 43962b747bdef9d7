"""Any input of any type, and what NumPy makes of it: what host and GPU reductions must give."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from rdmakit.datatypes import HALVES, PROD, ReduceOp

UFUNC = {
    "SUM": np.add, "PROD": np.multiply, "MIN": np.minimum, "MAX": np.maximum, "AVG": np.add,
    "EXACT_SUM": np.add,
    "LAND": np.logical_and, "LOR": np.logical_or, "LXOR": np.logical_xor,
    "BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor,
}  # fmt: skip


def bits(dtype: np.dtype[Any], count: int, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Return any bit patterns: NaN, infinities, zeros of both signs, extremes."""
    if dtype.kind == "b":
        return rng.random(count) < 0.5
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        data = rng.integers(info.min, info.max, count, dtype, endpoint=True)
        data[rng.random(count) < 0.2] = 0
        return data
    if dtype.kind == "c":
        part = np.empty(0, dtype).real.dtype
        return bits(part, 2 * count, rng).view(dtype)
    data = rng.normal(size=count).astype(dtype)
    with np.errstate(over="ignore"):
        odd = rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e38, 1e-40], count).astype(dtype)
    return np.where(rng.random(count) < 0.2, odd, data)


def wanted(srcs: list[Any], op: ReduceOp, divide_by: int = 0) -> Any:
    """Return NumPy's reduction in the order of ``srcs``; of halves, and complex parts, by hand."""
    dtype = srcs[0].dtype
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wide = np.dtype(np.float32) if dtype.name in HALVES else dtype
        total = srcs[0].astype(wide)
        for src in srcs[1:]:
            x = src.astype(wide)
            if op is PROD and dtype.kind == "c":
                real = total.real * x.real - total.imag * x.imag
                imag = total.real * x.imag + total.imag * x.real
                total = np.empty_like(total)
                total.real, total.imag = real, imag
            else:
                total = UFUNC[op.name](total, x).astype(wide)
        if divide_by:
            parts = total.view(total.real.dtype) if dtype.kind == "c" else total
            total = (parts / parts.dtype.type(divide_by)).view(wide)
        return total.astype(dtype)


def same(got: Any, want: Any) -> None:
    """Compare bit by bit, but for the payload of NaN."""
    got, want = got.copy(), want.copy()
    if got.dtype.kind not in "biu":
        part = got.dtype if got.dtype.kind != "c" else np.empty(0, got.dtype).real.dtype
        got, want = got.view(part), want.view(part)
        assert ((got != got) == (want != want)).all(), "NaN in other places"
        got[got != got], want[want != want] = 0, 0
    bad = np.flatnonzero(got.view(f"u{got.itemsize}") != want.view(f"u{got.itemsize}"))
    assert not bad.size, f"{bad.size} wrong, first {got[bad[0]]} in place of {want[bad[0]]}"
