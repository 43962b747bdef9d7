"""Dask beside a communicator in the same ranks: its threads, its processes, its clusters."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

import pytest

from tests.mpi import FAMILIES, python_of, run_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(200)]

PROGRAM = Path(__file__).parent / "programs" / "dask_beside.py"


@cache
def has_dask(python: str) -> bool:
    done = subprocess.run([python, "-c", "import dask.array, distributed"], capture_output=True)
    return done.returncode == 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("mode", "workers", "says"),
    [
        ("threads", 0, ""),
        ("processes=spawn", 2, "this process was started by multiprocessing in rank"),
        ("processes=fork", 2, "this process was forked from a rank and is none"),
        ("cluster", 1, "this process was started by multiprocessing in rank 0"),
    ],
)
def test_beside(family: str, mode: str, workers: int, says: str) -> None:
    """Both give right results; a worker that would be a rank is told that it is none."""
    python = python_of(family)
    if not has_dask(python):
        pytest.skip(f"dask and distributed are not installed beside {python} (group test)")
    result = run_ranks(2, PROGRAM, [mode], timeout=150, python=python)
    assert result.rc == 0, result.out
    assert result.out.count("] end\n") == 2, result.out
    told = [line for line in result.out.splitlines() if "] worker: " in line]
    assert len(told) == workers, result.out
    assert all(says in line for line in told), told
    assert not result.left
