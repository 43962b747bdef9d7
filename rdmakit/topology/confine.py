"""Network devices of all ranks of a job at once: for every rank, or for none. Pure.

A rank that may use RDMA devices alone cannot reach one whose UCX has TCP alone, so nobody is
confined unless all can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rdmakit.topology.fabric import FabricPort
from rdmakit.topology.netdevices import NetDevices, choose_net_devices
from rdmakit.topology.placement import RankPlace, place_ranks
from rdmakit.topology.rails import Rail, match_rails
from rdmakit.topology.ranks import Node

__all__ = ["Confinement", "confine"]

_MOST_SAID = 8
"""Ranks and warnings that a note names."""


@dataclass(frozen=True)
class Confinement:
    """What each rank's UCX may use; equal on all ranks."""

    devices: tuple[str, ...] = ()
    """NET_DEVICES of each rank's UCX context; empty: UCX chooses, on every rank."""
    notes: tuple[str, ...] = ()


def confine(
    nodes: Sequence[Node],
    users: Sequence[str | None],
    offered: Sequence[Sequence[str] | None],
) -> Confinement:
    """Return the network devices of every rank. Pure; equal inputs, equal answer.

    Args:
        nodes: machines of the job with their ranks.
        users: UCX_NET_DEVICES of each rank's environment; None where it is not set.
        offered: network devices of each rank's UCX; None where its UCX cannot be asked, which
            is reported elsewhere.
    """
    if any(own is None for own in offered):
        return Confinement()
    rails, _ = match_rails([node.machine for node in nodes], [node.fabric for node in nodes])
    usable = [rail for rail in rails if rail.usable]
    narrow = place_ranks(nodes).ranks
    places = _reachable(nodes, usable, narrow)
    chosen = [
        choose_net_devices(
            place,
            nodes[place.node].machine,
            nodes[place.node].fabric,
            users[place.rank],
            offered=offered[place.rank],
        )
        for place in places
    ]
    warnings = _shortened(list(dict.fromkeys(text for own in chosen for text in own.warnings)))
    free = _why_free(nodes, places, chosen, users)
    if free is not None:
        return Confinement((), tuple(text for text in (free, *warnings) if text))
    devices = tuple(own.value or "" for own in chosen)
    why = f"rank 0: {chosen[0].reason}"
    if places != narrow:
        why += "; ports of different rails may not reach each other, so every rank has all rails"
    return Confinement(devices, (f"network devices: {_listed(places, devices)} ({why})", *warnings))


def _reachable(
    nodes: Sequence[Node], usable: Sequence[Rail], places: tuple[RankPlace, ...]
) -> tuple[RankPlace, ...]:
    """Add the other rails where ranks on different ones could not reach each other.

    Rails that are subnets of their own need a router between them, and nothing says that there
    is one; nor for the Ethernet ports of one machine.
    """
    ports = [[rail.ports[index] for rail in usable] for index in range(len(nodes))]
    layers = {port.link_layer for own in ports for port in own if port is not None}
    apart = any(rail.separate for rail in usable) or (len(nodes) == 1 and "Ethernet" in layers)
    used = {
        frozenset(rail for rail, port in enumerate(ports[p.node]) if port and port.title in p.nics)
        for p in places
    }
    if not apart or len(used) < 2:
        return places
    return tuple(_widened(place, ports[place.node]) for place in places)


def _widened(place: RankPlace, ports: Sequence[FabricPort | None]) -> RankPlace:
    names = [port.device for port in ports if port is not None]
    if place.net_devices is None or None in names:
        return replace(place, net_devices=None)
    every = dict.fromkeys((*place.net_devices, *(name for name in names if name)))
    return replace(place, net_devices=tuple(every))


def _why_free(
    nodes: Sequence[Node],
    places: Sequence[RankPlace],
    chosen: Sequence[NetDevices],
    users: Sequence[str | None],
) -> str | None:
    """Return why no rank is confined, None if all are; nothing to say where users chose."""
    theirs = [rank for rank, value in enumerate(users) if value is not None]
    if len(theirs) == len(users):
        return ""
    if theirs:
        return (
            f"network devices: UCX_NET_DEVICES is set on {_ranks(theirs)} only; on the other "
            "ranks UCX chooses"
        )
    free = [index for index, own in enumerate(chosen) if own.value is None]
    if free:
        place, own = places[free[0]], chosen[free[0]]
        machine = nodes[place.node].machine
        more = f" ({machine.notes[0]})" if not machine.nics and machine.notes else ""
        return f"network devices: chosen for no rank; rank {place.rank}: {own.reason}{more}"
    layers: dict[str, int] = {}
    for place in places:
        for port in nodes[place.node].fabric.ports:
            if port.title in place.nics:
                layers.setdefault(port.link_layer or "unknown", place.rank)
    if len(layers) > 1:
        found = ", ".join(f"rank {rank} has {layer}" for layer, rank in layers.items())
        return f"network devices: UCX chooses on every rank, since {found}"
    return None


def _listed(places: Sequence[RankPlace], devices: Sequence[str]) -> str:
    """Return who has which, by local rank where all nodes are alike."""
    if len(set(devices)) == 1:
        return f"{devices[0]} on all ranks"
    by_local: dict[int, set[str]] = {}
    for place, own in zip(places, devices, strict=True):
        by_local.setdefault(place.local_rank, set()).add(own)
    if all(len(own) == 1 for own in by_local.values()):
        title, pairs = "local rank", [(n, next(iter(own))) for n, own in by_local.items()]
    else:
        title, pairs = "rank", [(p.rank, own) for p, own in zip(places, devices, strict=True)]
    groups: dict[str, list[int]] = {}
    for number, own in sorted(pairs):
        groups.setdefault(own, []).append(number)
    said = [f"{own} {title}{'s' * (len(n) > 1)} {_short(n)}" for own, n in groups.items()]
    return "; ".join(_shortened(said))


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {_short(ranks)}"


def _short(numbers: Sequence[int]) -> str:
    return " ".join(_shortened([str(number) for number in numbers]))


def _shortened(texts: list[str]) -> list[str]:
    more = len(texts) - _MOST_SAID
    return texts if more <= 0 else [*texts[:_MOST_SAID], f"and {more} more"]
