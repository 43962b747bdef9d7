"""Inputs that differ for every rank and element, and what must come out.

Element i of rank r depends on i only modulo a prime period, so the expected vector is a small
table computed exactly and repeated. All sums and products of up to 64 ranks are exactly
representable, so the comparison is bitwise; integers wrap; a mean is the exact sum, divided once.
The inputs of means of half precision are alike on all ranks, since GPUs of several nodes make the
mean of the nodes' means, which would round twice.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rdmakit.datatypes import (
    AVG,
    BAND,
    BOR,
    EXACT_SUM,
    HALVES,
    LAND,
    LOR,
    LXOR,
    MAX,
    MIN,
    PROD,
    SUM,
    ReduceOp,
)

__all__ = ["SPOILED", "block", "count_wrong", "expected", "fill", "repeat", "sent"]

SPOILED = 0xA5
"""A byte that no result has everywhere."""

Array = npt.NDArray[Any]

_UFUNC = {
    ReduceOp.SUM: np.add, ReduceOp.EXACT_SUM: np.add, ReduceOp.AVG: np.add,
    ReduceOp.PROD: np.multiply, ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum,
    ReduceOp.LAND: np.logical_and, ReduceOp.LOR: np.logical_or, ReduceOp.LXOR: np.logical_xor,
    ReduceOp.BAND: np.bitwise_and, ReduceOp.BOR: np.bitwise_or, ReduceOp.BXOR: np.bitwise_xor,
}  # fmt: skip
_PERIOD = 251
"""A prime: no size of a block or piece is a multiple of it by chance."""
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
"""Odd, so that different numbers stay different, and with bits everywhere."""


def _is_half(dtype: np.dtype[Any]) -> bool:
    return dtype.name in HALVES


def block(rank: int, dtype: np.dtype[Any], op: ReduceOp = ReduceOp.SUM) -> Array:
    """Return one period of the input of ``rank``."""
    period = 11 if _is_half(dtype) else _PERIOD
    i = np.arange(period)
    if op is AVG and _is_half(dtype):
        rank = 0
    number = (i * 7 + rank * 13) % period
    if dtype.kind == "b" or op in (LAND, LOR, LXOR):
        return _truth(number, op).astype(dtype)
    if op is PROD:
        units = [1, -1, 2, 1j, -1j] if dtype.kind == "c" else [1, -1, 2, 1, -1]
        return np.array(units)[(i + 3 * rank) % 5].astype(dtype)
    if op in (BAND, BOR):
        bit = np.uint64(1) << (number % (8 * dtype.itemsize)).astype(np.uint64)
        return (bit if op is BOR else ~bit).astype(dtype)
    if op is ReduceOp.BXOR:
        return (number.astype(np.uint64) * _SPREAD).astype(dtype)
    if dtype.kind == "c":
        return ((number + 1) + 1j * ((i * 5 + rank * 17) % period)).astype(dtype)
    if dtype.name == "bfloat16" and op in (SUM, EXACT_SUM, AVG):
        return (number % 3).astype(dtype)  # 8 bits hold sums up to 256
    return (number + 1).astype(dtype)


def _truth(number: Array, op: ReduceOp) -> Array:
    """Return what is not 0 mostly, or seldom, so that of many ranks the result still differs."""
    if op in (LAND, PROD, MIN, BAND):
        return np.where(number < 3, 0, number)
    if op in (LOR, SUM, MAX, BOR):
        return np.where(number < 3, number + 1, 0)
    return number % 2


def fill(array: Array, rank: int, op: ReduceOp = ReduceOp.SUM, start: int = 0) -> None:
    """Write the input of ``rank`` into ``array``, whose first element has index ``start``."""
    repeat(array, block(rank, array.dtype, op), start)


def sent(source: int, target: int, ranks: int, dtype: np.dtype[Any]) -> Array:
    """Return one period of what ``source`` has for ``target`` in an all-to-all of ``ranks``.

    Another for each pair of up to 64 ranks: one sequence, begun at another place, and in other
    steps for each 251 of them. What is only moved is exact in every type.
    """
    turn, shift = divmod(source * ranks + target, _PERIOD)
    number = (np.arange(_PERIOD) * (7 + turn) + shift * 13) % _PERIOD
    if dtype.kind == "b":
        return (number % 2).astype(dtype)
    if dtype.kind == "c":
        return (number + 1j * ((number * 5 + shift) % _PERIOD)).astype(dtype)
    return number.astype(dtype)


def expected(ranks: int, dtype: np.dtype[Any], op: ReduceOp) -> Array:
    """Return one period of the reduction over ``ranks`` ranks."""
    total = block(0, dtype, op)
    if _is_half(dtype):
        total = total.astype(np.float32)
    for rank in range(1, ranks):
        _UFUNC[op](total, block(rank, dtype, op), out=total)
    if op is AVG:
        parts = total.view(total.real.dtype) if dtype.kind == "c" else total
        parts /= parts.dtype.type(ranks)
    return total.astype(dtype)


def count_wrong(array: Array, period: Array, start: int = 0) -> int:
    """Return how many elements differ from ``period`` repeated, from index ``start`` on."""
    if array.dtype.kind == "b":  # a byte that is neither 0 nor 1 is wrong
        array, period = array.view(np.uint8), period.view(np.uint8)
    wrong, size = 0, len(period)
    step = size * 4096
    for at in range(0, len(array), step):
        part = array[at : at + step]
        want = np.empty_like(part)
        repeat(want, period, start + at)
        wrong += int(np.count_nonzero(part != want))
    return wrong


def repeat(array: Array, period: Array, start: int = 0) -> None:
    """Write ``period`` again and again into ``array``, whose first element has index ``start``."""
    turned = np.roll(period, -(start % len(period)))
    whole = len(array) // len(period) * len(period)
    array[:whole].reshape(-1, len(period))[:] = turned
    array[whole:] = turned[: len(array) - whole]
