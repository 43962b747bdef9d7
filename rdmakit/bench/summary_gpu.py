"""What the rows of a GPU run say together: links, ways side by side, shares of the limit. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rdmakit.bench.rows import at_size, best, impossible, of, phases, time_of
from rdmakit.config import format_size
from rdmakit.report.schema import Row

__all__ = ["gpu_summary"]

_WAYS = ("registered", "staged", "nccl", "host-staged MPI", "pipelined MPI")
_SHOWN = (1 << 10, 1 << 20)
"""Sizes that comparisons show beside the largest."""
_PAIRS_SHOWN = 12


def gpu_summary(rows: Sequence[Row]) -> list[str]:
    """Return the lines of each layer from rows that were made."""
    return [
        *_memory(rows),
        *_links(rows),
        *_ucx(rows),
        *_ways(rows, "intra"),
        *_share(rows),
        *_ways(rows, "intra", "broadcast", "broadcast"),
        *_ways(rows, "intra", "alltoall", "all-to-all"),
        *_pairs(rows),
        *_ways(rows, "allreduce"),
        *_limit(rows),
    ]


def _memory(rows: Sequence[Row]) -> list[str]:
    device = best(of(rows, "memory", "device copy"))
    if device is None:
        return []
    text = (
        f"memory: each GPU copies {_copy_traffic(device):.0f} GB/s on the device (read + write, "
        f"at {format_size(device.nbytes)})"
    )
    for case, words in (("H2D", "to the GPU"), ("D2H", "from it")):
        pinned = best(of(rows, "memory", case, "pinned"))
        pageable = best(of(rows, "memory", case, "pageable"))
        if pinned is not None:
            text += f"; each rank copies {words} {pinned.algbw_GBps:.1f} GB/s"
            text += f" (pageable {pageable.algbw_GBps:.1f})" if pageable is not None else ""
    return [text]


def _copy_traffic(row: Row) -> float:
    """Return the GB/s that cross one GPU's memory bus: all its ranks copied at once."""
    return 2 * (row.algbw_GBps or 0.0) * (row.sharing or 1)


# -- links ------------------------------------------------------------------------------------


def _links(rows: Sequence[Row]) -> list[str]:
    """Return a line for each way between GPUs, over all pairs."""
    lines: list[str] = []
    reads: list[float] = []
    p2p = [row for row in rows if row.layer == "intra" and row.case.startswith("p2p ")]
    large = max((row.nbytes for row in p2p), default=0)
    for way, unit in (
        ("read", "GB/s"),
        ("write", "GB/s"),
        ("both ways", "GB/s each way"),
        ("host-staged", "GB/s"),
    ):
        found = [row for row in p2p if row.algorithm == way and row.nbytes == large]
        rates = {row.case.removeprefix("p2p "): row.algbw_GBps or 0.0 for row in found}
        if not rates:
            continue
        how = "+".join(dict.fromkeys(row.transport for row in found))
        text = f"intra: p2p {way}, {unit} at {format_size(large)} ({how}): {_matrix(rates, 1)}"
        if way == "read":
            reads = list(rates.values())
        elif way == "host-staged" and reads:
            text += f"; mapped / host-staged {median(reads) / median(rates.values()):.1f}"
        lines.append(text)
    small = [row for row in p2p if row.algorithm == "read" and row.nbytes < large]
    if small:
        times = {row.case.removeprefix("p2p "): time_of(row) for row in small}
        lines.append(
            f"intra: p2p read of {format_size(small[0].nbytes)}, us: {_matrix(times, 1, low=True)}"
        )
    return lines


def _matrix(values: dict[str, float], digits: int, *, low: bool = False) -> str:
    """Return each pair's value, or for many the worst, the median and the best."""
    if len(values) <= _PAIRS_SHOWN:
        return ", ".join(f"{pair} {value:.{digits}f}" for pair, value in values.items())
    worst = (max if low else min)(values, key=lambda pair: values[pair])
    top = (min if low else max)(values, key=lambda pair: values[pair])
    return (
        f"worst {values[worst]:.{digits}f} ({worst}), median "
        f"{median(values.values()):.{digits}f}, best {values[top]:.{digits}f} ({top}) of "
        f"{len(values)} pairs"
    )


def _ucx(rows: Sequence[Row]) -> list[str]:
    parts = []
    for size, ours in sorted(at_size(of(rows, "intra", "ucx pair", "ucxx")).items()):
        text = f"{ours.algbw_GBps:.1f} at {format_size(size)}"
        tool = at_size(of(rows, "intra", "ucx pair", "ucx_perftest")).get(size)
        if tool is not None and tool.algbw_GBps:
            share = 100 * (ours.algbw_GBps or 0.0) / tool.algbw_GBps
            text += f" ({share:.0f} % of ucx_perftest's {tool.algbw_GBps:.1f})"
        parts.append(text)
    return [f"intra: UCX between two GPUs, GB/s: {', '.join(parts)}"] if parts else []


# -- collectives ------------------------------------------------------------------------------


