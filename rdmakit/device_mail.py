"""Messages between two ranks of GPU memory, strided or not: local to make, no set-up in common.

A message begins after the work that its stream has at the start. Inside a node whose ranks have
mapped each other's memory it is lent (:mod:`rdmakit.lending`), from the first collective call on
GPU arrays on. Otherwise it travels in pieces through pinned host memory: while one travels the next
is copied, on streams of our own, so that a message never waits for kernels that come later. Between
nodes whose messages take GPU memory as it is, it is one piece. The other side may be host memory: a
message is bytes. One that was sent from host memory comes whole, and is copied in pieces when it is
there.

No memory is mapped for a message: a mapping is made by both sides, waits for the device at its end,
and a message has no call in common in which to do so.

The host looks at events, and never makes a stream wait for another: the work before a message may
be a collective that waits for a peer, which waits for another message of this rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from rdmakit.buffer import Buffer
from rdmakit.device_stock import DeviceStock
from rdmakit.errors import UnsupportedError
from rdmakit.inter.staged import AHEAD, Piece
from rdmakit.lending import LEAST, Lending
from rdmakit.long_mail import Moved, Parts, Settled
from rdmakit.protocols import Arrived, Bytes, DirectMail, Form, Mail, Request

__all__ = ["DeviceMail"]


class DeviceMail(DeviceStock):
    """What the messages of one communicator begin with. With the engine's lock held."""

    def outgoing(self, buffer: Buffer, stream: int, *, copy: bool = False) -> _Outgoing:
        """Return what sends the elements as they are after the present work of ``stream``. Local.

        ``copy``: the array may be written by later work of the stream.
        """
        if buffer.strided is None and not copy:
            return _Outgoing(self, buffer.address, buffer.nbytes, self._mark(stream), None)
        scratch = self._take(buffer.nbytes)
        try:
            if buffer.strided is not None:
                self._bind(self._gpu.pack, buffer, scratch.address, buffer.nbytes)(stream)
            else:
                self.door.copy_async(scratch.address, buffer.address, buffer.nbytes, stream)
        except UnsupportedError:  # too many dimensions
            self._give_memory(scratch)
            raise
        return _Outgoing(self, scratch.address, buffer.nbytes, self._mark(stream), scratch)

    def incoming(self, buffer: Buffer, stream: int) -> _Incoming:
        """Return what receives into the array after the present work of ``stream``. Local."""
        if buffer.strided is None:
            return _Incoming(self, buffer, self._mark(stream), None, None)
        scratch = self._take(buffer.nbytes)
        try:
            unpack = self.unpack(buffer, scratch.address, buffer.nbytes)
        except UnsupportedError:  # too many dimensions
            self._give_memory(scratch)
            raise
        return _Incoming(self, buffer, self._mark(stream), scratch, unpack)


# -- sending ----------------------------------------------------------------------------------


class _Outgoing:
    """See :class:`rdmakit.long_mail.Outgoing`."""

    def __init__(
        self, mail: DeviceMail, address: int, nbytes: int, ready: Any, scratch: Any
    ) -> None:
        self.mail, self.address, self.nbytes = mail, address, nbytes
        self.ready, self.scratch = ready, scratch

    def begin(self, way: Mail, peer: int, number: int, moved: Moved) -> Parts:
        lender = self.mail.lender()
        if lender is not None and peer in lender.ranks and self.nbytes >= LEAST:
            first = lender.place(self.address, self.nbytes) or lender.take()
            if first is not None:
                return Lending(self, lender, way, peer, number, moved, first)
        if self.mail.direct and way.direct:
            return _SendingDirect(self, cast(DirectMail, way), peer, number, moved)
        return _Sending(self, way, peer, number, moved)

    def finish(self) -> None:
        self.mail.give(self.ready, self.scratch)


class _SendingDirect:
    """One piece, out of the GPU's memory."""

    def __init__(
        self, data: _Outgoing, way: DirectMail, peer: int, number: int, moved: Moved
    ) -> None:
        self._data, self._way, self._peer, self._number = data, way, peer, number
        self._moved = moved
        self._request: Request | None = None

    def done(self) -> bool:
        data = self._data
        data.mail.enter()
        if self._request is None:
            if not data.ready.done():
                return False
            self._request = self._way.send_device(
                self._peer, data.address, data.nbytes, self._number
            )
            self._moved()
        if not self._request.done():
            return False
        data.finish()
        return True

    def abandon(self, way: Mail, keep: Sequence[object]) -> None:
        self._data.mail.abandon(keep)
        way.abandon([self._request] if self._request is not None else [], keep)


class _Sending:
    """Pieces: copied from the GPU (``copied``), then sent (``sent``), in order."""

    def __init__(self, data: _Outgoing, way: Mail, peer: int, number: int, moved: Moved) -> None:
        self._data, self._way, self._peer, self._number = data, way, peer, number
        self._moved = moved
        self._pool = data.mail.pool(data.nbytes)
        self._copied, self._sent = deque[Piece](), deque[Piece]()
        self._at, self._ready = 0, False

    def done(self) -> bool:
        data, copied, sent, pool = self._data, self._copied, self._sent, self._pool
        data.mail.enter()
        if not self._ready:
            if not data.ready.done():
                return False
            self._ready = True
        while copied and copied[0].event.done():
            piece = copied.popleft()
            part: Bytes = piece.bytes[: piece.place[1]]
            piece.request = self._way.send(self._peer, part, self._number, Form.PIECE)
            sent.append(piece)
            self._moved()
        while sent and sent[0].request.done():
            pool.give(sent.popleft())
            self._moved()
        self._fill()
        if self._at < data.nbytes or copied or sent:
            return False
        data.finish()
        return True

    def _fill(self) -> None:
        data, copied, sent = self._data, self._copied, self._sent
        while self._at < data.nbytes and len(copied) + len(sent) < AHEAD:
            piece = self._pool.take(first=not copied and not sent)
            if piece is None:
                return
            nbytes = min(self._pool.piece, data.nbytes - self._at)
            piece.place = (self._at, nbytes)
            stream = data.mail.streams[0]
            data.mail.door.copy_async(piece.address, data.address + self._at, nbytes, stream)
            piece.event.record(stream)
            copied.append(piece)
            self._at += nbytes

    def abandon(self, way: Mail, keep: Sequence[object]) -> None:
        self._data.mail.abandon(keep)
        way.abandon([piece.request for piece in self._sent], keep)


