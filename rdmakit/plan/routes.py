"""Which way blocks go from rank to rank, and where they lie in windows on the way.

A *parcel* is what one rank gives to another, or to all. Between nodes it may go straight from
rank to rank (:class:`Direct`), to a rank of the target's node that stands in for its source
(:class:`Spread`: blocks of a node come in over all rails), or through a rank of its own node
that stands in for its target and sends what the node has for it as one message
(:class:`Collect`). All of this is equal on all ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from rdmakit.layout import RankLayout
from rdmakit.plan.pieces import piece, turns_for
from rdmakit.plan.shape import Call, Kind
from rdmakit.plan.slots import chunk_elements, slot_elements

__all__ = [
    "ALL",
    "Area",
    "Collect",
    "Direct",
    "Parcel",
    "Region",
    "Routes",
    "Spread",
    "clients",
    "proxy",
]

ALL = -1
"""Target of a parcel that every rank wants."""
Parcel = tuple[int, int]
"""Source and target."""
_MESSAGE_CHUNKS = 4
"""Chunks in the longest message."""


def proxy(layout: RankLayout, node: int, rank: int) -> int:
    """Return the rank of ``node`` that handles the block of ``rank`` there.

    The one of equal local rank; those of smaller nodes are spread over the ranks of ``node``.
    """
    ranks, home = layout.nodes[node], layout.node_of(rank)
    size = len(layout.nodes[home])
    shift = home * size if size < len(ranks) else 0
    return ranks[(layout.local_rank(rank) + shift) % len(ranks)]


@lru_cache(maxsize=2048)
def clients(layout: RankLayout, node: int) -> dict[int, list[int]]:
    """Return for each rank of ``node`` the ranks of other nodes that it is the proxy of."""
    found: dict[int, list[int]] = {rank: [] for rank in layout.nodes[node]}
    for i, ranks in enumerate(layout.nodes):
        for q in ranks if i != node else ():
            found[proxy(layout, node, q)].append(q)
    return found


@dataclass(frozen=True)
class Region:
    """Part of a window slot: pieces of ``parcels``, one behind the other from ``start``."""

    start: int
    parcels: tuple[Parcel, ...]


@dataclass
class Area:
    """What a rank's window slot holds."""

    kept: dict[Parcel, Region]
    """Parcels of this rank that peers read."""
    leaving: dict[int, Region]
    """Messages to other nodes, by target, which peers help to fill."""
    landing: dict[int, Region]
    """Messages from other nodes, by source, that hold something for peers."""
    elements: int = 0


