"""``rdmakit doctor`` for people: the worst first, then what to do, in order."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Protocol

from rich.console import Console
from rich.text import Text

from rdmakit.doctor.fold import Folded, count, cures, fold, names_of, where
from rdmakit.doctor.model import Status
from rdmakit.proof import describe
from rdmakit.report.doctor_schema import Outcome
from rdmakit.report.terminal import on_terminal

__all__ = ["Listed", "print_checks", "print_doctor"]

_STYLES = {
    Status.FAIL: "bold red",
    Status.WARN: "yellow",
    Status.UNKNOWN: "magenta",
    Status.OK: "green",
    Status.SKIPPED: "dim",
}
_WORDS = {
    Status.FAIL: "fail",
    Status.WARN: "warn",
    Status.UNKNOWN: "could not be found out",
    Status.OK: "ok",
    Status.SKIPPED: "skipped (nothing to check)",
}
_INDENT = 8
_SHARED = 4
"""Checks that one reason keeps from an answer, from which on they are told in groups."""
_NO_TERMINAL = 100
"""Columns where no terminal says how many there are."""


class Listed(Protocol):
    """A check, of a node or of the job."""

    @property
    def id(self) -> str:
        """Identifier."""
        ...

    @property
    def title(self) -> str:
        """A few words."""
        ...

    @property
    def why(self) -> str:
        """Why it matters."""
        ...

    @property
    def needs(self) -> Sequence[str]:
        """What must be there."""
        ...


class _Page:
    """Lines of a width, on standard output."""

    def __init__(self, watched: bool | None = None) -> None:
        self.watched = on_terminal() if watched is None else watched
        size = shutil.get_terminal_size((_NO_TERMINAL, 24))
        self.width = min(120, max(40, size.columns))
        self.console = Console(file=sys.stdout, highlight=False, force_terminal=self.watched)

    def say(self, text: str, style: str = "", indent: int = 0, first: int | None = None) -> None:
        """Print a paragraph; ``first`` is the indent of its first line."""
        lines = textwrap.wrap(
            text,
            self.width,
            initial_indent=" " * (indent if first is None else first),
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in lines or [""]:
            self.console.print(Text(line, style=style), soft_wrap=True)

    def headed(self, word: str, style: str, text: str) -> None:
        """Print a paragraph with a word before it."""
        lines = textwrap.wrap(
            text, self.width - _INDENT, break_long_words=False, break_on_hyphens=False
        )
        head = Text(f"{word:<{_INDENT}}", style=style).append(lines[0] if lines else "", style="")
        head.stylize("not bold not dim", _INDENT)
        self.console.print(head, soft_wrap=True)
        for line in lines[1:]:
            self.console.print(Text(" " * _INDENT + line), soft_wrap=True)


def print_doctor(
    outcome: Outcome, *, title: str, verbose: bool = False, watched: bool | None = None
) -> None:
    """Print everything to standard output; used by one rank only.

    Args:
        outcome: what came of the checks.
        title: the first line.
        verbose: show what is good too.
        watched: whether a person watches; None: found out here.
    """
    page = _Page(watched)
    names = names_of(outcome.nodes)
    folded = fold(outcome.nodes, outcome.job)
    page.say(title)
    page.say("")
    shared = Counter(filter(None, map(_reason, folded)))
    for entry in folded:
        bad = entry.finding.status in (Status.FAIL, Status.WARN, Status.UNKNOWN)
        if verbose or (bad and shared[_reason(entry)] < _SHARED):
            _finding(page, entry, names, outcome)
    if not verbose:
        many = [one for one in folded if shared[_reason(one)] >= _SHARED]
        _groups(page, Status.UNKNOWN, many, names)
        _good(page, folded, names)
    _cures(page, folded, names)
    for report in outcome.paths:
        page.say("")
        for line in describe(report):
            first = len(line) - len(line.lstrip())
            page.say(line.strip(), indent=first + 2, first=first)
    page.say("")
    _summary(page, outcome)


def _finding(page: _Page, entry: Folded, names: Sequence[str], outcome: Outcome) -> None:
    finding = entry.finding
    subject = f" {finding.subject}" if finding.subject else ""
    place = where(entry.nodes, names)
    head = f"{finding.check}{subject}" + (f" [{place}]" if place else "")
    text = f"{head}: {finding.found}"
    if finding.expected:
        text += f"; expected {finding.expected}"
    page.headed(finding.status.value, _STYLES[finding.status], text)
    why = outcome.why(finding)
    if why and finding.status in (Status.FAIL, Status.WARN):
        page.say(why, "dim", indent=_INDENT)


def _reason(entry: Folded) -> str:
    """Return why something could not be found out, where that is no device's own matter."""
    finding = entry.finding
    return finding.found if finding.status is Status.UNKNOWN and not finding.subject else ""


