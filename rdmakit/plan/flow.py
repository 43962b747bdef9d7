"""Bounds on what is under way: messages of one rank, and private memory that they pass through."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from rdmakit.plan.steps import Builder, Ref

__all__ = ["Buffers", "Throttle", "exchange_round"]

_UNDER_WAY = 16
"""Messages of one rank in one direction at once."""
_BUFFERS = 4
"""Messages that wait in private memory at once."""


def exchange_round(source: int, target: int, n: int, *, in_pairs: bool = False) -> int:
    """Return in which round ``source`` of ``n`` sends to ``target`` when all send to all.

    In a round each sends one message and receives one, so that all links are busy. ``in_pairs``:
    from the same one, for which an odd number needs a round more than there are others.
    """
    if not in_pairs:
        return (target - source) % n
    low, high = min(source, target), max(source, target)
    if n % 2:
        return (low + high) % n
    return (2 * low if high == n - 1 else low + high) % (n - 1)


@dataclass
class Throttle:
    """Lets a message begin once the one ``limit`` before it is complete.

    All ranks must order their messages alike (as one order of all messages of the plan would);
    then the first that is not complete waits for nothing, and no rank waits for ever.
    """

    limit: int = _UNDER_WAY
    _steps: deque[list[int]] = field(default_factory=deque)

    def waits(self) -> list[int]:
        """Return what the next message waits for."""
        return self._steps.popleft() if len(self._steps) >= self.limit else []

    def began(self, steps: list[int]) -> None:
        """Take the steps of the message that :meth:`waits` was asked for."""
        self._steps.append(steps)


@dataclass
class Buffers:
    """Private memory for messages of at most ``elements``, used in turn."""

    b: Builder
    elements: int
    _places: list[Ref] = field(default_factory=list)
    _used: Throttle = field(default_factory=lambda: Throttle(_BUFFERS))
    _taken: int = 0

    def take(self, count: int) -> tuple[Ref, list[int]]:
        """Return ``count`` elements and the steps after which they are free."""
        if len(self._places) < _BUFFERS:
            self._places.append(self.b.private(self.elements))
        place = self._places[self._taken % _BUFFERS]
        self._taken += 1
        return place.part(0, count), self._used.waits()

    def release(self, steps: list[int]) -> None:
        """Say that what was taken last is free after ``steps``."""
        self._used.began(steps)
