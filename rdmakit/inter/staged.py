"""GPU memory through pinned host memory and host messages: where no NIC reads the GPU.

A message is cut into pieces; while one travels, the next is copied. Both sides cut alike, and
pieces of one message carry its tag, since messages of one source and tag arrive in order; so the
next message of that source and tag begins when all pieces of this one are on their way. Copies
run on streams of their own, so a message never waits for the user's kernels.

Every message under way has at least one piece of pinned memory, so none waits for the end of
another; more come out of a pool that is bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rdmakit.protocols import Channel, Request

__all__ = ["AHEAD", "PIECE", "Piece", "PinnedPool", "StagedChannel"]

PIECE = 1 << 20
"""Bytes of a piece: over TCP some hundred microseconds, against some ten for its handling."""
AHEAD = 4
"""Pieces of one message under way at once: one copied, two in the network, one to spare."""
_POOL = 64
"""Pieces that messages may hold together beyond their first."""
_SLAB = 8
"""Pieces made at once: pinning memory costs more than a piece's copy."""

_QUARANTINE: list[object] = []
"""Pinned memory that a late peer may still write."""


@dataclass(frozen=True)
class _Handle:
    """GPU memory of a message."""

    address: int
    nbytes: int


class Piece:
    """Pinned memory of one piece, reused."""

    __slots__ = ("address", "bytes", "event", "place", "request", "whole")

    def __init__(self, address: int, data: Any, event: Any, whole: Any) -> None:
        self.address, self.bytes, self.event = address, data, event
        self.whole = whole
        """The host channel's handle of all of it."""
        self.place = (0, 0)
        """(offset, bytes) of what it holds of its message."""
        self.request: Any = None


class PinnedPool:
    """Pinned pieces; grows, is freed as a whole.

    Attributes:
        piece: bytes of each.
    """

    def __init__(self, door: Any, wrap: Callable[[Any], Any], piece: int) -> None:
        """Describe it; ``wrap`` makes of memory what messages take."""
        self._door, self._wrap, self.piece = door, wrap, piece
        self._slabs: list[Any] = []
        self._free: list[Piece] = []
        self._pieces: list[Piece] = []

    def take(self, *, first: bool) -> Piece | None:
        """Return a free piece; None when all are in use and this message has one already."""
        if not self._free and (first or len(self._pieces) < _POOL):
            self._grow()
        return self._free.pop() if self._free else None

    def _grow(self) -> None:
        slab = self._door.PinnedMemory(self.piece * _SLAB)
        self._slabs.append(slab)
        for index in range(_SLAB):
            at = index * self.piece
            data = slab.bytes[at : at + self.piece]
            whole = self._wrap(data)
            made = Piece(slab.address + at, data, self._door.Event(), whole)
            self._free.append(made)
            self._pieces.append(made)

    def give(self, piece: Piece) -> None:
        """Take a piece back."""
        piece.request = None
        self._free.append(piece)

    def end(self) -> None:
        """Keep all until the process ends: a late peer may still write it."""
        _QUARANTINE.append(self)

    def handle(self, piece: Piece, nbytes: int) -> Any:
        """Return the host channel's handle of the piece's first bytes."""
        return piece.whole if nbytes == self.piece else self._wrap(piece.bytes[:nbytes])

    def close(self) -> None:
        """Free all; nothing is under way."""
        for piece in self._pieces:
            piece.event.close()
        self._free, self._pieces = [], []
        for slab in self._slabs:
            slab.close()
        self._slabs = []


@dataclass
class _Message:
    """One message under way; pieces pass from ``first`` to ``second`` in order."""

    handle: _Handle
    peer: int
    tag: int
    sends: bool
    first: deque[Piece] = field(default_factory=deque)
    """Sending: copied from the GPU; receiving: in the network."""
    second: deque[Piece] = field(default_factory=deque)
    next: int = 0
    """Bytes for which a piece was taken."""
    complete: bool = False
    problem: BaseException | None = None

    @property
    def key(self) -> tuple[int, int, bool]:
        """What it shares with messages that must keep their order."""
        return self.peer, self.tag, self.sends

    @property
    def posted(self) -> bool:
        """Whether the host channel has all its pieces: then the next of its key may follow."""
        return self.next == self.handle.nbytes and not (self.sends and self.first)

    def done(self) -> bool:
        """See :class:`rdmakit.protocols.Request`."""
        if self.problem is not None:
            raise self.problem
        return self.complete


