"""Ranks that die or stop while the kernels of the others wait for them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.faults.test_faults_library import named
from tests.faults.test_faults_process import assert_gone
from tests.mpi import Job, Result, python_of, run_ranks

PROGRAMS = Path(__file__).parent / "programs"
DEADLINE = 3.0
REPORT = DEADLINE + 5
"""Seconds after the fault within which the others say what is wrong."""
END = REPORT + 5
"""And within which the job is gone: the ranks speak first, then the launcher ends them."""
N = 4


def start(env: dict[str, str], per_node: str, folder: Path) -> tuple[Job, list[int]]:
    """Start the job and return it with its ranks' pids once they are in the middle of calls."""
    settings = {"RDMAKIT_RANKS_PER_NODE": per_node, "RDMAKIT_TIMEOUT": str(DEADLINE)}
    job = Job(N, PROGRAMS / "busy.py", [str(folder)], env | settings, python_of("openmpi"))
    files = [folder / f"pid{rank}" for rank in range(N)]
    job.until(lambda: all(file.exists() for file in files), 60)
    time.sleep(0.5)
    return job, [int(file.read_text()) for file in files]


def ended(job: Job, ranks: list[int], since: float, within: float) -> Result:
    """Wait for the end: in time, and no process of it is left, on the GPU neither."""
    result = job.wait(90)
    seconds = time.time() - since
    assert not result.timed_out, result.out
    assert seconds < within, (seconds, result.out)
    assert result.rc != 0, result.out
    assert not result.left
    until = time.monotonic() + 10  # MPS lets a client's process go when its kernels have ended
    while any(Path(f"/proc/{pid}").exists() for pid in ranks) and time.monotonic() < until:
        time.sleep(0.1)
    assert_gone(ranks)
    smi = shutil.which("nvidia-smi")
    if smi is not None:
        query = [smi, "--query-compute-apps=pid", "--format=csv,noheader"]
        told = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
        assert not set(map(str, ranks)) & set(told.stdout.split()), told.stdout
    return result


def serves_the_next_job(env: dict[str, str]) -> None:
    """See that no kernel of the dead still spins on the GPU.

    The MPS server refuses new clients (cudaErrorDevicesUnavailable) until it has let go of those
    that died.
    """
    until = time.monotonic() + 20
    while True:
        after = run_ranks(
            2, PROGRAMS / "public.py", ["shared"], env, timeout=60, python=python_of("openmpi")
        )
        if "DevicesUnavailable" not in after.out or time.monotonic() > until:
            break
        time.sleep(1)
    assert "ok shared" in after.out, after.out


@pytest.mark.parametrize(("per_node", "faulty"), [("0", 1), ("2", 3)], ids=["4-1", "2+2-3"])
def test_stopped_rank(
    fragile_mps: dict[str, str], per_node: str, faulty: int, tmp_path: Path
) -> None:
    job, ranks = start(fragile_mps, per_node, tmp_path)
    now = time.time()
    os.kill(ranks[faulty], signal.SIGSTOP)
    result = ended(job, ranks, now, END)
    told = [
        (float(match[2]), match[3])
        for match in re.finditer(r"^\[(\d)\] \w+ at ([\d.]+): (.*)$", result.out, re.MULTILINE)
    ]
    assert told, result.out
    assert min(when for when, _ in told) - now < REPORT, result.out
    late = [text for _, text in told if re.search(rf"\brank {faulty}\b", text)]
    assert late, result.out
    assert any(re.search(rf"limit {DEADLINE:g} s|within {DEADLINE:g} s", text) for text in late)
    serves_the_next_job(fragile_mps)


@pytest.mark.parametrize(("per_node", "faulty"), [("0", 0), ("2", 3)], ids=["4-0", "2+2-3"])
def test_killed_rank(
    fragile_mps: dict[str, str], per_node: str, faulty: int, tmp_path: Path
) -> None:
    job, ranks = start(fragile_mps, per_node, tmp_path)
    now = time.time()
    os.kill(ranks[faulty], signal.SIGKILL)
    result = ended(job, ranks, now, REPORT)
    assert any("killed" in line for line in named(result, faulty)), result.out
    serves_the_next_job(fragile_mps)


def test_killed_mpirun(fragile_mps: dict[str, str], tmp_path: Path) -> None:
    job, ranks = start(fragile_mps, "0", tmp_path)
    now = time.time()
    job.mpirun.kill()
    ended(job, ranks, now, REPORT)
