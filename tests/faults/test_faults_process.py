"""Ranks that die, stop, raise or leave while the others block inside MPI, in both families."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.mpi import FAMILIES, Job, python_of, run_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.slow, pytest.mark.quiet]

DEADLINE = 3.0

# What a library program looks like from the process package's side: a control plane with
# deadlines on its blocking calls and a communicator that is open until the end.
PROGRAM = """
import os, sys, time
from pathlib import Path
folder, fault, faulty = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
from rdmakit.process import launcher, watchdog
from rdmakit.process.phase import current
from rdmakit.errors import SetupError
from rdmakit.config import Config
found = launcher.launcher_of(os.environ)
try:
    found = launcher.check_before_mpi()
    from mpi4py import MPI
    world = MPI.COMM_WORLD
    launcher.check_world(found, world.size)
except SetupError as error:
    launcher.report_once(found, str(error))
rank, size, host = world.rank, world.size, MPI.Get_processor_name()
assert (rank, size) == (found.rank, found.size)
watchdog.install(rank, size, host, world.Abort, Config())
watchdog.abort_on_exception(rank, host, world.Abort)
is_open = True
watchdog.register_exit_guard(rank, host, lambda: is_open, lambda: world.Ibarrier().Test,
                             world.Abort, 3.0)
world.Barrier()
(folder / f"new{rank}").write_text(str(os.getpid()))
(folder / f"new{rank}").rename(folder / f"pid{rank}")
if rank == faulty:
    current.enter("compute")
    if fault == "raise":
        time.sleep(0.3)
        raise ValueError("made to fail")
    if fault == "exit":
        time.sleep(0.3)
        sys.exit(3)
    if fault == "none":
        time.sleep(0.3)
    else:
        time.sleep(60)
others = tuple(r for r in range(size) if r != rank)
current.enter("bench/barrier", others, 1 << 20, 3.0)
world.Barrier()
current.enter("")
if fault == "none" and rank == 0:
    time.sleep(1)  # less than the guard's patience
"""


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def start(family: str, program: Path, fault: str, faulty: int) -> Job:
    folder = str(program.parent)
    return Job(3, program, [folder, fault, str(faulty)], python=python_of(family))


def pids(job: Job, program: Path, n: int = 3) -> list[int]:
    """Return the pids of the ranks once all of them are in their blocking calls."""
    files = [program.parent / f"pid{rank}" for rank in range(n)]
    job.until(lambda: all(file.exists() for file in files), 30)
    time.sleep(0.3)
    return [int(file.read_text()) for file in files]


def state(pid: int) -> str:
    """Return the letter of the process's state: Z is ended, where nobody has asked how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def assert_gone(ranks: list[int]) -> None:
    alive = [pid for pid in ranks if state(pid) not in ("", "Z", "X")]
    assert not alive, f"still running: {alive}"


def test_all_well(family: str, program: Path) -> None:
    result = start(family, program, "none", 1).wait(40)
    assert result.rc == 0, result.out
    assert "rdmakit:" not in result.out
    assert not result.left


@pytest.mark.parametrize("faulty", [1, 0])
def test_killed_rank(family: str, program: Path, faulty: int) -> None:
    job = start(family, program, "wait", faulty)
    ranks = pids(job, program)
    killed = time.monotonic()
    os.kill(ranks[faulty], signal.SIGKILL)
    result = job.wait(40)
    assert time.monotonic() - killed < DEADLINE + 4
    assert result.rc != 0
    assert not result.left
    assert_gone(ranks)
    # The launcher kills the others, MPICH's without a warning: the witness knows who was first.
    dead = f"rdmakit: rank {faulty} (host "
    line = next((x for x in result.out.splitlines() if x.startswith(dead)), "")
    assert "in compute for" in line, result.out
    assert "killed" in line
    if family == "openmpi":
        assert "in bench/barrier 1M, waiting for rank" in result.out, "survivors, by SIGTERM"
    else:
        assert result.out.count("rdmakit:") == 1, result.out


