"""Arrays with gaps in real ranks, by every algorithm: REPORTS 17."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi import FAMILIES, python_of, run_ranks

PROGRAM = Path(__file__).parent / "programs" / "strided.py"
pytestmark = pytest.mark.parallel


@pytest.mark.parametrize(("n", "per_node"), [(2, "0"), (3, "2"), (4, "2")])
@pytest.mark.parametrize("family", FAMILIES)
def test_any_strides(family: str, n: int, per_node: str) -> None:
    """Collectives and messages."""
    env = {"RDMAKIT_RANKS_PER_NODE": per_node}
    result = run_ranks(n, PROGRAM, env=env, timeout=100, python=python_of(family))
    assert result.rc == 0, result.out
    assert result.out.count("ok strided\n") == 1, result.out
    assert result.out.count("ok strided messages\n") == 1, result.out
