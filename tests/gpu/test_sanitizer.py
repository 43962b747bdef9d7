"""The kernels under compute-sanitizer. It and its device support are asked for first."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mpi import python_of, run_ranks

PROGRAMS = Path(__file__).parent / "programs"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(260)]


@pytest.fixture(scope="module")
def sanitizer(gpu: None) -> str:
    """Return the tool's path, or skip the test with the reason why it cannot be used."""
    beside = Path("/usr/local/cuda/bin/compute-sanitizer")
    path = shutil.which("compute-sanitizer") or (str(beside) if beside.is_file() else None)
    if path is None:
        pytest.skip("compute-sanitizer is not on PATH nor in /usr/local/cuda/bin")
    code = "import cupy; assert int(cupy.ones(3).sum()) == 3"
    command = [path, "--error-exitcode", "86", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    text = done.stdout + done.stderr
    if "not supported" in text:
        line = next(line for line in text.splitlines() if "not supported" in line)
        pytest.skip(f"compute-sanitizer cannot be used here: {line.strip('= ')}")
    assert done.returncode == 0, text
    return path


def run(sanitizer: str, env: dict[str, str], tool: str, n: int, mode: str) -> None:
    # Without MPS: the tool instruments each process's own context.
    args = [sanitizer, tool, str(PROGRAMS / "node.py"), mode]
    result = run_ranks(
        n, PROGRAMS / "sanitized.py", args, os.environ | env, timeout=240,
        python=python_of("openmpi"),
    )  # fmt: skip
    assert result.rc == 0, result.out
    assert f"ok {mode}" in result.out, result.out
    assert result.out.count("ERROR SUMMARY: 0 errors") == n or (
        tool == "racecheck" and result.out.count("RACECHECK SUMMARY: 0 hazards") == n
    ), result.out


def test_memcheck_of_one_rank(sanitizer: str, no_mps: dict[str, str]) -> None:
    """Reduce and pack kernels on a rank's own memory."""
    run(sanitizer, no_mps, "memcheck", 1, "local=few")


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_two_ranks(sanitizer: str, no_mps: dict[str, str], tool: str) -> None:
    """Every collective's kernels once; they wait on each other, so all is slow."""
    run(sanitizer, no_mps, tool, 2, "conformance=few")