def _good(page: _Page, folded: Sequence[Folded], names: Sequence[str]) -> None:
    """Print what is good in groups, and what is skipped."""
    bad = {
        (entry.finding.check, node)
        for entry in folded
        if entry.finding.status.badness < Status.OK.badness
        for node in entry.nodes or (-1,)
    }
    for status in (Status.OK, Status.SKIPPED):
        _groups(page, status, folded, names, bad)


def _groups(
    page: _Page,
    status: Status,
    folded: Sequence[Folded],
    names: Sequence[str],
    bad: Collection[tuple[str, int]] = (),
) -> None:
    """Print a line for each group of checks that ended so for one reason, but the ``bad`` ones."""
    groups: dict[tuple[str, str], dict[str, set[int]]] = {}
    for entry in folded:
        check = entry.finding.check
        nodes = {node for node in entry.nodes or (-1,) if (check, node) not in bad}
        if entry.finding.status is status and nodes:
            reason = "" if status is Status.OK else entry.finding.found
            key = (check.partition(".")[0], reason)
            groups.setdefault(key, {}).setdefault(check, set()).update(nodes)
    for (group, reason), checks in groups.items():
        short = ", ".join(check.partition(".")[2] for check in checks)
        some = set[int]().union(*checks.values()) - {-1}
        place = where(sorted(some), names)
        text = f"{group}: {short}" + (f" [{place}]" if place else "")
        page.headed(status.value, _STYLES[status], text + (f": {reason}" if reason else ""))


def _cures(page: _Page, folded: Sequence[Folded], names: Sequence[str]) -> None:
    found = cures(folded)
    if not found:
        return
    page.say("")
    page.say("what to do, in this order", "bold")
    for number, cure in enumerate(found, 1):
        place = where(cure.nodes, names)
        about = ", ".join(cure.checks) + (f"; {place}" if place else "")
        page.say(f"{f'{number}.':<4}{cure.text}  ({about})", indent=6, first=2)


def _summary(page: _Page, outcome: Outcome) -> None:
    counts = count(outcome.nodes, outcome.job)
    told = ", ".join(f"{number} {_WORDS[s]}" for s, number in counts.items() if number)
    silent = [
        name
        for name, node in zip(names_of(outcome.nodes), outcome.nodes, strict=True)
        if not node.complete
    ]
    page.say(f"checks: {told or 'none'}", "bold")
    if silent:
        page.say(f"no whole report from: {', '.join(silent)}", "bold red")
    if counts[Status.UNKNOWN]:
        page.say("What could not be found out is not ok: run as root, or see the reasons above.")


def print_checks(checks: Sequence[Listed]) -> None:
    """Print identifiers, titles and reasons of checks."""
    page = _Page()
    for check in checks:
        needs = f" (needs: {', '.join(check.needs)})" if check.needs else ""
        page.say(f"{check.id}: {check.title}{needs}", "bold")
        page.say(check.why, indent=4)
