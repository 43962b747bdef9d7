"""Which GPU, NICs and cores each rank should have, with the reason for each.

A pure function of the nodes' topologies and of what each rank may see: equal inputs give every
rank the same answer without talking.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rdmakit.topology.cores import Cores, give_cores
from rdmakit.topology.fabric import FabricPort
from rdmakit.topology.nic_choice import choose_ports
from rdmakit.topology.ranks import Node, RankFacts, spread_numa
from rdmakit.topology.visible import hidden_peers
from rdmakit.topology.words import Path

__all__ = ["Placement", "RankPlace", "place_ranks"]


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


def place_ranks(nodes: Sequence[Node]) -> Placement:
    """Return the place of every rank. Pure."""
    notes: list[str] = []
    chosen = [_choose_gpus(node, notes) for node in nodes]
    gpus = [[gpu for gpu, _, _, _ in own] for own in chosen]
    ports = choose_ports(nodes, gpus, notes)
    places: list[RankPlace] = []
    for index, node in enumerate(nodes):
        cores = give_cores(
            node.machine, gpus[index], spread_numa(node, gpus[index]), node.machine.available
        )
        for local, facts in enumerate(node.ranks):
            own, why = ports[index][local]
            places.append(
                _place(node, index, local, facts, chosen[index][local], own, why, cores[local])
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
