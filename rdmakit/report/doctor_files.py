"""Findings for automation: JUnit XML, and a text file for node_exporter's textfile collector."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from rdmakit.doctor.fold import names_of
from rdmakit.doctor.model import Finding, Status
from rdmakit.errors import InvalidArgument
from rdmakit.report.doctor_schema import Outcome, by_check

__all__ = ["junit", "prometheus", "write_whole"]

_VALUES = {
    Status.OK: 0,
    Status.SKIPPED: 1,
    Status.UNKNOWN: 2,
    Status.WARN: 3,
    Status.FAIL: 4,
}
# XML 1.0 has no place for other control characters, however they are written.
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(outcome: Outcome) -> str:
    """Return JUnit XML: a suite for each node and one for the job, a case for each check.

    A failed check is a failure; a warning too with ``strict``, else it is told in ``system-out``.
    What could not be found out, and what has nothing to check, is skipped, with the reason.
    """
    root = ElementTree.Element("testsuites", name="rdmakit doctor")
    for name, findings in _suites(outcome, "job"):
        groups: dict[str, list[Finding]] = {check: [] for check in by_check(findings)}
        for finding in findings:
            groups[finding.check].append(finding)
        suite = ElementTree.SubElement(root, "testsuite", name=_xml(name))
        kinds: Counter[str] = Counter()
        for check, own in groups.items():
            group = check.partition(".")[0]
            case = ElementTree.SubElement(suite, "testcase", classname=group, name=check)
            kinds[_case(case, own, outcome)] += 1
        suite.set("tests", str(len(groups)))
        suite.set("failures", str(kinds["failure"]))
        suite.set("errors", "0")
        suite.set("skipped", str(kinds["skipped"]))
    ElementTree.indent(root, " ")
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _case(case: ElementTree.Element, own: Sequence[Finding], outcome: Outcome) -> str:
    """Fill a case and return what kind it is."""
    bad = [f for f in own if f.status in (Status.FAIL, Status.WARN, Status.UNKNOWN)]
    status = next(iter(by_check(own).values()))
    text = "\n".join(_told(finding, outcome) for finding in bad or own)
    if status is Status.FAIL or (status is Status.WARN and outcome.strict):
        kind, message = "failure", "; ".join(f.found for f in bad if f.status is status)
        element = ElementTree.SubElement(case, kind, type=status.value, message=_xml(message))
        element.text = _xml(text)
        return kind
    if status in (Status.UNKNOWN, Status.SKIPPED):
        reasons = "; ".join(f.found for f in own if f.status is status)
        message = f"unknown: {reasons}" if status is Status.UNKNOWN else reasons
        ElementTree.SubElement(case, "skipped", type=status.value, message=_xml(message))
        return "skipped"
    out = ElementTree.SubElement(case, "system-out")
    out.text = _xml(text)
    return "passed"


def _told(finding: Finding, outcome: Outcome) -> str:
    subject = f"{finding.subject}: " if finding.subject else ""
    text = f"{finding.status.value}: {subject}{finding.found}"
    if finding.expected:
        text += f"; expected {finding.expected}"
    if finding.cure:
        text += f"\n  why: {outcome.why(finding)}\n  cure: {finding.cure}"
    return text


def prometheus(outcome: Outcome, now: float | None = None) -> str:
    """Return metrics in Prometheus' text format: one sample for each check on each node.

    Values: 0 ok, 1 skipped, 2 unknown, 3 warn, 4 fail. What is about the job has no node.
    """
    names = names_of(outcome.nodes)
    seconds = time.time() if now is None else now
    lines = [
        "# HELP rdmakit_doctor_check_status Worst finding of a check: 0 ok, 1 skipped (nothing to "
        "check), 2 unknown, 3 warn, 4 fail.",
        "# TYPE rdmakit_doctor_check_status gauge",
    ]
    lines += [
        f"rdmakit_doctor_check_status{_labels(node=name, check=check, status=status.value)} "
        f"{_VALUES[status]}"
        for name, findings in _suites(outcome)
        for check, status in by_check(findings).items()
    ]
    lines += [
        "# HELP rdmakit_doctor_checks Checks of a node by their worst finding.",
        "# TYPE rdmakit_doctor_checks gauge",
    ]
    for name, findings in _suites(outcome):
        counted = Counter(by_check(findings).values())
        lines += [
            f"rdmakit_doctor_checks{_labels(node=name, status=status.value)} {counted[status]}"
            for status in Status
        ]
    lines += [
        "# HELP rdmakit_doctor_node_reported Whether the node reported: 1, or 0.",
        "# TYPE rdmakit_doctor_node_reported gauge",
    ]
    lines += [
        f"rdmakit_doctor_node_reported{_labels(node=name)} {int(node.complete)}"
        for name, node in zip(names, outcome.nodes, strict=True)
    ]
    lines += [
        "# HELP rdmakit_doctor_run_timestamp_seconds When the checks ended, in Unix time.",
        "# TYPE rdmakit_doctor_run_timestamp_seconds gauge",
        f"rdmakit_doctor_run_timestamp_seconds {seconds:.3f}",
    ]
    return "\n".join(lines) + "\n"


def write_whole(path: Path, text: str) -> None:
    """Replace a file at once: a reader sees the old text or the new.

    Local, blocking. What a link leads to is replaced, not the link; a device or pipe is written to.

    Raises:
        InvalidArgument: it cannot be written.
    """
    target = Path(os.path.realpath(path))
    # node_exporter reads every name that ends in .prom.
    temporary = target.with_name(f".{target.name}.{os.getpid()}.new")
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8", errors="replace")
            return
        try:
            temporary.write_text(text, encoding="utf-8", errors="replace")
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as exc:
        raise InvalidArgument(f"{path}: cannot be written: {exc.strerror or exc}") from exc


def _suites(outcome: Outcome, job: str = "") -> list[tuple[str, Sequence[Finding]]]:
    names = names_of(outcome.nodes)
    found: list[tuple[str, Sequence[Finding]]] = [
        (name, node.findings) for name, node in zip(names, outcome.nodes, strict=True)
    ]
    return [*found, (job, outcome.job)] if outcome.job else found


def _xml(text: str) -> str:
    return _NOT_XML.sub("?", text)


def _labels(**labels: str) -> str:
    def quoted(value: str) -> str:
        return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    return "{" + ",".join(f'{name}="{quoted(value)}"' for name, value in labels.items()) + "}"
