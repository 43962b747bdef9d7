"""Messages between two ranks: which of those that came belongs to which receive.

Messages come over several ways (MPI inside a node, the job's channel between nodes, and to
oneself), each of which keeps the order of one source. All are matched here, so that a receive
from any source sees all of them, a receive that is not matched can be taken back, and one that
is too short knows how long the message is. Of a message in pieces (:mod:`rdmakit.long_mail`) the
head is matched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from rdmakit.engine import Pending
from rdmakit.errors import MessageTruncated
from rdmakit.long_mail import Borrow, Inbox, Incoming, Outbox, Outgoing, Parts, receive_into
from rdmakit.protocols import Arrived, Bytes, Form, Mail, Request

__all__ = ["ANY", "TAG_UB", "Mailbox", "Transfer"]

ANY = -1
"""Of a receive: any source, any tag."""
TAG_UB = (1 << 28) - 1
"""Largest tag of the user's, where MPI's own is not smaller."""
_EAGER = 64 << 10
"""Bytes up to which a message to oneself is copied, so that its send is complete at once."""


class Transfer(Pending):
    """A message under way, and what became of it.

    Attributes:
        source: who sent it, once known.
        tag: its tag, once known.
        nbytes: its bytes, once known.
        cancelled: whether it was taken back.
    """

    def __init__(
        self, label: str | Callable[[], str], keep: object, source: int = ANY, tag: int = ANY
    ) -> None:
        super().__init__(label, keep)
        self.source, self.tag, self.nbytes, self.cancelled = source, tag, 0, False


class _Receive:
    """A receive that waits for its message."""

    __slots__ = ("data", "source", "tag", "transfer")

    def __init__(self, transfer: Transfer, source: int, tag: int, data: Bytes | Incoming) -> None:
        self.transfer, self.source, self.tag, self.data = transfer, source, tag, data

    def takes(self, message: Arrived) -> bool:
        return _fits(self.source, self.tag, message)


def _fits(source: int, tag: int, message: Arrived) -> bool:
    return source in (ANY, message.source) and tag in (ANY, message.tag)


class _Own:
    """Messages of this rank to itself. See :class:`rdmakit.protocols.Mail`."""

    tags = TAG_UB + 1
    numbers = 1 << 16
    direct = False

    def __init__(self, rank: int) -> None:
        self._rank, self._there = rank, deque[Arrived]()

    def send(self, peer: int, data: Bytes, tag: int, form: Form = Form.WHOLE) -> Request:
        sent = _Flag()
        if data.nbytes <= _EAGER:
            data, sent.complete = data.copy(), True

        def receive(into: Bytes) -> Request:
            np.copyto(into, data)
            sent.complete = True
            return _Flag(True)

        self._there.append(Arrived(self._rank, tag, data.nbytes, receive, form))
        return sent

    def arrived(self) -> Arrived | None:
        return self._there.popleft() if self._there else None

    def abandon(self, requests: Sequence[Request], keep: Sequence[object]) -> None:
        self._there.clear()


class _Flag:
    def __init__(self, complete: bool = False) -> None:
        self.complete = complete

    def done(self) -> bool:
        return self.complete


class Mailbox:
    """The messages of one communicator on this rank. Used with the engine's lock held.

    Attributes:
        tags: the user's tags are below this.
    """

    def __init__(
        self, rank: int, routes: Sequence[Mail], tags: int, borrow: Borrow | None = None
    ) -> None:
        """Make it. Local.

        Args:
            rank: this rank.
            routes: what carries messages to each rank; this one's own entry is not used.
            tags: what carries them has tags below this, on every rank.
            borrow: see :class:`rdmakit.long_mail.Inbox`.
        """
        self.rank = rank
        self._own = _Own(rank)
        self._routes: list[Mail] = list(routes)
        self._routes[rank] = self._own
        self._ways: tuple[Mail, ...] = tuple(dict.fromkeys(self._routes))
        self.tags = min(TAG_UB + 1, tags)
        self._receives: list[_Receive] = []
        self._messages: list[tuple[Mail, Arrived]] = []
        self._moving: list[tuple[Request, Transfer, Mail]] = []
        self._inbox = Inbox(borrow)
        self._outbox = Outbox(self._inbox)

    @property
    def busy(self) -> bool:
        """Whether any send or receive is not complete."""
        return bool(self._moving or self._receives)

    def send(self, transfer: Transfer, peer: int, data: Bytes | Outgoing, tag: int) -> None:
        """Start sending ``data`` to rank ``peer``."""
        way = self._routes[peer]
        request: Request
        if isinstance(data, np.ndarray):
            request = way.send(peer, data, tag)
        else:
            request = self._outbox.send(way, peer, data, tag, partial(self._step, transfer))
        if request.done():
            transfer.end()
        else:
            self._moving.append((request, transfer, way))

    def _step(self, transfer: Transfer) -> None:
        transfer.moves += 1
        self._inbox.moved = True

    def receive(self, transfer: Transfer, source: int, tag: int, data: Bytes | Incoming) -> None:
        """Start receiving into ``data`` what comes from ``source`` with ``tag`` (or ANY)."""
        receive = _Receive(transfer, source, tag, data)
        for index, (way, message) in enumerate(self._messages):
            if receive.takes(message):
                del self._messages[index]
                self._take(receive, message, way)
                return
        self._receives.append(receive)
        self._look_in()

    def find(self, source: int, tag: int) -> Arrived | None:
        """Return the first message for such a receive, which stays where it is; None if none."""
        self._look_in(all_=True)
        return next((m for _, m in self._messages if _fits(source, tag, m)), None)

    def cancel(self, transfer: Transfer) -> bool:
        """Take a receive back if it has no message yet; return whether it was."""
        for receive in self._receives:
            if receive.transfer is transfer:
                self._receives.remove(receive)
                if not isinstance(receive.data, np.ndarray):
                    receive.data.drop()
                transfer.cancelled = True
                transfer.end()
                return True
        return False

    def waiting(self) -> list[Transfer]:
        """Return what is not complete: first what moves, then receives without a message."""
        moving = [transfer for _, transfer, _ in self._moving]
        return moving + [receive.transfer for receive in self._receives]

    @property
    def moving(self) -> bool:
        """Whether a send is not complete, or a receive that has its message."""
        return bool(self._moving)

    def advance(self) -> bool:
        """Do all that can be done without waiting; return whether anything moved.

        Raises:
            TransportError: a message was lost.
        """
        inbox = self._inbox
        inbox.moved = False
        if self._receives or inbox.hungry:
            self._look_in()
        moved = inbox.moved
        if self._moving:
            still = []
            for entry in self._moving:
                if entry[0].done():
                    entry[1].end(entry[1].error)
                else:
                    still.append(entry)
            moved = inbox.moved or len(still) < len(self._moving)
            self._moving = still
        return moved

    def _look_in(self, *, all_: bool = False) -> None:
        """Match what has come; while receives wait for it, or all there is."""
        inbox = self._inbox
        for way in self._ways:
            while self._receives or all_ or inbox.hungry:
                message = inbox.next(way)
                if message is None:
                    break
                for receive in self._receives:
                    if receive.takes(message):
                        self._receives.remove(receive)
                        self._take(receive, message, way)
                        break
                else:
                    self._messages.append((way, message))

    def _take(self, receive: _Receive, message: Arrived, way: Mail) -> None:
        transfer, data = receive.transfer, receive.data
        transfer.source, transfer.tag = message.source, message.tag
        transfer.nbytes = message.nbytes
        transfer.moves += 1
        if message.pieces is not None:
            self._inbox.feed(message)
        into = data[: message.nbytes] if isinstance(data, np.ndarray) else data
        if message.nbytes > data.nbytes:
            transfer.error = MessageTruncated(
                f"rank {self.rank}: {transfer.label}: the message of {message.nbytes} bytes from "
                f"rank {message.source} with tag {message.tag} is longer than the array of "
                f"{data.nbytes} bytes; it is lost"
            )
            if not isinstance(data, np.ndarray):
                data.drop()
            into = np.empty(message.nbytes, np.uint8)  # its sender waits for it to be taken
            transfer.keep = (transfer.keep, into)
        if not isinstance(into, np.ndarray):
            request: Request = into.begin(message, partial(self._step, transfer))
        elif message.pieces is not None:
            request = receive_into(into, message, partial(self._step, transfer))
        else:
            request = message.receive(into)
        if request.done():
            transfer.end(transfer.error)
        else:
            self._moving.append((request, transfer, way))

    def refuse(self, error: BaseException) -> None:
        """End the receives that have no message with ``error``; what carries messages stays."""
        waiting, self._receives = self._receives, []
        for receive in waiting:
            if not isinstance(receive.data, np.ndarray):
                receive.data.drop()
            receive.transfer.end(error)

    def abandon(self, error: BaseException) -> None:
        """Give everything up; its memory stays as long as somebody may write to it."""
        moving, self._moving = self._moving, []
        waiting, self._receives = self._receives, []
        self._messages.clear()
        self._inbox.abandon()
        for request, transfer, way in moving:
            if isinstance(request, Parts):
                request.abandon(way, [transfer.keep])
            else:
                way.abandon([request], [transfer.keep])
            transfer.end(error)
        for receive in waiting:
            receive.transfer.end(error)
