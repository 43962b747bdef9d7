"""What is said of the proven paths between nodes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from rdmakit.config import format_size
from rdmakit.doctor.context import Context
from rdmakit.doctor.model import Check, Finding, Status
from rdmakit.proof import PathReport
from rdmakit.proof.evidence import PairProof

__all__ = ["PATH", "path_findings"]

_SHOWN = 4
"""Pairs that are named; more are counted."""
_GDR = ("gdr-peermem", "gdr-dmabuf")


def _between(_: Context) -> Iterator[Finding]:
    yield PATH.finding(Status.SKIPPED, "proven between ranks, not on one: --path")


PATH = Check(
    "path.proof",
    "Path of the bytes",
    "A job is right and 5 to 20 times slower where its bytes do not take the path that they could.",
    _between,
    needs=("live", "job"),
)


def path_findings(report: PathReport, rdma_hosts: Collection[str]) -> list[Finding]:
    """Return what to say of a report; pairs of one verdict are told together.

    Args:
        report: what was proven, with its evidence.
        rdma_hosts: hosts that have an active RDMA port.
    """
    groups: dict[tuple[str, str, bool], list[PairProof]] = {}
    for proof in report.pairs:
        could = set(proof.hosts) <= set(rdma_hosts)
        key = (proof.verdict.path, proof.verdict.carrier, could)
        groups.setdefault(key, []).append(proof)
    found = [_judged(report, proofs, could) for (_, _, could), proofs in groups.items()]
    return found or [PATH.finding(Status.SKIPPED, "no pair of ranks on two nodes")]


def _judged(report: PathReport, proofs: Sequence[PairProof], could: bool) -> Finding:
    verdict = proofs[0].verdict
    path, carrier = verdict.path, verdict.carrier
    what = f"{format_size(report.nbytes)} messages of {report.memory} memory"
    text = f"{what}: {path}" + (f" over {carrier}" if carrier else "")
    open_ = "; ".join((*verdict.disagreements, *verdict.missing))
    subject = _pairs(proofs)

    def finding(status: Status, expected: str = "", cure: str = "", urgency: int = 20) -> Finding:
        return PATH.finding(
            status,
            f"{text}: {open_}" if open_ else text,
            subject=subject,
            expected=expected,
            cure=cure,
            urgency=urgency,
        )

    if path == "unproven":
        return finding(Status.UNKNOWN)
    if report.memory == "gpu":
        return _gpu(finding, path, carrier, could=could)
    if path == "tcp" and could:
        return finding(
            Status.FAIL,
            "rdma-host: both hosts have an active RDMA port",
            "rdmakit doctor --only ucx --only rdma says why UCX leaves it; unset UCX_TLS and "
            "UCX_NET_DEVICES, or name it: UCX_TLS=rc,self,sm UCX_NET_DEVICES=<device>:<port>",
        )
    return finding(Status.OK)


def _gpu(finding: Callable[..., Finding], path: str, carrier: str, *, could: bool) -> Finding:
    if path in _GDR or path in ("cuda-ipc", "shm"):
        return finding(Status.OK)
    if could:
        return finding(
            Status.FAIL,
            "gdr-peermem or gdr-dmabuf: both hosts have an active RDMA port",
            "modprobe nvidia-peermem (or the open NVIDIA modules with Linux 5.12 or newer, for "
            "dma-buf); rdmakit doctor --only gpu --only pcie --only ucx says what is missing",
        )
    return finding(Status.OK)


def _pairs(proofs: Sequence[PairProof]) -> str:
    shown = [f"ranks {p.first} -> {p.second} ({p.hosts[0]} -> {p.hosts[1]})" for p in proofs]
    more = f" and {len(shown) - _SHOWN} more pairs" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more
