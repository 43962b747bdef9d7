"""A report in words, and whether it meets a demand; pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rdmakit.config import format_size
from rdmakit.errors import InvalidArgument
from rdmakit.proof.evidence import PairProof, PathReport, Verdict

__all__ = ["REQUIREMENTS", "describe", "fulfils", "paths"]

REQUIREMENTS = ("rdma", "gdr")
_SHOWN = 12


def _named(verdict: Verdict) -> str:
    return verdict.path + (f" over {verdict.carrier}" if verdict.carrier else "")


def paths(report: PathReport) -> str:
    """Return the verdicts between nodes, each once, joined by ``+``; empty where there are none."""
    between = [proof for proof in report.pairs if not proof.evidence.inside]
    return "+".join(dict.fromkeys(_named(proof.verdict) for proof in between))


def _meets(verdict: Verdict, requirement: str) -> bool:
    if verdict.path in ("gdr-peermem", "gdr-dmabuf"):
        return True
    return requirement == "rdma" and (verdict.path == "rdma-host" or verdict.carrier == "rdma")


def fulfils(report: PathReport, requirement: str) -> str:
    """Return why a report does not meet a demand, or nothing.

    ``rdma``: between nodes RDMA carries the bytes; ``gdr``: and it reads and writes GPU memory.
    Both ask for a proof of every pair of nodes that was looked at, and for one pair at least.

    Raises:
        InvalidArgument: ``requirement`` is none of ``REQUIREMENTS``.
    """
    if requirement not in REQUIREMENTS:
        raise InvalidArgument(f"requirement {requirement!r}: one of {', '.join(REQUIREMENTS)}")
    between = [proof for proof in report.pairs if not proof.evidence.inside]
    if not between:
        return f"{requirement} is required, but there is one node: no bytes go between nodes"
    if requirement == "gdr" and report.memory != "gpu":
        return "gdr is required, but the messages lie in host memory"
    bad = [proof for proof in between if not _meets(proof.verdict, requirement)]
    if not bad:
        return ""
    first = bad[0]
    return (
        f"{requirement} is required, but ranks {first.first} -> {first.second} "
        f"({first.hosts[0]} -> {first.hosts[1]}) are {_named(first.verdict)}"
        + (f", and {len(bad) - 1} more of {len(between)} pairs" if len(bad) > 1 else "")
    )


def describe(report: PathReport, *, evidence: bool = True) -> list[str]:
    """Return lines for people: pairs of one verdict and evidence alike are told together."""
    lines = [
        f"path of {format_size(report.nbytes)} messages of {report.memory} memory"
        + (f" ({report.sample})" if report.sample else "")
    ]
    groups: dict[tuple[str, tuple[str, ...]], list[PairProof]] = {}
    for proof in report.pairs:
        groups.setdefault((_named(proof.verdict), proof.verdict.disagreements), []).append(proof)
    for (name, _), proofs in groups.items():
        lines.append(f"  {name}: {_pairs(proofs)}")
        if evidence:
            lines += [f"    {line}" for line in _reasons(proofs[0])]
    return lines


def _pairs(proofs: Sequence[PairProof]) -> str:
    shown = [f"{p.first} -> {p.second} ({p.hosts[0]} -> {p.hosts[1]})" for p in proofs[:_SHOWN]]
    more = f" and {len(proofs) - _SHOWN} more" if len(proofs) > _SHOWN else ""
    return ("ranks " if proofs else "") + ", ".join(shown) + more


def _reasons(proof: PairProof) -> Iterator[str]:
    verdict = proof.verdict
    for text in verdict.disagreements:
        yield f"disagrees: {text}"
    for text in verdict.missing:
        yield f"missing: {text}"
    yield from verdict.reasons
    for variant in proof.evidence.variants:
        if variant.problem:
            yield f"(a)(c) {variant.name}: no result: {variant.problem}"
        elif variant.GBps is not None and len(proof.evidence.variants) > 1:
            what = f"{variant.name}{f' ({variant.setting})' if variant.setting else ''}"
            yield f"(c) {what}: {variant.GBps:g} GB/s from {variant.memory} memory"
    others = [m for m in proof.evidence.counters if m.others]
    for one in others[:4]:
        yield f"(b) {one.port} at the {one.side}: {one.note}"
