"""``rdmakit bench`` as users start it, with the mpirun of both families."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from rdmakit.report.schema import Row
from tests.mpi import FAMILIES, Result, python_of, run_ranks

pytestmark = pytest.mark.parallel
PROGRAMS = Path(__file__).parent / "programs"
MPI_WAYS = ("host-staged MPI", "pipelined MPI")
QUICK = ["-e", "64K", "-f", "16", "-n", "3", "-w", "1", "--time-budget", "20"]


def bench(
    n: int, *options: str, python: str | None = None, timeout: float = 90, **env: str
) -> Result:
    return run_ranks(
        n, "-m", ["rdmakit", "bench", *options], env=env, timeout=timeout, python=python
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_on_two_virtual_nodes(family: str, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    python = python_of(family)
    result = bench(4, *QUICK, "--ranks-per-node", "2", "--output", str(out), python=python)
    assert result.rc == 0, result.out
    assert not result.left
    data = json.loads(out.read_text())
    rows = msgspec.convert(data["rows"], list[Row])
    assert data["schema"] == "rdmakit.bench/1"
    assert {row.layer for row in rows} == {"memory", "intra", "inter", "allreduce", "broadcast"}
    assert not [row for row in rows if row.wrong]
    checked = [row for row in rows if row.layer != "memory" and not row.skipped]
    assert len(checked) > 30
    assert all(row.wrong == 0 for row in checked)
    names = {row.algorithm for row in rows if row.layer == "allreduce"}
    assert names == {"auto", "hierarchical", "ring", "mpi"}
    lanes = {row.transport for row in rows if row.layer == "inter" and not row.skipped}
    assert all(lane.startswith("tcp/") for lane in lanes), lanes
    # On one host nothing shows that bytes went by a network.
    assert {row.path for row in rows if row.layer == "inter" and not row.skipped} == {"unproven"}
    assert data["environment"]["path"]["pairs"][0]["verdict"]["missing"]
    for row in rows:
        if row.layer == "allreduce" and row.algorithm == "hierarchical" and row.nbytes > 1024:
            # Two nodes: every rank sends its shard once there and once back, S/2 in all.
            assert row.time_us is not None
            assert row.wire_GBps == pytest.approx(row.algbw_GBps / 2, rel=0.02)  # type: ignore[operator]
    chains = {
        row.ranks: row for row in rows if row.layer == "broadcast" and row.algorithm == "ring"
    }
    assert sorted(chains) == [2, 3, 4]
    assert {r: row.transport.partition("/")[0] for r, row in chains.items() if not row.skipped} == {
        2: "shm", 3: "shm+tcp", 4: "shm+tcp",
    }  # fmt: skip
    environment = data["environment"]
    assert environment["layout"] == "2x2"
    assert environment["ucx"]["version"]
    assert environment["ucx"]["libraries"]["libucp"]
    assert environment["mpi"]["vendor"] == {"openmpi": "Open MPI", "mpich": "MPICH"}[family]
    for text in ("memory:", "intra:", "inter:", "allreduce:", "summary", "the limit is"):
        assert text in result.out
    assert "\x1b" not in result.out, "no terminal, no colours"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("n", "per_node"), [(1, 0), (2, 0), (3, 2), (4, 1)])
def test_other_shapes(family: str, n: int, per_node: int) -> None:
    options = [*QUICK, "-d", "float16", "-o", "max", "--ranks-per-node", str(per_node)]
    result = bench(n, *options, python=python_of(family))
    assert result.rc == 0, result.out
    assert " 0 wrong in" in result.out


@pytest.mark.parametrize("family", FAMILIES)
def test_both_broadcasts_can_be_forced(family: str, tmp_path: Path) -> None:
    """One sender puts all copies on its link, the chain one."""
    out = tmp_path / "bench.json"
    options = ["--layer", "broadcast", "--algorithm", "ring", "--algorithm", "flat", "-e", "64K",
               "-n", "2", "-w", "1", "--time-budget", "20", "--ranks-per-node", "1"]  # fmt: skip
    result = bench(3, *options, "--output", str(out), python=python_of(family))
    assert result.rc == 0, result.out
    rows = msgspec.convert(json.loads(out.read_text())["rows"], list[Row])
    assert [(row.ranks, row.algorithm) for row in rows] == [
        (2, "ring"), (2, "flat"), (3, "ring"), (3, "flat"),
    ]  # fmt: skip
    for row in rows:
        assert (row.nbytes, row.wrong, row.skipped) == (64 << 10, 0, "")
        assert row.transport.startswith("tcp/")
        copies = row.ranks - 1 if row.algorithm == "flat" else 1
        assert row.wire_GBps == pytest.approx(copies * row.algbw_GBps, rel=0.02)  # type: ignore[operator]
    assert "broadcast: 64K to 2 3 ranks in ms: ring " in result.out


def test_without_ucx_the_mpi_channel_serves() -> None:
    result = bench(2, *QUICK, "--ranks-per-node", "1", RDMAKIT_UCX="none")
    assert result.rc == 0, result.out
    assert "messages go through MPI: RDMAKIT_UCX=none" in result.out
    assert re.search(r"pair latency +mpi/", result.out)


def test_types_and_operations() -> None:
    """One job for all: starting it, and proving its path, is most of the time."""
    options = ["bench", *QUICK, "--layer", "allreduce", "--ranks-per-node", "2"]
    types, ops = ("float32", "float64", "int32", "int64"), ("sum", "prod", "min")
    given = [[*options, "-d", dtype, "-o", op] for dtype in types for op in ops]
    result = run_ranks(4, PROGRAMS / "commands.py", [json.dumps(given)], timeout=110)
    assert result.rc == 0, result.out
    assert result.out.count("] ended 0: bench ") == 4 * len(given), result.out
    assert result.out.count("values: 0 wrong in ") == len(given), result.out


# Of each way in which it is found: by click, by us before MPI is there, by us with MPI.
BAD_USAGE = [
    (["--frobnicate"], "No such option"),
    (["-b", "8Q"], "'8Q' is not a size"),
    (["--device", "cpu", "-b", "128M"], "-b 128M is above -e 64M"),
]
MORE_BAD_USAGE = [
    (["-b", "1M", "-e", "8"], "above -e"),
    (["-d", "float99"], "unknown dtype 'float99'"),
    (["-o", "xor"], "unknown op 'xor'"),
    (["-n", "0"], "-n 0: at least 1"),
    (["--ranks-per-node", "-1"], "0 or more"),
    (["--gpu-map", "0,x"], "'x' is neither the number of a visible GPU nor a UUID"),
    (["--gpu-map", "0", "--device", "cpu"], "--device cpu takes none"),
    (["--device", "cpu", "--algorithm", "nccl"], "--algorithm 'nccl': with host arrays"),
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("options", "says"), BAD_USAGE)
def test_bad_usage_is_told_once(family: str, options: list[str], says: str) -> None:
    told_once(bench(3, *options, python=python_of(family), timeout=30), says)


@pytest.mark.parametrize(("options", "says"), MORE_BAD_USAGE)
def test_more_bad_usage_is_told_once(options: list[str], says: str) -> None:
    """In one family: who speaks is decided in the same ways as above."""
    told_once(bench(3, *options, timeout=30), says)


def told_once(result: Result, says: str) -> None:
    assert result.rc == 2, result.out
    assert result.out.count(says) == 1, result.out
    assert "Traceback" not in result.out
    assert not result.left


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [["--device", "gpu"], ["--gpu-map", "0,1"]])
def test_gpus_that_cannot_be_used_are_told_once(family: str, options: list[str]) -> None:
    from rdmakit.drivers import cuda

    if not cuda.why_not():
        pytest.skip("there is a GPU")
    result = bench(3, *options, python=python_of(family), timeout=60)
    assert result.rc == 2, result.out
    assert result.out.count("rank 0 (and 2 more ranks): ") == 1, result.out
    assert "Traceback" not in result.out
    assert not result.left


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("n", "options", "sharing"), [
    (3, [], 2), (2, ["--gpu-map", "1"], 2), (4, ["--ranks-per-node", "2"], 2),
])  # fmt: skip
def test_on_gpus_whose_memory_cannot_be_mapped(
    family: str, n: int, options: list[str], sharing: int, tmp_path: Path
) -> None:
    """GPUs of host memory under a real MPI: everything goes through the host, and says so."""
    out = tmp_path / "bench.json"
    args = ["bench", *QUICK, "-b", "64", "--device", "gpu", "--output", str(out), *options]
    program = PROGRAMS / "bench_gpu.py"
    result = run_ranks(n, program, args, python=python_of(family), timeout=90)
    assert result.rc == 0, result.out
    assert not result.left
    data = json.loads(out.read_text())
    rows = msgspec.convert(data["rows"], list[Row])
    assert {row.sharing for row in rows} == {sharing}
    assert not [row for row in rows if row.wrong]
    uuids = [gpu["uuid"] for gpu in data["environment"]["gpus"]]
    assert uuids == (["GPU-odd"] * 2 if "--gpu-map" in options else ["GPU-even", "GPU-odd"] * n)[:n]
    made = [row for row in rows if not row.skipped and row.layer != "memory"]
    carried = {row.transport for row in made if row.algorithm not in MPI_WAYS}
    assert carried
    assert all(text.startswith("host-staged") for text in carried), carried
    assert {row.algorithm for row in made} >= {*MPI_WAYS, "staged", "host-staged"}
    skipped = {row.algorithm: row.skipped for row in rows if row.skipped and row.layer == "intra"}
    assert "cannot be mapped" in skipped["read"]
    assert "GPU arrays go through pinned host memory: local rank 0: CUDA IPC" in result.out
    assert skipped["nccl"]
    for text in ("GPU: rank", "intra: inside each node, between GPUs", "p2p host-staged, GB/s"):
        assert text in result.out, result.out
    if n == 4:
        lanes = {row.transport for row in made if row.layer == "inter"}
        assert all(lane.startswith("host-staged+tcp/") for lane in lanes), lanes


def test_a_variable_not_understood_is_told_once() -> None:
    result = bench(2, RDMAKIT_TIMEOUT="soon")
    assert result.rc == 2
    assert result.out.count("RDMAKIT_TIMEOUT='soon'") == 1


def test_help_is_printed_once() -> None:
    result = bench(3, "--help")
    assert result.rc == 0
    assert result.out.count("Usage: rdmakit bench") == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_wrong_values_are_an_error(family: str) -> None:
    options = ["-e", "64K", "-b", "64K", "--layer", "allreduce", "--algorithm", "hierarchical"]
    program = PROGRAMS / "bench_wrong.py"
    result = run_ranks(2, program, ["add", "bench", *options], python=python_of(family))
    assert result.rc == 1, result.out
    wrong = re.search(r"values: (\d+) wrong in 1 checked rows", result.out)
    assert wrong, result.out
    assert int(wrong[1]) >= 1, result.out
