"""One-way links of a ring: from the left neighbour to this rank and on to the right one.

Between nodes a link is messages, inside a node it is places in the sender's window area. Both
number what passes; a place is used again only when what it held has been consumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from rdmakit.layout import RankLayout
from rdmakit.plan.pieces import LANE_FREE, LANE_FULL
from rdmakit.plan.steps import DONE, Builder, Ref, Space

__all__ = ["PLACES", "Link"]

PLACES = 4
"""Pieces that may be on a link inside a node at once."""
_AHEAD = 16
"""Messages that may be on a link between nodes at once."""

Release = Callable[[Iterable[int]], None]


@dataclass
class Link:
    """This rank's two ends in a ring ``order`` of ranks.

    ``piece`` is the largest number of elements that passes at once. Window areas hold
    ``PLACES`` pieces from element 0 on, private memory as many.
    """

    b: Builder
    layout: RankLayout
    order: Sequence[int]
    piece: int
    _pushed: int = 0
    _pulled: int = 0
    _consumed: dict[int, list[int]] = field(default_factory=dict)
    _sent: dict[int, list[int]] = field(default_factory=dict)
    _last_push: list[int] = field(default_factory=list)
    _last_pull: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        me = self.order.index(self.b.rank)
        self.right = self.order[(me + 1) % len(self.order)]
        self.left = self.order[(me - 1) % len(self.order)]
        node = self.layout.node_of(self.b.rank)
        self._to_window = self.layout.node_of(self.right) == node
        self._from_window = self.layout.node_of(self.left) == node
        self._tmp = None if self._from_window else self.b.private(PLACES * self.piece)
        if self._to_window or self._from_window:
            self.b.window = max(self.b.window, PLACES * self.piece)
        # Earlier plans' readers of this area must be done before the first write to it.
        self._entry = self.b.wait(self.layout.nodes[node], DONE, 0) if self._to_window else []

    def push(self, src: Ref, tag: int, after: Iterable[int]) -> list[int]:
        """Pass ``src`` to the right; return when it may be overwritten."""
        if not src.count:
            return list(after)
        if not self._to_window:
            # A bounded number on the way: the receiver may be far behind.
            sent = self.b.send(self.right, src, tag, [*after, *self._sent.get(self._pushed, [])])
            self._pushed += 1
            self._sent[self._pushed + _AHEAD - 1] = sent
            return sent
        self._pushed += 1
        waits = [*after, *self._entry]
        if self._pushed > PLACES:
            freed = self._pushed - PLACES
            waits += self.b.wait([self.right], LANE_FREE, freed, self._last_push)
        place = Ref(Space.WINDOW, (self._pushed - 1) % PLACES * self.piece, src.count, self.b.rank)
        copied = self.b.copy(place, src, waits)
        self._last_push = self.b.post(LANE_FULL, self._pushed, copied)
        return copied

    def pull(self, count: int, tag: int) -> tuple[Ref, list[int], Release]:
        """Take ``count`` elements from the left.

        Returns where they are, what to wait for, and a function to call with the steps that
        consumed them.
        """
        if not count:
            return Ref(Space.SCRATCH, 0, 0), [], lambda _: None
        self._pulled += 1
        number = self._pulled
        offset = (number - 1) % PLACES * self.piece
        if self._tmp is None:
            ready = self._last_pull = self.b.wait([self.left], LANE_FULL, number, self._last_pull)

            def release(consumed: Iterable[int]) -> None:
                self.b.post(LANE_FREE, number, consumed)

            return Ref(Space.WINDOW, offset, count, self.left), ready, release
        place = self._tmp.part(offset, count)
        ready = self.b.recv(self.left, place, tag, self._consumed.get(number - PLACES, []))

        def remember(consumed: Iterable[int]) -> None:
            self._consumed[number] = list(consumed)

        return place, ready, remember

    def pull_into(self, dst: Ref, tag: int, after: Iterable[int]) -> list[int]:
        """Take the next elements from the left into ``dst``; return when they are there."""
        if not dst.count:
            return list(after)
        if not self._from_window:
            return self.b.recv(self.left, dst, tag, after)
        place, ready, release = self.pull(dst.count, tag)
        copied = self.b.copy(dst, place, [*ready, *after])
        release(copied)
        return copied
