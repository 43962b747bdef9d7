"""Network devices of real UCX contexts; tests/unit/test_nics.py has how they are chosen."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.mpi import FAMILIES, Result, python_of, run_ranks

pytestmark = pytest.mark.parallel

PROGRAM = Path(__file__).parent / "programs" / "nics.py"
RDMA = Path("/sys/class/infiniband")


MODES = ("plain", "confined", "useless")


def has_rdma() -> bool:
    return RDMA.is_dir() and any(RDMA.iterdir())


@cache
def job(family: str) -> Result:
    """Return what became of the job of all modes; the first wants nothing imported before it."""
    modes = MODES[1:] if has_rdma() else MODES
    return run_ranks(2, PROGRAM, modes, timeout=90, python=python_of(family))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_devices_of_a_communicator(family: str, mode: str) -> None:
    if mode == "plain" and has_rdma():
        pytest.skip("this machine has RDMA devices, and the test is of one that has none")
    result = job(family)
    assert result.out.count(f"end {mode}\n") == 2, result.out
    assert result.rc == 0, result.out
    assert not result.left
