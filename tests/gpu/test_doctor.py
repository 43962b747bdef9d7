"""``rdmakit doctor`` and its path proof on a machine with a GPU and no NIC."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.mpi import python_of, run_ranks


def doctor(n: int, env: dict[str, str]) -> dict[str, Any]:
    args = ["rdmakit", "doctor", "--path", "--json"]
    result = run_ranks(n, "-m", args, env=env, timeout=110, python=python_of("openmpi"))
    assert not result.left, result.out
    start = result.out.index("{\n")
    told: dict[str, Any] = json.loads(result.out[start : result.out.rindex("}") + 1])
    return told


def found(told: dict[str, Any], check: str) -> list[dict[str, Any]]:
    return [one for one in told["findings"] if one["check"] == check]


@pytest.mark.slow
def test_one_node(mps: dict[str, str]) -> None:
    told = doctor(2, mps)
    assert [one["status"] for one in found(told, "ipc.cuda")] == ["ok"], found(told, "ipc.cuda")
    assert all(one["status"] in ("ok", "unknown") for one in found(told, "pcie.load"))
    verdicts = {
        (report["memory"], pair["verdict"]["path"])
        for report in told["paths"]
        for pair in report["pairs"]
    }
    assert verdicts == {("host", "shm"), ("gpu", "cuda-ipc")}, told["paths"]
    # A GPU and no NIC: there is nothing that could read its memory.
    assert {one["status"] for one in found(told, "gpu.gpudirect")} == {"skipped"}


@pytest.mark.slow
def test_virtual_nodes_prove_nothing_of_gpu_direct(mps: dict[str, str]) -> None:
    told = doctor(2, mps | {"RDMAKIT_RANKS_PER_NODE": "1"})
    verdicts = {
        pair["verdict"]["path"]
        for report in told["paths"]
        if report["memory"] == "gpu"
        for pair in report["pairs"]
    }
    assert not verdicts & {"gdr-peermem", "gdr-dmabuf"}, told["paths"]
