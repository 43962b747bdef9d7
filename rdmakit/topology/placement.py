"""Which GPU, NICs and cores each rank should have, with the reason for each.

A pure function of the nodes' topologies and of what each rank may see: equal inputs give every
rank the same answer without talking.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rdmakit.topology.cores import Cores, give_cores
from rdmakit.topology.fabric import Fabric, FabricPort
from rdmakit.topology.model import Machine
from rdmakit.topology.rails import Rail, assign_rails, match_rails
from rdmakit.topology.visible import hidden_peers
from rdmakit.topology.words import Path

__all__ = ["Node", "Placement", "RankFacts", "RankPlace", "place_ranks", "ranks_of"]


@dataclass(frozen=True)
class RankFacts:
    """What is known of a rank before it is placed."""

    rank: int
    visible: tuple[str, ...] | None = None
    """Labels of the GPUs that it sees, device 0 first; None: all of its node's, by index."""
    devices: tuple[str, ...] = ()
    """UUID of each of them, or of the MIG device."""
    cpus: tuple[int, ...] | None = None
    """CPUs that its launcher bound it to; None: not known."""


@dataclass(frozen=True)
class Node:
    """A machine with its ranks; the place in ``ranks`` is the local rank."""

    machine: Machine
    fabric: Fabric
    ranks: tuple[RankFacts, ...]


@dataclass(frozen=True)
class RankPlace:
    """What one rank should have."""

    rank: int
    node: int
    local_rank: int
    gpu: str | None
    device: str | None
    """UUID of the GPU or MIG device, where known."""
    ordinal: int | None
    """CUDA's number of the device in this process."""
    nics: tuple[str, ...]
    """Ports by title, the nearest first."""
    net_devices: tuple[str, ...] | None
    """As UCX_NET_DEVICES takes them; None where names are not known."""
    path: Path | None
    """From the GPU to the first NIC."""
    cores: tuple[int, ...]
    gpu_reason: str
    nic_reason: str
    core_reason: str


@dataclass(frozen=True)
class Placement:
    """All ranks, by rank."""

    ranks: tuple[RankPlace, ...]
    notes: tuple[str, ...] = ()


def ranks_of(machine: Machine, count: int | None = None) -> tuple[RankFacts, ...]:
    """Return ranks to propose a place for where no job runs: one for each GPU (MIG device).

    ``count`` takes the place of that number; without GPUs it is 1.
    """
    devices = [(g.label, m.uuid) for g in machine.gpus for m in g.mig] or [
        (g.label, g.uuid) for g in machine.gpus
    ]
    number = count or len(devices) or 1
    labels, uuids = tuple(d[0] for d in devices), tuple(d[1] for d in devices)
    return tuple(RankFacts(rank, labels or None, uuids) for rank in range(number))


def place_ranks(nodes: Sequence[Node]) -> Placement:
    """Return the place of every rank. Pure."""
    notes: list[str] = []
    chosen = [_choose_gpus(node, notes) for node in nodes]
    rails, rail_notes = match_rails([n.machine for n in nodes], [n.fabric for n in nodes])
    notes += rail_notes
    numa = [_spread_numa(node, gpus) for node, gpus in zip(nodes, chosen, strict=True)]
    nics = _choose_nics(nodes, chosen, numa, rails, notes)
    places: list[RankPlace] = []
    for index, node in enumerate(nodes):
        labels = [gpu for gpu, _, _, _ in chosen[index]]
        cores = give_cores(node.machine, labels, numa[index], node.machine.available)
        for local, facts in enumerate(node.ranks):
            gpu, device, ordinal, why = chosen[index][local]
            ports, nic_why = nics[index][local]
            places.append(
                _place(
                    node,
                    index,
                    local,
                    facts,
                    (gpu, device, ordinal, why),
                    ports,
                    nic_why,
                    cores[local],
                )
            )
            notes += _binding_note(node, facts, places[-1])
    notes += _oversubscribed(nodes, places)
    places.sort(key=lambda place: place.rank)
    return Placement(tuple(places), tuple(dict.fromkeys(notes)))