# -- receiving --------------------------------------------------------------------------------


class _Incoming:
    """See :class:`rdmakit.long_mail.Incoming`."""

    def __init__(
        self,
        mail: DeviceMail,
        buffer: Buffer,
        ready: Any,
        scratch: Any,
        unpack: Callable[[int], object] | None,
    ) -> None:
        self.mail, self.nbytes, self.ready, self.scratch = mail, buffer.nbytes, ready, scratch
        self.address = buffer.address if scratch is None else scratch.address
        self._buffer, self._unpack = buffer, unpack

    def begin(self, message: Arrived, moved: Moved) -> Parts:
        return _Receiving(self, message, moved)

    def scatter(self, nbytes: int, stream: int) -> None:
        """Put the message's bytes in their places, if these are others."""
        unpack = self._unpack
        if unpack is not None and nbytes < self.nbytes:
            unpack = self.mail.unpack(self._buffer, self.address, nbytes)
        if unpack is not None and nbytes:
            unpack(stream)

    def drop(self) -> None:
        # The event may be unmarked yet, which whoever records it anew does not care about.
        self.mail.give(self.ready, self.scratch)


class _Receiving:
    """Pieces: received (``come``), then copied to the GPU (``copied``), in order."""

    def __init__(self, into: _Incoming, message: Arrived, moved: Moved) -> None:
        self._into, self._nbytes, self._moved = into, message.nbytes, moved
        self._pieces = message.pieces if message.pieces is not None else deque([message])
        self._pool = into.mail.pool(message.nbytes)
        self._come, self._copied = deque[Piece](), deque[Piece]()
        self._straight: list[Request] = []
        self._whole: tuple[Arrived, Bytes, Request] | None = None
        self._at, self._ready, self._scattered = 0, False, False

    def done(self) -> bool:
        into = self._into
        into.mail.enter()
        if not self._ready:
            if not into.ready.done():
                return False
            self._ready = True
        if not self._scattered:
            if not self._all_there():
                return False
            if into.scratch is not None:
                stream = into.mail.streams[1]
                into.scatter(self._nbytes, stream)
                into.ready.record(stream)
            self._scattered = True
        if into.scratch is not None and not into.ready.done():
            return False
        into.drop()
        return True

    def _all_there(self) -> bool:
        """Move pieces along; return whether all bytes are in GPU memory."""
        come, copied = self._come, self._copied
        self._cut()
        while self._pieces and self._begin(self._pieces[0]):
            self._pieces.popleft()
        stream = self._into.mail.streams[1]
        while come and come[0].request.done():
            piece = come.popleft()
            at, nbytes = piece.place
            to = self._into.address + at
            self._into.mail.door.copy_async(to, piece.address, nbytes, stream)
            piece.event.record(stream)
            copied.append(piece)
            self._moved()
        while copied and copied[0].event.done():
            self._pool.give(copied.popleft())
            self._moved()
        if self._straight:
            before = len(self._straight)
            self._straight = [request for request in self._straight if not request.done()]
            if len(self._straight) < before:
                self._moved()
        left = self._pieces or come or copied or self._straight
        return self._at == self._nbytes and not left

    def _begin(self, piece: Arrived) -> bool:
        """Start receiving a piece, if there is room for it now."""
        into = self._into
        if self._whole is not None:
            return False
        if piece.receive_device is not None and (into.mail.direct or piece.lent):
            self._straight.append(piece.receive_device(into.address + self._at, piece.nbytes))
        elif piece.nbytes > self._pool.piece:
            memory = np.empty(piece.nbytes, np.uint8)
            self._whole = piece, memory, piece.receive(memory)
            return True
        else:
            come, copied = self._come, self._copied
            if len(come) + len(copied) >= AHEAD:
                return False
            pinned = self._pool.take(first=not come and not copied)
            if pinned is None:
                return False
            pinned.place = (self._at, piece.nbytes)
            pinned.request = piece.receive(pinned.bytes[: piece.nbytes])
            come.append(pinned)
        self._at += piece.nbytes
        return True

    def _cut(self) -> None:
        """Make pieces of what came whole, and is there."""
        if self._whole is None or not self._whole[2].done():
            return
        piece, memory, _ = self._whole
        self._whole = None
        step = self._pool.piece
        parts = [memory[at : at + step] for at in range(0, memory.nbytes, step)]
        cut = [
            replace(piece, nbytes=part.nbytes, receive=_copier(part), receive_device=None)
            for part in parts
        ]
        self._pieces.extendleft(reversed(cut))
        self._moved()

    def abandon(self, way: Mail, keep: Sequence[object]) -> None:
        self._into.mail.abandon(keep)
        requests = [*(piece.request for piece in self._come), *self._straight]
        whole = [] if self._whole is None else [self._whole[2]]
        way.abandon([*requests, *whole], [*keep, self._whole])


def _copier(part: Bytes) -> Callable[[Bytes], Request]:
    def receive(into: Bytes) -> Request:
        np.copyto(into, part)
        return Settled()

    return receive
