"""The closing lines of a run on GPU arrays, from rows made up so that each figure is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rdmakit.bench.rows import phases
from rdmakit.bench.statistics import bus_factor
from rdmakit.bench.summary import summarize
from rdmakit.report.schema import Row, Times

M = 1 << 20


def row(
    layer: str, case: str, algorithm: str, nbytes: int, us: float, **more: Any
) -> Row:  # fmt: skip
    ranks = more.pop("ranks", 2)
    fields = {"nodes": 1, "ranks_per_node": "1x2", "gpu": "H200", "sharing": 1, "mps": False}
    rate = nbytes / us / 1e3
    return Row(
        layer=layer, case=case, algorithm=algorithm, nbytes=nbytes, count=nbytes // 4,
        dtype="float32", wire_dtype="float32", iterations=20, wrong=0, ranks=ranks,
        time_us=Times(us, us, us, us, us), algbw_GBps=rate,
        busbw_GBps=rate * bus_factor(case, ranks),
        **{**fields, **more},
    )  # fmt: skip


def text(rows: Sequence[Row]) -> str:
    return "\n".join(summarize(rows))


def test_the_ways_are_told_apart() -> None:
    rows = [
        row("intra", "allreduce", way, size, us * size / M, transport="cuda_ipc")
        for way, us in (("registered", 10.0), ("staged", 12.0), ("nccl", 15.0))
        for size in (M, 64 * M)
    ]
    rows += [
        row("allreduce", "allreduce", way, 64 * M, us, transport="cuda_ipc")
        for way, us in (("registered", 600.0), ("host-staged MPI", 60_000.0),
                        ("pipelined MPI", 30_000.0))
    ]  # fmt: skip
    lines = text(rows)
    assert "intra: all-reduce 64M registered in 640.0 us, 104.86 GB/s (busbw 104.86)" in lines
    assert (
        "intra: time / that of registered: staged 1.20 at 1M, 1.20 at 64M; "
        "nccl 1.50 at 1M, 1.50 at 64M"
    ) in lines
    assert (
        "allreduce: time / that of registered: host-staged MPI 100.00 at 64M; "
        "pipelined MPI 50.00 at 64M"
    ) in lines


def test_what_only_moves_has_lines_of_its_own() -> None:
    rows = [
        row("intra", case, way, 64 * M, us, transport="cuda_ipc", ranks=4)
        for case, ours in (("alltoall", 100.0), ("broadcast", 200.0))
        for way, us in (("registered", ours), ("nccl", 1.5 * ours))
    ]
    lines = text(rows)
    assert "intra: all-to-all 64M registered in 100.0 us, 671.09 GB/s (busbw 503.32)" in lines
    assert "intra: all-to-all time / that of registered: nccl 1.50 at 64M" in lines
    assert "intra: broadcast 64M registered in 200.0 us, 335.54 GB/s (busbw 335.54)" in lines


def test_links_in_one_line_each() -> None:
    def pair(name: str, way: str, gbps: float, size: int = 64 * M, via: str = "") -> Row:
        how = via or "cuda_ipc/NVLink"
        return row("intra", f"p2p {name}", way, size, size / gbps / 1e3, transport=how)

    rows = [
        pair("0->1", "read", 390.0), pair("1->0", "read", 380.0),
        pair("0<->1", "both ways", 360.0), pair("0->1", "write", 350.0),
        pair("0->1", "read", 8e-4, 8),
        pair("0->1", "host-staged", 35.0, via="host-staged"),
    ]  # fmt: skip
    lines = text(rows)
    assert "p2p read, GB/s at 64M (cuda_ipc/NVLink): 0->1 390.0, 1->0 380.0" in lines
    assert "p2p both ways, GB/s each way at 64M (cuda_ipc/NVLink): 0<->1 360.0" in lines
    assert "p2p write, GB/s at 64M (cuda_ipc/NVLink): 0->1 350.0" in lines
    assert (
        "p2p host-staged, GB/s at 64M (host-staged): 0->1 35.0; mapped / host-staged 11.0" in lines
    )
    assert "p2p read of 8, us: 0->1 10.0" in lines
    many = [pair(f"{a}->{b}", "read", 100.0 + 10 * a + b) for a in range(8) for b in range(8)]
    assert "worst 100.0 (0->0), median 138.5, best 177.0 (7->7) of 64 pairs" in text(many)


def test_share_of_the_gpus_copy_rate_where_ranks_share_it() -> None:
    shared = {"sharing": 4, "ranks": 4, "mps": True}
    rows = [
        # Four ranks copy 64 MiB each in 134.2 us: 500 GB/s each, 4 TB/s read and written.
        row("memory", "device copy", "device", 64 * M, 64 * M / 500e3, sharing=4, ranks=1),
        # 2 x 4 x 64 MiB at 3 TB/s.
        row("intra", "allreduce", "registered", 64 * M, 8 * 64 * M / 3000e3, **shared),
    ]
    lines = text(rows)
    assert "each GPU copies 4000 GB/s on the device" in lines
    assert "moves 3000 GB/s through the GPU's memory (2 x ranks x bytes), 75 % of its copy" in lines
    assert "slowest pair" not in lines, "there is no link"


def test_share_of_the_link_where_each_rank_has_a_gpu() -> None:
    rows = [
        row("intra", "p2p 0<->1", "both ways", 64 * M, 64 * M / 400e3, transport="cuda_ipc/NVLink"),
        row("intra", "allreduce", "registered", 64 * M, 64 * M / 320e3),
        row("intra", "allreduce", "nccl", 64 * M, 64 * M / 390e3),
    ]
    assert "busbw 320.0 GB/s, 80 % of what the slowest pair copies each way at once" in text(rows)


def test_what_gpudirect_brings() -> None:
    rows = [
        row("inter", case, way, size, us, transport=via, nodes=2)
        for way, via, times in (
            ("gpu-direct", "rc_mlx5/mlx5_0:1", (4.0, 2000.0)),
            ("host-staged", "host-staged+rc_mlx5/mlx5_0:1", (40.0, 3000.0)),
        )
        for case, size, us in (
            ("pair latency", 8, times[0]), ("pair one-way", 64 * M, times[1]),
        )
    ]  # fmt: skip
    lines = text(rows)
    assert "inter: gpu-direct (rc_mlx5/mlx5_0:1), 4.0 us one way at 8, 33.55 GB/s one way" in lines
    assert "inter: host-staged (host-staged+rc_mlx5/mlx5_0:1), 40.0 us" in lines
    assert "gains over the host: 10.00 in latency at 8, 1.50 in one way at 64M" in lines


def test_which_layer_limits_several_nodes() -> None:
    rows = [
        row("intra", "reduce_scatter", "registered", M, 20.0, nodes=2),
        row("intra", "reduce_scatter", "staged", M, 999.0, nodes=2),
        row("intra", "allgather", "registered", M, 30.0, nodes=2),
        row("inter", "rail allreduce", "staged", M // 2, 400.0, nodes=2),
        row("allreduce", "allreduce", "registered", M, 500.0, nodes=2, ranks=4),
    ]
    assert phases(rows, M, "registered") == (50.0, 400.0)
    assert "the limit is inter (rail phase); the whole is at 80 % of the slower" in text(rows)


def test_ucx_between_two_gpus() -> None:
    rows = [
        row("intra", "ucx pair", "ucxx", 16 * M, 16 * M / 300e3),
        row("intra", "ucx pair", "ucx_perftest", 16 * M, 16 * M / 400e3),
        row("intra", "ucx pair", "ucxx", 256 * M, 256 * M / 350e3),
    ]
    want = "UCX between two GPUs, GB/s: 300.0 at 16M (75 % of ucx_perftest's 400.0), 350.0 at 256M"
    assert want in text(rows)


@pytest.mark.parametrize("keep", range(6))
def test_any_part_of_a_run_has_a_summary(keep: int) -> None:
    rows = [
        row("memory", "device copy", "device", M, 10.0),
        row("memory", "H2D", "pinned", M, 10.0),
        row("intra", "p2p 0->1", "host-staged", M, 10.0),
        row("intra", "allreduce", "staged", M, 10.0),
        row("inter", "pair latency", "host-staged", M, 10.0, nodes=2),
        row("allreduce", "allreduce", "nccl", M, 10.0, nodes=2),
    ]
    assert summarize([rows[keep]])[-1] == "values: 0 wrong in 1 checked rows"
