"""Whole runs of the benchmark on GPUs made of host memory: rows, values, labels, what is freed."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rdmakit.bench import mpi_ways, p2p, staged, ucx_pair
from rdmakit.bench.gpus import RankGpu, find_gpus, warm_up
from rdmakit.bench.nccl_ways import shared_gpu
from rdmakit.bench.options import Options
from rdmakit.bench.runner import run
from rdmakit.bench.summary import summarize
from rdmakit.bench.ucx_pair import parse_perftest
from rdmakit.buffer import array_at
from rdmakit.communicator import Communicator
from rdmakit.config import Config
from rdmakit.datatypes import SUM
from rdmakit.errors import SetupError
from rdmakit.layout import RankLayout
from rdmakit.memory import MemoryBootstrap, MemoryChannel, MemoryWindow, run_threads
from rdmakit.plan.pieces import FLAGS
from rdmakit.plan.shape import Kind
from rdmakit.report.schema import Row
from tests.unit import fake_bench
from tests.unit.fake_bench import DirectChannel, Shared, UcxLike, make
from tests.unit.test_bench_parts import GIVEN

_mine = threading.local()
KINDS = ("reduce_scatter", "allgather", "allreduce", "broadcast", "alltoall")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Small pieces, so that messages have several; UCX and its tool from here."""
    for module in (staged, p2p):
        monkeypatch.setattr(module, "PIECE", 512)
    monkeypatch.setattr(ucx_pair, "SIZES", (8 << 10,))
    monkeypatch.setattr(ucx_pair, "UcxChannel", UcxLike)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    from rdmakit.bench import gpus, runner

    monkeypatch.setattr(runner, "_SETTLE", 0.0)
    monkeypatch.setattr(gpus, "_LARGE", 4 << 10)


def bench(
    sizes: list[int],
    gpus: Sequence[str],
    *,
    denied: bool = False,
    nccl: str = "",
    channel: Any = MemoryChannel,
    virtual: bool = False,
    **options: Any,
) -> list[Row]:
    """Run on nodes of ``sizes`` ranks, rank r on GPU ``gpus[r]``; return rank 0's rows."""
    layout = RankLayout.of_sizes(sizes)
    given = {**GIVEN, "end": "8K", "factor": 32, "iterations": 2, "warmup": 1, "time_budget": 60.0,
             "device": "gpu", **options}  # fmt: skip

    def main(boot: MemoryBootstrap) -> list[Row]:
        node = boot.split(layout.node_of(boot.rank), boot.rank)
        window: Any = MemoryWindow.create(node, 1 << 16, FLAGS) if node.size > 1 else None
        way = channel.create(boot) if len(sizes) > 1 else None
        gpu, doors = make(gpus[boot.rank], denied=denied, nccl=nccl)
        config = Config(window_bytes=1 << 16, timeout=20, check=True)
        comm = Communicator.from_parts(boot, layout, window, way, config, gpu=gpu)
        comm.virtual = virtual
        _mine.comm = comm
        placed = Options.of(**given).placed("gpu")
        warm_up(comm, placed.dtype, placed.op, doors)
        rows: list[Row] = []
        run(comm, placed, rows.append, gpus=find_gpus(comm, doors))
        comm.close()
        assert not doors.cuda.live, "GPU or pinned memory was left over"
        assert not doors.tools.pinned
        return rows

    told = run_threads(layout.size, main)
    for other in told[1:]:
        assert other == told[0], "rows are equal on all ranks"
    for row in told[0]:
        assert (row.gpu, row.mps) == ("Fake 1", True)
        assert row.sharing == max(Counter(gpus).values())
        if not row.skipped:
            expect = None if row.layer == "memory" or row.algorithm == "ucx_perftest" else 0
            assert row.wrong == expect, row
    return told[0]


def skipped(rows: Sequence[Row]) -> dict[tuple[str, str, str], str]:
    return {(r.layer, r.case, r.algorithm): r.skipped for r in rows if r.skipped}


def made(rows: Sequence[Row], layer: str, case: str) -> dict[str, set[str]]:
    """Return the transports of each algorithm whose rows were made."""
    found: dict[str, set[str]] = {}
    for row in rows:
        if (row.layer, row.case) == (layer, case) and not row.skipped:
            found.setdefault(row.algorithm, set()).add(row.transport)
    return found


