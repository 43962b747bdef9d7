"""Equal findings of many nodes as one, and the cures in the order of what to do first. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rdmakit.doctor.messages import NodeReport
from rdmakit.doctor.model import Finding, Status, worst

__all__ = ["Cure", "Folded", "count", "cures", "exit_status", "fold", "names_of", "where"]

_SHOWN = 6


@dataclass(frozen=True)
class Folded:
    """A finding, and the nodes that have it."""

    finding: Finding
    nodes: tuple[int, ...]
    """Indices; none for what is about the job as a whole."""


@dataclass(frozen=True)
class Cure:
    """Something to do, once, whatever finds call for it."""

    text: str
    urgency: int
    status: Status
    """The worst of the findings that it cures."""
    checks: tuple[str, ...]
    nodes: tuple[int, ...]


def names_of(nodes: Sequence[NodeReport]) -> list[str]:
    """Return a name for each node, each once: its host's, where several have it with a rank."""
    hosts = Counter(node.host for node in nodes)
    names: list[str] = []
    for index, node in enumerate(nodes):
        name = node.host or "node"
        if hosts[node.host] > 1:
            name += f" (rank {node.ranks[0]})" if node.ranks else f" ({index})"
        while name in names:
            name += f" ({index})"
        names.append(name)
    return names


def fold(nodes: Sequence[NodeReport], job: Sequence[Finding] = ()) -> list[Folded]:
    """Return each finding once with all nodes that have it: the worst first, then by urgency.

    Args:
        nodes: reports of nodes.
        job: findings about the job as a whole, such as pairs of nodes.
    """
    groups: dict[Finding, list[int]] = {}
    for index, node in enumerate(nodes):
        for finding in node.findings:
            own = groups.setdefault(finding, [])
            if index not in own:
                own.append(index)
    folded = [Folded(finding, ()) for finding in dict.fromkeys(job)]
    folded += [Folded(finding, tuple(own)) for finding, own in groups.items()]
    return sorted(folded, key=_order)


def _order(entry: Folded) -> tuple[int, int, int]:
    finding = entry.finding
    urgency = finding.urgency if finding.status in (Status.FAIL, Status.WARN) else 0
    return (finding.status.badness, urgency, -len(entry.nodes))


def cures(folded: Iterable[Folded]) -> list[Cure]:
    """Return each cure once: the most urgent first, of equals what cures most nodes."""
    groups: dict[str, list[Folded]] = {}
    for entry in folded:
        if entry.finding.cure and entry.finding.status in (Status.FAIL, Status.WARN):
            groups.setdefault(entry.finding.cure, []).append(entry)
    found = [
        Cure(
            text,
            min(entry.finding.urgency for entry in own),
            worst(entry.finding for entry in own),
            tuple(dict.fromkeys(entry.finding.check for entry in own)),
            tuple(sorted({node for entry in own for node in entry.nodes})),
        )
        for text, own in groups.items()
    ]
    return sorted(found, key=lambda cure: (cure.urgency, -len(cure.nodes), cure.status.badness))


def where(nodes: Sequence[int], names: Sequence[str]) -> str:
    """Return whom a finding is about in words; nothing where there is one node only.

    Most nodes are counted (``14 of 16 nodes``), the odd ones named.
    """
    total = len(names)
    if not nodes or total == 1:
        return ""
    if len(nodes) == total:
        return f"all {total} nodes"
    text = ", ".join(names[node] for node in nodes[:_SHOWN])
    text += f" and {len(nodes) - _SHOWN} more" if len(nodes) > _SHOWN else ""
    if len(nodes) == 1:
        return text
    if 2 * len(nodes) > total and total > _SHOWN:
        return f"{len(nodes)} of {total} nodes"
    return f"{len(nodes)} of {total} nodes: {text}"


def count(nodes: Sequence[NodeReport], job: Sequence[Finding] = ()) -> dict[Status, int]:
    """Return how many checks ended how, by their worst finding on each node."""
    found: Counter[Status] = Counter()
    for findings in (*(node.findings for node in nodes), list(job)):
        by_check: dict[str, list[Finding]] = {}
        for finding in findings:
            by_check.setdefault(finding.check, []).append(finding)
        found.update(worst(own) for own in by_check.values())
    return {status: found[status] for status in Status}


def exit_status(counts: dict[Status, int], *, strict: bool) -> int:
    """Return 1 with a failed check, 3 with a warning where these are not taken lightly, else 0."""
    if counts[Status.FAIL]:
        return 1
    return 3 if strict and counts[Status.WARN] else 0
