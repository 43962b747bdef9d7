"""CPU cores for the ranks of a node: those of each rank's GPU, shared out without overlap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rdmakit.topology.cpulist import parse_cpus, share_cpus
from rdmakit.topology.model import Gpu, Machine

__all__ = ["Cores", "give_cores", "gpu_cpus"]


@dataclass(frozen=True)
class Cores:
    """CPUs for one rank."""

    cpus: tuple[int, ...]
    reason: str


def gpu_cpus(machine: Machine, gpu: Gpu) -> tuple[tuple[int, ...] | None, str]:
    """Return the CPUs near a GPU and where that comes from; None where it is not known.

    A NUMA node without CPUs (the memory of a Grace machine's GPU) is nobody's place to run.
    """
    cpus = gpu.cpus or parse_cpus(gpu.cpu_affinity)
    numa = gpu.numa
    if numa is None and gpu.numa_affinity and gpu.numa_affinity.isdigit():
        numa = int(gpu.numa_affinity)
    node = next((n for n in machine.numa_nodes if n.index == numa and n.cpus), None)
    # One NUMA node: what a virtual machine says of its only node holds for the GPU.
    if cpus:
        return cpus, f"NUMA {numa}" if numa is not None else "its CPU affinity"
    if node is not None:
        return node.cpus, f"NUMA {node.index}"
    return None, "its NUMA node is not known"


def give_cores(
    machine: Machine,
    gpus: Sequence[str | None],
    numa: Sequence[int | None],
    available: Sequence[int] | None,
) -> list[Cores]:
    """Return cores for the ranks of one node, in their order. Pure.

    Args:
        machine: the node.
        gpus: GPU of each rank; None for a rank without.
        numa: NUMA node of each rank that has no GPU; None where it does not matter.
        available: CPUs that the job has on this node; None: all.
    """
    everything = set(_all_cpus(machine)) if available is None else set(available)
    whole = available is not None or bool(machine.numa_nodes or machine.siblings)
    wanted: list[tuple[set[int], str]] = []
    for gpu_label, node in zip(gpus, numa, strict=True):
        gpu = machine.gpu(gpu_label) if gpu_label is not None else None
        cpus, where = gpu_cpus(machine, gpu) if gpu is not None else _node_cpus(machine, node)
        near = set(cpus or ()) & everything
        if cpus and not near:
            where = f"{where} has none of the job's CPUs"
        wanted.append((near, where))
    taken = set().union(*(near for near, _ in wanted)) if wanted else set()
    rest = everything - taken or everything
    if whole:
        wanted = [(near, where) if near else (rest, where) for near, where in wanted]
    found = [Cores((), f"not known: {where}") for _, where in wanted]
    for members in _groups([near for near, _ in wanted]):
        union = set().union(*(wanted[member][0] for member in members))
        shares = share_cpus(union, len(members), machine.siblings)
        threads = len(union)
        for place, (member, share) in enumerate(zip(members, shares, strict=True)):
            if not share:
                continue
            reason = wanted[member][1]
            if len(members) > threads:
                reason += f": {len(members)} ranks for {threads} CPUs, which they share in turn"
            elif len(members) > 1:
                reason += f", part {place + 1} of {len(members)}"
            found[member] = Cores(share, reason)
    return found


def _all_cpus(machine: Machine) -> list[int]:
    known = [cpu for node in machine.numa_nodes for cpu in node.cpus]
    known += [cpu for core in machine.siblings for cpu in core]
    for gpu in machine.gpus:
        known += gpu.cpus or parse_cpus(gpu.cpu_affinity) or ()
    return known


def _node_cpus(machine: Machine, numa: int | None) -> tuple[tuple[int, ...] | None, str]:
    node = next((n for n in machine.numa_nodes if n.index == numa and n.cpus), None)
    if node is None:
        return None, "no GPU, no NUMA node of its own"
    return node.cpus, f"NUMA {node.index}"


def _groups(sets: Sequence[set[int]]) -> list[list[int]]:
    """Return the members that share CPUs with each other, directly or through others."""
    groups: list[tuple[set[int], list[int]]] = []
    for member, cpus in enumerate(sets):
        together = [group for group in groups if group[0] & cpus]
        merged: tuple[set[int], list[int]] = (set(cpus), [member])
        for group in together:
            merged[0].update(group[0])
            merged[1].extend(group[1])
            groups.remove(group)
        groups.append((merged[0], sorted(merged[1])))
    return [members for _, members in groups]
