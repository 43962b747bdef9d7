"""Inputs into GPU memory, and what came out compared with them, by the piece.

Values repeat with a short period (:mod:`rdmakit.bench.values`), so a piece of whole periods serves
for any size: no host memory as large as the array is needed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rdmakit.bench import values

__all__ = ["SPOILED", "count_wrong", "fill"]

SPOILED = np.array([values.SPOILED], np.uint8)
"""One period of what no result is."""

_PIECE = 4 << 20
"""Bytes of a piece, about: it stays in the host's cache."""


def _piece(period: npt.NDArray[Any], start: int, nbytes: int) -> npt.NDArray[Any]:
    """Return whole periods for memory of ``nbytes`` whose first element has index ``start``."""
    turned = np.roll(period, -(start % len(period)))
    return np.tile(turned, max(1, -(-min(_PIECE, nbytes) // turned.nbytes)))


def fill(door: Any, address: int, nbytes: int, period: npt.NDArray[Any]) -> None:
    """Write ``period`` again and again to ``nbytes`` at ``address``. Local, blocking.

    Args:
        door: :mod:`rdmakit.drivers.cuda`.
        address: GPU memory.
        nbytes: whole elements of ``period``'s type.
        period: one period of the values.
    """
    piece = _piece(period, 0, nbytes)
    for at in range(0, nbytes, piece.nbytes):
        door.copy_now(address + at, piece.ctypes.data, min(piece.nbytes, nbytes - at))


def count_wrong(
    door: Any, address: int, count: int, period: npt.NDArray[Any], start: int = 0
) -> int:
    """Return how many of ``count`` elements differ from ``period`` repeated. Local, blocking.

    Args:
        door: :mod:`rdmakit.drivers.cuda`.
        address: GPU memory.
        count: elements of ``period``'s type.
        period: one period of what is expected.
        start: index of the first element.
    """
    want = _piece(period, start, count * period.itemsize)
    got, wrong, itemsize = np.empty_like(want), 0, want.itemsize
    for first in range(0, count, len(want)):
        size = min(len(want), count - first)
        door.copy_now(got.ctypes.data, address + first * itemsize, size * itemsize)
        wrong += int(np.count_nonzero(got[:size] != want[:size]))
    return wrong
