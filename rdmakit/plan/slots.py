"""The window as a row of slots that chunks pass through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rdmakit.layout import RankLayout
from rdmakit.plan.pieces import SLOTS, free, full, reduced
from rdmakit.plan.shape import Limits
from rdmakit.plan.steps import DONE, Builder, Program, Ref, Space

__all__ = ["Slots", "chunk_elements", "closed", "slot_elements"]


_GRAIN = 64
"""Elements: a slot holds a multiple, so that vector loads of the next are aligned."""


def slot_elements(limits: Limits) -> int:
    """Return how many elements one slot of the window holds."""
    room = limits.window // SLOTS
    return room - room % _GRAIN if room > _GRAIN else room


def chunk_elements(limits: Limits, layout: RankLayout) -> int:
    """Return how many elements of a vector are under way together."""
    slot = slot_elements(limits) if max(layout.ranks_per_node) > 1 else limits.chunk * 4
    return max(1, min(slot, limits.chunk) if len(layout.nodes) > 1 else slot)


@dataclass
class Slots:
    """This rank's use of the window: ``SLOTS`` places of ``elements``, one chunk in each.

    ``peers`` take part, among ``everyone`` on the node (default: the same).
    """

    b: Builder
    peers: Sequence[int]
    elements: int
    everyone: Sequence[int] = ()
    _entry: list[int] | None = None

    def __post_init__(self) -> None:
        if self.elements > _GRAIN:  # slots begin on cache lines, if areas do
            self.elements += -self.elements % _GRAIN

    def place(self, owner: int, slot: int, offset: int, count: int) -> Ref:
        """Return elements of ``slot`` in the area of ``owner``."""
        assert offset + count <= self.elements
        self.b.window = max(self.b.window, SLOTS * self.elements)
        return Ref(Space.WINDOW, slot * self.elements + offset, count, owner)

    def writable(
        self, turn: int, after: Sequence[int] = (), readers: Sequence[int] | None = None
    ) -> list[int]:
        """Return the waits after which nobody reads the slot of chunk ``turn`` any more.

        ``readers`` (default: all peers) are those that read what is written there.
        """
        if turn >= SLOTS:
            readers = self.peers if readers is None else readers
            return self.b.wait(readers, free(turn % SLOTS), turn - SLOTS + 1, after)
        if self._entry is None:
            self._entry = self.b.wait(self.everyone or self.peers, DONE, 0)
        return self._entry

    def filled(self, turn: int, after: Sequence[int]) -> list[int]:
        """Say that this rank's part of chunk ``turn`` is in the window."""
        return self.b.post(full(turn % SLOTS), turn + 1, after)

    def await_filled(
        self, turn: int, owners: Sequence[int], after: Sequence[int] = ()
    ) -> list[int]:
        """Wait for the parts of ``owners``."""
        return self.b.wait(owners, full(turn % SLOTS), turn + 1, after)

    def finish(self, turn: int, turns: int, after: Sequence[int]) -> None:
        """Say that this rank has read all it needs of chunk ``turn``."""
        if turn + SLOTS < turns:
            self.b.post(free(turn % SLOTS), turn + 1, after)

    def announce(self, turn: int, after: Sequence[int]) -> None:
        """Say that what this rank gives to its peers of chunk ``turn`` is complete."""
        self.b.post(reduced(turn % SLOTS), turn + 1, after)

    def await_announced(
        self, turn: int, owners: Sequence[int], after: Sequence[int] = ()
    ) -> list[int]:
        """Wait for what ``owners`` give."""
        return self.b.wait(owners, reduced(turn % SLOTS), turn + 1, after)


def closed(b: Builder, layout: RankLayout, span: int, tags: int) -> Program:
    """Return the program, ended by the word that this rank has left the node's window.

    The word comes behind every step, so that the next plan finds no use of the window left.
    """
    if span and len(layout.nodes[layout.node_of(b.rank)]) > 1:
        waited = {step for after in b.after for step in after}
        b.post(DONE, span, [step for step in range(len(b.steps)) if step not in waited])
    return b.build(span, tags)
