"""``rdmakit bench`` that is interrupted, or whose ranks or mpirun fail, stop or die."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.mpi import FAMILIES, Job, leftovers, python_of, run_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.quiet]
PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("how", "says"), [("raise", "ZeroDivisionError"), ("exit", "SystemExit")])
def test_an_error_in_one_rank_ends_the_run(family: str, how: str, says: str) -> None:
    options = ["-e", "64K", "--layer", "allreduce", "--algorithm", "hierarchical"]
    program = PROGRAMS / "bench_wrong.py"
    result = run_ranks(2, program, [how, "bench", *options], python=python_of(family), timeout=40)
    assert result.rc not in (0, None), result.out
    assert not result.timed_out
    assert says in result.out
    assert "rank 1 (host" in result.out
    assert not result.left


LONG = [
    "rdmakit", "bench", "-b", "1M", "-e", "64M", "--time-budget", "60", "-n", "1000",
    "--layer", "allreduce", "--algorithm", "hierarchical", "--ranks-per-node", "2",
]  # fmt: skip


def started(family: str, tmp_path: Path, **env: str) -> tuple[Job, Path]:
    out = tmp_path / "bench.json"
    job = Job(4, "-m", [*LONG, "--output", str(out)], env=env, python=python_of(family))
    job.until(out.exists, 40)
    time.sleep(0.3)
    return job, out


def ranks_of(job: Job) -> list[int]:
    found = []
    for pid in job.processes():
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"rdmakit" in words and b"bench" in words and b"mpirun" not in words[0]:
            found.append(pid)
    return [
        pid
        for pid in sorted(found)
        if b"python" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_interrupt_leaves_what_there_is(family: str, tmp_path: Path) -> None:
    job, out = started(family, tmp_path)
    job.mpirun.send_signal(signal.SIGINT)
    result = job.wait(60)
    assert not result.timed_out, result.out
    assert not result.left
    assert result.rc != 0
    rows = json.loads(out.read_text())["rows"]
    assert rows
    assert "allreduce: the whole job" in result.out
    if family == "mpich":  # Open MPI drops what ranks print after the signal
        assert "summary of what was measured until the interrupt" in result.out


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("rank", "number"),
    [(1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP), (0, signal.SIGSTOP)],
)
def test_a_rank_that_dies_or_stops(family: str, rank: int, number: int, tmp_path: Path) -> None:
    job, _ = started(family, tmp_path, RDMAKIT_TIMEOUT="4")
    victim = ranks_of(job)[rank]
    os.kill(victim, number)
    result = job.wait(job_limit(job, 45))
    assert not result.timed_out, result.out
    assert result.rc != 0
    assert not result.left
    assert re.search(r"rank \d \(host \S+\): .*(allreduce|bench)", result.out), result.out
    assert not leftovers()


def job_limit(job: Job, seconds: float) -> float:
    return time.monotonic() - job.started + seconds


@pytest.mark.parametrize("family", FAMILIES)
def test_mpirun_is_killed(family: str, tmp_path: Path) -> None:
    job, _ = started(family, tmp_path)
    job.mpirun.kill()
    result = job.wait(job_limit(job, 20))
    assert not result.left, "ranks outlived their launcher"
    assert not leftovers()