_Chosen = tuple[str | None, str | None, int | None, str]
"""GPU, UUID, ordinal, reason."""


def _place(
    node: Node,
    index: int,
    local: int,
    facts: RankFacts,
    gpu: _Chosen,
    ports: Sequence[FabricPort],
    nic_reason: str,
    cores: Cores,
) -> RankPlace:
    relation = node.machine.relation(gpu[0], ports[0].nic) if gpu[0] and ports else None
    names = [port.device for port in ports]
    return RankPlace(
        facts.rank,
        index,
        local,
        gpu[0],
        gpu[1],
        gpu[2],
        tuple(port.title for port in ports),
        None if None in names else tuple(name for name in names if name),
        relation.path if relation is not None else None,
        cores.cpus,
        gpu[3],
        nic_reason,
        cores.reason,
    )


def _choose_gpus(node: Node, notes: list[str]) -> list[_Chosen]:
    """Give each rank one of the GPUs that it sees: its turn among ranks that see the same."""
    machine = node.machine
    turns: Counter[tuple[str, ...]] = Counter()
    found: list[_Chosen] = []
    for local, facts in enumerate(node.ranks):
        every = tuple(gpu.label for gpu in machine.gpus)
        seen = every if facts.visible is None else facts.visible
        if not seen:
            why = "this node has no GPU" if not every else "no GPU is visible to this rank"
            found.append((None, None, None, why))
            continue
        key = (*seen, *facts.devices)
        ordinal = turns[key] % len(seen)
        turns[key] += 1
        gpu = machine.gpu(seen[ordinal])
        device = facts.devices[ordinal] if ordinal < len(facts.devices) else ""
        why = f"device {ordinal} of {len(seen)} for local rank {local}"
        if device.startswith("MIG-"):
            why += " (a MIG device)"
        found.append((seen[ordinal], device or (gpu.uuid if gpu else "") or None, ordinal, why))
    shared = Counter((gpu, device) for gpu, device, _, _ in found if gpu is not None)
    host = machine.host or "this node"
    for (label, _), count in shared.items():
        if count > 1:
            notes.append(f"{host}: {count} ranks share {label}: their rates are not a link's")
    if any(gpu.mig_mode or gpu.mig for gpu in machine.gpus):
        notes.append(
            f"{host}: MIG: no P2P, CUDA IPC or NVLink between MIG devices, one per process; "
            "results are right, rates do not compare with those of whole GPUs"
        )
    seen_by = [
        tuple(
            (facts.devices[i] if i < len(facts.devices) else "") or label
            for i, label in enumerate(facts.visible)
        )
        if facts.visible is not None
        else None
        for facts in node.ranks
    ]
    notes += [f"{host}: {text}" for text in [hidden_peers(seen_by)] if text]
    return found


