"""Messages between two ranks of CuPy arrays: in a node, between nodes, direct and staged."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi import python_of, run_ranks

PROGRAM = Path(__file__).parent / "programs" / "message_arrays.py"
CASES = ("sizes_and_sides", "halo", "semantics", "beside_collectives", "lent")


@pytest.mark.parametrize("direct", ["on", "off"])
@pytest.mark.parametrize(("n", "per_node"), [(2, "0"), (2, "1"), (4, "2")])
def test_messages(mps: dict[str, str], direct: str, n: int, per_node: str) -> None:
    env = mps | {"RDMAKIT_GPU_DIRECT": direct, "RDMAKIT_RANKS_PER_NODE": per_node}
    result = run_ranks(n, PROGRAM, env=env, timeout=120, python=python_of("openmpi"))
    assert result.rc == 0, result.out
    assert not result.left, result.out
    for case in CASES:
        assert f"ok {case}" in result.out, result.out
    assert result.out.count("ok halo") == 2, result.out
    assert f"direct {direct == 'on' and per_node != '0'}" in result.out, result.out
