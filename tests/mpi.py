"""Starts ranks with the mpirun of each MPI family that is here, for every multi-rank test.

The family of the running environment is always tested if it has one; RDMAKIT_TEST_MPICH_PYTHON
names the Python of a second environment with MPICH and rdmakit's dependencies.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from rdmakit.process.launcher import LAUNCHER_VARIABLES, mpi_family_to_load

FAMILIES = ("openmpi", "mpich")
MPICH_VARIABLE = "RDMAKIT_TEST_MPICH_PYTHON"

_ROOT = Path(__file__).resolve().parent.parent
_MARK = "RDMAKIT_TEST_JOB"
# Open MPI's launcher gives its own thread a second or so to start, too short on a busy machine.
_NOT_STARTED = "The PMIx server's listener thread failed to start"
_STARTS = 3
# Root, more ranks than cores, and sharing the cores: see the README's section on mpirun. Open MPI's
# own way over libfabric stays out: it looks for devices for a second in each MPI_Init, and carries
# one-sided calls only, which nothing here makes.
_SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_btl": "^ofi",
    "PYTHONFAULTHANDLER": "1",
    "PYTHONUNBUFFERED": "1",
}


@cache
def _found() -> Mapping[str, str]:
    found: dict[str, str] = {}
    family, _ = mpi_family_to_load()
    if family is not None and _mpirun(sys.executable).is_file():
        found["openmpi" if family == "openmpi" else "mpich"] = sys.executable
    python = os.environ.get(MPICH_VARIABLE, "")
    if python and "mpich" not in found:
        found["mpich"] = python
    return found


def families() -> Iterator[tuple[str, str]]:
    """Yield (family, python) of the MPI families that can be tested here."""
    yield from _found().items()


def python_of(family: str) -> str:
    """Return the Python whose mpi4py uses ``family``, or skip the test saying what is missing."""
    python = _found().get(family)
    if python is None:
        if family == "mpich":
            pytest.skip(f"{MPICH_VARIABLE} is not set: the python of an environment with MPICH")
        pytest.skip(f"no {family} with its mpirun in the running environment")
    return python


@cache
def compiled(python: str) -> None:
    """Have bytecode of all that ranks import: where Python keeps none each rank compiles anew.

    That is half of what a rank takes to start, and where PYTHONDONTWRITEBYTECODE is set it never
    gets better by itself.
    """
    if not os.access(_ROOT / "rdmakit", os.W_OK):
        return
    command = [python, "-m", "compileall", "-q", str(_ROOT / "rdmakit"), str(_ROOT / "tests")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"


@dataclass(frozen=True)
class Result:
    """What became of a job."""

    rc: int
    """Exit status of mpirun, negative for a signal."""
    out: str
    """stdout and stderr of all ranks and of mpirun."""
    seconds: float
    timed_out: bool = False
    left: Sequence[int] = field(default=())
    """Processes of the job that outlived mpirun by more than three seconds; killed since."""


class Job:
    """A running mpirun and its ranks. End it with ``wait``."""

    def __init__(
        self,
        n: int,
        program: str | Path,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        python: str | None = None,
        mpirun: str | Path | None = None,
        mpirun_args: Sequence[str] = (),
    ) -> None:
        python = python or next(iter(_found().values()), sys.executable)
        compiled(python)
        self._mark = uuid.uuid4().hex
        environ = {k: v for k, v in os.environ.items() if not LAUNCHER_VARIABLES.match(k)}
        path = [str(_ROOT), *filter(None, [environ.get("PYTHONPATH")])]
        environ |= {**_SETTINGS, "PYTHONPATH": os.pathsep.join(path), _MARK: self._mark}
        environ |= env or {}
        # A file, not a pipe: a rank that is left over must not keep the reader waiting.
        self._out = tempfile.TemporaryFile()  # noqa: SIM115
        command = [str(mpirun or _mpirun(python)), *mpirun_args, "-n", str(n), python]
        self._command = [*command, str(program), *args]
        self._environ = environ
        self._starts = 0
        self._start()

    def _start(self) -> None:
        self._starts += 1
        self.started = time.monotonic()
        self.mpirun = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=subprocess.STDOUT,
            env=self._environ,
            start_new_session=True,
        )

    def started_again(self) -> bool:
        """Start mpirun again where it ended by its own fault before any rank was there."""
        if (
            self.mpirun.poll() is None
            or self._starts == _STARTS
            or _NOT_STARTED not in self.output()
        ):
            return False
        self._out.seek(0)  # the file is the new mpirun's from its start
        self._out.truncate()
        self._start()
        return True

    def until(self, ready: Callable[[], bool], seconds: float) -> None:
        """Wait until ``ready`` answers yes; fail with the job's output where it does not."""
        end = time.monotonic() + seconds
        while not ready():
            if self.started_again():
                end = time.monotonic() + seconds
            if time.monotonic() > end or self.mpirun.poll() is not None:
                pytest.fail(f"not ready within {seconds:g} s:\n{self.wait(0).out}")
            time.sleep(0.02)

    def output(self) -> str:
        """Return what was printed so far."""
        return os.pread(self._out.fileno(), 1 << 24, 0).decode(errors="replace")

    def processes(self) -> list[int]:
        """Return every living process of the job, found by a mark in its environment."""
        mark = f"{_MARK}={self._mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    if state != "Z" and mark in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    def wait(self, timeout: float) -> Result:
        """Wait for mpirun; at the timeout print all stacks and kill everything."""
        timed_out = False
        try:
            self._wait_mpirun(timeout)
            while self.started_again():
                self._wait_mpirun(timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
            for pid in self._ranks():  # continued, or a stopped rank prints nothing
                _signal(pid, signal.SIGCONT)
                _signal(pid, signal.SIGABRT)
            self._wait_gone(1.5)
        seconds = time.monotonic() - self.started
        left = [] if timed_out else self._wait_gone(3.0)
        for pid in self.processes():
            _signal(pid, signal.SIGKILL)
        rc = self.mpirun.wait()
        out = self.output()
        self._out.close()
        return Result(rc, out, seconds, timed_out, left)

    def _wait_mpirun(self, timeout: float) -> None:
        self.mpirun.wait(max(0.0, self.started + timeout - time.monotonic()))

    def _ranks(self) -> list[int]:
        return [pid for pid in self.processes() if _is_python(pid)]

    def _wait_gone(self, seconds: float) -> list[int]:
        end = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < end:
            time.sleep(0.05)
        return left


def run_ranks(
    n: int,
    program: str | Path,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    timeout: float = 60.0,
    python: str | None = None,
    mpirun: str | Path | None = None,
    mpirun_args: Sequence[str] = (),
) -> Result:
    """Run ``program`` in ``n`` ranks and return what became of it.

    Args:
        n: Number of ranks.
        program: A Python file, or ``-m`` with the module as the first of ``args``.
        args: Arguments of the program.
        env: Variables to set for the ranks.
        timeout: Seconds until the stacks of all ranks are printed and the job is killed.
        python: The Python to run, which also chooses mpirun (the one beside it); of the running
            environment by default.
        mpirun: Another mpirun than the one beside ``python``.
        mpirun_args: Options for mpirun, before ``-n``.
    """
    return Job(n, program, args, env, python, mpirun, mpirun_args).wait(timeout)


def leftovers() -> set[str]:
    """Return our shared memory whose makers are gone: other tests may be running."""
    found = set()
    for path in Path("/dev/shm").glob("rdmakit-*"):
        if not Path("/proc", path.name.split("-")[2]).exists():
            found.add(path.name)
    return found


def _mpirun(python: str) -> Path:
    return Path(python).parent / "mpirun"


def _is_python(pid: int) -> bool:
    try:
        return b"python" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
    except OSError:
        return False


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
