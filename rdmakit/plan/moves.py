"""Programs that move blocks along :mod:`~rdmakit.plan.routes`: windows in nodes, messages between.

Gather and all-gather go by :class:`~rdmakit.plan.routes.Spread`, their mirror scatter and
all-to-all by :class:`~rdmakit.plan.routes.Collect`, and all of them, and the broadcast of one
sender, also by :class:`~rdmakit.plan.routes.Direct`. Blocks are cut into equally many pieces;
piece by piece they are put into the window (1), sent and received (2), and, one chunk later,
read by those who want them (3). A slot of the window is filled again when all have read it.

Elements leaving a node: what its ranks have for others, once for each rank (gather, scatter,
all-to-all), once for each other node (all-gather) or, straight, for each rank there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rdmakit.plan.flow import Buffers, Throttle, exchange_round
from rdmakit.plan.pieces import SLOTS, joined
from rdmakit.plan.routes import ALL, Collect, Direct, Parcel, Region, Routes, Spread
from rdmakit.plan.shape import Call, Kind
from rdmakit.plan.slots import Slots, closed
from rdmakit.plan.steps import Builder, Program, Ref, Space

__all__ = ["direct_moves", "hierarchical_moves"]


def hierarchical_moves(call: Call, rank: int) -> Program:
    """Return the program of a gather, scatter, all-gather or all-to-all over nodes and rails."""
    spread = call.kind in (Kind.GATHER, Kind.ALLGATHER)
    return _Mover(call, rank, Spread(call) if spread else Collect(call)).program()


def direct_moves(call: Call, rank: int) -> Program:
    """Return the program in which all messages go from the source of a block to its target."""
    return _Mover(call, rank, Direct(call)).program()


@dataclass
class _Chunk:
    """Steps of this rank in one chunk that others wait for."""

    writable: list[int] = field(default_factory=list)
    """Behind these the slot may be filled."""
    filled: list[int] = field(default_factory=list)
    """The word that this rank's blocks are in the window."""
    taken: dict[int, list[int]] = field(default_factory=dict)
    """Behind these the own block for a rank has been read."""
    arrived: dict[int, list[int]] = field(default_factory=dict)
    """Messages in the window, by source."""
    seen: dict[tuple[int, bool], list[int]] = field(default_factory=dict)
    """Waits for peers that exist already."""
    ends: list[int] = field(default_factory=list)
    """Behind these this rank needs the window no more."""


