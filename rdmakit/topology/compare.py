"""What differs between nodes that should be equal, and which node is the odd one. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rdmakit.topology.cpulist import format_cpus
from rdmakit.topology.fabric import Fabric
from rdmakit.topology.model import Machine, Nic, Port
from rdmakit.topology.parsers.gids import choose_gid, gid_table

__all__ = ["Difference", "Facts", "compare", "facts_of", "group_alike", "shape_of"]


@dataclass(frozen=True)
class Difference:
    """One fact that is not the same on all nodes."""

    what: str
    usual: str
    """Value of most nodes; of equals the first node's."""
    usual_nodes: tuple[int, ...]
    odd: tuple[tuple[str, tuple[int, ...]], ...]
    """Other values and the nodes that have them."""
    grave: bool = True
    """Whether it can stop or slow a job; the others are worth knowing."""

    def describe(self, names: Sequence[str], most: int = 6) -> str:
        """Return a line: odd nodes by name, the others too where they are no more than those."""

        def who(nodes: Sequence[int]) -> str:
            text = ", ".join(names[node] for node in nodes[:most])
            return text + (f" and {len(nodes) - most} more" if len(nodes) > most else "")

        odd = "; ".join(f"{who(nodes)}: {value or 'none'}" for value, nodes in self.odd)
        count = len(self.usual_nodes)
        even = count <= max((len(nodes) for _, nodes in self.odd), default=0)
        usual = who(self.usual_nodes) if even else f"{count} node(s)"
        return f"{self.what}: {self.usual or 'none'} on {usual}; {odd}"


_HARMLESS = ("kernel", "container")


@dataclass(frozen=True)
class Facts:
    """What should be equal on all nodes of a job: no addresses, no serial numbers."""

    whole: dict[str, str]
    """Of the machine; a fact that a node lacks is ``none`` there."""
    parts: dict[str, str]
    """Of a GPU, NIC or port; compared between nodes that have it and tell."""


def facts_of(machine: Machine, fabric: Fabric) -> Facts:
    """Return a node's facts."""
    whole = dict(machine.software)
    whole["GPUs"] = ", ".join(
        f"{count} x {name or 'GPU'}"
        for name, count in Counter(g.name for g in machine.gpus).items()
    )
    whole["RDMA devices"] = ", ".join(nic.name or nic.label for nic in machine.nics)
    whole["CPUs by NUMA node"] = "; ".join(
        f"{node.index}: {format_cpus(node.cpus)}" for node in machine.numa_nodes if node.cpus
    )
    parts: dict[str, str] = {}
    for gpu in machine.gpus:
        link = gpu.link
        if link.max_speed or link.max_width:
            # An idle GPU lowers its speed, never its width.
            width = link.width or link.max_width
            parts[f"{gpu.label} PCIe"] = f"Gen{link.max_generation or '?'} x{width or '?'}"
        if gpu.nvlinks is not None:
            parts[f"{gpu.label} NVLinks"] = str(gpu.nvlinks)
        if gpu.mig_mode is not None:
            parts[f"{gpu.label} MIG"] = "on" if gpu.mig_mode else "off"
    for nic in machine.nics:
        parts |= _nic_facts(nic)
        for port in nic.ports:
            parts |= _port_facts(f"{nic.name or nic.label}:{port.number}", port)
    for port_ in fabric.ports:
        parts[f"{port_.title} role"] = port_.role
    return Facts(whole, parts)


def _nic_facts(nic: Nic) -> dict[str, str]:
    name = nic.name or nic.label
    found = {f"{name} model": nic.model, f"{name} firmware": nic.firmware}
    if nic.link.width:
        found[f"{name} PCIe"] = nic.link.describe()
    return {key: value for key, value in found.items() if value}


def _port_facts(title: str, port: Port) -> dict[str, str]:
    found = {
        f"{title} state": port.state.upper().removeprefix("PORT_") if port.state else None,
        f"{title} rate": f"{port.speed_gbps:g} Gb/s" if port.speed_gbps else None,
        f"{title} link layer": port.link_layer,
        f"{title} active MTU": str(port.active_mtu) if port.active_mtu else None,
        f"{title} net device MTU": str(port.netdev_mtu) if port.netdev_mtu else None,
    }
    if port.gids and port.link_layer != "InfiniBand":
        index, _ = choose_gid(port)
        found[f"{title} GID table"] = gid_table(port.gids)
        found[f"{title} RoCE v2 GID index"] = "none" if index is None else str(index)
    return {key: value for key, value in found.items() if value is not None}


def compare(facts: Sequence[Facts]) -> list[Difference]:
    """Return the facts that differ, the graver first, in the order they were found in."""
    found = []
    for part in (False, True):
        told = [own.parts if part else own.whole for own in facts]
        for name in dict.fromkeys(name for own in told for name in own):
            values = {
                node: own.get(name, "") for node, own in enumerate(told) if name in own or not part
            }
            if len(set(values.values())) > 1:
                found.append(_difference(name, values))
    return sorted(found, key=lambda difference: not difference.grave)


def _difference(name: str, values: dict[int, str]) -> Difference:
    every = list(values.values())
    usual = max(every, key=every.count)  # of equals the first, on every rank
    odd: dict[str, list[int]] = {}
    for node, value in values.items():
        if value != usual:
            odd.setdefault(value, []).append(node)
    return Difference(
        name,
        usual,
        tuple(node for node, value in values.items() if value == usual),
        tuple((value, tuple(nodes)) for value, nodes in odd.items()),
        name not in _HARMLESS,
    )


def shape_of(machine: Machine) -> tuple[object, ...]:
    """Return what a picture of the machine shows; equal for nodes that look alike."""
    return (
        tuple(
            (
                g.label,
                g.name,
                g.numa,
                g.cpu_affinity,
                g.cpus,
                g.link.max_speed,
                g.link.width,
                len(g.mig),
            )
            for g in machine.gpus
        ),
        tuple(
            (
                n.label,
                n.name,
                n.numa,
                n.model,
                n.bond,
                n.virtual_of is not None,
                tuple((p.number, p.active, p.link_up, p.rate_gbps, p.link_layer) for p in n.ports),
            )
            for n in machine.nics
        ),
        machine.matrix.cells,
        tuple((node.index, node.cpus) for node in machine.numa_nodes if node.cpus),
    )


def group_alike(machines: Sequence[Machine]) -> list[list[int]]:
    """Return nodes that look alike together: the largest group first, then in order."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, machine in enumerate(machines):
        groups.setdefault(shape_of(machine), []).append(index)
    return sorted(groups.values(), key=lambda nodes: (-len(nodes), nodes[0]))
