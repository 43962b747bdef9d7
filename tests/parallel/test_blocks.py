"""Every call in blocks, reduce and scan beside mpi4py's own, under both families."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi import FAMILIES, python_of, run_ranks

pytestmark = pytest.mark.parallel

PROGRAM = Path(__file__).parent / "programs" / "blocks.py"


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_beside_mpi(family: str) -> None:
    n = 3
    result = run_ranks(n, PROGRAM, [], timeout=110, python=python_of(family))
    assert result.rc == 0, result.out
    assert result.out.count("] end\n") == n, result.out
    assert result.out.count("] ok ") == 9, result.out
