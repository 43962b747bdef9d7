"""The cases of Window and Channel between real processes, in both MPI families."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.channel_cases import CHANNEL_CASES
from tests.conformance.window_cases import WINDOW_CASES
from tests.mpi import FAMILIES, python_of, run_ranks

pytestmark = pytest.mark.parallel

PROGRAM = Path(__file__).parent / "programs" / "conformance.py"
CASES = {
    "shm": WINDOW_CASES,
    "shm-named": WINDOW_CASES,
    "mpi": CHANNEL_CASES,
    "ucx": CHANNEL_CASES,
    "ucx-virtual": CHANNEL_CASES,
}


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_case(family: str, n: int) -> None:
    """One job runs all implementations: starting ranks is most of the time."""
    result = run_ranks(n, PROGRAM, list(CASES), timeout=90, python=python_of(family))
    assert result.rc == 0, result.out
    for name, cases in CASES.items():
        for case in cases:
            assert f"ok {name} {case.__name__} " in result.out, result.out
    assert result.out.count("end ") == n
    assert not result.left
