"""`rdmakit doctor` on emulated nodes, a rank each, with checks that a test holds or lets hang.

doctor_nodes.py FOLDER OPTIONS: a rank. doctor_nodes.py worker PARENT: its worker. FOLDER is where
ranks and workers write their process numbers, and where files of the test tell what to do:
``hang1``: the check of node 1 hangs; ``go``: checks may end.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rdmakit.doctor.context import Context
from rdmakit.doctor.model import Check, Finding, Status


def _folder() -> Path:
    return Path(os.environ["TEST_FOLDER"])


def _me() -> str:
    return os.environ["RDMAKIT_NODE_ID"]


def _first(_: Context) -> Iterator[Finding]:
    yield FIRST.finding(Status.OK, "right")


def _held(_: Context) -> Iterator[Finding]:
    mark = _folder() / f"held{_me()}"
    mark.write_text(str(os.getpid()))
    if (_folder() / f"hang{_me()}").exists():
        subprocess.run(["sleep", "600"], check=True)
    end = time.monotonic() + 60
    while not (_folder() / "go").exists() and time.monotonic() < end:
        time.sleep(0.05)
    yield HELD.finding(
        Status.WARN, "made to warn", cure=f"cure {'A' if _me() == '0' else 'B'}", why="A test."
    )


def _last(context: Context) -> Iterator[Finding]:
    ranks = ",".join(str(view.rank) for view in context.ranks)
    yield LAST.finding(Status.OK, f"{context.job_size} ranks, here {ranks}")


FIRST = Check("t.first", "First", "It comes first.", _first)
HELD = Check("t.held", "Held", "It waits for the test.", _held, seconds=6.0)
LAST = Check("t.last", "Last", "It comes last.", _last)
CHECKS = (FIRST, HELD, LAST)


def _rank(arguments: list[str]) -> int:
    from rdmakit.config import Config
    from rdmakit.doctor.supervise import Limits
    from rdmakit.process.launcher import launcher_of
    from rdmakit.survey.doctor_job import run_job
    from rdmakit.survey.doctor_options import DoctorOptions
    from rdmakit.survey.run import Run

    launcher = launcher_of(os.environ)
    os.environ["RDMAKIT_NODE_ID"] = str(launcher.rank)
    os.environ["TEST_FOLDER"] = arguments[0]
    socket.gethostname = lambda: f"n{launcher.rank}"
    (_folder() / f"new{launcher.rank}").write_text(str(os.getpid()))
    (_folder() / f"new{launcher.rank}").rename(_folder() / f"rank{launcher.rank}")
    limits = {"look": 30.0, "node": 40.0, "silence": 8.0, "init": 60.0}
    limits |= json.loads(arguments[1])
    options = DoctorOptions(json="--json" in arguments, verbose="-v" in arguments)
    command = (sys.executable, __file__, "worker")
    names = [check.id for check in CHECKS]
    run = Run(options, CHECKS, names, (), command, Limits(**limits))
    return run_job(run, Config.from_env(timeout=20.0), launcher)


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        from rdmakit.doctor.worker import serve

        serve(CHECKS, parent=int(sys.argv[2]))
    else:
        sys.exit(_rank(sys.argv[1:]))
