"""How the summaries find rows. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2

from rdmakit.report.schema import Row

__all__ = ["at_size", "best", "impossible", "of", "phases", "time_of"]


def of(rows: Sequence[Row], layer: str, case: str, algorithm: str | None = None) -> list[Row]:
    """Return the rows of a case, made by ``algorithm`` or by any."""
    return [
        row
        for row in rows
        if row.layer == layer and row.case == case and algorithm in (None, row.algorithm)
    ]


def at_size(rows: Sequence[Row]) -> dict[int, Row]:
    """Return rows by their bytes; of several with one size the last."""
    return {row.nbytes: row for row in rows}


def best(rows: Sequence[Row]) -> Row | None:
    """Return the row with the highest rate."""
    rated = [row for row in rows if row.algbw_GBps]
    return max(rated, key=lambda row: row.algbw_GBps or 0.0, default=None)


def time_of(row: Row) -> float:
    """Return the median in microseconds of a row that was made."""
    assert row.time_us is not None
    return row.time_us.median


def phases(
    rows: Sequence[Row], size: int, algorithm: str | None = None
) -> tuple[float, float] | None:
    """Return the microseconds of the node phases and of the rail phase, each measured alone.

    Args:
        rows: those that were made.
        size: bytes of the whole all-reduce.
        algorithm: of the node phases' rows; None: any.

    Returns:
        Both, the first one 0 where each node has one rank; None where a part was not measured.
    """
    rails = at_size(of(rows, "inter", "rail allreduce"))
    if not rails:
        return None
    ranks = max(_ranks_of_node(row) for row in rails.values())
    inside = 0.0
    for case in ("reduce_scatter", "allgather") if ranks > 1 else ():
        row = _of_blocks(of(rows, "intra", case, algorithm), size)
        if row is None:
            return None
        inside += time_of(row)
    nearest = min(rails, key=lambda nbytes: abs(log2(nbytes * ranks / size)))
    if not 0.25 <= nearest * ranks / size <= 4:
        return None  # latency there, bandwidth here: nothing follows from it
    return inside, time_of(rails[nearest]) * (size / ranks) / nearest


def _of_blocks(rows: Sequence[Row], size: int) -> Row | None:
    """Return the row that was asked to move ``size`` bytes, in equal blocks.

    They are whole elements, so together they may be fewer than an element each too many.
    """
    fitting = (row for row in rows if 0 <= row.nbytes - size < row.ranks * _itemsize(row))
    return min(fitting, key=lambda row: row.nbytes, default=None)


def _itemsize(row: Row) -> int:
    return row.nbytes // max(row.count, 1)


def _ranks_of_node(row: Row) -> int:
    """Return the ranks of the largest node: 8 of ``2x8`` and of ``8+7``."""
    return max(map(int, row.ranks_per_node.rpartition("x")[2].split("+")))


def impossible(share: float) -> str:
    """Return a warning where a share of a limit cannot be: something was cached or disturbed."""
    return " (above 100 %: cached, or the limit was disturbed)" if share > 105 else ""
