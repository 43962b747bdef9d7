"""Which ports each rank uses: rails agreed over the nodes, the nearest, shared out evenly. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rdmakit.topology.fabric import FabricPort
from rdmakit.topology.rails import Rail, assign_rails, match_rails
from rdmakit.topology.ranks import Node, spread_numa
from rdmakit.topology.words import Path

__all__ = ["Ports", "choose_ports"]

Ports = tuple[list[FabricPort], str]
"""Ports of a rank, the nearest first, and why."""


def choose_ports(
    nodes: Sequence[Node], gpus: Sequence[Sequence[str | None]], notes: list[str]
) -> list[list[Ports]]:
    """Return the ports of each node's local ranks, and add to ``notes``.

    Args:
        nodes: all nodes of the job.
        gpus: label of each rank's GPU, by node and local rank; None for a rank without.
        notes: what a person should know is added here.
    """
    rails, found = match_rails([n.machine for n in nodes], [n.fabric for n in nodes])
    notes += found
    usable = [rail for rail in rails if rail.usable]
    for rail in rails:
        down = [n for n, p in enumerate(rail.ports) if p is None or not p.usable]
        if down and len(down) < len(nodes):
            names = ", ".join(nodes[n].machine.host or f"node {n}" for n in down)
            notes.append(f"{rail.name} is not used on any node: it is down or absent on {names}")
    if len(nodes) > 1 and 2 * len(usable) < len(rails) and not rails[0].separate:
        notes.append(
            f"{len(usable)} of {len(rails)} rails are up on every node: each node is placed alone"
        )
        return [
            choose_ports([node], [own], notes)[0] for node, own in zip(nodes, gpus, strict=True)
        ]
    if not usable:
        why = "no RDMA port here"
        if rails:
            why = "no rail is up on every node" if len(nodes) > 1 else "no usable port"
        return [[([], why) for _ in node.ranks] for node in nodes]
    return _on_rails(nodes, gpus, usable, notes)


def _on_rails(
    nodes: Sequence[Node],
    gpus: Sequence[Sequence[str | None]],
    usable: Sequence[Rail],
    notes: list[str],
) -> list[list[Ports]]:
    """Give each local rank its rails, the same on all nodes."""
    most = max(len(node.ranks) for node in nodes)
    numa = [spread_numa(node, own) for node, own in zip(nodes, gpus, strict=True)]
    costs = [[_cost(nodes, gpus, numa, local, rail) for rail in usable] for local in range(most)]
    # A rank whose GPU's row is missing has no nearest NIC; one that all lack is shared out.
    lost = {rank for rank, row in enumerate(costs) if all(cost is None for cost in row)}
    lost = lost if len(lost) < most and _has_places(nodes) else set()
    ranks = [rank for rank in range(most) if rank not in lost]
    given = assign_rails([costs[rank] for rank in ranks], [rail.sure for rail in usable])
    taken = dict(zip(ranks, given, strict=True))
    extra = _extra_rails(costs, taken)
    idle = set(range(len(usable))) - set(given) - {r for more in extra.values() for r in more}
    if idle and most > 1:
        names = ", ".join(usable[r].name for r in sorted(idle))
        notes.append(f"compute ports without a rank: {names} (farther from every rank's GPU)")

    def of(index: int, local: int) -> Ports:
        if local in lost:
            return [], "how far its NICs are is not in the text"
        mine = [usable[r] for r in (taken[local], *extra[local])]
        ports = [port for port in (rail.ports[index] for rail in mine) if port is not None]
        return ports, _reason(nodes[index], gpus[index][local], ports, taken, usable, local)

    return [
        [of(index, local) for local in range(len(node.ranks))] for index, node in enumerate(nodes)
    ]


def _cost(
    nodes: Sequence[Node],
    gpus: Sequence[Sequence[str | None]],
    numa: Sequence[Sequence[int | None]],
    local: int,
    rail: Rail,
) -> int | None:
    """Return the worst path over the nodes from a local rank's GPU to a rail's port."""
    worst: int | None = None
    for index, node in enumerate(nodes):
        port = rail.ports[index]
        if local >= len(node.ranks) or port is None:
            continue
        gpu = gpus[index][local]
        if gpu is not None:
            relation = node.machine.relation(gpu, port.nic)
            path = relation.path if relation is not None else None
        else:
            nic = node.machine.nic(port.nic)
            where = nic.numa if nic is not None else None
            near = numa[index][local]
            path = None
            if near is not None and where is not None:
                path = Path.NODE if near == where else Path.SYS
        if path is None:
            return None
        worst = max(path, worst or 0)
    return worst


def _has_places(nodes: Sequence[Node]) -> bool:
    """Return whether any GPU's way to any NIC is known."""
    return any(
        node.machine.nearest_nics(gpu.label)[0] is not None
        for node in nodes
        for gpu in node.machine.gpus
    )


def _extra_rails(
    costs: Sequence[Sequence[int | None]], taken: Mapping[int, int]
) -> dict[int, list[int]]:
    """Give rails that nobody took to the ranks that are as near to them as to their own."""
    extra: dict[int, list[int]] = {rank: [] for rank in taken}
    for rail in sorted(set(range(len(costs[0]))) - set(taken.values())):
        near = [
            rank
            for rank, own in taken.items()
            if costs[rank][rail] is not None and costs[rank][rail] == costs[rank][own]
        ]
        if near:
            extra[min(near, key=lambda rank: (len(extra[rank]), rank))].append(rail)
    return extra


def _reason(
    node: Node,
    gpu: str | None,
    ports: Sequence[FabricPort],
    taken: Mapping[int, int],
    usable: Sequence[Rail],
    local: int,
) -> str:
    relation = node.machine.relation(gpu, ports[0].nic) if gpu and ports else None
    parts = []
    if relation is not None:
        best = min(
            (
                r.path
                for other in usable
                for p in other.ports
                if p is not None and (r := node.machine.relation(gpu or "", p.nic)) is not None
            ),
            default=relation.path,
        )
        word = "nearest" if relation.path is best else f"{best.name} ones have more ranks"
        parts.append(f"{relation.path.name}, {word} of {len(usable)} compute port(s)")
        if relation.path is Path.SYS:
            parts.append("no NIC is near: GPUDirect RDMA crosses the sockets")
        elif relation.path in (Path.PHB, Path.NODE):
            parts.append("GPUDirect RDMA goes through the CPU's host bridge")
    elif gpu is not None:
        parts.append(f"position not known: shared out by order over {len(usable)} port(s)")
    else:
        parts.append("by NUMA node and order")
    sharing = list(taken.values()).count(taken[local])
    if sharing > 1:
        parts.append(f"shared by {sharing} ranks")
    match = usable[taken[local]].match
    if match:
        parts.append(match)
    if ports and ports[0].health.degraded:
        parts.append(ports[0].health.why)
    return "; ".join(parts)
