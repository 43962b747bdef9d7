"""Messages whose bytes come piece by piece: GPU memory, which is copied while it travels.

Such a message is a *head* and *pieces*. The head goes at once and keeps the place of the message
among those of its source; it tells tag, length and a number. The pieces carry that number and
come in their order, each when its bytes are there; between them there may be other messages.
Messages of contiguous host memory are one message each, as they are.

Numbers come round again; one is not used while pieces of its last message are still to be sent.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np

from rdmakit.errors import TransportError, UnsupportedError
from rdmakit.protocols import Arrived, Bytes, Form, Mail, Request

__all__ = ["Inbox", "Incoming", "Moved", "Outbox", "Outgoing", "Parts", "Settled", "receive_into"]

Moved = Callable[[], None]
"""Tells that a message came closer to its end: its deadline begins anew."""
Borrow = Callable[[Mail, Arrived, Bytes], Arrived]
_HEAD = np.dtype([("nbytes", "<i8"), ("number", "<i8"), ("tag", "<i8")])


class Settled:
    """A request that is complete."""

    def done(self) -> bool:
        """Return True."""
        return True


@runtime_checkable
class Parts(Protocol):
    """A request made of several, which asking moves along."""

    def done(self) -> bool:
        """See :class:`rdmakit.protocols.Request`."""
        ...

    def abandon(self, way: Mail, keep: Sequence[object]) -> None:
        """Give up what is under way; ``keep`` must outlive it."""
        ...


class Outgoing(Protocol):
    """Memory that is sent in pieces."""

    nbytes: int

    def begin(self, way: Mail, peer: int, number: int, moved: Moved) -> Parts:
        """Start sending its pieces with ``number``. Local, does not block."""
        ...


@runtime_checkable
class Lent(Parts, Protocol):
    """Pieces that the receiver says it has taken, see :mod:`rdmakit.lending`."""

    def taken(self) -> None:
        """Hear that the next piece was taken."""
        ...


class Incoming(Protocol):
    """Memory that a message is received into in its own way."""

    nbytes: int
    """What it can hold."""

    def begin(self, message: Arrived, moved: Moved) -> Parts:
        """Start receiving ``message``, which fits. Local, does not block."""
        ...

    def drop(self) -> None:
        """Let go of what it holds: no message will be received. Local."""
        ...


# -- sending ----------------------------------------------------------------------------------


class Outbox:
    """Sends messages in pieces. With the engine's lock held."""

    def __init__(self, inbox: Inbox) -> None:
        """``inbox`` hears that lent pieces were taken."""
        self._inbox = inbox
        self._last: dict[int, int] = defaultdict(int)
        self._used: set[tuple[int, int]] = set()

    def send(self, way: Mail, peer: int, data: Outgoing, tag: int, moved: Moved) -> Parts:
        """Start sending. Local, does not block.

        Raises:
            UnsupportedError: more messages are under way than there are numbers.
        """
        for _ in range(way.numbers):
            number = self._last[peer] = (self._last[peer] + 1) % way.numbers
            if (peer, number) not in self._used:
                break
        else:
            raise UnsupportedError(
                f"{way.numbers} messages to rank {peer} are under way in pieces: wait for some"
            )
        head = np.array([(data.nbytes, number, tag)], _HEAD).view(np.uint8)
        announced = way.send(peer, head, 0, Form.HEAD)
        self._used.add((peer, number))
        parts = data.begin(way, peer, number, moved)
        if isinstance(parts, Lent):
            self._inbox.owed[peer, number] = parts.taken
        return _Sent(head, announced, parts, partial(self._end, (peer, number)))

    def _end(self, message: tuple[int, int]) -> None:
        self._used.discard(message)
        self._inbox.owed.pop(message, None)


class _Sent:
    """A message that is sent in pieces."""

    def __init__(self, head: Bytes, announced: Request, parts: Parts, end: Moved) -> None:
        self._head, self._announced, self._parts, self._end = head, announced, parts, end
        self._sent = False

    def done(self) -> bool:
        self._sent = self._sent or self._parts.done()
        if not self._sent or not self._announced.done():
            return False
        self._end()
        return True

    def abandon(self, way: Mail, keep: Sequence[object]) -> None:
        self._parts.abandon(way, keep)
        way.abandon([self._announced], [self._head])


# -- receiving --------------------------------------------------------------------------------


class _Long:
    """A message of which not all pieces have come."""

    def __init__(self, nbytes: int) -> None:
        self.left, self.pieces = nbytes, deque[Arrived]()


