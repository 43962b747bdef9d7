"""What is known of the ranks of a job before they are placed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rdmakit.topology.fabric import Fabric
from rdmakit.topology.model import Machine

__all__ = ["Node", "RankFacts", "ranks_of", "spread_numa"]


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


def spread_numa(node: Node, gpus: Sequence[str | None]) -> list[int | None]:
    """Return a NUMA node for each rank without a GPU: the one it runs on, else its share."""
    nodes = [n for n in node.machine.numa_nodes if n.cpus]
    found: list[int | None] = []
    for local, (facts, gpu) in enumerate(zip(node.ranks, gpus, strict=True)):
        if gpu is not None or not nodes:
            found.append(None)
            continue
        inside = [n.index for n in nodes if facts.cpus and set(facts.cpus) <= set(n.cpus)]
        share = nodes[local * len(nodes) // len(node.ranks)].index
        found.append(inside[0] if inside else share)
    return found
