"""Which rank is on which node, and what follows from it: node groups, rails, shard owners.

Pure data and pure functions of values that are equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from rdmakit.errors import InvalidArgument

__all__ = ["RankLayout", "group_reachable", "split_virtual"]


@dataclass(frozen=True)
class RankLayout:
    """Ranks 0..size-1 on nodes; within a node the order of the tuple is the local rank."""

    nodes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        ranks = sorted(rank for node in self.nodes for rank in node)
        if ranks != list(range(len(ranks))) or not ranks or not all(self.nodes):
            raise InvalidArgument(f"nodes {self.nodes} are not a division of ranks 0..n-1")

    @classmethod
    def uniform(cls, nodes: int, ranks_per_node: int) -> RankLayout:
        """Return ``nodes`` nodes of ``ranks_per_node`` consecutive ranks each."""
        return cls.of_sizes([ranks_per_node] * nodes)

    @classmethod
    def of_sizes(cls, sizes: Sequence[int]) -> RankLayout:
        """Return nodes of the given sizes with consecutive ranks: ``[3, 1]`` is (0,1,2), (3)."""
        nodes, start = [], 0
        for size in sizes:
            nodes.append(tuple(range(start, start + size)))
            start += size
        return cls(tuple(nodes))

    def part(self, ranks: Sequence[int]) -> RankLayout:
        """Return where ``ranks`` are, numbered anew in the order given."""
        nodes: dict[int, list[int]] = {}
        for number, rank in enumerate(ranks):
            nodes.setdefault(self.node_of(rank), []).append(number)
        return RankLayout(tuple(map(tuple, nodes.values())))

    @cached_property
    def size(self) -> int:
        """Number of ranks."""
        return sum(len(node) for node in self.nodes)

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        return {
            rank: (node, local)
            for node, ranks in enumerate(self.nodes)
            for local, rank in enumerate(ranks)
        }

    def node_of(self, rank: int) -> int:
        """Return the index of the node that ``rank`` is on."""
        return self._places[rank][0]

    def local_rank(self, rank: int) -> int:
        """Return the index of ``rank`` within its node."""
        return self._places[rank][1]

    @cached_property
    def ranks_per_node(self) -> tuple[int, ...]:
        """Number of ranks of each node."""
        return tuple(len(node) for node in self.nodes)

    @cached_property
    def rails(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of equal local rank, one group for each local rank, in the order of nodes."""
        return tuple(
            tuple(node[local] for node in self.nodes if local < len(node))
            for local in range(max(self.ranks_per_node))
        )

    @cached_property
    def shards(self) -> int:
        """Into how many parts a node divides a vector before it goes onto the rails.

        With equal nodes one part for each local rank. With unequal nodes the number that makes
        the busiest rank's share smallest (8 + 7 gives 7, 3 + 1 gives 3: the lone rank holds all
        three); of equals the largest, which divides the node's own work best.
        """
        sizes = self.ranks_per_node

        def busiest(shards: int) -> float:
            return max(-(-shards // size) for size in sizes) / shards

        return min(range(1, max(sizes) + 1), key=lambda shards: (busiest(shards), -shards))

    def owner(self, node: int, shard: int) -> int:
        """Return the rank of ``node`` that holds ``shard``; consecutive shards stay together."""
        ranks = self.nodes[node]
        return ranks[shard * len(ranks) // self.shards if len(ranks) < self.shards else shard]

    def rank_order(self) -> tuple[int, ...]:
        """Return all ranks node by node: the order of the flat ring, one link between nodes."""
        return tuple(rank for node in self.nodes for rank in node)

    def describe(self) -> str:
        """Return the shape: ``2x8`` or ``8+7``."""
        sizes = self.ranks_per_node
        if len(set(sizes)) == 1:
            return f"{len(sizes)}x{sizes[0]}"
        return "+".join(map(str, sizes))


def group_reachable(ranks: Sequence[int], reach: Sequence[Sequence[bool]]) -> list[list[int]]:
    """Divide ``ranks`` into groups whose members all reach each other, both ways.

    ``reach[i][j]`` says whether ``ranks[i]`` could address memory of ``ranks[j]``. Greedy in
    rank order, so that every rank computes the same groups from the same matrix.
    """
    groups: list[list[int]] = []
    for i in range(len(ranks)):
        for group in groups:
            if all(reach[i][j] and reach[j][i] for j in group):
                group.append(i)
                break
        else:
            groups.append([i])
    return [[ranks[i] for i in group] for group in groups]


def split_virtual(node: Sequence[int], ranks_per_node: int) -> list[list[int]]:
    """Cut one node's ranks into virtual nodes of ``ranks_per_node``; 0 leaves it whole."""
    step = ranks_per_node or len(node)
    return [list(node[start : start + step]) for start in range(0, len(node), step)]
