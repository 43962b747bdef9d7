"""Messages of GPU memory inside a node, where its ranks have each other's memory mapped.

Bytes that are registered with the node (``comm.empty``, ``comm.register``) are lent as they lie;
others are copied into a slot of memory that each rank has registered for this. The sender tells
where they are (``LENT``: registration, offset, length); the receiver copies them to where they
belong and says so (``TAKEN``), and then the memory is the sender's again. So a byte crosses a link
once, as fast as copies go, and the hosts meet only to tell and to take.

Slots come back when the receiver has taken what is in them, and it may first want a later message.
So a message that finds no free slot goes through pinned memory, and none waits for another's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rdmakit.buffer import bytes_at
from rdmakit.errors import TransportError
from rdmakit.long_mail import Moved
from rdmakit.protocols import Arrived, Bytes, Form, Mail, Request

__all__ = ["LEAST", "SLOT", "SLOTS", "Borrower", "Lender", "Lending", "pieces_of"]

LEAST = 64 << 10
"""Bytes from which a message is lent: below, the hosts' words are what takes time either way."""
SLOT = 8 << 20
"""Bytes of a slot: over NVLink some 20 us, as long as the hosts need for a piece."""
SLOTS = 4
"""Slots of a rank: one filled, one read, two whose words are on their way."""
_STEP = 1 << 20
"""A message of several slots is cut into so many bytes at least."""
_RECORD = np.dtype([("index", "<i8"), ("offset", "<i8"), ("nbytes", "<i8")])


