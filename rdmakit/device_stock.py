"""What messages of GPU memory take: pinned pieces, scratch memory, events and streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rdmakit.buffer import Buffer, Strided
from rdmakit.inter.staged import PIECE, PinnedPool
from rdmakit.lending import Lender

__all__ = ["DeviceStock"]

SMALL = 64 << 10
"""Bytes up to which a message takes a small pinned piece, of which many are made at once."""
_QUARANTINE: list[object] = []
"""GPU memory that a copy may still be under way to."""


class DeviceStock:
    """Pinned pieces, scratch, events and streams for the messages of one communicator.

    With the engine's lock held. Memory is taken when it is needed, used again and kept until
    :meth:`close`: freeing it would wait for the device.
    """

    def __init__(
        self,
        gpu: Any,
        device: int,
        enter: Callable[[], None],
        *,
        direct: bool,
        lender: Callable[[], Lender | None] = lambda: None,
        piece: int = PIECE,
        small: int = SMALL,
    ) -> None:
        """Describe it. Local.

        Args:
            gpu: has ``door`` (:mod:`rdmakit.drivers.cuda`), ``pack`` and ``unpack``.
            device: ordinal of the GPU.
            enter: makes it current in the calling thread.
            direct: whether messages between nodes take GPU memory; equal on all ranks.
            lender: gives what lends GPU memory inside the node, once there is any.
            piece: bytes of a piece.
            small: bytes of a small one.
        """
        self.door, self.device, self.enter, self.direct = gpu.door, device, enter, direct
        self._gpu, self.lender = gpu, lender
        self._pools = [PinnedPool(gpu.door, _same, size) for size in (min(small, piece), piece)]
        self._scratch: dict[int, list[Any]] = {}
        self._memory: list[Any] = []
        self._events: list[Any] = []
        self._all_events: list[Any] = []
        self._streams: tuple[Any, Any] | None = None

    def unpack(self, buffer: Buffer, packed: int, nbytes: int) -> Callable[[int], object]:
        """Return what scatters the first bytes of an array, which may end within an element."""
        return self._bind(self._gpu.unpack, buffer, packed, nbytes)

    def _bind(
        self, kernel: Any, buffer: Buffer, packed: int, nbytes: int
    ) -> Callable[[int], object]:
        assert buffer.strided is not None
        where, itemsize = buffer.strided, buffer.dtype.itemsize
        if nbytes % itemsize:
            where = Strided((*where.shape, itemsize), (*where.strides, 1))
            itemsize = 1
        launch: Callable[[int], object] = kernel(
            self.device, packed, buffer.address, where, nbytes // itemsize, itemsize
        )
        return launch

    @property
    def streams(self) -> tuple[int, int]:
        """Where bytes are copied from the GPU, and to it."""
        if self._streams is None:
            self._streams = self.door.Stream(), self.door.Stream()
        return self._streams[0].ptr, self._streams[1].ptr

    def pool(self, nbytes: int) -> PinnedPool:
        """Return the pinned pieces for a message of so many bytes."""
        return self._pools[nbytes > self._pools[0].piece]

    def _take(self, nbytes: int) -> Any:
        """Return GPU memory of at least so many bytes: a power of two, so that it fits again."""
        size = max(1 << 12, 1 << (nbytes - 1).bit_length())
        free = self._scratch.setdefault(size, [])
        if free:
            return free.pop()
        made = self.door.DeviceMemory(size)
        self._memory.append(made)
        return made

    def event(self) -> Any:
        """Return an event."""
        if self._events:
            return self._events.pop()
        made = self.door.Event()
        self._all_events.append(made)
        return made

    def _mark(self, stream: int) -> Any:
        event = self.event()
        event.record(stream)
        return event

    def give(self, event: Any, scratch: Any) -> None:
        """Take back an event, and GPU memory (or None) that no work uses any more."""
        self._events.append(event)
        if scratch is not None:
            self._give_memory(scratch)

    def _give_memory(self, scratch: Any) -> None:
        self._scratch[scratch.nbytes].append(scratch)

    def abandon(self, keep: object) -> None:
        """Keep everything until the process ends."""
        _QUARANTINE.append((self, keep))
        for pool in self._pools:
            pool.end()

    def close(self) -> None:
        """Free everything. Local, blocking, idempotent; all messages are complete."""
        for pool in self._pools:
            pool.close()
        for part in (*self._all_events, *self._memory, *(self._streams or ())):
            part.close()
        self._all_events, self._memory, self._streams = [], [], None
        self._events, self._scratch = [], {}


def _same(data: Any) -> Any:
    return data
