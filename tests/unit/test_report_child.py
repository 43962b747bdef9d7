"""Children that print a report: what is made of one that does not, and of CUDA's errors in one."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace

import pytest

from rdmakit.drivers.host import CommandResult
from rdmakit.drivers.python_report import ask_python, read_python
from rdmakit.drivers.report_child import MARK
from rdmakit.drivers.ucx_report import ask_ucx
from rdmakit.process.mpi_report import ask_mpi


class BrokenRuntime:
    """Of a CuPy without libcudart, whose error has an empty line first."""

    def runtimeGetVersion(self) -> int:
        raise RuntimeError("\nlibcudart.so.12 is not there\nmore")

    def driverGetVersion(self) -> int:
        return 13000


def test_a_reason_of_cuda_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = SimpleNamespace(__version__="13.6", cuda=SimpleNamespace(runtime=BrokenRuntime()))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "cupy" or None)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    report = read_python()
    assert (report.cupy, report.cuda_runtime, report.cuda_driver) == ("13.6", None, 13000)
    assert report.cuda_error == "runtimeGetVersion: RuntimeError: libcudart.so.12 is not there"


@pytest.mark.parametrize(
    ("result", "problem", "silent"),
    [
        (CommandResult((), None, "", "", "no end after 60 s"), "no end after 60 s", True),
        (CommandResult((), -11, "", "last words"), "ended by signal 11", False),
        (CommandResult((), 1, "", "first\nlast\n"), "last", False),
        (CommandResult((), 3, "", ""), "status 3", False),
    ],
)
def test_a_child_without_a_report(result: CommandResult, problem: str, silent: bool) -> None:
    asked = [
        (ask_ucx(lambda *_: result, {}), "load UCX"),
        (ask_mpi(lambda *_: result, {}), "look for MPI"),
        (ask_python(lambda *_: result), "look at Python"),
    ]
    for report, task in asked:
        assert report.problem == f"the process that was to {task}: {problem}"
        assert report.silent is silent


@pytest.mark.parametrize("text", ["{", '{"problem": 7}', "\udcff"])
def test_a_report_that_is_not_understood(text: str) -> None:
    result = CommandResult((), 0, f"chatter\n{MARK}{text}\n", "")
    assert "about UCX is not understood" in ask_ucx(lambda *_: result, {}).problem
