"""Which algorithm ``auto`` takes: a pure function of what all ranks know.

The switch points are measured ones for host memory on x86-64 (medians, 2 and 4 ranks on two
cores; benchmarks/README.md): MPI's own collectives win while a call costs less than the few
microseconds that Python needs for a window round. Whether an all-to-all collects messages in
the nodes or sends straight is asked of the cost model.
"""

from __future__ import annotations

from rdmakit.layout import RankLayout
from rdmakit.plan.cost import Costs, alltoall_seconds
from rdmakit.plan.shape import Kind, Limits

__all__ = ["CHUNK_BYTES", "MPI_UP_TO", "ONE_SHOT_UP_TO", "SMALL_BYTES", "choose", "limits_for"]

MPI_UP_TO = 16 << 10
"""Bytes up to which MPI's collective is taken, where MPI has the type."""
ONE_SHOT_UP_TO = 8 << 10
"""Bytes up to which every rank of a lone node reduces for itself."""
SMALL_BYTES = 32 << 10
"""Bytes of a shard up to which the rail takes the schedule of fewest rounds."""
CHUNK_BYTES = 1 << 20
"""Bytes of a vector that go through node and rail together, where there are several nodes."""


def choose(kind: Kind, layout: RankLayout, nbytes: int, *, mpi: bool) -> str:
    """Return the algorithm for ``nbytes`` on ``layout``.

    Args:
        kind: which collective.
        layout: where the ranks are.
        nbytes: bytes of the longest array of any rank (:attr:`Call.longest`), so that all ranks
            choose alike.
        mpi: whether MPI can do it (it has no half precision).
    """
    if mpi and layout.size > 1 and nbytes <= MPI_UP_TO:
        return "mpi"
    lone = len(layout.nodes) == 1
    reduces = kind in (Kind.ALLREDUCE, Kind.REDUCE)
    if reduces and lone and layout.size > 1 and nbytes <= ONE_SHOT_UP_TO:
        return "one-shot"
    if kind is Kind.ALLTOALL and not lone:
        collected, straight = alltoall_seconds(layout, nbytes, CHUNK_BYTES, Costs())
        return "hierarchical" if collected < straight else "flat"
    return "hierarchical"


def limits_for(itemsize: int, window_bytes: int) -> Limits:
    """Return the planners' limits for elements of ``itemsize`` bytes."""
    return Limits(window_bytes // itemsize, CHUNK_BYTES // itemsize, SMALL_BYTES // itemsize)