@pytest.mark.parametrize(("limit", "messages"), [(1.0, 100), (0.0, ucx_pair.WINDOW)])
def test_messages_of_the_ucx_pair(
    monkeypatch: pytest.MonkeyPatch, limit: float, messages: int
) -> None:
    """As many as ucx_perftest sends, a window of them open; no more than one where UCX is slow."""
    monkeypatch.setattr(ucx_pair, "_MOST_SECONDS", limit)
    rows = bench([2], ["GPU-a", "GPU-b"], layers=("intra",))
    (row,) = [row for row in rows if row.algorithm == "ucxx"]
    assert f"{messages} messages a call" in row.note


def test_one_node_with_a_gpu_for_each_rank() -> None:
    rows = bench([2], ["GPU-a", "GPU-b"])
    for first, second in ((0, 1), (1, 0)):
        assert made(rows, "intra", f"p2p {first}->{second}") == {
            "read": {"cuda_ipc/NVLink"},
            "write": {"cuda_ipc/NVLink"},
            "host-staged": {"host-staged"},
        }
    assert made(rows, "intra", "p2p 0<->1") == {"both ways": {"cuda_ipc/NVLink"}}
    assert {r.nbytes for r in rows if r.case == "p2p 0->1"} == {8, 8192}
    own = {"registered": {"cuda_ipc"}, "staged": {"cuda_ipc"}}
    for case in KINDS:
        assert made(rows, "intra", case) == {**own, "nccl": {"nccl"}}
    assert made(rows, "allreduce", "allreduce") == own
    assert made(rows, "intra", "ucx pair") == {"ucxx": {"memory/memory+host copies by UCX"}}
    assert skipped(rows) == {
        ("intra", "ucx pair", "ucx_perftest"): "no ucx_perftest on PATH (optional)",
        ("inter", "pair latency", ""): "all ranks are on one node (try --ranks-per-node)",
        ("allreduce", "allreduce", "host-staged MPI"): "this group has no MPI communicator",
        ("allreduce", "allreduce", "pipelined MPI"): "this group has no MPI communicator",
    }
    assert UcxLike.opened == 0


def test_ranks_share_a_gpu() -> None:
    rows = bench([4], ["GPU-a"] * 4, algorithms=("registered", "staged", "nccl"))
    text = "NCCL refuses two ranks on one GPU (ranks 0 and 1 on 0000:00:06.0 of "
    assert set(skipped(rows)) == {("intra", kind, "nccl") for kind in KINDS} | {
        ("inter", "pair latency", "")
    }
    assert all(skipped(rows)["intra", kind, "nccl"].startswith(text) for kind in KINDS)
    assert not [row for row in rows if row.case.startswith(("p2p", "ucx"))], "not asked for"
    rows = bench([3], ["GPU-a", "GPU-a", "GPU-b"], layers=("intra",))
    assert made(rows, "intra", "p2p 0->1")["read"] == {"cuda_ipc/same-GPU"}
    assert made(rows, "intra", "p2p 2->1")["read"] == {"cuda_ipc/NVLink"}
    assert len({row.case for row in rows if row.case.startswith("p2p")}) == 6 + 3


@pytest.mark.parametrize("channel", [MemoryChannel, DirectChannel])
def test_two_nodes(channel: Any) -> None:
    rows = bench([2, 2], ["GPU-a", "GPU-b"] * 2, channel=channel, virtual=True)
    pairs = ("pair latency", "pair one-way", "pair both-way", "pairs one-way")
    for case in pairs:
        found = made(rows, "inter", case)
        assert found["host-staged"] == {"host-staged+memory/memory"}
        assert ("gpu-direct" in found) == (channel is DirectChannel)
    if channel is MemoryChannel:
        reason = skipped(rows)["inter", "pair latency", "gpu-direct"]
        assert reason == "the memory channel takes no GPU memory"
    assert made(rows, "inter", "rail allreduce") == {"staged": {"host-staged+memory/memory"}}
    whole = made(rows, "allreduce", "allreduce")
    assert whole["registered"] == whole["staged"] == {"cuda_ipc+host-staged+memory/memory"}
    assert "NCCL refuses" in skipped(rows)["allreduce", "allreduce", "nccl"]
    assert made(rows, "intra", "allreduce")["nccl"] == {"nccl"}
    text = "\n".join(summarize(rows))
    assert ("gains over the host" in text) == (channel is DirectChannel)
    assert "the limit is" in text


