"""Which ranks share a node: asked of the kernel, then tried with real shared memory."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from rdmakit.config import Config
from rdmakit.drivers.host import HostTree
from rdmakit.intra.posix_shm import probe_reach
from rdmakit.layout import RankLayout, group_reachable, split_virtual
from rdmakit.protocols import Bootstrap

__all__ = ["Nodes", "find_nodes"]


@dataclass(frozen=True)
class Nodes:
    """Where the ranks are; equal on all ranks."""

    layout: RankLayout
    virtual: bool
    """Whether any two nodes are parts of one host, by request or because memory is not shared."""
    named: bool
    """Whether shared memory needs a name to be found by peers."""
    notes: tuple[str, ...]
    """What a person should know about the division."""
    machines: tuple[tuple[int, ...], ...]
    """Ranks of each node as it was before it was cut into virtual ones."""


def find_nodes(bootstrap: Bootstrap, config: Config, tree: HostTree | None = None) -> Nodes:
    """Divide the ranks into nodes. Collective, blocking.

    Ranks of one boot id are candidates (host names can be equal on two hosts, and differ
    between containers of one); those that map each other's memory are a node.
    """
    tree = tree or HostTree()
    boot = (tree.read_text("/proc/sys/kernel/random/boot_id") or "").strip()
    key = config.node_id or boot or f"unknown-{bootstrap.rank}"
    reach, keys = probe_reach(bootstrap, key, named=False)
    hosts: dict[str, list[int]] = defaultdict(list)
    for rank, name in enumerate(keys):
        hosts[name].append(rank)
    named = not all(reach[a][b] for ranks in hosts.values() for a in ranks for b in ranks)
    if named:
        # /proc/PID/fd is closed to us somewhere: other PID namespace, other user, hardening.
        reach, _ = probe_reach(bootstrap, key, named=True)
    notes: list[str] = []
    nodes: list[list[int]] = []
    machines: list[tuple[int, ...]] = []
    for ranks in hosts.values():
        groups = group_reachable(ranks, [[reach[a][b] for b in ranks] for a in ranks])
        if len(groups) > 1:
            notes.append(
                f"ranks {ranks} run on one host but cannot map each other's shared memory "
                f"(separate containers or /dev/shm): taken as {len(groups)} nodes {groups}"
            )
        for group in groups:
            machines.append(tuple(group))
            parts = split_virtual(group, config.ranks_per_node)
            nodes += parts
    cut = len(nodes) > len(hosts)
    if cut and not notes:
        notes.append(
            f"{len(hosts)} host(s) cut into {len(nodes)} virtual nodes of up to "
            f"{config.ranks_per_node} ranks, isolated from each other's shared memory"
        )
    nodes.sort(key=lambda ranks: ranks[0])
    layout = RankLayout(tuple(map(tuple, nodes)))
    return Nodes(layout, cut, named, tuple(notes), tuple(sorted(machines)))
