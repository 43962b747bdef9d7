"""Arrays of many shapes, types and layouts, and the sums that are expected of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from rdmakit import (
    Config,
)
from rdmakit.datatypes import AVG, MAX, SUM, ReduceOp

SHAPES = ([1], [2], [3], [2, 2], [3, 1], [1, 1, 1], [1, 2])
CHECKED = Config(window_bytes=1 << 16, timeout=20, check=True)
KINDS = (np.float32, np.int64, np.complex128, np.uint8, np.float64)


def mine(index: int, shape: tuple[int, ...], dtype: Any, rank: int, turn: int = 0) -> Any:
    """Return this rank's values: small whole numbers, other for each array, rank and element."""
    places = np.arange(int(np.prod(shape))).reshape(shape)
    return ((places * 3 + index * 5 + turn) % 7 + (rank + 1) * (index % 3 + 1)).astype(dtype)


def total(
    index: int, shape: tuple[int, ...], dtype: Any, ranks: int, op: ReduceOp, turn: int = 0
) -> Any:
    """Return what all ranks' values make, in closed form."""
    places = np.arange(int(np.prod(shape))).reshape(shape)
    first, step = (places * 3 + index * 5 + turn) % 7, index % 3 + 1
    if op is MAX:
        return (first + ranks * step).astype(dtype)
    added = ranks * first + step * ranks * (ranks + 1) // 2
    return (added / ranks if op is AVG else added).astype(dtype)


def laid(array: Any, how: str) -> Any:
    """Return an array with these values that lies in another way in memory, and what is around."""
    array = np.array(array)
    if how == "F":
        return np.asfortranarray(array)
    if how == "gaps" and array.ndim:
        wide = np.full((*array.shape[:-1], array.shape[-1] * 2), 99, array.dtype)
        wide[..., ::2] = array
        return wide[..., ::2]
    if how == "back" and array.ndim:
        return np.ascontiguousarray(array[::-1])[::-1]
    return array


ITEMS: list[tuple[tuple[int, ...], Any, str]] = [
    ((3, 4), np.float32, "C"), ((), np.float32, "C"), ((7,), np.int64, "gaps"),
    ((0, 5), np.float32, "C"), ((2, 3, 4), np.float32, "F"), ((), np.int64, "C"),
    ((5, 6), np.complex128, "back"), ((4000,), np.float32, "C"), ((60, 70), np.float32, "gaps"),
    ((1,), np.uint8, "C"), ((50, 20), np.float32, "F"), ((9, 9), np.float32, "back"),
]  # fmt: skip

SMALL: list[tuple[tuple[int, ...], Any, str]] = [
    ((3, 4), np.float32, "C"), ((), np.float32, "C"), ((7,), np.int64, "gaps"),
    ((0, 5), np.float32, "C"), ((2, 3, 4), np.float32, "F"), ((900,), np.float32, "C"),
    ((30, 40), np.float32, "gaps"), ((9, 9), np.int64, "back"),
]  # fmt: skip

ORDERED = [item for item in ITEMS if item[1] is not np.complex128]


def given_to(comm: Any, items: Any, turn: int = 0) -> list[Any]:
    return [
        laid(mine(i, shape, dtype, comm.rank, turn), how)
        for i, (shape, dtype, how) in enumerate(items)
    ]


def check(arrays: Any, items: Any, ranks: int, op: ReduceOp = SUM, turn: int = 0) -> None:
    for i, (array, (shape, dtype, _)) in enumerate(zip(arrays, items, strict=True)):
        np.testing.assert_array_equal(array, total(i, shape, dtype, ranks, op, turn), f"array {i}")
        if array.base is not None and array.ndim and array.strides[-1] == 2 * array.itemsize:
            assert (array.base[..., 1::2] == 99).all(), "what lies between is not touched"
