"""What follows from the evidence about one pair; pure.

Between nodes nothing is proven by what UCX says alone, nor by counters alone, nor by rates:

=============  ====================================================================================
``tcp``        lanes and net devices' counters of both ends agree
``rdma-host``  lanes and RDMA ports' counters of both ends agree; the messages lie in host memory
``gdr-*``      the same with GPU memory, the protocol tables of both ends say zero-copy, and the
               NIC's driver at both ends takes that very memory
``host-staged``  as ``tcp`` or ``rdma-host``, GPU memory, and copies through host memory are certain
=============  ====================================================================================

Inside a node ``shm`` and ``cuda-ipc`` need a window that is seen to be the peer's own memory, and
ports that counted nothing. Whatever is missing or disagrees makes ``unproven``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rdmakit.proof.counters import state_of
from rdmakit.proof.evidence import (
    UNPROVEN,
    Evidence,
    Lane,
    Moved,
    Registration,
    TableUse,
    Variant,
    Verdict,
)
from rdmakit.proof.tables import copies_host

__all__ = ["carries", "judge", "kind_of"]

_RDMA = ("rc_", "dc_", "ud_", "gga_", "srd")
_MEMORY = ("posix", "sysv", "cma", "xpmem", "knem", "self")
_KIND = {"rdma": "rdma", "tcp": "net"}
_SIDES = ("sender", "receiver")


def kind_of(transport: str) -> str:
    """Return ``rdma``, ``tcp``, ``memory`` or ``cuda`` for a transport of UCX; else empty."""
    if transport.startswith(_RDMA):
        return "rdma"
    if transport in _MEMORY:
        return "memory"
    if transport.startswith(("cuda_", "gdr_copy")):
        return "cuda"
    return "tcp" if transport == "tcp" else ""


def judge(evidence: Evidence) -> Verdict:
    """Return the verdict. Equal for equal evidence."""
    case = _Case(evidence)
    if evidence.problems:
        case.missing.extend(evidence.problems)
    elif evidence.wrong is None:
        case.missing.append("what arrived was not compared with what was sent")
    elif evidence.wrong:
        case.missing.append(f"{evidence.wrong} bytes did not arrive as they were sent")
    elif evidence.inside:
        return case.inside()
    else:
        return case.between()
    return case.unproven()


@dataclass
class _Case:
    evidence: Evidence
    reasons: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    against: list[str] = field(default_factory=list)

    def unproven(self) -> Verdict:
        return Verdict(
            path=UNPROVEN,
            reasons=tuple(self.reasons),
            missing=tuple(self.missing),
            disagreements=tuple(self.against),
        )

    def proven(self, path: str, carrier: str = "") -> Verdict:
        """Return ``path``, unless something is missing or disagrees."""
        if self.missing or self.against:
            return self.unproven()
        return Verdict(path=path, carrier=carrier, reasons=tuple(self.reasons))

    # -- inside a node ------------------------------------------------------------------------

    def inside(self) -> Verdict:
        evidence = self.evidence
        window = evidence.window
        if window is None:
            self.missing.append("the node's window was not looked at")
            return self.unproven()
        if window.same:
            self.reasons.append(f"{window.kind} window: {window.note or 'the same memory'}")
        else:
            self.missing.append(f"{window.kind} window: {window.note or 'not the same memory'}")
        self._quiet()
        if evidence.memory == "host":
            path = "shm" if window.kind == "shm" else UNPROVEN
        else:
            path = {
                "cuda-ipc": "cuda-ipc",
                "host-staged": "host-staged",
                "cuda-copy": "cuda-copy",
            }.get(window.kind, UNPROVEN)
        if path == UNPROVEN:
            self.missing.append(f"a {window.kind} window is no way for {evidence.memory} memory")
        return self.proven(path)

    def _quiet(self) -> None:
        """See that no port carried the bytes."""
        # Of lo a window has no need, and others on this host use it.
        counters = [m for m in self.evidence.counters if m.port != "lo"]
        loud = [m for m in counters if m.state in ("agrees", "too many")]
        dark = [m for m in counters if m.state in ("too few", "busy", "unknown")]
        if not counters:
            self.missing.append("no counters of ports: bytes may have left the node")
        elif loud:
            self.against.append(
                "the window should carry the bytes, but " + "; ".join(map(_counted, loud))
            )
        elif dark:
            self.missing.append("cannot be excluded: " + "; ".join(map(_counted, dark)))
        else:
            self.reasons.append("no port counted the bytes")

    # -- between nodes ------------------------------------------------------------------------

    def between(self) -> Verdict:
        evidence = self.evidence
        claim = self._claim()
        if claim:
            self._counted(claim)
        if evidence.memory == "host":
            return self.proven({"rdma": "rdma-host", "tcp": "tcp"}.get(claim, UNPROVEN))
        if evidence.staged:
            self.reasons.append(f"rdmakit copies through pinned host memory: {evidence.staged}")
            return self.proven("host-staged", claim)
        return self._gpu(claim)

    def _claim(self) -> str:
        """Return what UCX says carries the bytes: ``rdma``, ``tcp``, or nothing."""
        evidence = self.evidence
        sides = (evidence.sender_lanes, evidence.receiver_lanes)
        if evidence.channel == "mpi":
            self.missing.append("(a) the messages go through MPI, which does not tell its lanes")
            return ""
        if not all(sides):
            self.missing.append("(a) the channel told no lanes")
            return ""
        by_lanes = [_networks(lanes) for lanes in sides]
        by_table = [_networks([(t, d) for t, d, _ in use.lanes]) for use in self._uses()]
        words = "UCX's lanes: " + (
            _lanes(sides[0])
            if set(sides[0]) == set(sides[1])
            else f"{_lanes(sides[0])} at the sender, {_lanes(sides[1])} at the receiver"
        )
        if any("memory" in found or not found for found in by_lanes):
            self.missing.append(f"(a) {words}: not a network's")
            return ""
        said = [found for found in by_table if found] or by_lanes
        kinds = set().union(*said)
        if len(kinds) > 1 or not kinds <= {"rdma", "tcp"}:
            self.missing.append(f"(a) {words}: of several kinds, and no table tells which is used")
            return ""
        claim = kinds.pop()
        if any(claim not in found for found in by_lanes):
            self.against.append(f"UCX's table says {claim}, but {words}")
        for use in self._uses():
            words += (
                f"; {use.side}'s table: {use.text} on {_lanes([(t, d) for t, d, _ in use.lanes])}"
            )
        self.reasons.append(f"(a) {words}")
        return claim

    def _variant(self, name: str) -> Variant | None:
        return next((v for v in self.evidence.variants if v.name == name and not v.problem), None)

    def _uses(self, name: str = "") -> tuple[TableUse, ...]:
        """Return the rows of both ends' tables in the run that is like the messages."""
        name = name or ("host" if self.evidence.staged else "default")
        variant = self._variant(name)
        if variant is None or not variant.same_library:
            return ()
        return variant.uses

    def _counted(self, claim: str) -> None:
        evidence = self.evidence
        kind = _KIND[claim]
        lanes = dict(zip(_SIDES, (evidence.sender_lanes, evidence.receiver_lanes), strict=True))
        agree: dict[str, set[str]] = {}
        for side in _SIDES:
            named = {d for t, d in lanes[side] if kind_of(t) == claim}
            mine = [m for m in evidence.counters if m.side == side and m.kind == kind]
            state, ports = carries(
                [m for m in mine if m.port in named - {"lo"}], evidence.sent, evidence.messages
            )
            what = "; ".join(map(_counted, ports)) or f"no counters of {', '.join(sorted(named))}"
            if state == "agrees":
                self.reasons.append(f"(b) {side}: {what} for {evidence.sent} bytes sent")
                agree[side] = {m.port for m in ports}
                continue
            if named <= {"lo"}:
                self.missing.append("(b) loopback: its counters say nothing of a network")
            elif state in ("busy", "too many"):
                self.missing.append(f"(b) {side}: others use the port: {what}")
            else:
                self.missing.append(f"(b) {side}: {what}, for {evidence.sent} bytes sent")
            self._elsewhere(side, claim, named, state)
        if evidence.one_stack and set(agree) == set(_SIDES) and agree["sender"] & agree["receiver"]:
            self.missing.append(
                "(b) both ranks are on one host and one port: bytes may turn round inside it"
            )
        if evidence.one_stack and self.missing:
            words = "virtual nodes of one host" if evidence.virtual else "both ranks on one host"
            self.missing.append(f"{words}: bytes need not leave it")

    def _elsewhere(self, side: str, claim: str, named: set[str], state: str) -> None:
        """Say where the bytes went, if they did not go where UCX says."""
        if state not in ("nothing", "too few"):
            return
        others = [
            m
            for m in self.evidence.counters
            if m.side == side and m.state == "agrees" and m.port not in named
        ]
        if others and self.evidence.one_stack and {m.port for m in others} == {"lo"}:
            turned = "; ".join(map(_counted, others))
            self.missing.append(f"(b) {side}: bytes to the own host turn round in it: {turned}")
        elif others:
            self.against.append(
                f"UCX says {claim} on {', '.join(sorted(named))}, but at the {side} "
                + "; ".join(map(_counted, others))
            )

    # -- GPU memory between nodes -------------------------------------------------------------

    def _gpu(self, claim: str) -> Verdict:
        if claim == "tcp":
            self.reasons.append("TCP sends from host memory only: UCX copies through it")
            return self.proven("host-staged", claim)
        uses = [use for use in self._uses() if use.memory == "cuda"]
        if {use.side for use in uses} != set(_SIDES):
            other = any(not v.same_library for v in self.evidence.variants)
            why = ": the children found another UCX than the ranks have" if other else ""
            self.missing.append(f"(a) no protocol table for GPU memory of both ends{why}")
            return self.unproven()
        copies = [use.side for use in uses if copies_host(use)]
        if copies:
            text = "; ".join(f"{use.side}: {use.text}" for use in uses if copies_host(use))
            self.reasons.append(f"(a) UCX copies through host memory: {text}")
            if self._registered():
                self.reasons.append("(d) though the NIC's driver would take the GPU's memory")
            return self.proven("host-staged", claim)
        path = self._registered()
        if not path:
            self._why_unregistered()
        staged = self._uses("gdr-off")
        if staged and not any(map(copies_host, staged)):
            self.reasons.append("(c) UCX_IB_GPU_DIRECT_RDMA=n changed nothing in UCX's tables")
        return self.proven(path or UNPROVEN)

    def _registered(self) -> str:
        """Return how the NICs of both ends take the memory, or nothing."""
        found = {r.side: r for r in self.evidence.registrations}
        if set(found) != set(_SIDES):
            return ""
        off = any(
            v.dmabuf.lower() in ("n", "no", "0", "off")
            for v in self.evidence.variants
            if v.name == "default"
        )
        # Where both ways are open UCX takes dma-buf (ucp_mm.c, ucp_memh_register_internal).
        if not off and all(r.dmabuf for r in found.values()):
            return "gdr-dmabuf"
        return "gdr-peermem" if all(r.peermem for r in found.values()) else ""

    def _why_unregistered(self) -> None:
        registrations = self.evidence.registrations
        if {r.side for r in registrations} != set(_SIDES):
            self.missing.append("(d) the memory was not registered directly at both ends")
        for one in registrations:
            refused = one.peermem is False and one.dmabuf is False
            text = f"{one.side}: {_registration(one)}"
            if refused:
                self.against.append(f"UCX's table says zero-copy, but (d) {text}")
            else:
                self.missing.append(f"(d) {text}")