@pytest.mark.parametrize("faulty", [1, 0])
def test_stopped_rank(family: str, program: Path, faulty: int) -> None:
    job = start(family, program, "wait", faulty)
    ranks = pids(job, program)
    stopped = time.monotonic()
    os.kill(ranks[faulty], signal.SIGSTOP)
    result = job.wait(40)
    assert time.monotonic() - stopped < DEADLINE + 6
    assert result.rc != 0
    assert "in bench/barrier 1M, waiting for ranks" in result.out, result.out
    assert "past its deadline" in result.out
    assert "program.py" in result.out, "the stacks"
    lines = [x for x in result.out.splitlines() if f"rank {faulty} (host " in x]
    assert any("in compute" in x and "no sign of life for" in x for x in lines), result.out
    assert not result.left
    assert_gone(ranks)


def test_killed_mpirun(family: str, program: Path) -> None:
    job = start(family, program, "wait", 1)
    ranks = pids(job, program)
    killed = time.monotonic()
    job.mpirun.kill()
    result = job.wait(40)
    assert time.monotonic() - killed < DEADLINE + 4
    assert not result.left
    assert_gone(ranks)


@pytest.mark.parametrize("faulty", [1, 0])
def test_exception_in_one_rank(family: str, program: Path, faulty: int) -> None:
    job = start(family, program, "raise", faulty)
    ranks = pids(job, program)
    result = job.wait(40)
    assert result.seconds < DEADLINE + 10
    assert result.rc != 0
    assert "ValueError: made to fail" in result.out, result.out
    assert f"rank {faulty} (host " in result.out
    assert "in compute" in result.out
    assert "killed, or ended by force" not in result.out
    assert not result.left
    assert_gone(ranks)


@pytest.mark.parametrize("faulty", [1, 0])
def test_exit_of_one_rank(family: str, program: Path, faulty: int) -> None:
    job = start(family, program, "exit", faulty)
    ranks = pids(job, program)
    result = job.wait(40)
    assert result.rc != 0
    assert result.seconds < DEADLINE + 10
    # Whoever comes first: the guard of the rank that left or the watchdog of one that waits.
    left = f"rank {faulty} (host " in result.out and "left early" in result.out
    assert left or "past its deadline" in result.out, result.out
    assert not result.left
    assert_gone(ranks)


@pytest.mark.parametrize(("library", "launcher"), [("openmpi", "mpich"), ("mpich", "openmpi")])
def test_mpirun_of_the_other_family(program: Path, library: str, launcher: str) -> None:
    mpirun = Path(python_of(launcher)).parent / "mpirun"
    python = python_of(library)
    args = [str(program.parent), "none", "1"]
    result = run_ranks(3, program, args, timeout=40, python=python, mpirun=mpirun)
    assert result.rc == 2, result.out
    assert result.out.count("started this job, but mpi4py loads") == 1, result.out
    assert f"Start with {Path(python).parent.resolve() / 'mpirun'}" in result.out
    assert "Traceback" not in result.out
    assert result.seconds < 10


def test_no_library(family: str, program: Path) -> None:
    args = [str(program.parent), "none", "1"]
    env = {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}
    result = run_ranks(3, program, args, env, timeout=40, python=python_of(family))
    assert result.rc == 2, result.out
    assert result.out.count("MPI4PY_LIBMPI=/nowhere/libmpi.so leads to none") == 1, result.out
    assert "Traceback" not in result.out


def test_a_stuck_job_ends_with_stacks(family: str, tmp_path: Path) -> None:
    program = tmp_path / "stuck.py"
    program.write_text("import time\nwhile True:\n    time.sleep(0.1)\n")
    result = run_ranks(2, program, timeout=2.5, python=python_of(family))
    assert result.timed_out
    assert result.out.count("stuck.py") >= 1, result.out
    assert result.seconds < 8
