"""The public calls on CuPy arrays: one node, virtual nodes on one GPU, streams, memory, errors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.mpi import python_of, run_ranks

PROGRAMS = Path(__file__).parent / "programs"
PROGRAM = PROGRAMS / "public.py"


def run(
    env: dict[str, str], n: int, *modes: str, program: str = "public.py", timeout: float = 110.0,
    **settings: str,
) -> str:  # fmt: skip
    env = env | {f"RDMAKIT_{name}": value for name, value in settings.items()}
    result = run_ranks(
        n, PROGRAMS / program, modes, env, timeout=timeout, python=python_of("openmpi")
    )  # fmt: skip
    assert result.rc == 0, result.out
    assert not result.left, result.out
    for mode in modes:
        assert f"ok {mode}" in result.out, result.out
    return result.out


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_one_node(mps: dict[str, str], n: int) -> None:
    modes = ("values" if n == 2 else "values=few", "views", "memory", "streams", "torch_arrays")
    run(mps, n, *modes)


@pytest.mark.parametrize(("n", "per_node"), [(4, "2"), (4, "3"), (8, "4"), (2, "1")])
def test_virtual_nodes(mps: dict[str, str], n: int, per_node: str) -> None:
    out = run(mps, n, "values=few", "views", "memory", "streams", RANKS_PER_NODE=per_node)
    assert "messages of GPU memory go through pinned host memory" in out, out


def test_launches_that_block_change_nothing(mps: dict[str, str]) -> None:
    """REPORTS 13: CUDA_LAUNCH_BLOCKING serialises everything; results must be the same."""
    env = mps | {"CUDA_LAUNCH_BLOCKING": "1"}
    run(env, 2, "values=few", "streams")
    run(env, 2, "scratch_on_two_streams", program="calls.py")


def test_without_mps(no_mps: dict[str, str]) -> None:
    """REPORTS 31: right on one shared GPU, and the cure for the slowness is named."""
    one = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    out = run(no_mps | {"CUDA_VISIBLE_DEVICES": one}, 2, "shared")
    assert "ranks share one GPU" in out, out
    assert "without MPS: the driver runs them in turn" in out, out


@pytest.mark.parametrize("mode", ["late", "mismatched"])
def test_errors(mps: dict[str, str], mode: str) -> None:
    result = run_ranks(
        2, PROGRAM, [mode], mps | {"RDMAKIT_CHECK": str(int(mode == "mismatched"))}, timeout=60,
        python=python_of("openmpi"),
    )  # fmt: skip
    assert result.out.count("told") >= (1 if mode == "late" else 2), result.out