def _ways(
    rows: Sequence[Row], layer: str, case: str = "allreduce", words: str = "all-reduce"
) -> list[str]:
    """Return the best of our own of a collective, and the time of every other way over it."""
    found = {way: at_size(of(rows, layer, case, way)) for way in _WAYS}
    base = next((way for way in ("registered", "staged") if found[way]), "")
    if not base:
        return []
    top = max(found[base])
    row = found[base][top]
    text = (
        f"{layer}: {words} {format_size(top)} {base} in {_duration(time_of(row))}, "
        f"{row.algbw_GBps:.2f} GB/s (busbw {row.busbw_GBps:.2f}) over {row.transport}"
    )
    lines = [text]
    ratios = []
    for way in _WAYS:
        both = sorted(set(found[way]) & set(found[base]))
        if way == base or not both:
            continue
        shown = [size for size in both if size in _SHOWN] + both[-1:]
        parts = ", ".join(
            f"{time_of(found[way][size]) / time_of(found[base][size]):.2f} at {format_size(size)}"
            for size in dict.fromkeys(shown)
        )
        ratios.append(f"{way} {parts}")
    if ratios:
        which = "" if case == "allreduce" else f"{words} "
        lines.append(f"{layer}: {which}time / that of {base}: {'; '.join(ratios)}")
    return lines


def _share(rows: Sequence[Row]) -> list[str]:
    """Return how near the node's all-reduce comes to what limits it."""
    candidates = [r for r in of(rows, "intra", "allreduce") if r.algorithm in _WAYS[:2]]
    row = best(candidates)
    if row is None or row.ranks < 2 or "host-staged" in row.transport:
        return []
    what = f"{row.algorithm} {format_size(row.nbytes)}"
    sharing = row.sharing or 1
    if sharing >= row.ranks:  # all on one GPU, and maybe those of other nodes
        copies = best(of(rows, "memory", "device copy"))
        if copies is None or 8 * copies.nbytes < row.nbytes:
            return []  # a small copy shows its launch, not the memory
        traffic = 2 * sharing * row.nbytes / time_of(row) / 1e3
        share = 100 * traffic / _copy_traffic(copies)
        return [
            f"intra: {what} moves {traffic:.0f} GB/s through the GPU's memory (2 x ranks x bytes), "
            f"{share:.0f} % of its copy rate{impossible(share)}; that is no link's rate"
        ]
    links = [r for r in rows if r.layer == "intra" and r.algorithm == "both ways"]
    least = min((r.algbw_GBps or 0.0 for r in links), default=0.0)
    if sharing != 1 or not least:
        return []
    share = 100 * (row.busbw_GBps or 0.0) / least
    return [
        f"intra: {what} has busbw {row.busbw_GBps:.1f} GB/s, {share:.0f} % of what the slowest "
        f"pair copies each way at once{impossible(share)}"
    ]


def _limit(rows: Sequence[Row]) -> list[str]:
    """Return which layer limits the whole, where there are several nodes."""
    groups = [of(rows, "allreduce", "allreduce", way) for way in _WAYS[:2]]
    own = next((group for group in groups if group), [])
    whole = max(own, key=lambda row: row.nbytes, default=None)
    if whole is None or whole.nodes < 2 or not time_of(whole):
        return []
    found = phases(rows, whole.nbytes, whole.algorithm)
    if found is None:
        return []
    inside, between = found
    slower, name = max((inside, "intra (node phases)"), (between, "inter (rail phase)"))
    return [
        f"allreduce: alone the node phases take {_duration(inside)} and the rail phase "
        f"{_duration(between)}; the limit is {name}; the whole is at "
        f"{100 * slower / time_of(whole):.0f} % of the slower"
    ]


# -- pairs ------------------------------------------------------------------------------------


def _pairs(rows: Sequence[Row]) -> list[str]:
    lines = []
    for way in ("gpu-direct", "host-staged"):
        latency = at_size(of(rows, "inter", "pair latency", way))
        if not latency:
            continue
        least = latency[min(latency)]
        text = f"inter: {way} ({least.transport}), {time_of(least):.1f} us one way at "
        text += format_size(least.nbytes)
        for case, words in (("pair one-way", "one way"), ("pair both-way", "each way both ways")):
            row = best(of(rows, "inter", case, way))
            text += f", {row.algbw_GBps:.2f} GB/s {words}" if row is not None else ""
        lines.append(text)
    gains = []
    for case, words in (("pair latency", "latency"), ("pair one-way", "one way")):
        direct = at_size(of(rows, "inter", case, "gpu-direct"))
        staged = at_size(of(rows, "inter", case, "host-staged"))
        both = sorted(set(direct) & set(staged))
        for size in dict.fromkeys(both[:1] if words == "latency" else both[-1:]):
            gain = time_of(staged[size]) / time_of(direct[size])
            gains.append(f"{gain:.2f} in {words} at {format_size(size)}")
    if gains:
        lines.append(
            f"inter: what GPU memory sent directly gains over the host: {', '.join(gains)}"
        )
    rail = best(of(rows, "inter", "rail allreduce"))
    if rail is not None:
        lines.append(
            f"inter: rail all-reduce of GPU arrays up to {rail.algbw_GBps:.2f} GB/s at "
            f"{format_size(rail.nbytes)} over {rail.transport}"
        )
    return lines


def _duration(us: float) -> str:
    return f"{us / 1e3:.2f} ms" if us >= 1e3 else f"{us:.1f} us"
