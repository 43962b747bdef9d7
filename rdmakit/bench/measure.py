"""The one timing loop: first use, warm-up, samples, all agreed between the ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from rdmakit.protocols import Bootstrap

__all__ = ["Group", "Samples", "measure"]

_SAMPLE = 60e-6
"""Seconds: shorter calls are timed several at once, so that the clock does not count."""
_WARM_SHARE = 0.25
_WARM_SECONDS = 3e-3


class Group:
    """What the loop needs of the ranks that measure together."""

    def __init__(self, bootstrap: Bootstrap) -> None:
        self._bootstrap = bootstrap
        self.rank, self.size = bootstrap.rank, bootstrap.size

    def largest(self, values: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, Any]:
        """Return the largest of each value over the ranks. Collective."""
        rows = [np.frombuffer(row) for row in self._bootstrap.allgather(values.tobytes())]
        return np.asarray(np.max(rows, axis=0))

    def total(self, value: int) -> int:
        """Return the sum over the ranks. Collective."""
        return sum(int(text) for text in self._bootstrap.allgather(str(value).encode()))

    def first(self, value: float) -> float:
        """Return rank 0's value. Collective."""
        return float(self._bootstrap.allgather(repr(value).encode())[0])

    def share(self, value: Any) -> list[Any]:
        """Return every rank's value, of JSON's types. Collective."""
        rows = self._bootstrap.allgather(msgspec.json.encode(value))
        return [msgspec.json.decode(row) for row in rows]

    def barrier(self) -> None:
        """Return when all have called. Collective."""
        self._bootstrap.barrier()


@dataclass(frozen=True)
class Samples:
    """What :func:`measure` saw; equal on all ranks."""

    seconds: list[float]
    """One call, in each sample, on the slowest rank."""
    batch: int
    first: float

    @property
    def calls(self) -> int:
        """Timed calls."""
        return len(self.seconds) * self.batch


def measure(
    call: Callable[[], object],
    group: Group,
    *,
    iterations: int,
    warmup: int,
    allotment: float,
    apart: bool = False,
) -> Samples:
    """Time ``call`` on all ranks of ``group``. Collective, blocking.

    The first call is timed apart (cold buffers, connections). Calls are made back to back, unless
    ``apart``.

    Args:
        call: what to time; itself collective over the group.
        group: who measures.
        iterations: samples wanted; calls shorter than 60 us are timed several in a sample.
        warmup: calls before the samples.
        allotment: seconds that this may take; at least one sample is taken.
        apart: each timed call begins when all ranks have ended the one before, so that what leaves
            some ranks early, as a broadcast does, is timed whole; one call in a sample.
    """
    clock = time.perf_counter
    group.barrier()
    start = clock()
    call()
    first = float(group.largest(np.array([clock() - start]))[0])
    warm = max(1, min(warmup, int(_WARM_SHARE * allotment / max(first, 1e-7))))
    if first * 2 > allotment:
        warm = 0
    start = clock()
    for _ in range(warm):
        call()
    took = (clock() - start) / warm if warm else first
    usual = float(group.largest(np.array([took]))[0])
    if warm and usual * warm < _WARM_SECONDS:  # a few calls do not wake caches and clocks
        for _ in range(int(_WARM_SECONDS / max(usual, 1e-7))):
            call()
    batch = 1 if apart else max(1, int(_SAMPLE / max(usual, 1e-8)))
    spent = first + warm * usual
    wanted = max(1, min(iterations, int((allotment - spent) / max(usual * batch, 1e-7))))
    samples = np.empty(wanted)
    group.barrier()
    if batch == 1:
        for index in range(wanted):
            if apart:
                group.barrier()
            start = clock()
            call()
            samples[index] = clock() - start
    else:
        for index in range(wanted):
            start = clock()
            for _ in range(batch):
                call()
            samples[index] = (clock() - start) / batch
    return Samples([float(x) for x in group.largest(samples)], batch, first)
