"""Arrays with gaps: gathered into scratch memory before a collective, scattered after it.

Elements are taken in C order whatever the strides, so that ranks may have different ones. What
lies between them is never read or written. A collective itself sees contiguous memory only.

Scratch memory belongs to a communicator, grows with the largest array and is used by one call
after another. On the GPU everything is ordered on the call's stream; the host waits only where
the scratch must grow while an earlier call may still use it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rdmakit.buffer import Buffer, array_at, strided_at
from rdmakit.errors import UnsupportedError
from rdmakit.plan.shape import Kind
from rdmakit.waiting import Waiter

__all__ = ["DevicePacking", "HostPacked", "HostScratch", "moved", "place"]

_KEPT = 256
"""Kernel launches kept ready."""
_ROUND = 2 << 20
"""Scratch on the GPU is taken in multiples of this many bytes, CUDA's own granularity."""


def place(send: Buffer, recv: Buffer, take: Callable[[int, int], int]) -> tuple[Buffer, Buffer]:
    """Return the contiguous buffers that stand for the two, of which one at least is strided.

    Args:
        send: input.
        recv: output.
        take: returns the address of scratch area 0 or 1 of so many bytes.
    """
    to, of = recv.strided, send.strided
    if of is not None and to is not None and _same_array(send, recv):
        base = take(1, max(send.nbytes, recv.nbytes))  # in place, or this rank's block of it
        starts = [base + part.first * send.dtype.itemsize for part in (of, to)]
        return _plain(send, starts[0]), _plain(recv, starts[1])
    if of is not None:
        send = _plain(send, take(0, send.nbytes))
    if to is not None:
        recv = _plain(recv, take(1, recv.nbytes))
    return send, recv


def _same_array(a: Buffer, b: Buffer) -> bool:
    assert a.strided is not None
    assert b.strided is not None
    return a.address == b.address and a.strided == replace(b.strided, first=a.strided.first)


def moved(kind: Kind, rank: int, root: int) -> dict[str, bool]:
    """Return whether a rank's input is read (``reads``) and its output written (``writes``)."""
    at_root = rank == root
    return {
        "reads": at_root or kind not in (Kind.BROADCAST, Kind.SCATTER),
        "writes": {
            Kind.BROADCAST: not at_root,
            Kind.REDUCE: at_root,
            Kind.GATHER: at_root,
            Kind.EXSCAN: rank > 0,
        }.get(kind, True),
    }


def _plain(buffer: Buffer, address: int) -> Buffer:
    return replace(buffer, address=address, stream=0, order="", strided=None)


# -- host memory ------------------------------------------------------------------------------


class HostScratch:
    """Areas of host memory that are used again. Owned by whoever makes calls in a row."""

    def __init__(self) -> None:
        self.areas = [np.empty(0, np.uint8) for _ in range(3)]

    def take(self, index: int, nbytes: int) -> int:
        """Return the address of an area of at least so many bytes; its content is undefined."""
        if self.areas[index].nbytes < nbytes:
            self.areas[index] = np.empty(nbytes, np.uint8)
        address: int = self.areas[index].__array_interface__["data"][0]
        return address


class HostPacked:
    """One call's arrays in host memory, made contiguous.

    Attributes:
        send: contiguous, to be given to the collective.
        recv: the same.
        keep: what must outlive the transfer.
    """

    def __init__(
        self, send: Buffer, recv: Buffer, scratch: HostScratch, *, reads: bool, writes: bool
    ) -> None:
        """Take the memory; nothing is copied yet. Local.

        Args:
            send: resolved input.
            recv: resolved output; one of the two at least is strided.
            scratch: where they are put; not for another call until this one is done.
            reads: whether ``send`` is read on this rank (not at the receivers of a broadcast).
            writes: whether ``recv`` is written on this rank.
        """
        self.send, self.recv = place(send, recv, scratch.take)
        self._of = _views(send, self.send) if reads and send.strided is not None else None
        self._to = _views(recv, self.recv) if writes and recv.strided is not None else None
        self.keep = tuple(scratch.areas)

    def gather(self) -> None:
        """Copy the input into the scratch. Local."""
        if self._of is not None:
            view, first, flat = self._of
            if flat.size == view.size:
                np.copyto(flat.reshape(view.shape), view)
            else:
                flat[:] = view.flat[first : first + flat.size]

    def scatter(self) -> None:
        """Copy the result out of it. Local."""
        if self._to is not None:
            view, first, flat = self._to
            if flat.size == view.size:
                np.copyto(view, flat.reshape(view.shape))
            else:
                view.flat[first : first + flat.size] = flat

    def around(self, call: Callable[[], object]) -> Callable[[], None]:
        """Return ``call`` between the two."""

        def run() -> None:
            self.gather()
            call()
            self.scatter()

        return run


