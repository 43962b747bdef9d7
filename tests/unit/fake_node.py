"""One node for the doctor's checks: a directory of files, texts, settings and what is found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rdmakit.discovery.machine import find_out
from rdmakit.doctor.catalog import CHECKS
from rdmakit.doctor.context import Context
from rdmakit.doctor.model import Finding, Status
from rdmakit.doctor.run import run_check
from rdmakit.drivers.host import CommandResult, HostTree
from rdmakit.topology.assemble import assemble
from rdmakit.topology.model import Machine
from rdmakit.topology.texts import Texts, read_texts

BAD = (Status.WARN, Status.FAIL)


def absent(argv: Sequence[str], timeout: float) -> CommandResult:
    """A machine on which no command is installed."""
    return CommandResult(tuple(argv), None, "", "", f"{argv[0]}: command not found")


def write(root: Path, path: str, text: str | bytes) -> None:
    target = root / path.lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(text, bytes):
        target.write_bytes(text)
    else:
        target.write_text(text)


def node(root: Path, machine: Machine | None = None, **more: object) -> Context:
    """Return a node whose files lie below ``root``; without ``machine`` they say what it is."""
    found = find_out(HostTree(root), absent, {}) if machine is None else None
    values: dict[str, object] = {
        "tree": HostTree(root),
        "machine": found.machine if found is not None else machine,
        "texts": Texts(),
        "environ": {},
        "live": False,
        "runner": absent,
        **more,
    }
    return Context(**values)  # type: ignore[arg-type]


def texts_node(root: Path, **texts: str) -> Context:
    """Return a node of which there are only texts."""
    read = read_texts({name: text for name, text in texts.items()})
    return node(root, assemble(texts=read), texts=read)


def ask(context: Context, name: str) -> list[Finding]:
    """Return what one check finds, which must be well formed."""
    (check,) = [check for check in CHECKS if check.id == name]
    findings = run_check(check, context)
    assert_well_formed(findings)
    return findings


def ask_one(context: Context, name: str) -> Finding:
    """Return the only finding of a check."""
    (finding,) = ask(context, name)
    return finding


def alarms(context: Context) -> list[Finding]:
    """Return every warning and failure of all checks."""
    found = [finding for check in CHECKS for finding in run_check(check, context)]
    assert_well_formed(found)
    return [finding for finding in found if finding.status in BAD]


def assert_well_formed(findings: Iterable[Finding]) -> None:
    for finding in findings:
        assert finding.found, finding
        assert "the check itself failed" not in finding.found, finding
        if finding.status in BAD:
            assert finding.expected, finding
            assert finding.cure, finding
        assert 0 <= finding.urgency <= 99
