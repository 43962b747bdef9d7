"""What is said of pairs of nodes that do not reach each other. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from rdmakit.doctor.context import Context
from rdmakit.doctor.model import Check, Finding, Status

__all__ = ["REACH", "Outcome", "Place", "reach_findings"]

_MOST = 8
"""Findings of one kind that are told one by one."""


class Outcome(msgspec.Struct, frozen=True):
    """What came of one connection."""

    source: int
    peer: int
    interface: str
    address: str
    to_interface: str
    to_address: str
    kind: str
    """``ok``, ``same`` (the peer has this node's address), ``deaf`` (the peer could not listen),
    ``silent`` (no connection within the time), ``refused``, ``unreachable``, ``mute`` (connected,
    then no answer), ``stranger`` (somebody else answered), ``large-out`` and ``large-back`` (small
    packets pass, large ones do not) or ``broken``."""
    detail: str = ""
    mtu: int | None = None
    to_mtu: int | None = None


class Place(msgspec.Struct, frozen=True):
    """A node."""

    host: str
    takes_part: bool = True


def _between(_: Context) -> Iterator[Finding]:
    yield REACH.finding(Status.SKIPPED, "tried between nodes, not on one")


REACH = Check(
    "net.reach",
    "Nodes reach each other",
    "UCX and MPI hang, or end after a long time, where one node does not reach another.",
    _between,
    needs=("live", "job"),
)


def reach_findings(
    places: Sequence[Place], outcomes: Sequence[Outcome], seconds: float
) -> list[Finding]:
    """Return what to say of the outcomes; ``ok`` where all are. Pure, equal for equal inputs."""
    if sum(place.takes_part for place in places) < 2:
        return [REACH.finding(Status.SKIPPED, "fewer than two nodes with an address for tcp")]
    bad = [one for one in outcomes if one.kind != "ok"]
    if not bad:
        text = f"{len(outcomes)} connections between {len(places)} nodes, small and large packets"
        return [REACH.finding(Status.OK, text if outcomes else "all ranks are on one host")]
    names = _names(places)
    found: list[Finding] = []
    left = list(bad)
    for peer in sorted({one.peer for one in bad}):
        # Where nobody reaches a node, in one way, the node is what is wrong.
        to = [one for one in outcomes if one.peer == peer]
        kinds = {one.kind for one in to}
        if len(to) > 1 and len(kinds) == 1 and kinds != {"ok"}:
            found.append(_of_node(to, names, seconds))
            left = [one for one in left if one.peer != peer]
    seen: set[tuple[int, int, str]] = set()
    rest = 0
    for one in left:
        pair = (min(one.source, one.peer), max(one.source, one.peer), _family(one.kind))
        if pair in seen:
            continue
        seen.add(pair)
        both = any(
            (other.source, other.peer) == (one.peer, one.source) and _family(other.kind) == pair[2]
            for other in left
        )
        if len(seen) > _MOST:
            rest += 1
        else:
            found.append(_of_pair(one, names, seconds, both=both))
    if rest:
        found.append(
            REACH.finding(
                Status.FAIL,
                f"and {rest} more pairs of nodes",
                cure="see the cures of those that are named",
                urgency=30,
            )
        )
    return found


def _family(kind: str) -> str:
    return "large" if kind.startswith("large") else kind


def _names(places: Sequence[Place]) -> list[str]:
    every = [place.host for place in places]
    return [
        place.host if every.count(place.host) == 1 else f"{place.host} (node {number})"
        for number, place in enumerate(places)
    ]


def _of_node(to: Sequence[Outcome], names: Sequence[str], seconds: float) -> Finding:
    one = to[0]
    who = names[one.peer]
    text = f"none of {len(to)} nodes reaches {who} at {one.to_address} ({one.to_interface}): "
    return REACH.finding(
        Status.FAIL,
        text + _what(one, seconds),
        subject=who,
        expected="an answer to small and large packets",
        cure=_cure(one, names),
        urgency=8,
    )


def _of_pair(one: Outcome, names: Sequence[str], seconds: float, *, both: bool) -> Finding:
    source, peer = names[one.source], names[one.peer]
    return REACH.finding(
        Status.FAIL,
        f"{source} ({one.interface} {one.address}) does not reach {peer} ({one.to_interface} "
        f"{one.to_address}){', nor the other way round' if both else ''}: {_what(one, seconds)}",
        subject=f"{source} - {peer}",
        expected="an answer to small and large packets",
        cure=_cure(one, names),
        urgency=8,
    )


def _what(one: Outcome, seconds: float) -> str:
    mtus = f" (MTU {one.mtu} and {one.to_mtu})" if one.mtu and one.to_mtu else ""
    return {
        "same": "both have the same address, so a connection stays on its own host",
        "deaf": "the address is not one of that host",
        "silent": f"no answer within {seconds:g} s: a firewall drops the packets, or they go the "
        "wrong way",
        "mute": f"connected, but no answer within {seconds:g} s: a firewall or a proxy between",
        "refused": "refused: a firewall rejects it, or another host has that address",
        "unreachable": f"{one.detail or 'no route'}",
        "stranger": "somebody else answers at that address: several hosts have it",
        "large-out": f"small packets pass, {seconds:g} s without an answer to large ones: the MTU "
        f"differs on the way{mtus}",
        "large-back": f"small packets pass, large ones do not come back within {seconds:g} s: the "
        f"MTU differs on the way{mtus}",
        "broken": f"the connection broke: {one.detail}",
    }[one.kind]


def _cure(one: Outcome, names: Sequence[str]) -> str:
    source, peer = names[one.source], names[one.peer]
    if one.kind in ("same", "stranger", "deaf"):
        return (
            "export UCX_NET_DEVICES=<the interface that joins the hosts>: "
            f"{one.to_interface} does not (ip -br address shows them)"
        )
    if one.kind.startswith("large"):
        low = min(one.mtu or 1500, one.to_mtu or 1500)
        if one.mtu and one.to_mtu and one.mtu != one.to_mtu:
            place, device = (
                (source, one.interface) if one.mtu > one.to_mtu else (peer, one.to_interface)
            )
            return f"on {place}: ip link set {device} mtu {low} (or the larger one on all hosts)"
        low = 1500 if low > 1500 else 1400
        return (
            f"ip link set {one.interface} mtu {low} on all hosts, or a larger MTU on the switches "
            "between them"
        )
    if one.kind == "unreachable":
        return (
            f"on {source}: ip route get {one.to_address}; remove a blackhole or unreachable route, "
            "or export UCX_NET_DEVICES=<an interface that leads there>"
        )
    return (
        f"on {peer} and {source}: iptables -I INPUT -s {one.address} -j ACCEPT (and "
        f"{one.to_address}), firewall-cmd --zone=trusted --add-source=SUBNET, or an interface that "
        "joins them in UCX_NET_DEVICES"
    )
