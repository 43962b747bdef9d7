"""Everything that is concluded from the nodes' machines, in one value. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

from rdmakit.topology.acs import PathCheck, check_path, judge_acs, judge_link
from rdmakit.topology.compare import Difference, compare, facts_of, group_alike
from rdmakit.topology.fabric import Fabric, classify
from rdmakit.topology.model import Machine
from rdmakit.topology.placement import Placement, place_ranks
from rdmakit.topology.ranks import Node, RankFacts, ranks_of
from rdmakit.topology.texts import Texts
from rdmakit.topology.tree import PciTree
from rdmakit.topology.words import Path

__all__ = ["Survey", "SurveyNode", "make_survey"]


@dataclass(frozen=True)
class SurveyNode:
    """One node with what is concluded of it alone."""

    machine: Machine
    fabric: Fabric
    ranks: tuple[RankFacts, ...]
    texts: Texts = field(default_factory=Texts)
    paths: tuple[PathCheck, ...] = ()
    """PCIe paths of GPUs and NICs that share a switch or host bridge."""
    remarks: tuple[str, ...] = ()
    """On links and access control that no path shows."""


@dataclass(frozen=True)
class Survey:
    """All nodes."""

    nodes: tuple[SurveyNode, ...]
    alike: tuple[tuple[int, ...], ...]
    """Nodes that look the same, the largest group first."""
    placement: Placement
    differences: tuple[Difference, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """A name for each node; a number is added where two have the same."""
        hosts = [node.machine.host or "node" for node in self.nodes]
        return tuple(
            host if hosts.count(host) == 1 else f"{host}#{index}"
            for index, host in enumerate(hosts)
        )


def make_survey(
    machines: Sequence[Machine],
    ranks: Sequence[Sequence[RankFacts]] | None = None,
    texts: Sequence[Texts] | None = None,
    *,
    chosen: Sequence[str] = (),
    ranks_per_node: int | None = None,
) -> Survey:
    """Return the conclusions.

    Args:
        machines: the nodes.
        ranks: ranks of each node where a job runs; else one for each GPU is proposed, or
            ``ranks_per_node``.
        texts: what each machine's texts held, where there were some.
        chosen: compute ports that the user names.
        ranks_per_node: takes the place of the number of GPUs.
    """
    nodes: list[SurveyNode] = []
    count = 0
    for index, machine in enumerate(machines):
        own = ranks[index] if ranks is not None else ranks_of(machine, ranks_per_node)
        if ranks is None:
            own = [
                RankFacts(facts.rank + count, facts.visible, facts.devices, facts.cpus)
                for facts in own
            ]
        count += len(own)
        nodes.append(
            SurveyNode(
                machine,
                classify(machine, chosen),
                tuple(own),
                texts[index] if texts is not None else Texts(),
                _paths(machine),
                tuple(_remarks(machine, texts[index] if texts is not None else Texts())),
            )
        )
    return Survey(
        tuple(nodes),
        tuple(map(tuple, group_alike(machines))),
        place_ranks([Node(node.machine, node.fabric, node.ranks) for node in nodes]),
        tuple(compare([facts_of(node.machine, node.fabric) for node in nodes])),
    )


def _paths(machine: Machine) -> tuple[PathCheck, ...]:
    """Judge each GPU's way to the NICs that it shares a switch with."""
    tree = PciTree(machine.pci)
    gpus = [d.address for d in machine.pci if d.kind == "gpu"]
    nics = [d.address for d in machine.pci if d.kind == "nic"]
    near = []
    for gpu in gpus:
        for nic in nics:
            relation = tree.relation(gpu, nic)
            if relation is not None and relation.path in (Path.PIX, Path.PXB):
                near.append(check_path(tree, gpu, nic))
    return tuple(near)


def _remarks(machine: Machine, texts: Texts) -> list[str]:
    remarks = []
    tree = PciTree(machine.pci)
    on_paths = {address for check in _paths(machine) for address in (check.gpu, check.nic)}
    for device in machine.pci:
        if device.kind in ("gpu", "nic") and device.address not in on_paths:
            above = tree.device(device.parent)
            text = judge_link(
                device.link,
                gpu=device.kind == "gpu",
                partner=above.link if above is not None else None,
            )
            remarks += [text.replace(": ", f": {device.address} runs at ", 1)] if text else []
    remarks += _nvlink_islands(machine)
    if texts.lspci.loose_acs:
        remarks.append(judge_acs(texts.lspci.loose_acs)[1])
    for link in texts.lspci.loose_links:
        text = judge_link(link, gpu=None)
        remarks += [text] if text else []
    if texts.lspci.denied:
        remarks.append("lspci was not run as root: access control (ACS) is unknown, not off")
    return remarks


def _nvlink_islands(machine: Machine) -> list[str]:
    """Say which GPUs NVLink leaves out, where it joins some."""
    labels = [gpu.label for gpu in machine.gpus]
    count = {(a, b): machine.matrix.nvlinks(a, b) for a, b in combinations(labels, 2)}
    without = [pair for pair, links in count.items() if links == 0]
    if not without or not any(count.values()):
        return []
    islands: list[set[str]] = []
    for label in labels:
        joined = [own for own in islands if any(count.get((o, label)) for o in own)]
        islands = [own for own in islands if own not in joined]
        islands.append({label}.union(*joined))
    if len(islands) == 1:
        return [
            f"NVLink joins {len(count) - len(without)} of {len(count)} pairs of GPUs: the others "
            "go over PCIe, or over a GPU between them"
        ]
    parts = "; ".join(" ".join(own for own in labels if own in island) for island in islands)
    return [f"NVLink joins GPUs in {len(islands)} groups only ({parts}): between them it is PCIe"]
