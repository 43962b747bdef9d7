"""Collectives on device memory with 1 to 8 ranks that share one GPU under MPS."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi import python_of, run_ranks

PROGRAMS = Path(__file__).parent / "programs"


def run(
    mps: dict[str, str], n: int, *modes: str, program: str = "node.py", timeout: float = 110.0
) -> str:
    result = run_ranks(
        n, PROGRAMS / program, modes, mps, timeout=timeout, python=python_of("openmpi"),
        mpirun_args=("--oversubscribe",) if n > 8 else (),
    )  # fmt: skip
    assert result.rc == 0, result.out
    assert not result.left, result.out
    for mode in modes:
        assert f"ok {mode}" in result.out, result.out
    return result.out


@pytest.mark.timeout(300)
@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_values(mps: dict[str, str], n: int) -> None:
    run(mps, n, "conformance=all" if n == 2 else "conformance", timeout=280)


@pytest.mark.parametrize("n", [3, 5])
def test_values_of_odd_nodes(mps: dict[str, str], n: int) -> None:
    run(mps, n, "conformance", timeout=110)


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_values_when_links_are_written(mps: dict[str, str], n: int) -> None:
    run(mps, n, "conformance=push", timeout=110)


def test_local_kernels(mps: dict[str, str]) -> None:
    run(mps, 1, "local", "wide_index")


@pytest.mark.parametrize("n", [2, 4, 8])
def test_streams_and_graphs(mps: dict[str, str], n: int) -> None:
    run(mps, n, "chained", "producer", "graph", "stale=10000", program="streams.py")


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_all_to_all_in_a_row_and_in_graphs(mps: dict[str, str], n: int) -> None:
    run(mps, n, "exchanged=3000", "graph_of_blocks", program="streams.py")


def test_sixteen_ranks(mps: dict[str, str]) -> None:
    """REPORTS 13: many workers on one GPU at once; 16 is the most that one node's kernels serve."""
    run(mps, 16, "chained", "producer", "exchanged=300", program="streams.py")


@pytest.mark.parametrize("n", [2, 4])
def test_registered_memory(mps: dict[str, str], n: int) -> None:
    run(mps, n, "registered", "kinds")


@pytest.mark.parametrize("n", [2, 4])
def test_errors(mps: dict[str, str], n: int) -> None:
    out = run(mps, n, "absent", "aborted", "mismatched")
    assert "local rank 0 did not come within 1 s" in out, out
    assert "CollectiveMismatch" in out, out
