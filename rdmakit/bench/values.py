"""Inputs that differ for every rank and element, and what must come out.

Element i of rank r depends on i only modulo a prime period, so the expected vector is a small
table computed exactly and repeated. All values and results are exactly representable, so the
comparison is bitwise.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rdmakit.datatypes import ReduceOp

__all__ = ["SPOILED", "block", "count_wrong", "expected", "fill"]

SPOILED = 0xA5
"""A byte that no result has everywhere."""

Array = npt.NDArray[Any]


def _period(dtype: np.dtype[Any]) -> int:
    return 11 if dtype == np.float16 else 251


def block(rank: int, dtype: np.dtype[Any], op: ReduceOp = ReduceOp.SUM) -> Array:
    """Return one period of the input of ``rank``."""
    period = _period(dtype)
    i = np.arange(period)
    if op is ReduceOp.PROD:
        return np.array([1, -1, 2, 1, -1])[(i + 3 * rank) % 5].astype(dtype)
    return (((i * 7 + rank * 13) % period) + 1).astype(dtype)


def fill(array: Array, rank: int, op: ReduceOp = ReduceOp.SUM, start: int = 0) -> None:
    """Write the input of ``rank`` into ``array``, whose first element has index ``start``."""
    _tile(array, block(rank, array.dtype, op), start)


def expected(ranks: int, dtype: np.dtype[Any], op: ReduceOp) -> Array:
    """Return one period of the reduction over ``ranks`` ranks."""
    ufunc = {
        ReduceOp.SUM: np.add,
        ReduceOp.PROD: np.multiply,
        ReduceOp.MAX: np.maximum,
        ReduceOp.MIN: np.minimum,
    }[op]
    total = block(0, dtype, op)
    for rank in range(1, ranks):
        ufunc(total, block(rank, dtype, op), out=total)
    return total


def count_wrong(array: Array, period: Array, start: int = 0) -> int:
    """Return how many elements differ from ``period`` repeated, from index ``start`` on."""
    wrong, size = 0, len(period)
    step = size * 4096
    for at in range(0, len(array), step):
        part = array[at : at + step]
        want = np.empty_like(part)
        _tile(want, period, start + at)
        wrong += int(np.count_nonzero(part != want))
    return wrong


def _tile(array: Array, period: Array, start: int) -> None:
    turned = np.roll(period, -(start % len(period)))
    whole = len(array) // len(period) * len(period)
    array[:whole].reshape(-1, len(period))[:] = turned
    array[whole:] = turned[: len(array) - whole]
