"""Checks in a child process: what hangs is ended, what crashes is told, the others go on."""

from __future__ import annotations

import fcntl
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rdmakit.doctor.context import RankView
from rdmakit.doctor.messages import NodeReport, Order, Word
from rdmakit.doctor.model import Finding, Status
from rdmakit.doctor.supervise import NODE_CHECK, Limits, supervise
from rdmakit.doctor.worker import FACTS, LOOK
from rdmakit.drivers.child import Child

# A worker with checks of its own: what production reads from the catalog.
PROGRAM = """
import os, signal, subprocess, sys, time
from rdmakit.doctor.context import Context
from rdmakit.doctor.model import Check, Status
from rdmakit.doctor.worker import serve
from rdmakit.drivers.host import HostTree

def good(context):
    print("what a library prints stands between no words")
    yield GOOD.finding(Status.OK, f"{len(context.ranks)} ranks of {context.job_size}")

def command(_):
    subprocess.run(["sleep", "612"])
    return []

def python(_):
    while True:
        time.sleep(0.01)

def signalled(_):
    os.kill(os.getpid(), signal.SIGSEGV)
    return []

def left(_):
    print("fabric lost", file=sys.stderr, flush=True)
    os._exit(3)

def raises(_):
    raise OSError("made to fail")

GOOD = Check("t.good", "A", "A.", good)
CHECKS = [GOOD] + [Check(f"t.{f.__name__}", "A", "A.", f)
                   for f in (command, python, signalled, left, raises)]
MODE = sys.argv[1]
if MODE == "blind":
    time.sleep(60)
if MODE == "broken":
    sys.exit("no such driver")
serve(CHECKS, lambda context: {"host": context.machine.host, "live": context.live},
      HostTree(sys.argv[2]), parent=int(sys.argv[3]))
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "worker.py"
    path.write_text(PROGRAM)
    return path


def run(
    program: Path,
    *checks: str,
    mode: str = "",
    seconds: float = 5.0,
    order: Order | None = None,
    limits: Limits | None = None,
) -> tuple[NodeReport, list[Word]]:
    report, words = NodeReport(host="n0"), []
    supervise(
        order or Order(checks=list(checks)),
        dict.fromkeys((*checks, FACTS), seconds),
        report,
        limits=limits or Limits(look=15.0, node=60.0),
        command=(sys.executable, str(program), mode, str(program.parent)),
        heard=words.append,
    )
    assert report.complete
    assert [f for word in words for f in word.findings] == report.findings, "all is passed on"
    return report, words


def sleepers() -> list[str]:
    """Return processes that a hanging check had started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if b"sleep\x00612" in (entry / "cmdline").read_bytes():
                    found.append(entry.name)
            except OSError:
                continue
    return found


def test_words_come_as_checks_end(program: Path) -> None:
    report, words = run(program, "t.good", FACTS)
    assert report.findings == [
        Finding(check="t.good", status=Status.OK, found="0 ranks of 1"),
    ]
    said = [word.doing or word.check for word in words]
    assert said == [LOOK, LOOK, "t.good", "t.good", FACTS, FACTS]
    assert report.facts == {"host": report.machine.host, "live": True}  # type: ignore[union-attr]


def test_an_order_larger_than_a_pipe(program: Path) -> None:
    views = [
        RankView(
            rank=rank,
            local_rank=rank,
            host="n0",
            pid=rank,
            environ={"UCX_X": "x" * 3000},
            facts={},
        )
        for rank in range(128)
    ]
    order = Order(checks=["t.good"], ranks=views, job_size=500)
    report, _ = run(program, "t.good", order=order)
    assert report.findings[0].found == "128 ranks of 500"


def test_what_hangs_is_ended_and_what_it_did_is_told(program: Path) -> None:
    start = time.monotonic()
    report, _ = run(program, "t.command", "t.good", "t.python", seconds=1.5)
    assert time.monotonic() - start < 40
    by_check = {finding.check: finding for finding in report.findings}
    assert list(by_check) == ["t.command", "t.good", "t.python"]
    assert by_check["t.good"].status is Status.OK, "the others go on in a new child"
    for name, seen in (("t.command", "running sleep 612"), ("t.python", "worker.py:18 in python")):
        assert by_check[name].status is Status.UNKNOWN
        assert "gave no answer within 1.5 s, was ended; last seen" in by_check[name].found
        assert seen in by_check[name].found
    assert not sleepers(), "what a check started is ended with it"


