"""Numbers from samples: pure functions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rdmakit.report.schema import Times

__all__ = ["bus_factor", "rate", "times_of"]


def times_of(samples: Sequence[float]) -> Times:
    """Return the summary in microseconds of ``samples`` in seconds."""
    us = np.asarray(samples, dtype=float) * 1e6
    low, median, p95, p99, high = np.percentile(us, [0, 50, 95, 99, 100])
    return Times(*(round(float(value), 3) for value in (low, median, p95, p99, high)))


def rate(nbytes: float, us: float) -> float:
    """Return GB/s, GB = 1e9 bytes."""
    return float(f"{nbytes / us / 1e3:.5g}") if us > 0 else 0.0


def bus_factor(case: str, n: int) -> float:
    """Return busbw / algbw of a collective of ``n`` ranks, as nccl-tests defines it.

    Source: nccl-tests, doc/PERFORMANCE.md. It makes a rate comparable with that of a link,
    whatever the number of ranks.
    """
    if n < 2:
        return 1.0
    return {
        "allreduce": 2 * (n - 1) / n,
        "reduce_scatter": (n - 1) / n,
        "allgather": (n - 1) / n,
        "alltoall": (n - 1) / n,
        "broadcast": 1.0,
    }.get(case, 1.0)
