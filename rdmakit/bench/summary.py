"""What the rows say together: best figures, shares of the limit, which layer limits. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rdmakit.bench.rows import at_size, best, impossible, of, phases, time_of
from rdmakit.bench.summary_gpu import gpu_summary
from rdmakit.config import format_size
from rdmakit.report.schema import Row

__all__ = ["summarize"]

_Sizes = dict[int, Row]


def summarize(rows: Sequence[Row]) -> list[str]:
    """Return the closing lines of a run."""
    done = [row for row in rows if row.time_us is not None]
    if any(row.gpu for row in rows):
        lines = gpu_summary(done)
    else:
        lines = [*_memory(done), *_intra(done), *_inter(done), *_allreduce(done)]
        lines += _broadcast(done)
    wrong = sum(row.wrong or 0 for row in done)
    checked = sum(row.wrong is not None for row in done)
    skipped = sum(bool(row.skipped) for row in rows)
    lines.append(
        f"values: {wrong} wrong in {checked} checked rows"
        + (f"; {skipped} rows skipped" if skipped else "")
    )
    return lines


def _by_size(rows: Sequence[Row], layer: str, case: str, algorithm: str | None = None) -> _Sizes:
    return at_size(of(rows, layer, case, algorithm))


def _best(rows: Sequence[Row], layer: str, case: str) -> Row | None:
    """Return the fastest row that is not MPI's."""
    return best([row for row in of(rows, layer, case) if row.algorithm != "mpi"])


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
    copy = _by_size(rows, "memory", "copy").get(nbytes)
    add = _by_size(rows, "memory", "add").get(nbytes)
    if copy is None or add is None:
        return None
    part = (ranks - 1) / ranks
    return time_of(copy) * (part + 1) + time_of(add) * part


def _intra(rows: Sequence[Row]) -> list[str]:
    top = _best(rows, "intra", "allreduce")
    if top is None:
        return []
    line = (
        f"intra: all-reduce up to {top.algbw_GBps:.2f} GB/s ({top.algorithm}, "
        f"{format_size(top.nbytes)})"
    )
    floor = node_floor_us(rows, top.nbytes, top.ranks)
    if floor is not None:
        share = 100 * floor / time_of(top)
        line += f", {share:.0f} % of what copies and adds allow{impossible(share)}"
    return [line + _against_mpi(rows, "intra")]


def _inter(rows: Sequence[Row]) -> list[str]:
    lines = []
    latency = _by_size(rows, "inter", "pair latency")
    one, both = _best(rows, "inter", "pair one-way"), _best(rows, "inter", "pair both-way")
    if latency:
        least = latency[min(latency)]
        text = f"inter: {least.transport}, {time_of(least):.1f} us one way at "
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
            text += f", {share:.0f} % of the lone pair's both-way rate{impossible(share)}"
        lines.append(text)
    return lines


def _allreduce(rows: Sequence[Row]) -> list[str]:
    whole = _by_size(rows, "allreduce", "allreduce", "hierarchical")
    if not whole:
        whole = _by_size(rows, "allreduce", "allreduce", "auto")
    if not whole:
        return []
    size = max(whole)
    row = whole[size]
    total = time_of(row)
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
                f"{share:.0f} % of it{impossible(share)}; the limit is {limit}"
            )
        return lines
    found = phases(rows, size)
    if found is None or not total:
        return lines
    inside, between = found
    slowest, name = max((inside, "intra (node phases)"), (between, "inter (rail phase)"))
    lines.append(
        f"allreduce: alone the node phases take {inside / 1e3:.2f} ms and the rail phase "
        f"{between / 1e3:.2f} ms; the limit is {name}; the whole is at "
        f"{100 * slowest / total:.0f} % of the slower, {100 * (inside + between) / total:.0f} % "
        "of both one after the other"
    )
    return lines


def _broadcast(rows: Sequence[Row]) -> list[str]:
    """The curves: each way's times over the number of ranks."""
    curves: dict[str, dict[int, Row]] = {}
    for row in rows:
        if row.layer == "broadcast":
            curves.setdefault(row.algorithm, {})[row.ranks] = row
    if not curves:
        return []
    counts = sorted({ranks for curve in curves.values() for ranks in curve})
    size = format_size(next(iter(next(iter(curves.values())).values())).nbytes)
    parts = []
    for name, curve in curves.items():
        times = [f"{time_of(curve[n]) / 1e3:.2f}" if n in curve else "-" for n in counts]
        parts.append(f"{name} {' '.join(times)}")
    return [f"broadcast: {size} to {' '.join(map(str, counts))} ranks in ms: {', '.join(parts)}"]


def _against_mpi(rows: Sequence[Row], layer: str) -> str:
    ours = _by_size(rows, layer, "allreduce", "auto") or _by_size(
        rows, layer, "allreduce", "hierarchical"
    )
    mpi = _by_size(rows, layer, "allreduce", "mpi")
    both = sorted(set(ours) & set(mpi))
    if not both:
        return ""
    ratios = {size: time_of(mpi[size]) / time_of(ours[size]) for size in both}
    shown = [size for size in both if size in (8, 4 << 10, 1 << 20)]
    if both[-1] not in shown:
        shown.append(both[-1])
    parts = ", ".join(f"{ratios[size]:.2f} at {format_size(size)}" for size in shown)
    return f"; MPI's time / ours: {parts}"
