"""Devices that hang together, level by level: NUMA node, host bridge, switches. Pure.

Made from relations, so that a machine known by ``nvidia-smi topo -m`` alone gives the same
picture as one whose whole PCI tree is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rdmakit.topology.model import Machine
from rdmakit.topology.tree import PciTree
from rdmakit.topology.words import Path

__all__ = ["Cluster", "cluster_tree"]

_LEVELS = (Path.NODE, Path.PHB, Path.PXB, Path.PIX)


@dataclass(frozen=True)
class Cluster:
    """Devices below one thing, and the smaller clusters among them."""

    level: Path
    """SYS for the whole machine, NODE for a NUMA node, PHB for a host bridge, else switches."""
    children: tuple[Cluster, ...]
    devices: tuple[str, ...]
    """Labels of those that are in no smaller cluster."""
    numa: int | None = None
    bridge: str | None = None
    """PCI address of the bridge that they meet at, where it is known."""

    @property
    def members(self) -> tuple[str, ...]:
        """Labels of all devices in it."""
        return (*(m for child in self.children for m in child.members), *self.devices)


def cluster_tree(machine: Machine) -> tuple[Cluster, tuple[str, ...]]:
    """Return the tree of a machine, and the devices whose position is not known."""
    labels = [gpu.label for gpu in machine.gpus] + [nic.label for nic in machine.nics]
    known = _Known(machine)
    placed = []
    for label in labels:
        paths = [known.path(label, other) for other in labels if other != label]
        near = any(path is not None and path < Path.SYS for path in paths)
        # Far from all others is a place too, if all are known.
        if near or known.numa(label) is not None or (paths and None not in paths):
            placed.append(label)
    lost = tuple(label for label in labels if label not in placed)
    return Cluster(Path.SYS, *_divide(known, placed, 0)), lost


class _Known:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._tree = PciTree(machine.pci, sum(bool(n.cpus) for n in machine.numa_nodes))

    def pci(self, label: str) -> str | None:
        device = self._machine.gpu(label) or self._machine.nic(label)
        return device.pci if device is not None else None

    def numa(self, label: str) -> int | None:
        device = self._machine.gpu(label) or self._machine.nic(label)
        return device.numa if device is not None else None

    def path(self, a: str, b: str) -> Path | None:
        """Return the PCIe relation; NVLink hides it in a matrix."""
        relation = self._machine.relation(a, b)
        if relation is None or relation.path is Path.NV:
            places = self.pci(a), self.pci(b)
            relation = None
            if places[0] and places[1]:
                relation = self._tree.relation(places[0], places[1])
        if relation is not None:
            return relation.path
        if self.numa(a) is not None and self.numa(a) == self.numa(b):
            return Path.NODE
        return None

    def bridge(self, labels: Sequence[str]) -> str | None:
        places = [place for label in labels if (place := self.pci(label)) is not None]
        if len(places) < 2 or len(places) < len(labels):
            return None
        common = list(self._tree.chain(places[0]))
        for place in places[1:]:
            above = set(self._tree.chain(place))
            common = [bridge for bridge in common if bridge in above]
        return common[0] if common else None


def _divide(
    known: _Known, labels: Sequence[str], depth: int
) -> tuple[tuple[Cluster, ...], tuple[str, ...]]:
    """Return (clusters, single devices) of these devices at a level and below."""
    if depth == len(_LEVELS) or not labels:
        return (), tuple(labels)
    level = _LEVELS[depth]
    children: list[Cluster] = []
    single: list[str] = []
    for group in _groups(known, labels, level):
        below, devices = _divide(known, group, depth + 1)
        numas = {known.numa(label) for label in group} - {None}
        numa = next(iter(numas)) if len(numas) == 1 else None
        if level is Path.NODE:
            children.append(Cluster(level, below, devices, numa))
        elif len(group) == 1:
            single += group
        elif len(below) == 1 and not devices:
            children += below  # nothing but one smaller cluster: the smaller tells more
        else:
            children.append(Cluster(level, below, devices, numa, known.bridge(group)))
    return tuple(children), tuple(single)


def _groups(known: _Known, labels: Sequence[str], level: Path) -> list[list[str]]:
    groups: list[list[str]] = []
    for label in labels:
        near = [
            group
            for group in groups
            if any((path := known.path(label, o)) is not None and path <= level for o in group)
        ]
        merged = [member for group in near for member in group] + [label]
        groups = [group for group in groups if group not in near] + [merged]
    order = {label: place for place, label in enumerate(labels)}
    return sorted(
        (sorted(group, key=order.__getitem__) for group in groups),
        key=lambda group: order[group[0]],
    )
