"""The public calls on CuPy arrays: one node, virtual nodes on one GPU, streams, memory, errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi import python_of, run_ranks

PROGRAM = Path(__file__).parent / "programs" / "public.py"


def run(mps: dict[str, str], n: int, *modes: str, timeout: float = 110.0, **env: str) -> str:
    env = mps | {f"RDMAKIT_{name}": value for name, value in env.items()}
    result = run_ranks(
        n, PROGRAM, modes, env, timeout=timeout, python=python_of("openmpi")
    )  # fmt: skip
    assert result.rc == 0, result.out
    assert not result.left, result.out
    for mode in modes:
        assert f"ok {mode}" in result.out, result.out
    return result.out


@pytest.mark.parametrize("n", [1, 2, 4])
def test_one_node(mps: dict[str, str], n: int) -> None:
    run(mps, n, "values" if n == 2 else "values=few", "views", "memory", "streams", "torch_arrays")


@pytest.mark.parametrize(("n", "per_node"), [(4, "2"), (4, "3"), (8, "4"), (2, "1")])
def test_virtual_nodes(mps: dict[str, str], n: int, per_node: str) -> None:
    out = run(mps, n, "values=few", "views", "memory", "streams", RANKS_PER_NODE=per_node)
    assert ("have no equal shards" in out) == (per_node == "3"), out


@pytest.mark.parametrize("mode", ["late", "mismatched"])
def test_errors(mps: dict[str, str], mode: str) -> None:
    result = run_ranks(
        2, PROGRAM, [mode], mps | {"RDMAKIT_CHECK": str(int(mode == "mismatched"))}, timeout=60,
        python=python_of("openmpi"),
    )  # fmt: skip
    assert result.out.count("told") >= (1 if mode == "late" else 2), result.out
