"""Ranks that die, stop, raise or leave in the middle of big all-reduces, in both MPI families."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.faults.test_faults_process import assert_gone, pids
from tests.mpi import FAMILIES, Job, Result, python_of

pytestmark = [pytest.mark.parallel, pytest.mark.slow, pytest.mark.quiet]

PROGRAM = Path(__file__).resolve().parents[1] / "parallel" / "programs" / "busy.py"
N = 4
DEADLINE = 3.0
LIMIT = DEADLINE + 6
NODES = {"2x2": "2", "1x4": "0"}
BOTH = pytest.mark.parametrize(("nodes", "faulty"), [("2x2", 1), ("1x4", 0), ("2x2", 0)])


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def start(family: str, nodes: str, folder: Path, fault: str, faulty: int) -> Job:
    env = {"RDMAKIT_RANKS_PER_NODE": NODES[nodes], "RDMAKIT_TIMEOUT": str(DEADLINE)}
    return Job(N, PROGRAM, [str(folder), fault, str(faulty)], env, python_of(family))


def ended(job: Job, ranks: list[int], since: float) -> Result:
    """Wait for the end, which comes in time and leaves no process and no segment of ours."""
    result = job.wait(40)
    seconds = time.monotonic() - since
    assert not result.timed_out, result.out
    assert seconds < LIMIT, (seconds, result.out)
    assert not result.left
    assert_gone(ranks)
    for pid in ranks:
        assert not list(Path("/dev/shm").glob(f"rdmakit-*-{pid}-*"))
    return result


def named(result: Result, rank: int) -> list[str]:
    """Return the lines in which ``rank`` is said to be in a phase."""
    return [x for x in result.out.splitlines() if re.search(rf"\brank {rank} \(host \S+\):", x)]


@BOTH
def test_killed_rank(family: str, nodes: str, faulty: int, tmp_path: Path) -> None:
    job = start(family, nodes, tmp_path, "kill", faulty)
    ranks = pids(job, tmp_path / "x", N)
    now = time.monotonic()
    os.kill(ranks[faulty], signal.SIGKILL)
    result = ended(job, ranks, now)
    assert result.rc != 0, result
    lines = named(result, faulty)
    assert any("killed" in line for line in lines), result.out
    assert any("allreduce" in line or "outside of any call" in line for line in lines), result.out


@BOTH
def test_stopped_rank(family: str, nodes: str, faulty: int, tmp_path: Path) -> None:
    job = start(family, nodes, tmp_path, "stop", faulty)
    ranks = pids(job, tmp_path / "x", N)
    now = time.monotonic()
    os.kill(ranks[faulty], signal.SIGSTOP)
    result = ended(job, ranks, now)
    assert result.rc != 0, result
    late = [x for x in result.out.splitlines() if f"limit {DEADLINE:g} s" in x]
    assert late, result
    assert any("allreduce/" in line and "waiting" in line for line in late)
    assert any(re.search(rf"waiting .*rank {faulty}\b", line) for line in late), result.out


def test_killed_mpirun(family: str, tmp_path: Path) -> None:
    job = start(family, "2x2", tmp_path, "mpirun", 0)
    ranks = pids(job, tmp_path / "x", N)
    now = time.monotonic()
    job.mpirun.kill()
    ended(job, ranks, now)


@pytest.mark.parametrize(("nodes", "faulty"), [("2x2", 2), ("1x4", 0)])
def test_exception_in_one_rank(family: str, nodes: str, faulty: int, tmp_path: Path) -> None:
    job = start(family, nodes, tmp_path, "raise", faulty)
    ranks = pids(job, tmp_path / "x", N)
    result = ended(job, ranks, time.monotonic())
    assert result.rc != 0, result
    assert "ValueError: made to fail" in result.out
    assert any("exception" in line for line in named(result, faulty)), result.out


def test_exit_in_one_rank(family: str, tmp_path: Path) -> None:
    job = start(family, "2x2", tmp_path, "exit", 1)
    ranks = pids(job, tmp_path / "x", N)
    result = ended(job, ranks, time.monotonic())
    assert result.rc != 0, result
    said = "\n".join(named(result, 1))
    assert "left early" in said or re.search(r"waiting .*rank 1\b", result.out), result.out
