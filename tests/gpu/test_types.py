"""All element types with all operations in the GPU kernels and through the public calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi import python_of, run_ranks

PROGRAM = Path(__file__).parent / "programs" / "types.py"


def run(env: dict[str, str], n: int, mode: str, timeout: float = 110.0) -> None:
    result = run_ranks(n, PROGRAM, [mode], env, timeout=timeout, python=python_of("openmpi"))
    assert result.rc == 0, result.out
    assert not result.left, result.out
    assert f"ok {mode}" in result.out, result.out


@pytest.mark.timeout(400)
def test_every_pair(mps: dict[str, str]) -> None:
    """Compiles every kernel there is, once on each rank: minutes where CuPy's cache is empty."""
    run(mps, 2, "node=all", timeout=390)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("n", [3, 4])
def test_a_cover_of_pairs(mps: dict[str, str], n: int) -> None:
    run(mps, n, "node", timeout=290)


@pytest.mark.timeout(200)
def test_local_kernels(mps: dict[str, str]) -> None:
    run(mps, 1, "local", timeout=190)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("n", "per_node"), [(2, "0"), (4, "2"), (4, "3")])
def test_public_calls(mps: dict[str, str], n: int, per_node: str) -> None:
    run(mps | {"RDMAKIT_RANKS_PER_NODE": per_node}, n, "public", timeout=290)
