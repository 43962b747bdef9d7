"""Messages between two ranks, with mpi4py's manners."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from rdmakit.buffer import Buffer, as_buffer, bytes_at
from rdmakit.datatypes import MemoryKind
from rdmakit.errors import InvalidArgument, TransportError, UnsupportedError
from rdmakit.group import Group
from rdmakit.mailbox import ANY, TAG_UB, Mailbox
from rdmakit.operation import Persistent
from rdmakit.process.phase import current
from rdmakit.protocols import Arrived
from rdmakit.request import ANY_SOURCE, ANY_TAG, PROC_NULL, Request, Special, check_timeout, fill

__all__ = ["TAG_UB", "PointToPoint"]


class PointToPoint(Group):
    """Send, receive, probe. Arrays are contiguous host memory of any plain type.

    Messages of one pair of ranks with fitting tags are received in the order they were sent.
    A message may be shorter than the array it is received into; its Status tells. One that is
    longer raises MessageTruncated at the receiver. ``Send`` may return before the message is
    received, or not: do not rely on it. Inside a node MPI carries the messages.

    All raise InvalidArgument or UnsupportedError for what cannot be served, before anything is
    sent; CommunicatorClosed after an error; and while waiting TransferTimeout or PeerLost, after
    which the communicator is unusable.
    """

    _mailbox: Mailbox

    @property
    def tag_ub(self) -> int:
        """Largest tag that messages may have: TAG_UB, unless MPI's own is smaller."""
        return self._mailbox.tags - 1

    # -- that block ---------------------------------------------------------------------------

    def Send(self, buf: object, dest: Any, tag: int = 0, *, timeout: float | None = None) -> None:
        """Send ``buf`` to rank ``dest``. Returns when ``buf`` may be changed."""
        check_timeout(timeout)
        self._send(buf, dest, tag, background=False).Wait(timeout=timeout)
        self._state.settle()

    def Recv(
        self,
        buf: object,
        source: Any = ANY_SOURCE,
        tag: Any = ANY_TAG,
        status: Any = None,
        *,
        timeout: float | None = None,
    ) -> None:
        """Receive into ``buf`` from rank ``source``. Returns when it is there.

        Args:
            buf: array of at least the message's length.
            source: a rank, or ANY_SOURCE.
            tag: a tag, or ANY_TAG.
            status: filled with what came.
            timeout: seconds to wait; default: the configuration's.

        Raises:
            MessageTruncated: the message is longer, and lost.
        """
        check_timeout(timeout)
        self._receive(buf, source, tag, background=False).Wait(status, timeout=timeout)

    def Sendrecv(
        self,
        sendbuf: object,
        dest: Any,
        sendtag: int = 0,
        recvbuf: object = None,
        source: Any = ANY_SOURCE,
        recvtag: Any = ANY_TAG,
        status: Any = None,
        *,
        timeout: float | None = None,
    ) -> None:
        """Send and receive at once; the two must not overlap. Blocking."""
        check_timeout(timeout)
        receive = self._receive(recvbuf, source, recvtag, background=False)
        self._send_and_wait(receive, sendbuf, dest, sendtag, status, timeout)

    def Sendrecv_replace(
        self,
        buf: object,
        dest: Any,
        sendtag: int = 0,
        source: Any = ANY_SOURCE,
        recvtag: Any = ANY_TAG,
        status: Any = None,
        *,
        timeout: float | None = None,
    ) -> None:
        """Send ``buf`` and receive into it. Blocking; holds a copy meanwhile."""
        check_timeout(timeout)
        what = self._message(buf, "buf", writable=True)
        copy = bytes_at(what.address, what.nbytes).copy()
        receive = self._receive(buf, source, recvtag, background=False)
        self._send_and_wait(receive, copy, dest, sendtag, status, timeout)

    def _send_and_wait(
        self,
        receive: Request,
        sendbuf: object,
        dest: Any,
        tag: int,
        status: Any,
        timeout: float | None,
    ) -> None:
        try:
            send = self._send(sendbuf, dest, tag, background=False)
        except (InvalidArgument, UnsupportedError):
            receive.Cancel()
            raise
        send.Wait(timeout=timeout)
        receive.Wait(status, timeout=timeout)
        self._state.settle()

    def Probe(
        self,
        source: Any = ANY_SOURCE,
        tag: Any = ANY_TAG,
        status: Any = None,
        *,
        timeout: float | None = None,
    ) -> bool:
        """Wait until a message can be received, and tell of it; it stays to be received."""
        check_timeout(timeout)
        found: list[Arrived] = []
        wanted = self._wanted(source, tag)
        if wanted is None:
            fill(status, PROC_NULL, ANY, 0)
            return True
        rank, number = wanted

        def there() -> bool:
            found.extend(self._found(rank, number))
            return bool(found)

        before = current.enter("probe")
        try:
            self._engine.wait(
                there,
                self._waiter,
                lambda: f"probe of {_from(rank, number)}: waiting",
                timeout=timeout,
            )
        except TransportError as exc:
            self._fail(exc)
            raise
        finally:
            current.restore(before)
        fill(status, found[0].source, found[0].tag, found[0].nbytes)
        return True

    # -- that do not --------------------------------------------------------------------------

    def Isend(self, buf: object, dest: Any, tag: int = 0) -> Request:
        """Begin :meth:`Send`; ``buf`` must not be changed until the request is complete."""
        return self._send(buf, dest, tag, background=True)

    def Irecv(self, buf: object, source: Any = ANY_SOURCE, tag: Any = ANY_TAG) -> Request:
        """Begin :meth:`Recv`; ``buf`` must not be used until the request is complete."""
        return self._receive(buf, source, tag, background=True)

    def Iprobe(self, source: Any = ANY_SOURCE, tag: Any = ANY_TAG, status: Any = None) -> bool:
        """Return whether a message can be received, and tell of it. Local, does not block."""
        wanted = self._wanted(source, tag)
        if wanted is None:
            fill(status, PROC_NULL, ANY, 0)
            return True
        with self._engine.held():
            self._engine.step()
            found = self._found(*wanted)
        if not found:
            return False
        fill(status, found[0].source, found[0].tag, found[0].nbytes)
        return True

    def Send_init(self, buf: object, dest: Any, tag: int = 0) -> Persistent:
        """Return a send that can be started any number of times. Local."""
        self._check_send(buf, dest, tag)
        return Persistent(lambda: self.Isend(buf, dest, tag))

    def Recv_init(self, buf: object, source: Any = ANY_SOURCE, tag: Any = ANY_TAG) -> Persistent:
        """Return a receive that can be started any number of times. Local."""
        self._message(buf, "buf", writable=True)
        self._wanted(source, tag)
        return Persistent(lambda: self.Irecv(buf, source, tag))

    # -- how they are done --------------------------------------------------------------------

    def _check_send(self, buf: object, dest: Any, tag: Any) -> tuple[Buffer, int | None, int]:
        self._check_usable()
        what = self._message(buf, "buf", writable=False)
        number = self._tag(tag)
        return what, None if PROC_NULL.means(dest) else self._peer("dest", dest), number

    def _send(self, buf: object, dest: Any, tag: int, *, background: bool) -> Request:
        what, peer, tag = self._check_send(buf, dest, tag)
        if peer is None:
            return self._nothing("send to nobody", "send")
        request = Request(
            self._state,
            self._waiter,
            lambda: f"send to rank {peer} (tag {tag}, {what.nbytes} bytes)",
            buf,
            kind="send",
            nbytes=what.nbytes,
        )
        data = bytes_at(what.address, what.nbytes)
        self._post(lambda: self._mailbox.send(request, peer, data, tag), background)
        return request

    def _receive(self, buf: object, source: Any, tag: Any, *, background: bool) -> Request:
        self._check_usable()
        what = self._message(buf, "buf", writable=True)
        wanted = self._wanted(source, tag)
        if wanted is None:
            return self._nothing("receive from nobody", "receive")
        request = Request(
            self._state,
            self._waiter,
            lambda: f"receive from {_from(*wanted)} ({what.nbytes} bytes)",
            buf,
            kind="receive",
            nbytes=what.nbytes,
        )
        data = bytes_at(what.address, what.nbytes)
        self._post(lambda: self._mailbox.receive(request, *wanted, data), background)
        return request

    def _post(self, start: Callable[[], None], background: bool) -> None:
        engine, family = self._engine, self._state
        engine.enter()
        try:
            start()
            family.stir(background=background)
        except BaseException as exc:
            self._fail(exc)
            raise
        finally:
            engine.leave()

    def _nothing(self, label: str, kind: Any) -> Request:
        request = Request(self._state, self._waiter, label, None, kind=kind)
        request.null_source = PROC_NULL
        request.end()
        return request

    def _found(self, source: int, tag: int) -> list[Arrived]:
        try:
            found = self._mailbox.find(source, tag)
        except TransportError as exc:
            self._fail(exc)
            raise
        return [] if found is None else [found]

    def _message(self, buf: object, name: str, *, writable: bool) -> Buffer:
        what = as_buffer(buf, name, writable=writable)
        if what.kind is not MemoryKind.HOST:
            raise UnsupportedError(
                f"{name} is GPU memory: messages between two ranks are served on host arrays "
                "only; copy it to the host"
            )
        if what.dtype.hasobject or not what.dtype.itemsize:
            raise UnsupportedError(f"elements of type {what.dtype} are not plain bytes")
        return what

    def _wanted(self, source: Any, tag: Any) -> tuple[int, int] | None:
        """Return source and tag of a receive, ANY for any; None for PROC_NULL."""
        self._check_usable()
        number = ANY if ANY_TAG.means(tag) else self._tag(tag)
        if ANY_SOURCE.means(source):
            return ANY, number
        if PROC_NULL.means(source):
            return None
        return self._peer("source", source), number

    def _peer(self, name: str, rank: Any) -> int:
        number = _integer(name, rank)
        if not 0 <= number < self.size:
            raise InvalidArgument(f"{name} {rank} is not in 0..{self.size - 1}")
        return number

    def _tag(self, tag: Any) -> int:
        number = _integer("tag", tag)
        if not 0 <= number <= self.tag_ub:
            raise InvalidArgument(f"tag {tag} is not in 0..{self.tag_ub}")
        return number


def _integer(name: str, value: Any) -> int:
    if isinstance(value, Special):
        raise InvalidArgument(f"{name}: {value} cannot stand here")
    try:
        return operator.index(value)
    except TypeError as exc:
        raise InvalidArgument(f"{name}: expected a number, got {type(value).__name__}") from exc


def _from(source: int, tag: int) -> str:
    who = "any rank" if source == ANY else f"rank {source}"
    return f"{who} (any tag)" if tag == ANY else f"{who} (tag {tag})"