class _Mover:
    """Makes the program of one rank."""

    def __init__(self, call: Call, rank: int, routes: Routes) -> None:
        self.call, self.rank, self.routes = call, rank, routes
        self.b, self.turns = Builder(rank), routes.turns
        peers = routes.peers(rank)
        at = peers.index(rank)
        self.peers = (*peers[at + 1 :], *peers[:at])  # from the next one on: spreads the reads
        self.slots = Slots(self.b, peers, max(1, routes.slot(rank)))
        self._send_at = self._offsets(call.kind in (Kind.SCATTER, Kind.ALLTOALL), sends=True)
        self._recv_at = self._offsets(
            call.kind in (Kind.GATHER, Kind.ALLGATHER, Kind.ALLTOALL), sends=False
        )
        self.area = routes.area(rank)
        order = self._order
        self.leaving = sorted(routes.leaving(rank).items(), key=lambda x: order(rank, x[0]))
        self.landing = sorted(routes.landing(rank).items(), key=lambda x: order(x[0], rank))
        self.pushes, self.fetches = self._pushes(), self._fetches()
        self.readers = self._readers()
        self._sent, self._received = Throttle(), Throttle()
        self._inbox = Buffers(self.b, self._longest(self.landing))
        self._outbox = Buffers(self.b, self._longest(self.leaving))
        self._chunks: dict[int, _Chunk] = {}

    def program(self) -> Program:
        """Return the finished program."""
        for turn in range(self.turns + 1):
            if turn < self.turns:
                self._keep(turn)
                self._fill(turn)
                self._send(turn)
                self._receive(turn)
            if turn:
                self._fetch(turn - 1)
        return closed(self.b, self.call.layout, self.turns, self.turns)

    # -- what goes where ------------------------------------------------------------------------

    def _offsets(self, blocks: bool, *, sends: bool) -> Sequence[int]:
        if not blocks:
            return ()
        return (self.call.send_offsets if sends else self.call.recv_offsets)(self.rank)

    def _order(self, source: int, target: int) -> tuple[int, int, int, int]:
        """Return the place of a message in the order of all: by rounds of nodes, then of ranks.

        In place, both messages of a pair are next to each other: what is received takes the
        place of what is sent, for which there is little room elsewhere.
        """
        layout, pairs = self.call.layout, self.call.in_place
        nodes = layout.node_of(source), layout.node_of(target)
        of, to = layout.local_rank(source), layout.local_rank(target)
        among = (to + of if pairs else to - of) % max(layout.ranks_per_node)
        low, high = sorted((source, target)) if pairs else (source, target)
        return exchange_round(*nodes, len(layout.nodes), in_pairs=pairs), among, low, high

    def _pushes(self) -> list[tuple[Parcel, int, Region]]:
        """Return what this rank puts into the window, and in whose area."""
        pushes = [(parcel, self.rank, region) for parcel, region in self.area.kept.items()]
        for owner in (*self.peers, self.rank):
            for region in self.routes.area(owner).leaving.values():
                pushes += [(p, owner, region) for p in region.parcels if p[0] == self.rank]
        return pushes

    def _fetches(self) -> list[tuple[Parcel, int, Region, int]]:
        """Return what this rank reads from the window, in whose area, and where it came from."""
        fetches = []
        for owner in (*self.peers, self.rank):
            area = self.routes.area(owner)
            wanted = [(p, r, owner) for p, r in area.kept.items() if owner != self.rank]
            wanted += [(p, r, x) for x, r in area.landing.items() for p in r.parcels]
            fetches += [(p, owner, r, x) for p, r, x in wanted if p[1] in (self.rank, ALL)]
        return fetches

    def _readers(self) -> list[int]:
        """Return the peers that read what this rank writes, in its area or theirs."""
        found = {owner for _, owner, _ in self.pushes}
        for region in (*self.area.kept.values(), *self.area.landing.values()):
            for _, target in region.parcels:
                found |= {target} if target != ALL else set(self.peers)
        return [peer for peer in self.peers if peer in found]

    def _longest(self, messages: list[tuple[int, tuple[Parcel, ...]]]) -> int:
        return max(
            (sum(self.routes.piece(p, 0)[1] for p in parcels) for _, parcels in messages),
            default=0,
        )

    def _given(self, parcel: Parcel, turn: int) -> Ref:
        offset, count = self.routes.piece(parcel, turn)
        start = self._send_at[parcel[1]] if self._send_at else 0
        space = Space.RECV if self.call.kind is Kind.BROADCAST else Space.SEND
        return Ref(space, start + offset, count)

    def _wanted(self, parcel: Parcel, turn: int) -> Ref:
        offset, count = self.routes.piece(parcel, turn)
        start = self._recv_at[parcel[0]] if self._recv_at else 0
        return Ref(Space.RECV, start + offset, count)

    def _part(self, owner: int, region: Region, parcel: Parcel, turn: int) -> Ref:
        start = region.start
        for other in region.parcels:
            if other == parcel:
                break
            start += self.routes.piece(other, turn)[1]
        return self.slots.place(owner, turn % SLOTS, start, self.routes.piece(parcel, turn)[1])

    def _message(self, region: Region, turn: int) -> Ref:
        count = sum(self.routes.piece(parcel, turn)[1] for parcel in region.parcels)
        return self.slots.place(self.rank, turn % SLOTS, region.start, count)

    # -- the phases of one chunk ------------------------------------------------------------------

    def _keep(self, turn: int) -> None:
        """Copy what this rank has for itself."""
        own = self.routes.parcel(self.rank, self.rank)
        if own and self.call.kind is not Kind.BROADCAST and not self.call.in_place:
            self.b.copy(self._wanted(own, turn), self._given(own, turn))

    def _fill(self, turn: int) -> None:
        """Put blocks into the window."""
        state = self._chunks[turn] = _Chunk()
        before = self._chunks.pop(turn - SLOTS, _Chunk()).ends
        if not self.pushes and not self.area.landing:
            return
        waits = state.writable = [*before, *self.slots.writable(turn, before, self.readers)]
        copied: list[int] = []
        for parcel, owner, region in self.pushes:
            given = self._given(parcel, turn)
            if given.count:
                # One behind the other, as they are done anyway: saves dependencies.
                copied = self.b.copy(
                    self._part(owner, region, parcel, turn), given, copied or waits
                )
                state.taken[parcel[1]] = copied
        if self.pushes:
            state.filled = self.slots.filled(turn, copied or waits)

    def _send(self, turn: int) -> None:
        state = self._chunks[turn]
        for target, parcels in self.leaving:
            region = self.area.leaving.get(target)
            if region is not None:
                waits = list(state.filled)
                for source in dict.fromkeys(source for source, _ in parcels):
                    waits += self._await(turn, source, landed=False)
                state.ends += self._sends(target, self._message(region, turn), turn, waits)
                continue
            src = self._given(parcels[0], turn)
            if self.call.in_place and src.count:
                copy, free = self._outbox.take(src.count)
                state.taken[target] = self.b.copy(copy, src, free)
                self._outbox.release(self._sends(target, copy, turn, state.taken[target]))
            else:
                self._sends(target, src, turn, [])

    def _sends(self, target: int, src: Ref, turn: int, after: list[int]) -> list[int]:
        if not src.count:
            return []
        steps = self.b.send(target, src, turn, [*after, *self._sent.waits()])
        self._sent.began(steps)
        return steps

    def _receive(self, turn: int) -> None:
        state = self._chunks[turn]
        for source, parcels in self.landing:
            region = self.area.landing.get(source)
            if region is not None:
                message = self._message(region, turn)
                state.arrived[source] = self._recv(source, message, turn, state.writable)
                continue
            refs = joined([self._wanted(parcel, turn) for parcel in parcels])
            guards = [step for parcel in parcels for step in self._guard(parcel, turn)]
            if len(refs) == 1:
                self._recv(source, refs[0], turn, guards)
            elif refs:
                self._receive_apart(source, refs, turn, guards)
        if self.area.landing:
            arrived = [step for steps in state.arrived.values() for step in steps]
            self.slots.announce(turn, arrived)

    def _receive_apart(self, source: int, refs: list[Ref], turn: int, guards: list[int]) -> None:
        """Receive one message into private memory and copy its parts to their places."""
        place, free = self._inbox.take(sum(ref.count for ref in refs))
        came, at, ends = self._recv(source, place, turn, free), 0, list[int]()
        for ref in refs:
            ends += self.b.copy(ref, place.part(at, ref.count), [*came, *guards])
            at += ref.count
        self._inbox.release(ends)

    def _recv(self, source: int, dst: Ref, turn: int, after: list[int]) -> list[int]:
        if not dst.count:
            return after
        steps = self.b.recv(source, dst, turn, [*after, *self._received.waits()])
        self._received.began(steps)
        return steps

    def _fetch(self, turn: int) -> None:
        """Read what others put into the window; say that the slots may be filled again."""
        state = self._chunks[turn]
        for parcel, owner, region, source in self.fetches:
            part = self._part(owner, region, parcel, turn)
            if not part.count:
                continue
            if owner == self.rank:
                waits = state.arrived[source]
            else:
                waits = self._await(turn, owner, landed=source != owner)
            guards = self._guard(parcel, turn)
            state.ends += self.b.copy(self._wanted(parcel, turn), part, [*waits, *guards])
        if self.fetches or self.area.leaving:
            self.slots.finish(turn, self.turns, state.ends)

    def _await(self, turn: int, owner: int, *, landed: bool) -> list[int]:
        """Wait, once for each chunk, for what ``owner`` fills, or what lands at it."""
        state, before = self._chunks[turn], self._chunks.get(turn - 1)
        if (owner, landed) not in state.seen:
            # Not begun before there is hope: each open wait is polled.
            after = state.filled or (before.ends[-1:] if before else [])
            wait = self.slots.await_announced if landed else self.slots.await_filled
            state.seen[owner, landed] = wait(turn, [owner], after)
        return state.seen[owner, landed]

    def _guard(self, parcel: Parcel, turn: int) -> list[int]:
        """In place: return the reads of the own block that ``parcel`` takes the place of."""
        return self._chunks[turn].taken.get(parcel[0], []) if self.call.in_place else []