def _spread_numa(node: Node, gpus: Sequence[_Chosen]) -> list[int | None]:
    """Return a NUMA node for each rank without a GPU: the one it runs on, else its share."""
    nodes = [n for n in node.machine.numa_nodes if n.cpus]
    found: list[int | None] = []
    for local, (facts, (gpu, _, _, _)) in enumerate(zip(node.ranks, gpus, strict=True)):
        if gpu is not None or not nodes:
            found.append(None)
            continue
        inside = [n.index for n in nodes if facts.cpus and set(facts.cpus) <= set(n.cpus)]
        share = nodes[local * len(nodes) // len(node.ranks)].index
        found.append(inside[0] if inside else share)
    return found


def _choose_nics(
    nodes: Sequence[Node],
    chosen: Sequence[Sequence[_Chosen]],
    numa: Sequence[Sequence[int | None]],
    rails: Sequence[Rail],
    notes: list[str],
) -> list[list[tuple[list[FabricPort], str]]]:
    """Return (ports, reason) of each node's local ranks; rails are agreed over the nodes."""
    usable = [rail for rail in rails if rail.usable]
    for rail in rails:
        down = [n for n, p in enumerate(rail.ports) if p is None or not p.usable]
        if down and len(down) < len(nodes):
            names = ", ".join(nodes[n].machine.host or f"node {n}" for n in down)
            notes.append(f"{rail.name} is not used on any node: it is down or absent on {names}")
    split = len(nodes) > 1 and 2 * len(usable) < len(rails) and not rails[0].separate
    if split:
        notes.append(
            f"{len(usable)} of {len(rails)} rails are up on every node: each node is placed alone"
        )
        return [
            _choose_nics(
                [node], [chosen[i]], [numa[i]], match_rails([node.machine], [node.fabric])[0], notes
            )[0]
            for i, node in enumerate(nodes)
        ]
    if not usable:
        why = "no RDMA port here"
        if rails:
            why = "no rail is up on every node" if len(nodes) > 1 else "no usable port"
        return [[([], why) for _ in node.ranks] for node in nodes]
    most = max(len(node.ranks) for node in nodes)
    costs = [[_cost(nodes, chosen, numa, local, rail) for rail in usable] for local in range(most)]
    # A rank whose GPU's row is missing has no nearest NIC; one that all lack is shared out.
    lost = {rank for rank, row in enumerate(costs) if all(cost is None for cost in row)}
    lost = lost if len(lost) < most and _has_places(nodes) else set()
    ranks = [rank for rank in range(most) if rank not in lost]
    given = assign_rails([costs[rank] for rank in ranks], [rail.sure for rail in usable])
    taken = dict(zip(ranks, given, strict=True))
    extra = _extra_rails(costs, taken)
    found: list[list[tuple[list[FabricPort], str]]] = []
    for index, node in enumerate(nodes):
        own: list[tuple[list[FabricPort], str]] = []
        for local in range(len(node.ranks)):
            if local in lost:
                own.append(([], "how far its NICs are is not in the text"))
                continue
            mine = [usable[r] for r in (taken[local], *extra[local])]
            ports = [port for port in (rail.ports[index] for rail in mine) if port is not None]
            gpu = chosen[index][local][0]
            own.append((ports, _nic_reason(node, gpu, ports, taken, usable, local, mine[0])))
        found.append(own)
    idle = set(range(len(usable))) - set(given) - {r for more in extra.values() for r in more}
    if idle and most > 1:
        names = ", ".join(usable[r].name for r in sorted(idle))
        notes.append(f"compute ports without a rank: {names} (farther from every rank's GPU)")
    return found


def _cost(
    nodes: Sequence[Node],
    chosen: Sequence[Sequence[_Chosen]],
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
        gpu = chosen[index][local][0]
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


def _nic_reason(
    node: Node,
    gpu: str | None,
    ports: Sequence[FabricPort],
    taken: Mapping[int, int],
    usable: Sequence[Rail],
    local: int,
    rail: Rail,
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
    if rail.match:
        parts.append(rail.match)
    if ports and ports[0].health.degraded:
        parts.append(ports[0].health.why)
    return "; ".join(parts)


def _binding_note(node: Node, facts: RankFacts, place: RankPlace) -> list[str]:
    gpu = node.machine.gpu(place.gpu) if place.gpu is not None else None
    if gpu is None or not gpu.cpus or not facts.cpus or set(facts.cpus) & set(gpu.cpus):
        return []
    return [
        f"rank {facts.rank} is bound to CPUs that are all far from its {gpu.label}"
        + (f" (NUMA {gpu.numa})" if gpu.numa is not None else "")
    ]


def _oversubscribed(nodes: Sequence[Node], places: Sequence[RankPlace]) -> list[str]:
    notes = []
    for index, node in enumerate(nodes):
        cpus = [cpu for place in places if place.node == index for cpu in place.cores]
        if len(cpus) > len(set(cpus)):
            notes.append(
                f"{node.machine.host or 'this node'}: more ranks ({len(node.ranks)}) than CPUs "
                f"({len(set(cpus))}) where they belong: ranks share cores"
            )
    return notes
