"""cupyx.distributed (NCCL) and a communicator on the same ranks, streams and arrays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rdmakit.drivers import nccl
from tests.mpi import python_of, run_ranks

PROGRAM = Path(__file__).parent / "programs" / "beside.py"


@pytest.mark.parametrize("mode", ["first", "second", "host"])
def test_cupyx_distributed(gpu: None, mode: str) -> None:
    """Each mode's docstring says what it is."""
    if reason := nccl.why_not():
        pytest.skip(reason)
    code = "import cupy; print(cupy.cuda.runtime.getDeviceCount())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    if int(done.stdout) < 2:
        pytest.skip("one GPU is visible, and NCCL refuses two ranks on one GPU")
    result = run_ranks(2, PROGRAM, [mode], timeout=100, python=python_of("openmpi"))
    assert result.rc == 0, result.out
    assert result.out.count(f"] ok {mode}\n") == 2, result.out
    assert not result.left, result.out
