"""Network devices of real UCX contexts; tests/unit/test_nics.py has how they are chosen."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi import FAMILIES, python_of, run_ranks

pytestmark = pytest.mark.parallel

PROGRAM = Path(__file__).parent / "programs" / "nics.py"
RDMA = Path("/sys/class/infiniband")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["plain", "confined", "useless"])
def test_devices_of_a_communicator(family: str, mode: str) -> None:
    if mode == "plain" and RDMA.is_dir() and any(RDMA.iterdir()):
        pytest.skip("this machine has RDMA devices, and the test is of one that has none")
    result = run_ranks(2, PROGRAM, [mode], timeout=90, python=python_of(family))
    assert result.rc == 0, result.out
    assert result.out.count("end\n") == 2, result.out
    assert not result.left
