"""Boots the emulated machines once for all tests here and hands out what their steps gave."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rdmakit.process.launcher import LAUNCHER_VARIABLES
from tests.mpi import compiled, python_of
from tests.rdma.steps import MTU, PYTHON, Step, as_json, declared

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "scripts" / "rdma-hosts"
CANNOT = 3
LIMIT_SECONDS = 1200
PREPARE_SECONDS = 420


@dataclass(frozen=True)
class Outcome:
    """What became of a step."""

    rc: int | None
    """None: a command before it failed, so it was not run."""
    timed_out: bool
    out: str
    err: str
    seconds: float
    before: Sequence[Mapping[str, int]]
    """Counters of the RDMA device of each machine, before and after the step."""
    after: Sequence[Mapping[str, int]]
    problems: Sequence[str]

    def succeeded(self) -> Outcome:
        """Fail the test with all that was said if the step did not end well."""
        text = f"{self.out}\n{self.err}\n{self.problems}"
        assert not self.timed_out, f"over its limit after {self.seconds} s:\n{text}"
        assert self.rc == 0, f"status {self.rc}:\n{text}"
        assert not self.problems, text
        return self

    def packets(self, node: int, which: str = "sent_pkts") -> int:
        """Return how many packets the RDMA device of ``node`` sent or received."""
        return self.after[node][which] - self.before[node][which]


class Machines:
    """Two machines that were up and are gone: the outcomes of the steps."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        steps = [as_json(step, folder) for step in declared()]
        (folder / "steps.json").write_text(json.dumps(steps))
        env = {k: v for k, v in os.environ.items() if not LAUNCHER_VARIABLES.match(k)}
        env = {k: v for k, v in env.items() if not k.startswith(("UCX_", "RDMAKIT_TEST_"))}
        scratch = folder / "scratch"
        scratch.mkdir()
        env |= {
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(scratch),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        names = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
        self.done = subprocess.run(
            [
                str(TOOL), "run", "--limit", str(LIMIT_SECONDS), "--mtu", str(MTU),
                "--share", str(folder), *(word for name in names for word in ("--env", name)),
                "--", PYTHON, str(ROOT / "tests" / "rdma" / "driver.py"), str(folder),
            ],
            env=env, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=LIMIT_SECONDS + 300, check=False,
        )  # fmt: skip
        self.left = [path.name for path in scratch.iterdir()]
        """What the tool left in its folder for temporary files."""

    def __getitem__(self, step: Step) -> Outcome:
        path = self._folder / f"{step.name}.json"
        if not path.exists():
            pytest.fail(
                f"step {step.name} has no result; rdma-hosts ended with {self.done.returncode}:\n"
                f"{self.done.stdout}{self.done.stderr}"
            )
        return Outcome(**json.loads(path.read_text()))

    def read(self, name: str) -> Any:
        """Return what a step wrote as JSON into ``{folder}``."""
        return json.loads((self._folder / name).read_text())


def prepared() -> None:
    """Have ready what the machines need, or skip the test saying what cannot be had."""
    done = subprocess.run(
        [str(TOOL), "prepare"], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=PREPARE_SECONDS, check=False,
    )  # fmt: skip
    if done.returncode == CANNOT:
        pytest.skip(f"no emulated RDMA machines here: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Machines:
    """The outcomes of all declared steps; skips where the machines cannot be had."""
    python_of("openmpi")
    prepared()
    compiled(PYTHON)  # emulated, each process would compile for seconds
    return Machines(tmp_path_factory.mktemp("rdma"))