class Inbox:
    """Takes messages from the ways they come, and puts pieces to theirs.

    Attributes:
        hungry: whether pieces are missing of a message that is being received, or words of one
            that was lent.
        borrow: makes the piece of which a word tells that it is lent.
        owed: who hears that a peer has taken the next piece of a message (peer, number).
    """

    def __init__(self, borrow: Borrow | None = None) -> None:
        self.borrow = borrow
        self.owed: dict[tuple[int, int], Moved] = {}
        self._open: dict[tuple[int, int], _Long] = {}
        self._eaten: set[int] = set()
        self._reading: dict[Mail, tuple[Arrived, Bytes, Request]] = {}
        self.moved = False
        """Whether anything came since it was last set to False."""

    @property
    def hungry(self) -> bool:  # noqa: D102
        return bool(self._eaten or self.owed)

    def next(self, way: Mail) -> Arrived | None:
        """Take the next message of a way, whole or begun, if there is one."""
        while True:
            if self._reading and way in self._reading:
                message, words, request = self._reading[way]
                if not request.done():
                    return None  # what came after it waits
                del self._reading[way]
                if message.form is Form.HEAD:
                    return self._begun(message.source, words)
                self._heard(way, message, words)
            found = way.arrived()
            if found is None:
                return None
            self.moved = True
            if not found.form:
                return found
            if found.form is Form.PIECE:
                self._add(found)
            else:
                words = np.empty(found.nbytes, np.uint8)
                self._reading[way] = found, words, found.receive(words)

    def _heard(self, way: Mail, told: Arrived, words: Bytes) -> None:
        """Take word of a piece that is lent, or of one that was taken."""
        if told.form is Form.LENT and self.borrow is not None:
            self._add(self.borrow(way, told, words))
            return
        taken = self.owed.get((told.source, told.tag))
        if told.form is Form.LENT or taken is None:
            raise TransportError(
                f"rank {told.source} says that a piece of message {told.tag} is {told.form.name}, "
                "of which nothing is known here"
            )
        taken()

    def _begun(self, source: int, head: Bytes) -> Arrived:
        nbytes, number, tag = map(int, head.view(_HEAD)[0])
        long = self._open[source, number] = _Long(nbytes)
        receive = partial(_Gathered, long.pieces, nbytes, _nothing)
        return Arrived(source, tag, nbytes, receive, Form.HEAD, pieces=long.pieces)

    def _add(self, piece: Arrived) -> None:
        key = piece.source, piece.tag
        long = self._open.get(key)
        if long is None or piece.nbytes > long.left:
            raise TransportError(
                f"a piece of {piece.nbytes} bytes from rank {piece.source} belongs to no message "
                f"(number {piece.tag})"
            )
        long.pieces.append(piece)
        long.left -= piece.nbytes
        if not long.left:
            del self._open[key]
            self._eaten.discard(id(long.pieces))

    def feed(self, message: Arrived) -> None:
        """Look for the pieces of a message, which is being received from now on."""
        if any(long.pieces is message.pieces for long in self._open.values()):
            self._eaten.add(id(message.pieces))

    def abandon(self) -> None:
        """Give up what is being read."""
        for way, (_, head, request) in self._reading.items():
            way.abandon([request], [head])
        self._reading.clear()
        self._open.clear()
        self._eaten.clear()
        self.owed.clear()


def receive_into(into: Bytes, message: Arrived, moved: Moved) -> Request:
    """Start receiving a message, whole or begun, into memory of its length."""
    if message.pieces is None:
        return message.receive(into)
    return _Gathered(message.pieces, message.nbytes, moved, into)


class _Gathered:
    """A message that comes in pieces, received into host memory."""

    def __init__(self, pieces: deque[Arrived], nbytes: int, moved: Moved, into: Bytes) -> None:
        self._pieces, self._left, self._moved, self._into = pieces, nbytes, moved, into
        self._under_way = deque[Request]()

    def done(self) -> bool:
        pieces, under_way = self._pieces, self._under_way
        while pieces:
            piece = pieces.popleft()
            at = self._into.nbytes - self._left
            under_way.append(piece.receive(self._into[at : at + piece.nbytes]))
            self._left -= piece.nbytes
        while under_way and under_way[0].done():
            under_way.popleft()
            self._moved()
        return not self._left and not under_way

    def abandon(self, way: Mail, keep: Sequence[object]) -> None:
        way.abandon(list(self._under_way), [*keep, self._into])


def _nothing() -> None:
    """Do nothing."""