def pieces_of(nbytes: int) -> int:
    """Return the bytes of the pieces in which a message goes through slots. Pure."""
    return min(SLOT, max(_STEP, -(-nbytes // SLOTS)))


class Lender:
    """This rank's slots, and what the node's ranks have registered. With the engine's lock held."""

    def __init__(self, node: Any, slots: Any, ranks: Mapping[int, int]) -> None:
        """Describe it. Local.

        Args:
            node: the node's collectives, with which memory is registered.
            slots: the registration of the slots, ``SLOT * SLOTS`` bytes.
            ranks: the rank in the node of each rank of the communicator that is there.
        """
        self._node, self._slots, self.ranks = node, slots, ranks
        self._free = [slots.address + slot * SLOT for slot in range(SLOTS)]

    def knows(self, index: int) -> bool:
        """Return whether a registration was made here: peers may have made it a moment before."""
        newest: int = self._node.registry.newest
        return index <= newest

    def place_of_slot(self, slot: int) -> tuple[int, int]:
        """Return (registration, offset) of a slot."""
        return self._slots.index, slot - self._slots.address

    def place(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """Return (registration, offset) of bytes, or None where they are not registered."""
        entry = self._node.registration(address, nbytes)
        return None if entry is None else (entry.index, address - entry.address)

    def find(self, source: int, index: int, offset: int, nbytes: int) -> int:
        """Return where bytes that rank ``source`` lends are mapped here.

        Raises:
            TransportError: they are not: it is registered there only.
        """
        address: int | None = self._node.registry.mapped(index, self.ranks[source], offset, nbytes)
        if address is None:
            raise TransportError(
                f"rank {source} sends {nbytes} bytes of its registration {index}, which is not "
                "registered here (any more): unregister arrays after their messages are received"
            )
        return address

    def take(self) -> int | None:
        """Return the address of a free slot, if there is one."""
        return self._free.pop() if self._free else None

    def give(self, slot: int) -> None:
        """Take a slot back."""
        self._free.append(slot)


class Lending:
    """A message that is sent by lending it. See :class:`rdmakit.long_mail.Lent`."""

    def __init__(
        self, data: Any, lender: Lender, way: Mail, peer: int, number: int, moved: Moved,
        first: tuple[int, int] | int,
    ) -> None:  # fmt: skip
        """Describe it. Local.

        Args:
            data: what is sent, as :class:`rdmakit.device_mail.DeviceMail` holds it.
            lender: has the slots.
            way: carries the words.
            peer: who receives it.
            number: of the message.
            moved: tells that something moved.
            first: the place of the bytes, where they are registered themselves; or a slot.
        """
        self._data, self._lender, self._way, self._peer = data, lender, way, peer
        self._number, self._moved = number, moved
        self._slots = [first] if isinstance(first, int) else []
        self._whole = None if isinstance(first, int) else first
        self._piece = pieces_of(data.nbytes)
        self._filled = deque[tuple[int, int, Any]]()  # slot, bytes, event
        self._lent = deque[int | None]()  # slots
        self._words = deque[tuple[Bytes, Request]]()
        self._at, self._ready = 0, False

    def taken(self) -> None:
        """Hear that the receiver has taken the next piece."""
        slot = self._lent.popleft()
        if slot is not None:
            self._slots.append(slot)
        self._moved()

    def done(self) -> bool:
        """See :class:`rdmakit.protocols.Request`."""
        data = self._data
        data.mail.enter()
        if not self._ready:
            if not data.ready.done():
                return False
            self._ready = True
            if self._whole is not None:
                self._at = data.nbytes
                self._tell(self._whole, data.nbytes, None)
        while self._filled and self._filled[0][2].done():
            slot, nbytes, event = self._filled.popleft()
            data.mail.give(event, None)
            self._tell(self._lender.place_of_slot(slot), nbytes, slot)
            self._moved()
        self._fill()
        while self._words and self._words[0][1].done():
            self._words.popleft()
        if self._at < data.nbytes or self._filled or self._lent or self._words:
            return False
        for slot in self._slots:
            self._lender.give(slot)
        self._slots = []
        data.finish()
        return True

    def _fill(self) -> None:
        """Copy into the slots of this message that are free, and into others as it gets them."""
        data = self._data
        while self._at < data.nbytes:
            slot = self._slots.pop() if self._slots else self._lender.take()
            if slot is None:
                return
            nbytes = min(self._piece, data.nbytes - self._at)
            stream, event = data.mail.streams[0], data.mail.event()
            data.mail.door.copy_async(slot, data.address + self._at, nbytes, stream)
            event.record(stream)
            self._filled.append((slot, nbytes, event))
            self._at += nbytes

    def _tell(self, place: tuple[int, int], nbytes: int, slot: int | None) -> None:
        record = np.array([(*place, nbytes)], _RECORD).view(np.uint8)
        request = self._way.send(self._peer, record, self._number, Form.LENT)
        self._words.append((record, request))
        self._lent.append(slot)

    def abandon(self, way: Mail, keep: Sequence[object]) -> None:
        """See :class:`rdmakit.long_mail.Parts`."""
        self._data.mail.abandon((keep, self))
        way.abandon([request for _, request in self._words], keep)


class Borrower:
    """Takes what other ranks of the node lend. With the engine's lock held."""

    def __init__(self, side: Any) -> None:
        """Describe it; ``side`` has ``lender``, ``mail`` and ``enter``. Local."""
        self._side = side

    def piece(self, way: Mail, told: Arrived, record: Bytes) -> Arrived:
        """Return the piece that a word tells of. Local."""
        index, offset, nbytes = map(int, record.view(_RECORD)[0])
        place = (told.source, index, offset, nbytes)

        def receive(into: Bytes) -> Request:
            return _Taking(self._side, way, told.tag, place, into.ctypes.data, into)

        def receive_device(address: int, _: int) -> Request:
            return _Taking(self._side, way, told.tag, place, address, None)

        return Arrived(told.source, told.tag, nbytes, receive, Form.LENT, receive_device, lent=True)


class _Taking:
    """A piece that is copied from where a peer lends it."""

    def __init__(
        self, side: Any, way: Mail, number: int, place: tuple[int, int, int, int], to: int,
        keep: object,
    ) -> None:  # fmt: skip
        self._side, self._way, self._number, self._place = side, way, number, place
        self._to, self._keep = to, keep
        self._event: Any = None
        self._told: Request | None = None

    def done(self) -> bool:
        side = self._side
        if self._told is not None:
            return self._told.done()
        source, index, offset, nbytes = self._place
        if side.lender is None or not side.lender.knows(index):
            return False  # this rank is about to have it: the sender has been there already
        side.enter()
        if self._event is None:
            stream, self._event = side.mail.streams[1], side.mail.event()
            address = side.lender.find(source, index, offset, nbytes)
            side.mail.door.copy_async(self._to, address, nbytes, stream)
            self._event.record(stream)
        if not self._event.done():
            return False
        side.mail.give(self._event, None)
        self._told = self._way.send(source, bytes_at(0, 0), self._number, Form.TAKEN)
        return self._told.done()