class StagedChannel:
    """See :class:`rdmakit.protocols.DeviceChannel`. Local to make, on each rank alike."""

    way = "host-staged"

    def __init__(self, door: Any, host: Channel, *, piece: int = PIECE) -> None:
        """Describe it; memory is taken at the first message.

        Args:
            door: :mod:`rdmakit.drivers.cuda`.
            host: carries the pieces; not closed with this.
            piece: bytes of a piece; equal on all ranks.
        """
        self.name, self.messages = host.name, host.messages
        self._door, self._host, self._piece = door, host, piece
        self._pool = PinnedPool(door, host.wrap, piece)
        self._streams: tuple[Any, Any] | None = None
        self._active: list[_Message] = []
        self._broken = False

    @property
    def holds(self) -> bool:
        """Whether the host channel holds bytes."""
        return self._host.holds

    def wrap_device(self, address: int, nbytes: int) -> _Handle:
        """Return a handle of GPU memory."""
        return _Handle(address, nbytes)

    def wrap(self, data: Any) -> _Handle:
        """Return a handle of memory that the GPU can copy, pinned or not."""
        return _Handle(data.ctypes.data, data.nbytes)

    def send(self, peer: int, handle: _Handle, tag: int) -> Request:
        """Start sending."""
        return self._start(_Message(handle, peer, tag, sends=True))

    def recv(self, peer: int, handle: _Handle, tag: int) -> Request:
        """Start receiving; both sides give equal sizes."""
        return self._start(_Message(handle, peer, tag, sends=False))

    def _start(self, message: _Message) -> Request:
        if self._streams is None:
            self._streams = (self._door.Stream(), self._door.Stream())
        self._active.append(message)
        if all(other.posted for other in self._active[:-1] if other.key == message.key):
            self._move(message)
        return message

    def progress(self) -> None:
        """Move messages and copies along."""
        self._host.progress()
        if self._active:
            waiting: set[tuple[int, int, bool]] = set()
            for message in self._active:
                if message.key in waiting:
                    continue
                try:
                    self._move(message)
                except Exception as exc:  # belongs to this message; its caller gets it from done
                    message.problem = exc
                if not message.posted:
                    waiting.add(message.key)
            self._active = [m for m in self._active if not m.complete and m.problem is None]

    def _move(self, message: _Message) -> None:
        first, second, pool = message.first, message.second, self._pool
        assert self._streams is not None
        if message.sends:
            while first and first[0].event.done():
                piece = first.popleft()
                handle = pool.handle(piece, piece.place[1])
                piece.request = self._host.send(message.peer, handle, message.tag)
                second.append(piece)
            while second and second[0].request.done():
                pool.give(second.popleft())
        else:
            while first and first[0].request.done():
                piece = first.popleft()
                at, nbytes = piece.place
                stream = self._streams[1].ptr
                self._door.copy_async(message.handle.address + at, piece.address, nbytes, stream)
                piece.event.record(stream)
                second.append(piece)
            while second and second[0].event.done():
                pool.give(second.popleft())
        self._fill(message)
        message.complete = message.next == message.handle.nbytes and not first and not second

    def _fill(self, message: _Message) -> None:
        """Take pieces for what comes next of a message."""
        first, second, pool = message.first, message.second, self._pool
        assert self._streams is not None
        while message.next < message.handle.nbytes and len(first) + len(second) < AHEAD:
            piece = pool.take(first=not first and not second)
            if piece is None:
                return
            at, nbytes = message.next, min(self._piece, message.handle.nbytes - message.next)
            piece.place = (at, nbytes)
            if message.sends:
                stream = self._streams[0].ptr
                self._door.copy_async(piece.address, message.handle.address + at, nbytes, stream)
                piece.event.record(stream)
            else:
                handle = pool.handle(piece, nbytes)
                piece.request = self._host.recv(message.peer, handle, message.tag)
            message.next += nbytes
            first.append(piece)

    def flush(self) -> bool:
        """Return whether all sent bytes have left this process."""
        return self._host.flush()

    def check_peers(self) -> None:
        """Raise PeerLost if the host channel knows that a peer is gone."""
        self._host.check_peers()

    def transports(self, peer: int) -> Sequence[tuple[str, str]]:
        """Return the host channel's lanes."""
        return self._host.transports(peer)

    def abandon(self, requests: Sequence[Request], keep: Sequence[object]) -> None:
        """Give up messages; pinned and GPU memory stay until the process ends."""
        self._broken = True
        pieces = [p for m in self._active for p in (*m.first, *m.second) if p.request is not None]
        _QUARANTINE.extend((self._pool, keep))
        self._host.abandon([piece.request for piece in pieces], [self._pool, keep])
        self._active = []

    def close(self) -> None:
        """Free pinned memory and streams; idempotent. The host channel stays open."""
        if not self._broken:
            self._pool.close()
        for stream in self._streams or ():
            stream.close()
        self._streams = None