def _networks(lanes: Iterable[Lane]) -> set[str]:
    return {kind for transport, _ in lanes if (kind := kind_of(transport)) not in ("", "cuda")}


def carries(ports: Sequence[Moved], sent: int, messages: int) -> tuple[str, Sequence[Moved]]:
    """Return what these ports of one end say together, and those that counted something.

    Messages may be spread over several ports: together they must have carried them.
    """
    known = [m for m in ports if m.state != "unknown"]
    if not known:
        return "unknown", ports
    if any(m.state == "busy" for m in known):
        return "busy", [m for m in known if m.state == "busy"]
    if len(known) < len(ports):
        return "unknown", ports
    if len({m.unit for m in known}) > 1:
        return "unknown", ports
    mtu = max(m.mtu for m in known)
    state = state_of(sum(m.carried for m in known), sent, known[0].unit, 0, messages, mtu)
    return state, [m for m in known if m.carried > 0 and m.state != "nothing"] or known


def _lanes(lanes: Sequence[Lane]) -> str:
    return "+".join(dict.fromkeys(f"{t}/{d}" for t, d in lanes)) or "none"


def _counted(one: Moved) -> str:
    if one.state == "unknown":
        return f"{one.port}: {one.note or 'unknown'} ({one.source})"
    unit = f"{one.during - one.idle} packets of up to {one.mtu} bytes, " * (one.unit == "packets")
    verb = "sent" if one.side == "sender" else "received"
    text = f"{one.port} {verb} {unit}{one.carried} bytes"
    return text + (f" ({one.note})" if one.note else "")


def _registration(one: Registration) -> str:
    words = []
    for name, state, note in (
        ("ibv_reg_mr", one.peermem, one.peermem_note),
        ("ibv_reg_dmabuf_mr", one.dmabuf, one.dmabuf_note),
    ):
        what = "takes it" if state else "refuses it" if state is False else "not possible here"
        words.append(f"{name} {what}{f': {note}' if note else ''}")
    return f"{one.device or 'no device'}: {'; '.join(words)}"