def test_what_ends_by_itself_is_a_finding(program: Path) -> None:
    report, _ = run(program, "t.signalled", "t.left", "t.raises", "t.good")
    found = {finding.check: (finding.status, finding.found) for finding in report.findings}
    assert found["t.signalled"][0] is Status.UNKNOWN
    assert "SIGSEGV" in found["t.signalled"][1]
    assert found["t.left"] == (
        Status.UNKNOWN,
        "its process ended by exit status 3 in it: fabric lost",
    )
    assert "OSError: made to fail" in found["t.raises"][1]
    assert found["t.good"][0] is Status.OK


def test_the_limit_of_a_node(program: Path) -> None:
    start = time.monotonic()
    report, _ = run(program, "t.python", "t.good", seconds=50, limits=Limits(look=30, node=8))
    assert time.monotonic() - start < 40
    assert [finding.status for finding in report.findings] == [Status.UNKNOWN] * 2
    assert "within 8 s" in report.findings[0].found
    assert "together took longer than 8 s" in report.findings[1].found


@pytest.mark.parametrize(
    ("mode", "look", "text"),
    [
        ("blind", 2.0, "looking at the machine gave no answer within 2 s"),
        ("broken", 30.0, "ended by exit status 1: no such driver"),
    ],
)
def test_a_machine_that_cannot_be_looked_at(
    program: Path, mode: str, look: float, text: str
) -> None:
    report, _ = run(program, "t.good", "t.raises", mode=mode, limits=Limits(look=look, node=30))
    assert [finding.check for finding in report.findings] == [NODE_CHECK, "t.good", "t.raises"]
    first, *others = report.findings
    assert text in first.found
    assert first.status is Status.FAIL, "nothing is known of this node: no job should use it"
    assert first.cure
    assert {finding.status for finding in others} == {Status.UNKNOWN}


def test_a_worker_that_is_not_there(tmp_path: Path) -> None:
    report = NodeReport(host="n0")
    supervise(Order(checks=["t.x"]), {"t.x": 1.0}, report, command=[str(tmp_path / "absent")])
    assert "cannot be started: No such file" in report.findings[0].found
    assert report.findings[0].status is Status.FAIL
    assert report.findings[1].check == "t.x"


@pytest.fixture
def few_files() -> Iterator[Callable[[int], None]]:
    """Lower the number of files that this process may open, for the time of a test."""
    old = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda most: resource.setrlimit(resource.RLIMIT_NOFILE, (most, old[1]))
    resource.setrlimit(resource.RLIMIT_NOFILE, old)


def test_too_few_files_for_a_child(tmp_path: Path, few_files: Callable[[int], None]) -> None:
    report = NodeReport(host="n0")
    few_files(3)
    supervise(Order(checks=["t.x"]), {"t.x": 1.0}, report)
    first, other = report.findings
    assert (first.check, first.status) == (NODE_CHECK, Status.FAIL)
    assert "Too many open files; ulimit -n is 3" in first.found
    assert first.cure.startswith("ulimit -n 65536")
    assert (other.check, other.status) == ("t.x", Status.UNKNOWN)


def test_an_open_file_above_a_lowered_limit(few_files: Callable[[int], None]) -> None:
    read, write = os.pipe()
    high = fcntl.fcntl(write, fcntl.F_DUPFD, 200)
    few_files(100)
    child = Child([sys.executable, "-c", "import os; print(os.path.exists('/proc/self/fd/200'))"])
    lines: list[bytes] = []
    end = time.monotonic() + 20
    while not child.finished and time.monotonic() < end:
        lines += child.lines(0.1)
    child.kill()
    assert lines == [b"False"]
    assert os.get_inheritable(high), "it is as it was"
    for number in (read, write, high):
        os.close(number)


def test_a_child_is_given_no_files_and_reaped(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.set_inheritable(write, True)
    text = "import os; print(sorted(int(x) for x in os.listdir('/proc/self/fd')))"
    child = Child([sys.executable, "-c", text])
    os.close(write)
    lines = []
    end = time.monotonic() + 20
    while not child.finished and time.monotonic() < end:
        lines += child.lines(0.1)
    assert child.status == 0
    child.kill()
    assert lines == [b"[0, 1, 2, 3]"], "the fourth is the listing's own"
    assert os.read(read, 1) == b"", "nobody holds the other end"
    os.close(read)
