"""What a planner is told: the collective, its size and the limits of the machine."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from rdmakit.layout import RankLayout

__all__ = ["Call", "Kind", "Limits"]


class Kind(enum.Enum):
    """The collectives that have planners."""

    ALLREDUCE = "allreduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALLGATHER = "allgather"
    BROADCAST = "broadcast"


@dataclass(frozen=True)
class Limits:
    """Sizes in elements; equal on all ranks."""

    window: int
    """Window area of each rank."""
    chunk: int
    """Piece into which long vectors are cut so that node and rail work at the same time."""
    small: int
    """Messages up to here take the schedule of fewest rounds."""


@dataclass(frozen=True)
class Call:
    """One collective on ``layout``.

    ``count`` elements are: the whole vector (all-reduce, broadcast) or one rank's block
    (reduce-scatter receives it, all-gather sends it), as in MPI.
    """

    kind: Kind
    layout: RankLayout
    count: int
    limits: Limits
    root: int = 0

    @property
    def few_rounds(self) -> bool:
        """Whether the rails save rounds rather than bytes: decided by a whole shard."""
        if self.kind is Kind.ALLREDUCE:
            return -(-self.count // self.layout.shards) <= self.limits.small
        return self.kind is Kind.BROADCAST and self.count <= self.limits.small

    @property
    def total(self) -> int:
        """Elements of the longer of the two arrays."""
        blocks = self.kind in (Kind.REDUCE_SCATTER, Kind.ALLGATHER)
        return self.count * (self.layout.size if blocks else 1)
