"""Messages between two ranks, with mpi4py's manners."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from rdmakit.buffer import Buffer, bytes_at
from rdmakit.datatypes import MemoryKind
from rdmakit.device_side import DeviceSide
from rdmakit.errors import InvalidArgument, TransportError, UnsupportedError
from rdmakit.group import Group
from rdmakit.long_mail import Incoming, Outgoing
from rdmakit.mailbox import ANY, TAG_UB, Mailbox
from rdmakit.message_arrays import incoming, message, outgoing
from rdmakit.operation import Persistent
from rdmakit.process.phase import current
from rdmakit.protocols import Arrived, Bytes
from rdmakit.request import Request, check_timeout, integer
from rdmakit.status import ANY_SOURCE, ANY_TAG, PROC_NULL, fill

__all__ = ["TAG_UB", "PointToPoint"]


class PointToPoint(Group):
    """Send, receive, probe. Arrays are host or GPU memory of any plain type, strided or not.

    A message is the bytes of the elements in C order, so that the two sides may have other
    strides, or one of them GPU memory. An array that is received into must have each element in
    its own place; it is written when the message is there.

    GPU arrays: a call takes what is there after the present work of ``stream`` (any CUDA stream;
    default: CuPy's current one), and a receive writes after it. A send is complete when the array
    may be written again, a receive when the bytes are in GPU memory, for later work of any stream:
    Wait, Test and ``done`` tell. Nothing of it can be captured into a CUDA graph. Inside a node
    messages of 64 KiB and more are read where they lie in the sender's GPU (arrays of ``empty`` or
    ``register``) or from slots they are copied to, once a collective call on GPU arrays was made;
    a send is then complete when the receiver has read it. All others, and between nodes unless
    ``RDMAKIT_GPU_DIRECT`` holds, go through pinned host memory in pieces. Scratch, slots and pinned
    memory are kept until close. ``stream`` means nothing to host arrays.

    Messages of one pair of ranks with fitting tags are received in the order they were sent.
    A message may be shorter than the array it is received into; its Status tells. One that is
    longer raises MessageTruncated at the receiver. ``Send`` may return before the message is
    received, or not: do not rely on it. Inside a node MPI carries the messages.

    All raise InvalidArgument or UnsupportedError for what cannot be served, before anything is
    sent; CommunicatorClosed after an error; and while waiting TransferTimeout or PeerLost, after
    which the communicator is unusable.
    """

    _mailbox: Mailbox
    _gpus: DeviceSide

    @property
    def tag_ub(self) -> int:
        """Largest tag that messages may have: TAG_UB, unless MPI's own is smaller."""
        return self._mailbox.tags - 1

    # -- that block ---------------------------------------------------------------------------

    def Send(
        self,
        buf: object,
        dest: Any,
        tag: int = 0,
        *,
        stream: object = None,
        timeout: float | None = None,
    ) -> None:
        """Send ``buf`` to rank ``dest``. Returns when ``buf`` may be changed."""
        check_timeout(timeout)
        self._send(buf, dest, tag, stream, background=False).Wait(timeout=timeout)
        self._state.settle()

    def Recv(
        self,
        buf: object,
        source: Any = ANY_SOURCE,
        tag: Any = ANY_TAG,
        status: Any = None,
        *,
        stream: object = None,
        timeout: float | None = None,
    ) -> None:
        """Receive into ``buf`` from rank ``source``. Returns when it is there.

        Args:
            buf: array of at least the message's length.
            source: a rank, or ANY_SOURCE.
            tag: a tag, or ANY_TAG.
            status: filled with what came.
            stream: see the class.
            timeout: seconds to wait; default: the configuration's.

        Raises:
            MessageTruncated: the message is longer, and lost.
        """
        check_timeout(timeout)
        self._receive(buf, source, tag, stream, background=False).Wait(status, timeout=timeout)

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
        stream: object = None,
        timeout: float | None = None,
    ) -> None:
        """Send and receive at once; the two must not overlap. Blocking."""
        check_timeout(timeout)
        send = partial(self._send, sendbuf, dest, sendtag, stream, background=False)
        receive = self._receive(recvbuf, source, recvtag, stream, background=False)
        self._send_and_wait(receive, send, status, timeout)

    def Sendrecv_replace(
        self,
        buf: object,
        dest: Any,
        sendtag: int = 0,
        source: Any = ANY_SOURCE,
        recvtag: Any = ANY_TAG,
        status: Any = None,
        *,
        stream: object = None,
        timeout: float | None = None,
    ) -> None:
        """Send ``buf`` and receive into it. Blocking; holds a copy meanwhile."""
        check_timeout(timeout)
        message(buf, "buf", writable=True)
        what, peer, number = self._check_send(buf, dest, sendtag)
        self._wanted(source, recvtag)
        copy: Bytes | Outgoing = np.empty(0, np.uint8)
        if peer is not None:
            with self._engine.held():
                copy = outgoing(what, self._gpus, stream, copy=True)
        receive = self._receive(buf, source, recvtag, stream, background=False)
        send = partial(self._start_send, copy, (buf, copy), what, peer, number, background=False)
        self._send_and_wait(receive, send, status, timeout)

    def _send_and_wait(
        self,
        receive: Request,
        begin: Callable[[], Request],
        status: Any,
        timeout: float | None,
    ) -> None:
        try:
            send = begin()
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

    def Isend(self, buf: object, dest: Any, tag: int = 0, *, stream: object = None) -> Request:
        """Begin :meth:`Send`; ``buf`` must not be changed until the request is complete."""
        return self._send(buf, dest, tag, stream, background=True)

    def Irecv(
        self,
        buf: object,
        source: Any = ANY_SOURCE,
        tag: Any = ANY_TAG,
        *,
        stream: object = None,
    ) -> Request:
        """Begin :meth:`Recv`; ``buf`` must not be used until the request is complete."""
        return self._receive(buf, source, tag, stream, background=True)

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

    def Send_init(
        self, buf: object, dest: Any, tag: int = 0, *, stream: object = None
    ) -> Persistent:
        """Return a send that can be started any number of times. Local."""
        self._check_send(buf, dest, tag)
        return Persistent(lambda: self.Isend(buf, dest, tag, stream=stream))

    def Recv_init(
        self,
        buf: object,
        source: Any = ANY_SOURCE,
        tag: Any = ANY_TAG,
        *,
        stream: object = None,
    ) -> Persistent:
        """Return a receive that can be started any number of times. Local."""
        message(buf, "buf", writable=True)
        self._wanted(source, tag)
        return Persistent(lambda: self.Irecv(buf, source, tag, stream=stream))

    # -- how they are done --------------------------------------------------------------------

    def _check_send(self, buf: object, dest: Any, tag: Any) -> tuple[Buffer, int | None, int]:
        self._check_usable()
        what = message(buf, "buf", writable=False)
        number = self._tag(tag)
        return what, None if PROC_NULL.means(dest) else self._peer("dest", dest), number

    def _send(
        self, buf: object, dest: Any, tag: int, stream: object, *, background: bool
    ) -> Request:
        what, peer, tag = self._check_send(buf, dest, tag)
        if peer is None:
            return self._nothing("send to nobody", "send")
        keep: object = buf
        data: Bytes | Outgoing
        if what.kind is MemoryKind.HOST and what.strided is None:
            data = bytes_at(what.address, what.nbytes)
        else:
            with self._engine.held():
                data = outgoing(what, self._gpus, stream)
            keep = (buf, data)
        return self._start_send(data, keep, what, peer, tag, background=background)

    def _start_send(
        self,
        data: Bytes | Outgoing,
        keep: object,
        what: Buffer,
        peer: int | None,
        tag: int,
        *,
        background: bool,
    ) -> Request:
        if peer is None:
            return self._nothing("send to nobody", "send")
        request = Request(
            self._state,
            self._waiter,
            lambda: f"send to rank {peer} (tag {tag}, {what.nbytes} bytes)",
            keep,
            kind="send",
            nbytes=what.nbytes,
        )
        self._post(lambda: self._mailbox.send(request, peer, data, tag), background)
        return request

    def _receive(
        self, buf: object, source: Any, tag: Any, stream: object, *, background: bool
    ) -> Request:
        self._check_usable()
        what = message(buf, "buf", writable=True)
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
        data: Bytes | Incoming
        if what.kind is MemoryKind.HOST and what.strided is None:
            data = bytes_at(what.address, what.nbytes)
        else:
            with self._engine.held():
                data = incoming(what, self._gpus, stream)
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
        number = integer(name, rank)
        if not 0 <= number < self.size:
            raise InvalidArgument(f"{name} {rank} is not in 0..{self.size - 1}")
        return number

    def _tag(self, tag: Any) -> int:
        number = integer("tag", tag)
        if not 0 <= number <= self.tag_ub:
            raise InvalidArgument(f"tag {tag} is not in 0..{self.tag_ub}")
        return number


def _from(source: int, tag: int) -> str:
    who = "any rank" if source == ANY else f"rank {source}"
    return f"{who} (any tag)" if tag == ANY else f"{who} (tag {tag})"
