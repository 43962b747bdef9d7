"""A short-lived child process of ours that finds something out and prints it as JSON.

A child, because what is looked at stays in the process that looked (a UCX, an MPI library, CUDA),
or may hang or end it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from rdmakit.drivers.host import CommandResult, Runner

__all__ = ["MARK", "ChildReport", "ask_child", "print_report", "settings_given"]

MARK = "rdmakit-report "
"""Begins the line of the report: libraries print where they like."""


class ChildReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a child saw."""

    problem: str = ""
    """Why nothing is known, or there is nothing to be known; the rest is empty then."""
    silent: bool = False
    """The process gave no answer in time: ``problem`` says nothing of what it looked for."""


_Report = TypeVar("_Report", bound=ChildReport)


def ask_child(
    run: Runner,
    module: str,
    kind: type[_Report],
    limit: float,
    *,
    task: str,
    about: str,
    settings: Mapping[str, str] | None = None,
) -> _Report:
    """Return what ``python -m MODULE SETTINGS`` reports. Local, blocking; never raises.

    Args:
        run: starts it.
        module: calls :func:`print_report` with a ``kind``.
        kind: what it reports.
        limit: seconds it may take.
        task: what it is to do, in words, for ``problem``.
        about: what it reports of, in words, for ``problem``.
        settings: for :func:`settings_given` there.
    """
    given = () if settings is None else (msgspec.json.encode(settings).decode(),)
    result = run((sys.executable, "-m", module, *given), limit)
    text = next((x for x in result.stdout.splitlines() if x.startswith(MARK)), "")
    if not text:
        problem = f"the process that was to {task}: {_why(result)}"
        return kind(problem=problem, silent=result.rc is None)
    try:
        return msgspec.json.decode(text.removeprefix(MARK), type=kind)
    except (msgspec.MsgspecError, UnicodeError) as exc:
        return kind(problem=f"the answer about {about} is not understood: {exc}")


def _why(result: CommandResult) -> str:
    if result.error:
        return result.error
    if result.rc and result.rc < 0:
        return f"ended by signal {-result.rc}"
    last = result.stderr.strip().splitlines()[-1:]
    return last[0] if last else f"status {result.rc}"


def settings_given() -> dict[str, str]:
    """Return the settings that this child was started with."""
    text = sys.argv[1] if len(sys.argv) > 1 else "{}"
    return msgspec.json.decode(text, type=dict[str, str])


def print_report(report: ChildReport) -> None:
    """Print a child's report, on a line of its own."""
    sys.stdout.write(f"\n{MARK}{msgspec.json.encode(report).decode()}\n")
    sys.stdout.flush()