Array = npt.NDArray[Any]


def _views(buffer: Buffer, packed: Buffer) -> tuple[Array, int, Array]:
    """Return the strided array, the first element that is meant, and the contiguous array."""
    assert buffer.strided is not None
    view = strided_at(buffer.address, buffer.strided, buffer.dtype)
    return view, buffer.strided.first, array_at(packed.address, packed.count, buffer.dtype)


# -- GPU memory -------------------------------------------------------------------------------


class DevicePacking:
    """Scratch memory and kernels of one communicator on one GPU. Close it with :meth:`close`."""

    def __init__(self, gpu: Any, device: int, waiter: Waiter) -> None:
        """Describe it; memory is taken at the first call. Local.

        Args:
            gpu: has ``door`` (:mod:`rdmakit.drivers.cuda`), ``pack`` and ``unpack``.
            device: ordinal of the GPU.
            waiter: deadline of waits.
        """
        self._gpu, self._device, self._waiter = gpu, device, waiter
        self._areas: list[Any] = [None, None]
        self._launches: dict[tuple[Any, ...], Any] = {}
        self._done: Any = None
        self._stream = 0

    def run(
        self,
        send: Buffer,
        recv: Buffer,
        stream: int,
        call: Callable[[Buffer, Buffer], None],
        *,
        reads: bool,
        writes: bool,
    ) -> None:
        """Gather, ``call`` on contiguous buffers, scatter: ordered on ``stream``.

        Args:
            send: resolved input.
            recv: resolved output; one of the two at least is strided.
            stream: a CUstream.
            call: the collective.
            reads: whether ``send`` is read on this rank.
            writes: whether ``recv`` is written on this rank.

        Raises:
            UnsupportedError: ``stream`` is captured into a CUDA graph; nothing was started.
        """
        door = self._gpu.door
        if door.is_capturing(stream):
            raise UnsupportedError(
                "arrays with gaps go through memory that the next call uses again, which a CUDA "
                "graph cannot hold: capture the call on contiguous arrays"
            )
        if self._done is None:
            self._done = door.Event()
        elif stream != self._stream:
            door.wait_event(stream, self._done)
        self._stream = stream
        packed_send, packed_recv = place(send, recv, self._take)
        if reads and send.strided is not None:
            self._launch(self._gpu.pack, send, packed_send)(stream)
        call(packed_send, packed_recv)
        if writes and recv.strided is not None:
            self._launch(self._gpu.unpack, recv, packed_recv)(stream)
        self._done.record(stream)

    def _take(self, index: int, nbytes: int) -> int:
        area = self._areas[index]
        if area is None or area.nbytes < nbytes:
            if area is not None:
                self._wait()
                self._areas[index] = None
                area.close()
            self._launches.clear()
            area = self._gpu.door.DeviceMemory(-(-nbytes // _ROUND) * _ROUND)
            self._areas[index] = area
        address: int = area.address
        return address

    def _launch(self, kernel: Any, buffer: Buffer, packed: Buffer) -> Callable[[int], None]:
        itemsize = buffer.dtype.itemsize
        key = (kernel, packed.address, buffer.address, buffer.strided, buffer.count, itemsize)
        launch: Callable[[int], None] | None = self._launches.get(key)
        if launch is None:
            if len(self._launches) >= _KEPT:
                self._launches.clear()
            args = (packed.address, buffer.address, buffer.strided, buffer.count, itemsize)
            launch = self._launches[key] = kernel(self._device, *args)
        return launch

    def _wait(self) -> None:
        """Poll until no call uses the scratch any more: freeing it would block the host."""
        waiter = self._waiter
        waiter.until(
            self._done.done, (waiter.progress,), lambda: "waiting for the GPU to leave the scratch"
        )

    def close(self) -> None:
        """Free its memory. Local, blocking, idempotent; not after an error of a call."""
        if self._done is not None:
            self._wait()
            self._done.close()
        for area in self._areas:
            if area is not None:
                area.close()
        self._areas, self._done = [None, None], None
        self._launches.clear()
