"""The seams: what a bootstrap, a window and a channel must offer.

A *window* is memory that the ranks of one node can all address; a *channel* carries messages
between ranks. Everything above this line is written against these protocols only, so that
in-memory fakes, POSIX shared memory, CUDA IPC, UCX and MPI are interchangeable.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

__all__ = [
    "Arrived",
    "Bootstrap",
    "Bytes",
    "Channel",
    "DeviceChannel",
    "DirectMail",
    "Form",
    "Mail",
    "Request",
    "TaggedChannel",
    "Window",
]

Bytes = npt.NDArray[np.uint8]


@runtime_checkable
class Bootstrap(Protocol):
    """The control plane: who the ranks are, and small opaque bytes between them."""

    rank: int
    size: int

    def allgather(self, data: bytes) -> list[bytes]:
        """Return every rank's ``data``, by rank. Collective, blocking."""
        ...

    def barrier(self) -> None:
        """Return when all ranks have called. Collective, blocking."""
        ...

    def start_barrier(self) -> Callable[[], bool]:
        """Start a barrier and return its test. Collective; neither it nor the test blocks."""
        ...

    def start_gather(self, data: bytes) -> Callable[[], list[bytes] | None]:
        """Start an all-gather and return its test, which gives the result, or None before.

        Collective; neither it nor the test blocks.
        """
        ...

    def split(self, color: int, key: int) -> Bootstrap:
        """Return the control plane of the ranks with equal ``color``, ordered by ``key``."""
        ...

    def subset(self, ranks: Sequence[int]) -> Bootstrap:
        """Return the control plane of ``ranks``, in that order. Collective in these alone."""
        ...

    def free(self) -> None:
        """Let go of what it was made with. Collective in MPI's sense."""
        ...

    def abort(self, code: int) -> None:
        """End every rank of the job. Local; does not return."""
        ...


class Request(Protocol):
    """One message under way. The caller keeps the array alive until it is done."""

    def done(self) -> bool:
        """Return whether the message is complete. Local, does not block.

        Raises:
            TransportError: it failed.
        """
        ...


class Form(enum.IntEnum):
    """What a message between two ranks is on its way; see :mod:`rdmakit.long_mail`."""

    WHOLE = 0
    HEAD = 1
    """Announces a message that comes in pieces."""
    PIECE = 2
    LENT = 3
    """Tells where a piece is: in memory of the sender's that the receiver has mapped."""
    TAKEN = 4
    """Tells that the receiver has copied such a piece."""


@dataclass(slots=True)
class Arrived:
    """A message that has come and waits for memory; nobody else can receive it any more."""

    source: int
    """Rank that sent it."""
    tag: int
    """The user's tag; of a piece the number of its message."""
    nbytes: int
    """Its length."""
    receive: Callable[[Bytes], Request]
    """Starts receiving it into memory of at least that length. Local, does not block."""
    form: Form = Form.WHOLE
    receive_device: Callable[[int, int], Request] | None = None
    """The same into GPU memory (address, bytes), where what carries it can."""
    pieces: deque[Arrived] | None = None
    """Of a message that comes in pieces: those that have come and were not taken yet."""
    lent: bool = False
    """Whether it lies in GPU memory of this node, see :mod:`rdmakit.lending`."""


class Mail(Protocol):
    """Messages between two ranks of one communicator, with tags of the user's."""

    tags: int
    """The user's tags are below this; equal on all ranks."""
    numbers: int
    """Messages that may be on their way in pieces to one rank; equal on all ranks."""
    direct: bool
    """Whether :class:`DirectMail` may be asked for, where the communicator allows it."""

    def send(self, peer: int, data: Bytes, tag: int, form: Form = Form.WHOLE) -> Request:
        """Start sending ``data`` to rank ``peer``. Local, does not block.

        The caller keeps the memory alive until the request is done. ``tag`` of a piece is the
        number of its message, of a head 0.
        """
        ...

    def arrived(self) -> Arrived | None:
        """Take the next message that has come, if any; those of one source in their order."""
        ...

    def abandon(self, requests: Sequence[Request], keep: Sequence[object]) -> None:
        """Give up ``requests`` after an error; ``keep`` (their memory) must outlive them."""
        ...


