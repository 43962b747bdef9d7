"""How a run keeps to its time: rank 0 shares out seconds and leaves sizes out where it must."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Budget", "Planned", "planned"]

_HEAVY = 2 << 20
"""Bytes that get twice the time of the smallest size."""
_FLAT = 64 << 10
"""Bytes up to which a row's time does not grow with its size."""
_FLAT_MOST = 7e-3
"""Seconds of such a row that its bytes may account for: a hundred times 64 KiB at 1 GB/s. The rest
is what every row takes, however long its messages are."""
_KEPT = 3
"""When time is short, one size in so many is kept, the largest among them."""
_LEAST = 0.02


@dataclass(frozen=True)
class Planned:
    """A row to come."""

    nbytes: int
    kept: bool
    """Whether it is among those made first when time is short."""


def planned(sizes: Sequence[int]) -> list[Planned]:
    """Return the rows of one case: its sizes, in ascending order."""
    last = len(sizes) - 1
    return [Planned(size, (last - i) % _KEPT == 0) for i, size in enumerate(sizes)]


class Budget:
    """Seconds for rows that are made one after the other. Only rank 0's answers count."""

    def __init__(
        self, seconds: float, rows: Sequence[Planned], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock, self._rows = clock, list(rows)
        self._end = clock() + seconds
        self._began = clock()
        self._spent: dict[int, float] = {}

    def left(self) -> float:
        """Return the seconds that are left."""
        return self._end - self._clock()

    def estimate(self, nbytes: int) -> float:
        """Return what a row of ``nbytes`` may take, from those already made; 0 if unknown."""
        if nbytes in self._spent:
            return self._spent[nbytes]
        smaller = [size for size in self._spent if size < nbytes]
        if not smaller:
            return 0.0
        nearest = max(smaller)
        took = self._spent[nearest]
        grows = took if nearest > _FLAT else min(took, _FLAT_MOST)
        return took + grows * (max(1.0, nbytes / max(nearest, _FLAT)) - 1.0)

    def worth(self) -> bool:
        """Return whether the next row fits, with those behind it that should be made."""
        row, left = self._rows[0], self.left()
        need = self.estimate(row.nbytes)
        if left <= 0 or need > left:
            return False
        return row.kept or left - need >= sum(
            self.estimate(later.nbytes) for later in self._rows[1:] if later.kept
        )

    def share(self) -> float:
        """Return the seconds for timing the next row: more for large sizes."""
        weights = [1.0 + row.nbytes / _HEAVY for row in self._rows]
        return max(_LEAST, self.left() * weights[0] / sum(weights))

    def begin(self) -> None:
        """Note that the next row is begun."""
        self._began = self._clock()

    @contextmanager
    def setting_up(self) -> Iterator[None]:
        """Hold what is done once for many rows: it is no part of the present row's time."""
        began = self._clock()
        yield
        self._began += self._clock() - began

    def end(self, *, made: bool) -> None:
        """Note that it is finished or left out, and go on."""
        row = self._rows.pop(0)
        if made:
            took = self._clock() - self._began
            self._spent[row.nbytes] = max(took, self._spent.get(row.nbytes, 0.0))