class Routes(ABC):
    """The parcels of a call. Subclasses say which rank sends what to which rank."""

    assembles = False
    """Whether peers help to fill the messages that leave."""
    relays = False
    """Whether messages land at one rank for its peers."""

    def __init__(self, call: Call) -> None:
        self.call, self.layout = call, call.layout
        self._many = call.kind in (Kind.ALLGATHER, Kind.BROADCAST)
        self._areas: dict[int, Area] = {}

    @abstractmethod
    def leaving(self, rank: int) -> dict[int, tuple[Parcel, ...]]:
        """Return the messages that ``rank`` sends to ranks of other nodes."""

    @abstractmethod
    def landing(self, rank: int) -> dict[int, tuple[Parcel, ...]]:
        """Return the messages that ``rank`` receives from ranks of other nodes."""

    def parcel(self, source: int, target: int) -> Parcel | None:
        """Return what ``source`` has for ``target``, if anything."""
        kind, root = self.call.kind, self.call.root
        if kind in (Kind.SCATTER, Kind.BROADCAST) and source != root:
            return None
        if kind is Kind.GATHER and target != root:
            return None
        parcel = (source, ALL if self._many else target)
        return parcel if self.size(parcel) else None

    def parcels(self, sources: Iterable[int], target: int) -> tuple[Parcel, ...]:
        """Return what ``sources`` have for ``target``."""
        found = (self.parcel(source, target) for source in sources)
        return tuple(parcel for parcel in found if parcel is not None)

    def size(self, parcel: Parcel) -> int:
        """Return the elements of the whole parcel."""
        source, target = parcel
        match self.call.kind:
            case Kind.ALLTOALL:
                return self.call.elements(source, target)
            case Kind.SCATTER:
                return self.call.blocks[target]
            case Kind.BROADCAST:
                return self.call.count
        return self.call.blocks[source]

    def piece(self, parcel: Parcel, turn: int) -> tuple[int, int]:
        """Return (offset, count) of the part of the parcel that goes in chunk ``turn``."""
        return piece(self.size(parcel), self.turns, turn)

    def abroad(self, rank: int) -> Iterable[int]:
        """Return the ranks of the other nodes."""
        home = self.layout.node_of(rank)
        return (q for i, node in enumerate(self.layout.nodes) if i != home for q in node)

    def peers(self, rank: int) -> Sequence[int]:
        """Return the ranks of the node of ``rank``, it among them."""
        return self.layout.nodes[self.layout.node_of(rank)]

    def area(self, rank: int) -> Area:
        """Return what the window slot of ``rank`` holds."""
        if rank not in self._areas:
            self._areas[rank] = self._laid_out(rank)
        return self._areas[rank]

    def _laid_out(self, rank: int) -> Area:
        kept, leaving, landing = self._contents(rank)
        start = 0

        def region(parcels: tuple[Parcel, ...]) -> Region:
            nonlocal start
            begin = start
            start += sum(-(-self.size(parcel) // self.turns) for parcel in parcels)
            return Region(begin, parcels)

        area = Area(
            {parcel: region((parcel,)) for parcel in kept},
            {target: region(parcels) for target, parcels in leaving.items()},
            {source: region(parcels) for source, parcels in landing.items()},
        )
        area.elements = start
        return area

    def _contents(
        self, rank: int
    ) -> tuple[list[Parcel], dict[int, tuple[Parcel, ...]], dict[int, tuple[Parcel, ...]]]:
        peers = self.peers(rank)
        others = [peer for peer in peers if peer != rank]
        if not others:
            return [], {}, {}
        kept = dict.fromkeys(p for q in others if (p := self.parcel(rank, q)) is not None)
        leaving = {
            target: parcels
            for target, parcels in (self.leaving(rank) if self.assembles else {}).items()
            if any(source != rank for source, _ in parcels)
        }
        landing = {
            source: parcels
            for source, parcels in (self.landing(rank) if self.relays else {}).items()
            if any(target != rank for _, target in parcels)
        }
        return list(kept), leaving, landing

    @cached_property
    def turns(self) -> int:
        """Into how many pieces every parcel is cut.

        Raises:
            UnsupportedError: the window is too small.
        """
        limits = self.call.limits
        slot = slot_elements(limits)
        phases = self.assembles or self.relays
        wish = chunk_elements(limits, self.layout) if phases else slot
        turns = -(-self._longest // (limits.chunk * _MESSAGE_CHUNKS))
        for blocks, total in self._loads():
            turns = max(turns, turns_for(blocks, total, self._longest, wish, slot))
        return turns

    def _loads(self) -> Iterable[tuple[int, int]]:
        """Return number and sum of the blocks that areas hold at most, of all or the fullest."""
        for rank in self._witnesses():
            kept, leaving, landing = self._contents(rank)
            regions = ((*kept,), *leaving.values(), *landing.values())
            sizes = [self.size(parcel) for parcels in regions for parcel in parcels]
            yield len(sizes), sum(sizes)

    @cached_property
    def _longest(self) -> int:
        call = self.call
        if call.kind is Kind.BROADCAST or not call.counts:
            return call.count
        if call.kind is Kind.ALLTOALL:
            return max(max(row) for row in call.counts if isinstance(row, tuple))
        return max(call.blocks)

    def _witnesses(self) -> Iterable[int]:
        """Return ranks of whose areas one is the fullest."""
        layout = self.layout
        if self.call.kind in (Kind.GATHER, Kind.SCATTER, Kind.BROADCAST):
            return self.peers(self.call.root)  # elsewhere slots are empty
        if self.call.counts:
            return range(layout.size)
        return (q for node in {len(node): node for node in layout.nodes}.values() for q in node)

    def slot(self, rank: int) -> int:
        """Return the elements of a slot in the node of ``rank``."""
        return max(self.area(peer).elements for peer in self.peers(rank))


class Direct(Routes):
    """Every parcel goes from its source to each of its targets."""

    def leaving(self, rank: int) -> dict[int, tuple[Parcel, ...]]:
        """Return a message for each rank elsewhere that gets something."""
        found = {q: self.parcels([rank], q) for q in self.abroad(rank)}
        return {target: parcels for target, parcels in found.items() if parcels}

    def landing(self, rank: int) -> dict[int, tuple[Parcel, ...]]:
        """Return a message of each rank elsewhere that gives something."""
        found = {q: self.parcels([q], rank) for q in self.abroad(rank)}
        return {source: parcels for source, parcels in found.items() if parcels}


class Spread(Routes):
    """A block goes once to each node that wants it: to its source's proxy there.

    For kinds in which each rank has one parcel.
    """

    relays = True

    def leaving(self, rank: int) -> dict[int, tuple[Parcel, ...]]:
        """Return a message for each node that wants the block."""
        layout, home = self.layout, self.layout.node_of(rank)
        parcels = self.parcels([rank], self.call.root)
        nodes = [i for i in range(len(layout.nodes)) if i != home and self._wanted(i)]
        return {proxy(layout, i, rank): parcels for i in nodes} if parcels else {}

    def landing(self, rank: int) -> dict[int, tuple[Parcel, ...]]:
        """Return a message of each rank elsewhere that this one stands in for."""
        layout, home = self.layout, self.layout.node_of(rank)
        if not self._wanted(home):
            return {}
        root = self.call.root
        found = {q: self.parcels([q], root) for q in clients(layout, home)[rank]}
        return {source: parcels for source, parcels in found.items() if parcels}

    def _loads(self) -> Iterable[tuple[int, int]]:
        """Of an all-gather each area holds the own block and those that the rank stands in for."""
        if not (self._many and self.call.counts):
            yield from super()._loads()
            return
        blocks = self.call.blocks
        for home, node in enumerate(self.layout.nodes):
            for rank, others in clients(self.layout, home).items() if len(node) > 1 else ():
                sizes = [blocks[q] for q in (rank, *others)]
                yield sum(map(bool, sizes)), sum(sizes)

    def _wanted(self, node: int) -> bool:
        return self._many or node == self.layout.node_of(self.call.root)


class Collect(Routes):
    """What a node has for a rank elsewhere goes as one message from that rank's proxy here.

    For kinds in which each parcel has one target.
    """

    assembles = True

    def leaving(self, rank: int) -> dict[int, tuple[Parcel, ...]]:
        """Return a message for each rank elsewhere that this one stands in for."""
        home, peers = self.layout.node_of(rank), self.peers(rank)
        found = {q: self.parcels(peers, q) for q in clients(self.layout, home)[rank]}
        return {target: parcels for target, parcels in found.items() if parcels}

    def landing(self, rank: int) -> dict[int, tuple[Parcel, ...]]:
        """Return a message of each other node, from this rank's proxy there."""
        found = {
            proxy(self.layout, i, rank): self.parcels(node, rank)
            for i, node in enumerate(self.layout.nodes)
            if i != self.layout.node_of(rank)
        }
        return {source: parcels for source, parcels in found.items() if parcels}

    def _loads(self) -> Iterable[tuple[int, int]]:
        """Of a matrix of counts, sum whole columns: it has a million entries for 1024 ranks."""
        if not self.call.counts or self.call.kind is not Kind.ALLTOALL:
            yield from super()._loads()
            return
        for home, node in enumerate(self.layout.nodes):
            if len(node) == 1:
                continue
            rows = [row for q in node if isinstance(row := self.call.counts[q], tuple)]
            totals = [sum(column) for column in zip(*rows, strict=True)]
            blocks = [sum(map(bool, column)) for column in zip(*rows, strict=True)]
            for rank, others in clients(self.layout, home).items():
                kept = [self.call.elements(rank, q) for q in node if q != rank]
                yield (
                    sum(map(bool, kept)) + sum(blocks[q] for q in others),
                    sum(kept) + sum(totals[q] for q in others),
                )
