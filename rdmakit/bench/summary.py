"""What the rows say together: best figures, shares of the limit, which layer limits. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rdmakit.config import format_size
from rdmakit.report.schema import Row

__all__ = ["summarize"]


def summarize(rows: Sequence[Row]) -> list[str]:
    """Return the closing lines of a run."""
    done = [row for row in rows if row.time_us is not None]
    lines = [
        *_memory(done),
        *_intra(done),
        *_inter(done),
        *_allreduce(done),
    ]
    wrong = sum(row.wrong or 0 for row in done)
    checked = sum(row.wrong is not None for row in done)
    skipped = sum(bool(row.skipped) for row in rows)
    lines.append(
        f"values: {wrong} wrong in {checked} checked rows"
        + (f"; {skipped} rows skipped" if skipped else "")
    )
    return lines


def _of(rows: Sequence[Row], layer: str, case: str, algorithm: str = "") -> dict[int, Row]:
    return {
        row.nbytes: row
        for row in rows
        if row.layer == layer and row.case == case and algorithm in ("", row.algorithm)
    }


def _median(row: Row | None) -> float | None:
    return row.time_us.median if row is not None and row.time_us is not None else None


def _best(rows: Sequence[Row], layer: str, case: str) -> Row | None:
    rated = [r for r in _of_all(rows, layer, case) if r.algbw_GBps and r.algorithm != "mpi"]
    return max(rated, key=lambda r: r.algbw_GBps or 0.0, default=None)


def _of_all(rows: Sequence[Row], layer: str, case: str) -> list[Row]:
    return [row for row in rows if row.layer == layer and row.case == case]


def _memory(rows: Sequence[Row]) -> list[str]:
    copy, add = _best(rows, "memory", "copy"), _best(rows, "memory", "add")
    if copy is None or add is None:
        return []
    return [
        f"memory: each rank copies up to {copy.algbw_GBps:.1f} GB/s (at "
        f"{format_size(copy.nbytes)}) and adds up to {add.algbw_GBps:.1f} GB/s (at "
        f"{format_size(add.nbytes)}), all at once"
    ]


def node_floor_us(rows: Sequence[Row], nbytes: int, ranks: int) -> float | None:
    """Return the time that copies and adds of a node all-reduce need at the measured rates.

    Each of L ranks copies (L-1)/L of the vector in and all of it out, and adds (L-1)/L of it.
    """
    copy = _median(_of(rows, "memory", "copy").get(nbytes))
    add = _median(_of(rows, "memory", "add").get(nbytes))
    if copy is None or add is None:
        return None
    part = (ranks - 1) / ranks
    return copy * (part + 1) + add * part


def _intra(rows: Sequence[Row]) -> list[str]:
    best = _best(rows, "intra", "allreduce")
    if best is None or best.time_us is None:
        return []
    line = (
        f"intra: all-reduce up to {best.algbw_GBps:.2f} GB/s ({best.algorithm}, "
        f"{format_size(best.nbytes)})"
    )
    floor = node_floor_us(rows, best.nbytes, best.ranks)
    if floor is not None:
        share = 100 * floor / best.time_us.median
        line += f", {share:.0f} % of what copies and adds allow{_impossible(share)}"
    return [line + _against_mpi(rows, "intra")]


def _inter(rows: Sequence[Row]) -> list[str]:
    lines = []
    latency = _of(rows, "inter", "pair latency")
    one, both = _best(rows, "inter", "pair one-way"), _best(rows, "inter", "pair both-way")
    if latency:
        least = latency[min(latency)]
        text = f"inter: {least.transport}, {_median(least):.1f} us one way at "
        text += format_size(least.nbytes)
        if one is not None:
            text += f", {one.algbw_GBps:.2f} GB/s one way"
        if both is not None:
            text += f", {both.algbw_GBps:.2f} GB/s each way both ways"
        lines.append(text)
    rail = _best(rows, "inter", "rail allreduce")
    if rail is not None and rail.wire_GBps:
        text = f"inter: rail all-reduce puts {rail.wire_GBps:.2f} GB/s on each rank's link"
        if both is not None and both.algbw_GBps:
            share = 100 * rail.wire_GBps / both.algbw_GBps
            text += f", {share:.0f} % of the lone pair's both-way rate{_impossible(share)}"
        lines.append(text)
    return lines


def _allreduce(rows: Sequence[Row]) -> list[str]:
    whole = _of(rows, "allreduce", "allreduce", "hierarchical")
    if not whole:
        whole = _of(rows, "allreduce", "allreduce", "auto")
    if not whole:
        return []
    size = max(whole)
    row = whole[size]
    total = _median(row) or 0.0
    lines = [
        f"allreduce: {row.algorithm} {format_size(size)} in {total / 1e3:.2f} ms, "
        f"{row.algbw_GBps:.2f} GB/s" + _against_mpi(rows, "allreduce")
    ]
    if row.nodes == 1:
        floor = node_floor_us(rows, size, row.ranks)
        if floor is not None and total and row.ranks > 1:
            share = 100 * floor / total
            limit = "memory (copies and adds)" if share > 50 else "intra (the node's own steps)"
            lines.append(
                f"allreduce: one node; copies and adds alone would take {floor / 1e3:.2f} ms, "
                f"{share:.0f} % of it{_impossible(share)}; the limit is {limit}"
            )
        return lines
    phases = _phases(rows, size)
    if phases is None or not total:
        return lines
    inside, between = phases
    slowest, name = max((inside, "intra (node phases)"), (between, "inter (rail phase)"))
    lines.append(
        f"allreduce: alone the node phases take {inside / 1e3:.2f} ms and the rail phase "
        f"{between / 1e3:.2f} ms; the limit is {name}; the whole is at "
        f"{100 * slowest / total:.0f} % of the slower, {100 * (inside + between) / total:.0f} % "
        "of both one after the other"
    )
    return lines


def _impossible(share: float) -> str:
    """Return a warning where a share of a limit cannot be: something was cached or disturbed."""
    return " (above 100 %: cached, or the limit was disturbed)" if share > 105 else ""


def _phases(rows: Sequence[Row], size: int) -> tuple[float, float] | None:
    """Return the microseconds of the node phases and of the rail phase, measured alone."""
    scatter = _median(_of(rows, "intra", "reduce_scatter").get(size))
    gather = _median(_of(rows, "intra", "allgather").get(size))
    rails = _of(rows, "inter", "rail allreduce")
    ranks = next((r.ranks for r in rows if r.layer == "intra" and r.case == "allgather"), 1)
    if not rails:
        return None
    nearest = min(rails, key=lambda n: abs(n * ranks - size))
    rail = _median(rails[nearest])
    if rail is None:
        return None
    inside = (scatter or 0.0) + (gather or 0.0)
    return inside, rail * (size / ranks) / nearest


def _against_mpi(rows: Sequence[Row], layer: str) -> str:
    ours = _of(rows, layer, "allreduce", "auto") or _of(rows, layer, "allreduce", "hierarchical")
    mpi = _of(rows, layer, "allreduce", "mpi")
    both = sorted(set(ours) & set(mpi))
    if not both:
        return ""
    ratios = {size: (_median(mpi[size]) or 0.0) / (_median(ours[size]) or 1.0) for size in both}
    shown = [size for size in both if size in (8, 4 << 10, 1 << 20)]
    if both[-1] not in shown:
        shown.append(both[-1])
    parts = ", ".join(f"{ratios[size]:.2f} at {format_size(size)}" for size in shown)
    return f"; MPI's time / ours: {parts}"
