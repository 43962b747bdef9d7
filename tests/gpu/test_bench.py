"""``rdmakit bench --device gpu`` on real GPUs: rows, labels, values, and the choice of the GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rdmakit.drivers import cuda_tools, nccl
from rdmakit.report.schema import Row
from tests.mpi import python_of, run_ranks

QUICK = ["--device", "gpu", "-b", "1K", "-e", "4M", "-f", "64", "-n", "5", "-w", "2",
         "--time-budget", "40"]  # fmt: skip


def bench(
    n: int, tmp_path: Path, *options: str, env: dict[str, str] | None = None
) -> tuple[list[Row], dict[str, Any], str]:
    out = tmp_path / "bench.json"
    args = ["rdmakit", "bench", *QUICK, "--output", str(out), *options]
    python = python_of("openmpi")
    result = run_ranks(n, "-m", args, env=env, timeout=110, python=python)
    assert result.rc == 0, result.out
    assert not result.left, result.out
    data = json.loads(out.read_text())
    rows = msgspec.convert(data["rows"], list[Row])
    assert not [row for row in rows if row.wrong], result.out
    assert all(row.gpu for row in rows)
    return rows, data, result.out


def ways(rows: list[Row], layer: str, case: str) -> dict[str, str]:
    return {
        row.algorithm: row.transport
        for row in rows
        if (row.layer, row.case) == (layer, case) and not row.skipped
    }


def need(gpus: int) -> list[str]:
    uuids = list(cuda_tools.device_uuids())
    if len(uuids) < gpus:
        pytest.skip(f"needs {gpus} GPUs, {len(uuids)} visible")
    return uuids


@pytest.mark.slow
def test_ranks_that_share_a_gpu(mps: dict[str, str], tmp_path: Path) -> None:
    rows, data, out = bench(2, tmp_path, "--gpu-map", "0", env=mps)
    assert {(row.sharing, row.mps) for row in rows} == {(2, True)}
    assert len({gpu["uuid"] for gpu in data["environment"]["gpus"]}) == 1
    assert ways(rows, "intra", "p2p 0->1") == {
        "read": "cuda_ipc/same-GPU", "write": "cuda_ipc/same-GPU", "host-staged": "host-staged",
    }  # fmt: skip
    for case in ("allreduce", "broadcast", "alltoall"):
        assert ways(rows, "intra", case) == {"registered": "cuda_ipc", "staged": "cuda_ipc"}
    assert set(ways(rows, "allreduce", "allreduce")) == {
        "registered", "staged", "host-staged MPI", "pipelined MPI",
    }  # fmt: skip
    refused = [row.skipped for row in rows if row.algorithm == "nccl"]
    assert refused
    assert all("NCCL refuses two ranks on one GPU" in text for text in refused)
    assert "of its copy rate" in out


@pytest.mark.slow
def test_virtual_nodes(mps: dict[str, str], tmp_path: Path) -> None:
    rows, _, out = bench(4, tmp_path, "--ranks-per-node", "2", "--gpu-map", "0", env=mps)
    assert {row.sharing for row in rows} == {4}
    for case in ("pair latency", "pair one-way", "pair both-way", "pairs one-way"):
        assert ways(rows, "inter", case)["host-staged"].startswith("host-staged+tcp/")
    whole = ways(rows, "allreduce", "allreduce")
    assert "host-staged" in whole["staged"] or "tcp/" in whole["staged"], whole
    assert "the limit is" in out


@pytest.mark.slow
def test_a_gpu_for_each_rank(gpu: None, tmp_path: Path) -> None:
    uuids = need(2)
    rows, data, out = bench(2, tmp_path)
    assert [entry["uuid"] for entry in data["environment"]["gpus"]] == uuids[:2]
    assert {row.sharing for row in rows} == {1}
    links = ways(rows, "intra", "p2p 0->1")
    assert links["read"] in ("cuda_ipc/NVLink", "cuda_ipc/PCIe"), links
    assert "p2p both ways" in out
    reason = nccl.why_not()
    for case in ("reduce_scatter", "allgather", "allreduce", "broadcast", "alltoall"):
        found = ways(rows, "intra", case)
        assert ("nccl" in found) == (not reason), found
    if reason:
        assert all(row.skipped == reason for row in rows if row.algorithm == "nccl")


@pytest.mark.slow
def test_a_map_turns_the_gpus_round(gpu: None, tmp_path: Path) -> None:
    uuids = need(2)
    for gpu_map in ("1,0", f"{uuids[1]},{uuids[0]}"):
        _, data, _ = bench(2, tmp_path, "--gpu-map", gpu_map, "--layer", "memory")
        assert [entry["uuid"] for entry in data["environment"]["gpus"]] == [uuids[1], uuids[0]]


def test_a_gpu_that_is_not_there(gpu: None) -> None:
    args = ["rdmakit", "bench", "--device", "gpu", "--gpu-map", "99"]
    result = run_ranks(2, "-m", args, timeout=60, python=python_of("openmpi"))
    assert result.rc == 2, result.out
    assert result.out.count("'99' of local rank 0 is none of the visible GPUs") == 1, result.out
    assert "Traceback" not in result.out