def test_nccl_over_several_nodes() -> None:
    gpus = [f"GPU-{rank}" for rank in range(4)]
    rows = bench([2, 2], gpus, virtual=True, layers=("allreduce",), algorithms=("nccl",))
    assert {row.algorithm for row in rows} == {"nccl"}
    assert all("not confined to the virtual nodes" in row.note for row in rows)


@pytest.mark.parametrize("sizes", [[3, 1], [1, 1], [1]], ids=str)
def test_other_shapes(sizes: list[int]) -> None:
    gpus = [f"GPU-{rank}" for rank in range(sum(sizes))]
    rows = bench(sizes, gpus, channel=DirectChannel)
    assert {row.layer for row in rows} == {"memory", "intra", "inter", "allreduce"}
    if max(sizes) == 1:
        assert skipped(rows)["intra", "allreduce", ""] == "every node has one rank"
    whole = made(rows, "allreduce", "allreduce")
    wide = "cuda_ipc+host-staged+memory/memory" if max(sizes) > 1 else "host-staged+memory/memory"
    assert whole["staged"] == {wide if len(sizes) > 1 else "cuda"}


def test_memory_that_cannot_be_mapped() -> None:
    rows = bench([2], ["GPU-a", "GPU-b"], denied=True, nccl="NCCL is not installed")
    assert made(rows, "intra", "p2p 0->1") == {"host-staged": {"host-staged"}}
    reasons = skipped(rows)
    assert "cannot be mapped" in reasons["intra", "p2p", "read"]
    for kind in KINDS:
        assert "cannot be mapped" in reasons["intra", kind, "registered"]
    for kind in KINDS:
        assert made(rows, "intra", kind) == {"staged": {"host-staged"}}
    assert reasons["intra", "allgather", "nccl"] == "NCCL is not installed"


def test_memory_that_cannot_be_mapped_this_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node has its windows; there is no room for the buffers of the copies."""
    monkeypatch.setattr(Shared, "room", False)
    rows = bench([2], ["GPU-a", "GPU-b"], layers=("intra",))
    assert skipped(rows)["intra", "p2p 0->1", "read"] == "no window on this node's GPUs"
    assert made(rows, "intra", "p2p 0->1") == {"host-staged": {"host-staged"}}
    assert made(rows, "intra", "allreduce")["registered"] == {"cuda_ipc"}


@pytest.mark.parametrize("op", ["sum", "prod", "max"])
@pytest.mark.parametrize("dtype", ["float16", "float64", "int64"])
def test_types_and_operations(dtype: str, op: str) -> None:
    rows = bench([2], ["GPU-a", "GPU-b"], dtype=dtype, op=op, begin="16")
    assert made(rows, "intra", "allreduce")["nccl"] == {"nccl"}


def test_over_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies beside MPI, whole and in pieces; MPI itself is played by our own calls."""

    def call(mpi: Any, kind: Any, send: Any, recv: Any, op: Any, root: int) -> Any:
        comm = _mine.comm
        return lambda: comm._on_host(kind, send, recv, op, root), RuntimeError

    monkeypatch.setattr(mpi_ways, "mpi_call", call)
    monkeypatch.setattr(mpi_ways, "PIECE", 1 << 10)
    from rdmakit.bench import gpu_cases

    monkeypatch.setattr(gpu_cases, "why_no_mpi", lambda session, comm: "")
    rows = bench([2], ["GPU-a"] * 2, layers=("allreduce",), algorithms=("mpi",))
    assert made(rows, "allreduce", "allreduce") == {
        "host-staged MPI": {"mpi"},
        "pipelined MPI": {"mpi"},
    }


def test_half_precision_and_mpi_is_one_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Comm:
        _mpi = object()

    class Session:
        dtype, op = np.dtype("float16"), SUM

    assert mpi_ways.why_no_mpi(Session(), Comm()) == "MPI has no type for float16"  # type: ignore[arg-type]
    Session.dtype = np.dtype("float32")
    assert not mpi_ways.why_no_mpi(Session(), Comm())  # type: ignore[arg-type]


def test_a_large_row_needs_room_on_the_gpu() -> None:
    rows = bench([2], ["GPU-a"] * 2, layers=("memory",), begin="1G", end="1G")
    assert all("GB needed on the GPU of rank 0, 1.1 GB free" in row.skipped for row in rows)


