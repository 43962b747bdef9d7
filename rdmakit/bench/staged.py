"""GPU memory handed to a peer of the node through pinned host memory: what is left without P2P.

An *out* copies pieces from the GPU into slots and hands each over when it has arrived; an *in*
takes slots and copies them to the GPU. A :class:`Carrier` tells the peer of a slot: by memory that
both ranks address. Nothing blocks; ``poll`` moves on what can move. Pieces go in order, so that
the two ends, which are given the same transfers in the same order, agree in what a slot holds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from rdmakit.protocols import Request, Window

__all__ = ["PIECE", "SLOTS", "Carrier", "In", "Out", "SharedSlots"]

PIECE = 1 << 20
"""Bytes of a slot: a copy of it over PCIe takes some 30 us, several times its launch."""
SLOTS = 8
"""Slots of one direction: copies, messages and copies of others go on at once."""


class Carrier(Protocol):
    """Moves slots from an end to its peer; numbers count pieces from 0 and never turn back."""

    def out_slot(self, number: int) -> int:
        """Return the address that piece ``number`` leaves from."""
        ...

    def may_fill(self, number: int) -> bool:
        """Return whether that slot is free."""
        ...

    def give(self, number: int, nbytes: int, tag: int) -> None:
        """Let the piece go: it is in its slot."""
        ...

    def expect(self, number: int, nbytes: int, tag: int) -> None:
        """Be ready for the piece."""
        ...

    def arrived(self, number: int) -> bool:
        """Return whether it is there."""
        ...

    def in_slot(self, number: int) -> int:
        """Return the address where it has arrived."""
        ...

    def release(self, number: int) -> None:
        """Let the slot be used again: the piece was copied out of it."""
        ...


class _Line(ABC):
    """Pieces under way in one direction."""

    def __init__(self, door: Any, carrier: Carrier, stream: int) -> None:
        self._copy, self._carrier, self._stream = door.copy_async, carrier, stream
        self._events = [door.Event() for _ in range(SLOTS)]
        self._pieces: dict[int, tuple[int, int, int]] = {}
        """Address, bytes and tag of those that are not finished, by number."""
        self._added = self._copied = self._done = 0
        """How many pieces there were, how many copies were begun, and how many are finished."""

    def add(self, address: int, nbytes: int, tag: int) -> Request:
        """Append a transfer of GPU memory; its request is done when all its pieces are. Local."""
        first = self._added
        for at in range(0, nbytes, PIECE):
            self._pieces[self._added] = address + at, min(PIECE, nbytes - at), tag
            self._added += 1
        return _Part(self, first, self._added)

    @abstractmethod
    def poll(self) -> None:
        """Move on what can move."""

    @property
    def done(self) -> int:
        """Pieces that are finished."""
        return self._done

    def close(self) -> None:
        """Release events. Local; the GPU has passed them."""
        for event in self._events:
            event.close()


class _Part:
    """The pieces of one transfer, as a request."""

    def __init__(self, line: _Line, first: int, last: int) -> None:
        self._line, self._first, self._last = line, first, last

    def done(self) -> bool:
        if self._first <= self._line.done < self._last:  # of several, the first one polls
            self._line.poll()
        return self._line.done >= self._last


class Out(_Line):
    """From this GPU to the carrier."""

    def poll(self) -> None:
        """Begin copies into free slots; hand over those that have arrived there."""
        carrier, copied = self._carrier, self._copied
        while copied < self._added and copied - self._done < SLOTS and carrier.may_fill(copied):
            address, nbytes, _ = self._pieces[copied]
            self._copy(carrier.out_slot(copied), address, nbytes, self._stream)
            self._events[copied % SLOTS].record(self._stream)
            copied += 1
        self._copied = copied
        while self._done < copied and self._events[self._done % SLOTS].done():
            _, nbytes, tag = self._pieces.pop(self._done)
            carrier.give(self._done, nbytes, tag)
            self._done += 1


class In(_Line):
    """From the carrier to this GPU."""

    def __init__(self, door: Any, carrier: Carrier, stream: int) -> None:
        super().__init__(door, carrier, stream)
        self._expected = 0

    def poll(self) -> None:
        """Expect pieces, begin copies of those that are there, release the slots of the copied."""
        carrier, events = self._carrier, self._events
        while self._expected < self._added and self._expected - self._done < SLOTS:
            _, nbytes, tag = self._pieces[self._expected]
            carrier.expect(self._expected, nbytes, tag)
            self._expected += 1
        while self._copied < self._expected and carrier.arrived(self._copied):
            address, nbytes, _ = self._pieces.pop(self._copied)
            self._copy(address, carrier.in_slot(self._copied), nbytes, self._stream)
            events[self._copied % SLOTS].record(self._stream)
            self._copied += 1
        while self._done < self._copied and events[self._done % SLOTS].done():
            carrier.release(self._done)
            self._done += 1


class SharedSlots:
    """Slots of host memory that the ranks of a node address and have pinned: nothing is sent.

    Each rank fills slots of its own area; its peer copies from there. Of each rank, counter p is
    how many pieces it has filled for rank p, and counter n + p how many it has taken from rank p.
    A rank fills for one peer at a time.
    """

    def __init__(self, window: Window, addresses: Sequence[int], peer: int) -> None:
        """Describe those of this rank and ``peer``; ``addresses`` are the areas', by rank."""
        self._window, self._peer = window, peer
        self._own, self._theirs = addresses[window.rank], addresses[peer]

    def out_slot(self, number: int) -> int:
        """Return the slot's address."""
        return self._own + number % SLOTS * PIECE

    def may_fill(self, number: int) -> bool:
        """Return whether the peer has taken what was in the slot."""
        window = self._window
        return window.reached(self._peer, window.size + window.rank, number + 1 - SLOTS)

    def give(self, number: int, nbytes: int, tag: int) -> None:
        """Count it as filled."""
        self._window.post(self._peer, number + 1)

    def expect(self, number: int, nbytes: int, tag: int) -> None:
        """Nothing to do: the peer fills slots as they are taken."""

    def arrived(self, number: int) -> bool:
        """Return whether the peer has filled it."""
        return self._window.reached(self._peer, self._window.rank, number + 1)

    def in_slot(self, number: int) -> int:
        """Return the slot's address, in the peer's area."""
        return self._theirs + number % SLOTS * PIECE

    def release(self, number: int) -> None:
        """Count it as taken."""
        self._window.post(self._window.size + self._peer, number + 1)
