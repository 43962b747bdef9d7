"""What a planner is told: the collective, its size and the limits of the machine."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from rdmakit.errors import InvalidArgument
from rdmakit.layout import RankLayout

__all__ = ["Call", "Form", "Kind", "Limits"]


class Kind(enum.Enum):
    """The collectives that have planners; those in blocks serve MPI's v-calls too."""

    __hash__ = object.__hash__  # members are singletons; Enum hashes their names in Python

    ALLREDUCE = "allreduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALLGATHER = "allgather"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    GATHER = "gather"
    SCATTER = "scatter"
    ALLTOALL = "alltoall"
    SCAN = "scan"
    EXSCAN = "exscan"


_SENDS_BLOCKS = (Kind.SCATTER, Kind.REDUCE_SCATTER, Kind.ALLTOALL)
_RECEIVES_BLOCKS = (Kind.GATHER, Kind.ALLGATHER, Kind.ALLTOALL)
_IN_PLACE = (Kind.ALLTOALL, Kind.REDUCE_SCATTER)


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
    """One collective on ``layout``, equal on all ranks but for the displacements.

    What SEND and RECV hold, in elements; where only the root has an array, the other ranks'
    programs do not touch it:

    ================== ============================== =================================
    kind               SEND                           RECV
    ================== ============================== =================================
    all-reduce, scans  ``count``                      ``count``
    reduce             ``count``                      ``count``, at the root
    broadcast          not used                       ``count``; the input, at the root
    gather             own block                      block of each rank, at the root
    scatter            block for each rank, at root   own block
    all-gather         own block                      block of each rank
    reduce-scatter     block for each rank            own block
    all-to-all         block for each rank            block of each rank
    ================== ============================== =================================

    Raises:
        InvalidArgument: the fields do not fit each other.
    """

    kind: Kind
    layout: RankLayout
    count: int
    """Elements of the vector, or of each block; not used where ``counts`` are given."""
    limits: Limits
    root: int = 0
    counts: tuple[int, ...] | tuple[tuple[int, ...], ...] = ()
    """Elements of each rank's block; of an all-to-all one row for each sender, of what it sends
    to each rank. Empty: all blocks have ``count``."""
    send_at: tuple[int, ...] = ()
    """This rank's own: where in SEND the block for each rank begins. Empty: one behind the
    other in the order of ranks. Only the program of this rank depends on it."""
    recv_at: tuple[int, ...] = ()
    """Likewise where in RECV the block of each rank begins; what is between stays untouched."""
    in_place: bool = False
    """All-to-all: SEND and RECV are the same memory, ``recv_at`` counts for both. Reduce-scatter:
    RECV is the front of SEND, as MPI has it. Elsewhere, and for a reduce-scatter whose RECV is
    the own block in SEND, arrays that share memory need no word: RECV of an all-reduce, reduce
    or scan may be SEND; in gather and all-gather SEND may be the own block in RECV; in scatter
    RECV may be the own block in SEND."""

    def __post_init__(self) -> None:
        n, kind = self.layout.size, self.kind
        if self.count < 0 or not 0 <= self.root < n:
            raise InvalidArgument(f"count {self.count}, root {self.root} of {n} ranks")
        blocks = kind in _SENDS_BLOCKS or kind in _RECEIVES_BLOCKS
        if self.counts and not blocks:
            raise InvalidArgument(f"{kind.value} has one count for all ranks")
        if self.send_at and kind not in (Kind.SCATTER, Kind.ALLTOALL):
            raise InvalidArgument(f"SEND of {kind.value} has no displacements")
        if self.recv_at and kind not in _RECEIVES_BLOCKS:
            raise InvalidArgument(f"RECV of {kind.value} has no displacements")
        for name in ("counts", "send_at", "recv_at"):
            given = getattr(self, name)
            if given and len(given) != n:
                raise InvalidArgument(f"{name} has {len(given)} entries for {n} ranks")
        least = [min(entry) if isinstance(entry, tuple) else entry for entry in self.counts]
        if min((*least, *self.send_at, *self.recv_at, 0)) < 0:
            raise InvalidArgument("a count or displacement is below 0")
        self._check_matrix()

    def _check_matrix(self) -> None:
        rows = [row for row in self.counts if isinstance(row, tuple)]
        if self.counts and (self.kind is Kind.ALLTOALL) != (len(rows) == len(self.counts)):
            raise InvalidArgument("counts of an all-to-all are a row for each rank, others are not")
        if any(len(row) != self.layout.size for row in rows):
            raise InvalidArgument(f"a row of counts has not {self.layout.size} entries")
        if not self.in_place:
            return
        if self.kind not in _IN_PLACE:
            raise InvalidArgument(f"in place {self.kind.value} is told by the addresses alone")
        if self.kind is Kind.ALLTOALL and (self.send_at or rows != list(zip(*rows, strict=True))):
            raise InvalidArgument("in place, each pair of ranks exchanges equal counts, at recv_at")

    @cached_property
    def _hash(self) -> int:
        return hash(
            (self.kind, self.layout, self.count, self.limits, self.root, self.counts,
             self.send_at, self.recv_at, self.in_place)
        )  # fmt: skip

    def __hash__(self) -> int:
        """Return a hash that is computed once: a matrix of counts is long."""
        return self._hash

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """Elements of each rank's block; not for an all-to-all."""
        assert self.kind is not Kind.ALLTOALL
        counts = tuple(entry for entry in self.counts if not isinstance(entry, tuple))
        return counts or (self.count,) * self.layout.size

    def elements(self, source: int, target: int) -> int:
        """Return what an all-to-all sends from ``source`` to ``target``."""
        row = self.counts[source] if self.counts else ()
        return row[target] if isinstance(row, tuple) and row else self.count

    def send_offsets(self, rank: int) -> tuple[int, ...]:
        """Return where in SEND of ``rank`` (this one) the block for each rank begins."""
        if self.in_place and self.kind is Kind.ALLTOALL:
            return self.recv_offsets(rank)
        if self.send_at:
            return self.send_at
        if self.kind is not Kind.ALLTOALL:
            return _starts(self.blocks)
        return _starts(self.elements(rank, q) for q in range(self.layout.size))

    def recv_offsets(self, rank: int) -> tuple[int, ...]:
        """Return where in RECV of ``rank`` (this one) the block of each rank begins."""
        if self.recv_at:
            return self.recv_at
        if self.kind is not Kind.ALLTOALL:
            return _starts(self.blocks)
        return _starts(self.elements(q, rank) for q in range(self.layout.size))

    @property
    def few_rounds(self) -> bool:
        """Whether the rails save rounds rather than bytes: decided by a whole shard."""
        if self.kind in (Kind.ALLREDUCE, Kind.REDUCE):
            return -(-self.count // self.layout.shards) <= self.limits.small
        return self.kind is Kind.BROADCAST and self.count <= self.limits.small

    @cached_property
    def longest(self) -> int:
        """Elements of the longest array of any rank, without holes; equal on all ranks."""
        n = self.layout.size
        if self.kind is Kind.ALLTOALL:
            if not self.counts:
                return self.count * n
            rows = [row for row in self.counts if isinstance(row, tuple)]
            return max(*map(sum, rows), *map(sum, zip(*rows, strict=True)))
        blocks = self.kind in _SENDS_BLOCKS or self.kind in _RECEIVES_BLOCKS
        return sum(self.blocks) if blocks else self.count


@dataclass(frozen=True)
class Form:
    """What a call moves: of a :class:`Call` all that the machine has no say in."""

    count: int = 0
    counts: tuple[int, ...] | tuple[tuple[int, ...], ...] = ()
    send_at: tuple[int, ...] = ()
    recv_at: tuple[int, ...] = ()
    in_place: bool = False

    def longest(self, kind: Kind, ranks: int) -> int:
        """Return :attr:`Call.longest`, which is the same wherever the ranks are."""
        return self.call(kind, RankLayout.of_sizes([ranks]), Limits(1, 1, 1)).longest

    def call(self, kind: Kind, layout: RankLayout, limits: Limits, root: int = 0) -> Call:
        """Return the call on ``layout``."""
        return Call(
            kind, layout, self.count, limits, root,
            self.counts, self.send_at, self.recv_at, self.in_place,
        )  # fmt: skip


def _starts(counts: Iterable[int]) -> tuple[int, ...]:
    return tuple(accumulate(counts, initial=0))[:-1]
