"""Which ports of different nodes belong together, and which rank uses which: agreed by all.

A rail is one compute port of each node. Ranks of equal local rank use the same rail on all
nodes, so that their messages stay behind one switch. Rails are matched by subnet where every
node has the same set of distinct ones, else by device name, else by position; a port that is
down keeps its place.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from rdmakit.topology.fabric import Fabric, FabricPort
from rdmakit.topology.model import Machine
from rdmakit.topology.parsers.gids import address_of, choose_gid

__all__ = ["Rail", "assign_rails", "match_rails"]

_UNKNOWN = 99
"""Cost of a path that is not known: after all that are."""
_SYS = 6


@dataclass(frozen=True)
class Rail:
    """One port on each node."""

    index: int
    ports: tuple[FabricPort | None, ...]
    """By node; None where a node has no port for it."""
    match: str
    """What makes them one rail."""
    separate: bool = False
    """Whether other rails are other subnets, which may not reach this one."""

    @property
    def usable(self) -> bool:
        """Whether it is up on every node."""
        return all(port is not None and port.usable for port in self.ports)

    @property
    def sure(self) -> bool:
        """Whether it is known to be up on every node."""
        return self.usable and all(p is not None and p.health.healthy for p in self.ports)

    @property
    def name(self) -> str:
        """Its ports' name where they share one."""
        names = {port.title for port in self.ports if port is not None}
        return next(iter(names)) if len(names) == 1 else f"rail {self.index}"


def match_rails(
    machines: Sequence[Machine], fabrics: Sequence[Fabric]
) -> tuple[list[Rail], list[str]]:
    """Return the rails of these nodes, and what a person should know of the matching. Pure."""
    ports = [_of_one_kind(fabric.compute) for fabric in fabrics]
    if not ports or not any(ports):
        return [], []
    subnets = _common_subnets(machines, ports)
    if subnets is not None:
        keys: list[list[str]] = subnets
        match, separate = "subnet {}", True
    else:
        keys = [[port.title for port in own] for own in ports]
        separate = False
        common = set(keys[0]).intersection(*keys)
        # A device that is missing on one node must not move those behind it to other rails.
        if 2 * len(common) >= min(len(own) for own in keys):
            match = "device {}" if len(ports) > 1 else ""
        else:
            keys = [[str(place) for place in range(len(own))] for own in ports]
            match = "position {} among the compute ports"
    order = list(dict.fromkeys(key for own in keys for key in own))
    rails = [
        Rail(
            index,
            tuple(
                dict(zip(own_keys, own, strict=True)).get(key)
                for own_keys, own in zip(keys, ports, strict=True)
            ),
            match.format(key),
            separate,
        )
        for index, key in enumerate(order)
    ]
    notes = []
    counts = {len(own) for own in ports}
    if len(counts) > 1:
        notes.append(
            "nodes have different numbers of compute ports ("
            + ", ".join(
                f"{m.host or i}: {len(o)}"
                for i, (m, o) in enumerate(zip(machines, ports, strict=True))
            )
            + "): rails that are not on every node are not used"
        )
    return rails, notes


def _of_one_kind(ports: Sequence[FabricPort]) -> list[FabricPort]:
    """Drop ports without a place in the matrix where others have one, and the other way round."""
    placed = [port for port in ports if port.device is None or port.nearest is not None]
    return placed or list(ports)


def _common_subnets(
    machines: Sequence[Machine], ports: Sequence[Sequence[FabricPort]]
) -> list[list[str]] | None:
    """Return each port's subnet, if they are distinct on a node and the same on all nodes.

    The kernel's GID table has no netmask, so the longest one that fits is taken.
    """
    addresses = []
    for machine, own in zip(machines, ports, strict=True):
        found = [_address(machine, port) for port in own]
        if any(address is None for address in found) or len(own) < 2:
            return None
        addresses.append([address for address in found if address is not None])
    if len(addresses) < 2:
        return None
    versions = {address.version for own in addresses for address in own}
    lengths = range(30, 7, -1) if versions == {4} else (64,) if versions == {6} else ()
    for length in lengths:
        nets = [
            [str(ipaddress.ip_network(f"{address}/{length}", strict=False)) for address in own]
            for own in addresses
        ]
        first = set(nets[0])
        if all(len(set(own)) == len(own) and set(own) == first for own in nets):
            return nets
    return None


def _address(
    machine: Machine, port: FabricPort
) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    nic = machine.nic(port.nic)
    found = next((p for p in nic.ports if p.number == port.port), None) if nic else None
    if found is None or not found.gids:
        return None
    index, _ = choose_gid(found)
    return next((address_of(gid.gid) for gid in found.gids if gid.index == index), None)


def assign_rails(costs: Sequence[Sequence[int | None]], sure: Sequence[bool]) -> list[int]:
    """Return the rail of each local rank: the nearest, shared out evenly. Pure.

    Args:
        costs: ``costs[rank][rail]``: the path, worst over the nodes; None where not known.
        sure: which rails are known to be up.

    First every rank takes one of its nearest, so that the fullest of them is as empty as can
    be. Then ranks move to emptier rails that are known to be up: any that is not across a
    socket, and one across a socket rather than leave it idle beside a rail with two ranks.
    """
    if not costs or not costs[0]:
        return []
    known = [[_UNKNOWN if cost is None else cost for cost in row] for row in costs]
    nearest = [[r for r, cost in enumerate(row) if cost == min(row)] for row in known]
    load = [0] * len(known[0])
    taken: list[int] = []
    for choices in nearest:
        rail = min(choices, key=lambda r: (load[r], r))
        taken.append(rail)
        load[rail] += 1
    while _shift(taken, load, nearest):
        pass
    while _spill(taken, load, known, sure):
        pass
    return taken


def _shift(taken: list[int], load: list[int], nearest: Sequence[Sequence[int]]) -> bool:
    """Move ranks along a chain of their nearest rails to one with at least two ranks fewer."""
    for start in sorted(range(len(load)), key=lambda r: -load[r]):
        came: dict[int, tuple[int, int]] = {}  # rail -> (rank that moves there, from which rail)
        queue = [start]
        for rail in queue:
            if load[start] - load[rail] >= 2:
                while rail != start:
                    rank, before = came[rail]
                    taken[rank] = rail
                    load[rail] += 1
                    load[before] -= 1
                    rail = before
                return True
            for rank, own in enumerate(taken):
                if own != rail:
                    continue
                for other in nearest[rank]:
                    if other != start and other not in came:
                        came[other] = (rank, rail)
                        queue.append(other)
    return False


def _spill(
    taken: list[int], load: list[int], costs: Sequence[Sequence[int]], sure: Sequence[bool]
) -> bool:
    moves = [
        (load[own] - load[rail], costs[rank][own] - costs[rank][rail], rank, -rail)
        for rank, own in enumerate(taken)
        for rail in range(len(load))
        if sure[rail]
        and load[own] - load[rail] >= 2
        and (costs[rank][rail] < _SYS or (load[rail] == 0 and costs[rank][rail] == _SYS))
    ]
    if not moves:
        return False
    _, _, rank, place = max(moves)
    load[taken[rank]] -= 1
    load[-place] += 1
    taken[rank] = -place
    return True
