"""Where the messages of a pair lie: host memory, or GPU memory sent directly or through the host.

The cases of :mod:`rdmakit.bench.pair` are the same on all three.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy.typing as npt

from rdmakit.bench import gpu_values, values
from rdmakit.bench.session import Session
from rdmakit.errors import CudaError
from rdmakit.inter.staged import StagedChannel
from rdmakit.protocols import Channel, Request
from rdmakit.waiting import Waiter

__all__ = ["DirectMemory", "HostMemory", "PairMemory", "StagedMemory", "why_not_direct"]

_RDMA = ("rc", "dc", "ud", "gga", "srd", "efa", "gaudi")
"""How the names of UCX's RDMA transports begin."""


def why_not_direct(channel: Channel | None) -> str:
    """Return why ``channel`` takes no GPU memory, or nothing. Local."""
    if channel is None:
        return "there is no channel"
    return str(getattr(channel, "why_no_device", f"the {channel.name} channel takes no GPU memory"))


class PairMemory(Protocol):
    """One message out and one in, of equal size, at one end of a pair."""

    def send(self, tag: int) -> Request:
        """Start sending the one. Local, does not block."""
        ...

    def recv(self, tag: int) -> Request:
        """Start receiving the other. Local, does not block."""
        ...

    def progress(self) -> None:
        """Move the messages along. Local."""
        ...

    def spoil(self) -> None:
        """Give the one that comes in what no message is. Local."""
        ...

    def count_wrong(self, period: npt.NDArray[Any]) -> int:
        """Return how many of its elements differ from ``period`` repeated. Local; when it is in."""
        ...

    def transport(self, found: Sequence[tuple[str, str]], name: str) -> str:
        """Return what carried them, from the lanes that the channel ``name`` reports."""
        ...

    def close(self, waiter: Waiter) -> None:
        """Release it. Blocking until nothing is under way any more."""
        ...


def _lanes(found: Sequence[tuple[str, str]], name: str) -> str:
    return "+".join(dict.fromkeys(f"{t}/{d}" for t, d in found)) or name


class HostMemory:
    """NumPy arrays."""

    def __init__(
        self, session: Session, channel: Channel, peer: int, nbytes: int, who: int
    ) -> None:
        """Make it; ``who`` is the number whose values are sent. So for the others. Local."""
        count = nbytes // session.dtype.itemsize
        self._channel, self._peer = channel, peer
        self._out, self._in = session.array(count), session.array(count)
        values.fill(self._out, who)
        self._handles = [channel.wrap(array.view("u1")) for array in (self._out, self._in)]

    def send(self, tag: int) -> Request:
        """Send the array."""
        return self._channel.send(self._peer, self._handles[0], tag)

    def recv(self, tag: int) -> Request:
        """Receive the other."""
        return self._channel.recv(self._peer, self._handles[1], tag)

    def progress(self) -> None:
        """Move the messages along."""
        self._channel.progress()

    def spoil(self) -> None:
        """Overwrite it."""
        self._in.view("u1").fill(values.SPOILED)

    def count_wrong(self, period: npt.NDArray[Any]) -> int:
        """Compare it where it is."""
        return values.count_wrong(self._in, period)

    def transport(self, found: Sequence[tuple[str, str]], name: str) -> str:
        """Return the lanes."""
        return _lanes(found, name)

    def close(self, waiter: Waiter) -> None:
        """Memory goes with its last user."""


class _GpuMemory:
    """Plain GPU memory of the two messages."""

    def __init__(self, session: Session, nbytes: int, who: int) -> None:
        self._door, self._nbytes = session.gpu.doors.cuda, nbytes
        self._memory: list[Any] = []
        try:
            for _ in range(2):
                self._memory.append(self._door.DeviceMemory(nbytes))
        except CudaError:
            self._free()
            raise
        mine = values.block(who, session.dtype)
        gpu_values.fill(self._door, self._memory[0].address, nbytes, mine)

    def spoil(self) -> None:
        """Overwrite it."""
        gpu_values.fill(self._door, self._memory[1].address, self._nbytes, gpu_values.SPOILED)

    def count_wrong(self, period: npt.NDArray[Any]) -> int:
        """Copy it to the host by the piece, and compare."""
        count = self._nbytes // period.itemsize
        return gpu_values.count_wrong(self._door, self._memory[1].address, count, period)

    def _free(self) -> None:
        for memory in self._memory:
            memory.close()


class DirectMemory(_GpuMemory):
    """GPU memory given to the channel by its address: GPUDirect RDMA where the machine has it."""

    def __init__(self, session: Session, channel: Any, peer: int, nbytes: int, who: int) -> None:
        """Raises CudaError where the GPU has no room."""
        super().__init__(session, nbytes, who)
        self._channel, self._peer = channel, peer
        self._handles = [channel.wrap_device(m.address, nbytes) for m in self._memory]

    def send(self, tag: int) -> Request:
        """Send the GPU memory."""
        request: Request = self._channel.send(self._peer, self._handles[0], tag)
        return request

    def recv(self, tag: int) -> Request:
        """Receive into GPU memory."""
        request: Request = self._channel.recv(self._peer, self._handles[1], tag)
        return request

    def progress(self) -> None:
        """Move the messages along."""
        self._channel.progress()

    def transport(self, found: Sequence[tuple[str, str]], name: str) -> str:
        """Return the lanes; without one that reads GPU memory, UCX copies through the host."""
        able = any(t.startswith((*_RDMA, "cuda_ipc")) for t, _ in found)
        return _lanes(found, name) + ("" if able else "+host copies by UCX")

    def close(self, waiter: Waiter) -> None:
        """Free the memory."""
        self._handles = []
        self._free()


class StagedMemory(DirectMemory):
    """GPU memory sent through pinned host memory, in pieces whose copies and messages overlap."""

    def __init__(
        self, session: Session, channel: Channel, peer: int, nbytes: int, who: int
    ) -> None:
        """Raises CudaError where the GPU has no room."""
        self._staged = StagedChannel(session.gpu.doors.cuda, channel)
        super().__init__(session, self._staged, peer, nbytes, who)

    def transport(self, found: Sequence[tuple[str, str]], name: str) -> str:
        """Return that it went through the host, and the lanes."""
        return f"host-staged+{_lanes(found, name)}"

    def close(self, waiter: Waiter) -> None:
        """Free everything; no message is under way."""
        super().close(waiter)
        self._staged.close()