class DirectMail(Mail, Protocol):
    """Mail that also takes GPU memory."""

    def send_device(self, peer: int, address: int, nbytes: int, number: int) -> Request:
        """Start sending GPU memory, which is complete, as one piece. Local, does not block."""
        ...


class Channel(Protocol):
    """Messages between ranks of the job, matched by (source, tag) in the order of posting."""

    name: str
    """What carries the messages: ``ucx``, ``mpi`` or ``memory``."""

    messages: int
    """Tags that one operation may use; equal on all ranks."""

    @property
    def holds(self) -> bool:
        """Whether bytes of an earlier operation are known to be still in this process."""
        ...

    def wrap(self, data: Bytes) -> Any:
        """Return a reusable handle of ``data`` for send and recv. Local.

        The handle may hold only the address: the memory must stay valid while it is used.
        """
        ...

    def send(self, peer: int, handle: Any, tag: int) -> Request:
        """Start sending the bytes behind ``handle`` to rank ``peer``. Local, does not block."""
        ...

    def recv(self, peer: int, handle: Any, tag: int) -> Request:
        """Start receiving from rank ``peer`` into ``handle``. Local, does not block."""
        ...

    def progress(self) -> None:
        """Move messages along; cheap when there is nothing to do."""
        ...

    def flush(self) -> bool:
        """Return whether all sent bytes have left this process; does not block.

        A transport may report a send complete while bytes are still in its own buffer, which
        only ``progress`` empties: whoever stops calling it flushes first.
        """
        ...

    def check_peers(self) -> None:
        """Raise PeerLost if the transport knows that a peer is gone. Local."""
        ...

    def transports(self, peer: int) -> Sequence[tuple[str, str]]:
        """Return (transport, device) of each lane to ``peer``, as the transport reports it."""
        ...

    def abandon(self, requests: Sequence[Request], keep: Sequence[object]) -> None:
        """Give up ``requests`` after an error; ``keep`` (their memory) must outlive them."""
        ...

    def close(self) -> None:
        """Release everything. Local, idempotent; peers must have stopped sending to this rank."""
        ...


class DeviceChannel(Channel, Protocol):
    """A channel that also moves GPU memory, directly or through the host.

    ``done`` of a receive means that kernels launched afterwards see the bytes; a send reads its
    memory when it is called, so what fills it must be complete.
    """

    way: str
    """``gpu-direct`` or ``host-staged``."""

    def wrap_device(self, address: int, nbytes: int) -> Any:
        """Return a reusable handle of GPU memory for send and recv. Local; owns nothing."""
        ...


class TaggedChannel(Channel, Protocol):
    """A channel that tells what has come, by part of the tag."""

    def arrived(self, tag: int, mask: int) -> Arrived | None:
        """Take the first message that has come with ``tag`` in the bits of ``mask``, if any.

        Its ``tag`` is the whole one, without the source. Local, does not block.
        """
        ...


class Window(Protocol):
    """Equal areas of memory, one per rank of a node, addressable by all of them.

    Each rank also owns ``flags`` counters that only it writes and all can read. A post makes
    the rank's earlier writes to any window visible to a rank that sees the counter.
    """

    rank: int
    """This rank's index in the window."""
    size: int
    """Number of ranks."""
    nbytes: int
    """Bytes in each rank's area."""
    flags: int
    """Number of counters of each rank."""
    base: int
    """Counter values up to here belong to earlier plans; advanced equally by all ranks."""
    kind: str
    """What the memory is: ``shm`` or ``memory``."""

    def area(self, owner: int) -> Bytes:
        """Return the area of rank ``owner``. Local."""
        ...

    def post(self, flag: int, value: int) -> None:
        """Set this rank's counter ``flag`` to ``value``, not below its present one."""
        ...

    def reached(self, owner: int, flag: int, value: int) -> bool:
        """Return whether counter ``flag`` of ``owner`` is at ``value`` or above. Does not block."""
        ...

    def close(self) -> None:
        """Unmap. Collective in effect: call after a barrier, then do not use the areas."""
        ...