@pytest.mark.parametrize("case", ["broadcast", "alltoall"])
def test_what_only_moves(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Sizes and rates as nccl-tests count them; an element in the wrong place is found."""
    gpus = ["GPU-a", "GPU-b", "GPU-c"]
    rows = [r for r in bench([3], gpus, layers=("intra",)) if r.case == case and not r.skipped]
    assert {r.algorithm for r in rows} == {"registered", "staged", "nccl"}
    for row in rows:
        assert row.nbytes == row.count * 4
        assert row.count % 3 == 0 or case == "broadcast"
        assert row.algbw_GBps is not None
        factor = 2 / 3 if case == "alltoall" else 1.0
        assert row.busbw_GBps == pytest.approx(row.algbw_GBps * factor, rel=1e-4)
    run = fake_bench._NcclGroup.run

    def swapped(self: Any, kind: Kind, send: int, recv: int, count: int, *more: Any) -> None:
        run(self, kind, send, recv, count, *more)
        if kind in (Kind.BROADCAST, Kind.ALLTOALL) and self.boot.rank == 2:
            got = array_at(recv, count, np.dtype("float32"))
            got[:2] = got[1::-1].copy()

    monkeypatch.setattr(fake_bench._NcclGroup, "run", swapped)
    with pytest.raises(AssertionError, match="wrong=2"):
        bench([3], gpus, layers=("intra",), algorithms=("nccl",), begin="8K")


def test_nccl_refuses_a_shared_gpu() -> None:
    def gpu(rank: int, uuid: str) -> RankGpu:
        return RankGpu(rank, "n0", 0, "H200", uuid, "0000:06:00.0", False, False, 0, 0)

    assert not shared_gpu([gpu(0, "GPU-a"), gpu(1, "GPU-b")])
    assert shared_gpu([gpu(0, "GPU-a"), gpu(1, "GPU-b"), gpu(4, "GPU-a")]) == (
        "NCCL refuses two ranks on one GPU (ranks 0 and 4 on 0000:06:00.0 of n0)"
    )


# -- UCX's own tool ---------------------------------------------------------------------------

_WIDE = (
    "Final:                  40      5.123   123.456   125.000   2048.00   2048.00    8000    8000"
)
_NARROW = "Final:                  40   123.456   125.000   2048.00   2048.00    8000    8000"


@pytest.mark.parametrize("line", [_WIDE, _NARROW])
def test_perftest_output(line: str) -> None:
    assert parse_perftest(f"+-----+\n| Stage |\n{line}\n") == (40, 125e-6)


def test_perftest_output_of_the_last_line_alone() -> None:
    """As UCX 1.20.1 prints it with -f, between two H200."""
    line = "   100     45.284    45.850    45.850   348961.91  348961.91       21810       21810"
    assert parse_perftest(f"+-----+------+\n{line}") == (100, pytest.approx(45.85e-6))


@pytest.mark.parametrize("text", ["", "Final: 3 4", "[thread 0]  1 2 3 4 5 6 7"])
def test_not_perftest_output(text: str) -> None:
    with pytest.raises(SetupError, match="no result"):
        parse_perftest(text)


def test_perftest_runs_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "ucx_perftest"
    told = tmp_path / "told"
    tool.write_text(
        f'#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES $OMPI_COMM_WORLD_SIZE $*" >> {told}\n'
        f'echo "{_WIDE}"\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setattr(ucx_pair, "_STARTING", 0.05)
    rows = bench([2], ["GPU-a", "GPU-b"], layers=("intra",))
    row = next(row for row in rows if row.algorithm == "ucx_perftest")
    assert row.time_us is not None
    assert (row.time_us.median, row.iterations, row.first_use_us) == (125.0, 40, None)
    lines = [line for line in told.read_text().splitlines() if "tag_bw" in line]
    assert len(lines) == 2
    assert all(line.startswith("GPU-a,GPU-b  ") for line in lines), "no launcher's variables"
    assert sum("127.0.0.1" in line for line in lines) == 1
    assert "of ucx_perftest's" in "\n".join(summarize(rows))
    tool.write_text("#!/bin/sh\necho cannot >&2\nexit 3\n")
    rows = bench([2], ["GPU-a", "GPU-b"], layers=("intra",))
    row = next(row for row in rows if row.algorithm == "ucx_perftest")
    assert row.skipped == "ucx_perftest client: status 3: cannot"


def test_the_broadcasts_are_of_host_arrays() -> None:
    (only,) = bench([2], ["GPU-a", "GPU-b"], layers=("broadcast",))
    assert only.skipped == "GPU arrays have one way; the two are of host arrays"
