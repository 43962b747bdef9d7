"""What ``rdmakit doctor --json`` writes: schema ``rdmakit.doctor/1``.

Identifiers of checks never change; texts may. A status is ``fail``, ``warn``, ``unknown`` (it
should be known and could not be found out: not ok), ``ok`` or ``skipped`` (nothing to check).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

import rdmakit
from rdmakit.doctor.fold import count, cures, exit_status, fold, names_of
from rdmakit.doctor.messages import NodeReport
from rdmakit.doctor.model import Finding, Status, worst
from rdmakit.proof import PathReport

__all__ = ["SCHEMA", "DoctorResult", "Outcome", "doctor_result"]

SCHEMA = "rdmakit.doctor/1"


@dataclass(frozen=True)
class Outcome:
    """A finished run, as far as outputs look at it."""

    nodes: Sequence[NodeReport]
    job: Sequence[Finding] = ()
    """What is about the job as a whole: pairs of nodes, ranks that are missing."""
    whys: Mapping[str, str] = field(default_factory=dict)
    """Why a check matters, by its identifier."""
    strict: bool = False
    paths: Sequence[PathReport] = ()
    """Evidence about the paths of bytes, host memory first."""

    @property
    def exit(self) -> int:
        """Exit status of the command."""
        return exit_status(count(self.nodes, self.job), strict=self.strict)

    def why(self, finding: Finding) -> str:
        """Return why a finding matters."""
        return finding.why or self.whys.get(finding.check, "")


class FindingResult(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a check found, on all nodes that have it."""

    check: str
    status: Status
    subject: str
    """Device, port, rank or pair; nothing for the whole node or job."""
    found: str
    expected: str
    why: str
    cure: str
    urgency: int
    """0 to 99; what blocks other things is lower."""
    nodes: list[str]
    """Names of the nodes; none for what is about the job as a whole."""


class NodeResult(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the job, or the machine."""

    name: str
    """Host name; where several nodes have one, with the first rank behind it."""
    host: str
    ranks: list[int]
    complete: bool
    """Whether it reported; where not, there may be findings from before that."""
    status: Status
    """The worst of its findings."""
    checks: dict[str, Status]
    """Worst finding of each check."""


class CureResult(msgspec.Struct, frozen=True, kw_only=True):
    """Something to do; the list is in the order of what to do first."""

    cure: str
    urgency: int
    checks: list[str]
    nodes: list[str]


class DoctorResult(msgspec.Struct, frozen=True, kw_only=True):
    """The whole."""

    schema: str = SCHEMA
    rdmakit: str
    status: Status
    """The worst of all findings."""
    exit: int
    """Exit status: 0, 1 with a fail, 3 with a warn and --strict."""
    counts: dict[Status, int]
    """Checks by status, each counted on each node."""
    nodes: list[NodeResult]
    findings: list[FindingResult]
    """The worst first."""
    cures: list[CureResult]
    paths: list[PathReport]
    """With --path: verdicts and their evidence, schema ``rdmakit.proof/1``."""


def doctor_result(outcome: Outcome) -> DoctorResult:
    """Return the document. Pure."""
    names = names_of(outcome.nodes)
    folded = fold(outcome.nodes, outcome.job)
    return DoctorResult(
        rdmakit=rdmakit.__version__,
        status=worst(entry.finding for entry in folded),
        exit=outcome.exit,
        counts=count(outcome.nodes, outcome.job),
        nodes=[
            NodeResult(
                name=name,
                host=node.host,
                ranks=list(node.ranks),
                complete=node.complete,
                status=worst(node.findings),
                checks=by_check(node.findings),
            )
            for name, node in zip(names, outcome.nodes, strict=True)
        ],
        findings=[
            FindingResult(
                check=entry.finding.check,
                status=entry.finding.status,
                subject=entry.finding.subject,
                found=entry.finding.found,
                expected=entry.finding.expected,
                why=outcome.why(entry.finding),
                cure=entry.finding.cure,
                urgency=entry.finding.urgency,
                nodes=[names[node] for node in entry.nodes],
            )
            for entry in folded
        ],
        cures=[
            CureResult(
                cure=cure.text,
                urgency=cure.urgency,
                checks=list(cure.checks),
                nodes=[names[node] for node in cure.nodes],
            )
            for cure in cures(folded)
        ],
        paths=list(outcome.paths),
    )


def by_check(findings: Sequence[Finding]) -> dict[str, Status]:
    """Return the worst status of each check, in the order they were found in."""
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.check, []).append(finding)
    return {check: worst(own) for check, own in groups.items()}
