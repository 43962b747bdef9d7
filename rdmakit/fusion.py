"""Arrays that are reduced together, one behind the other in one piece of memory: a bucket.

:class:`HostFused` and :class:`DeviceFused` copy between arrays and bucket; what uses them does not
see which memory it is. On the GPU all copies are ordered on a stream.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rdmakit.buffer import Buffer, Strided, array_at, as_buffer, strided_at
from rdmakit.datatypes import MemoryKind
from rdmakit.errors import InvalidArgument, RdmaKitError
from rdmakit.plan.buckets import buckets

__all__ = [
    "Bucket",
    "DeviceArea",
    "DeviceAreas",
    "DeviceFused",
    "Fused",
    "HostFused",
    "buffers_of",
    "described",
    "fill",
    "on_gpu",
]

_TOLD = 1000
"""Characters of a description that ranks compare; what is longer is told by its digest."""
_SHARE_WORK = 100_000
"""Candidates looked at before two views of the same stretch are taken to share an element."""
_ROUND = 2 << 20
"""Memory on the GPU is taken in multiples of this many bytes, CUDA's own granularity."""


@dataclass(frozen=True)
class Bucket:
    """Arrays of one type that are reduced together.

    Attributes:
        indices: which of the call's arrays.
        parts: the same as they are counted: one in Fortran order as it lies in memory.
    """

    indices: tuple[int, ...]
    parts: tuple[Buffer, ...]

    @property
    def alone(self) -> bool:
        """Whether it is one array that is reduced where it lies."""
        part = self.parts[0]
        return len(self.parts) == 1 and (part.strided is None or part.kind is MemoryKind.HOST)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(part.nbytes for part in self.parts)

    def changed(self, position: int, array: Buffer) -> Bucket:
        """Return it with another array in the place of one."""
        parts = list(self.parts)
        parts[position] = _as_counted(array)
        return replace(self, parts=tuple(parts))

    def at(self, address: int) -> Buffer:
        """Return the bucket as one array at ``address``."""
        first, count = self.parts[0], sum(part.count for part in self.parts)
        return Buffer(address, count, first.dtype, first.kind, False, first.device)


def fill(arrays: Sequence[Buffer], most: int) -> tuple[Bucket, ...]:
    """Return the buckets of at most ``most`` bytes, in their order. Local, pure.

    Raises:
        InvalidArgument: ``most`` is no number of bytes.
    """
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise InvalidArgument(f"bucket_bytes {most!r}: a number of bytes, 1 or more")
    parts = [_as_counted(array) for array in arrays]
    kinds = [((part.dtype, part.kind), part.nbytes) for part in parts]
    return tuple(Bucket(found, tuple(parts[i] for i in found)) for found in buckets(kinds, most))


def _as_counted(array: Buffer) -> Buffer:
    return replace(array, strided=None) if array.order == "F" else array


def buffers_of(arrays: Sequence[object]) -> tuple[Buffer, ...]:
    """Describe arrays that are reduced in place. Local.

    Raises:
        InvalidArgument: one is no array, or cannot be written.
        UnsupportedError: one is masked.
    """
    return tuple(as_buffer(a, f"arrays[{i}]", writable=True) for i, a in enumerate(arrays))


def check_apart(arrays: Sequence[Buffer]) -> None:
    """See that no two arrays, all of one kind of memory, share an element. Local.

    Raises:
        InvalidArgument: two do, or it cannot be told in reasonable time.
    """
    order = sorted((i for i, a in enumerate(arrays) if a.nbytes), key=lambda i: arrays[i].extent)
    before: list[int] = []  # those that reach beyond where the next one begins
    for index in order:
        begin = arrays[index].extent[0]
        before = [other for other in before if arrays[other].extent[1] > begin]
        for other in before:
            if _share(arrays[index], arrays[other]):
                first, second = sorted((index, other))
                raise InvalidArgument(
                    f"arrays[{first}] and arrays[{second}] share memory: each element would be "
                    "reduced twice; give it once"
                )
        before.append(index)


def _share(a: Buffer, b: Buffer) -> bool:
    """Return whether two arrays share an element, or whether that takes too long to tell."""
    work: Any = _SHARE_WORK  # NumPy's stubs know two numbers only
    try:
        return np.shares_memory(_view(a), _view(b), max_work=work)
    except np.exceptions.TooHardError:
        return True


def _view(buffer: Buffer) -> npt.NDArray[Any]:
    """Return the array for its addresses alone."""
    lies = buffer.strided or Strided((buffer.count,), (buffer.dtype.itemsize,))
    return strided_at(buffer.address, lies, buffer.dtype, touched=False)


def on_gpu(buffers: Sequence[Buffer]) -> bool:
    """Return whether arrays, all of one kind, are on the GPU."""
    return bool(buffers) and buffers[0].kind is MemoryKind.DEVICE


def described(arrays: Sequence[object], buffers: Sequence[Buffer]) -> str:
    """Return types and shapes of arrays, as ranks compare them."""
    items = []
    for array, buffer in zip(arrays, buffers, strict=True):
        shape = getattr(array, "shape", (buffer.count,))
        order = "F" if buffer.order == "F" else ""
        items.append(f"{buffer.dtype.name}[{','.join(map(str, shape))}]{order}")
    text = " ".join(items)
    if len(text) > _TOLD:
        digest = hashlib.blake2s(text.encode(), digest_size=8).hexdigest()
        text = f"{text[:_TOLD]}... digest of all: {digest}"
    return f"{len(items)} arrays: {text}"


class Fused(Protocol):
    """The copies between the arrays of a bucket and its memory."""

    flat: Buffer
    """The bucket's memory."""

    def put(self, position: int) -> None:
        """Copy an array in, by its position in the bucket."""
        ...

    def gather(self) -> None:
        """Copy all in."""
        ...

    def scatter(self) -> None:
        """Copy all out."""
        ...

    def change(self, position: int, part: Buffer) -> None:
        """Let another array, of equal count and type, take the place of one."""
        ...


class HostFused:
    """A bucket in host memory; see :class:`Fused`."""

    def __init__(self, bucket: Bucket, memory: npt.NDArray[np.uint8]) -> None:
        """Describe it; ``memory`` is kept alive, and must be unused when something is copied."""
        self._memory = memory
        address: int = memory.__array_interface__["data"][0]
        self.flat = bucket.at(address)
        self._pairs: list[tuple[npt.NDArray[Any], npt.NDArray[Any]]] = []
        for part in bucket.parts:
            self._pairs.append(_pair(part, address))
            address += part.nbytes

    def change(self, position: int, part: Buffer) -> None:
        """Let another array take the place of one."""
        address: int = self._pairs[position][1].__array_interface__["data"][0]
        self._pairs[position] = _pair(part, address)

    def put(self, position: int) -> None:
        """Copy an array in."""
        view, flat = self._pairs[position]
        np.copyto(flat, view)

    def gather(self) -> None:
        """Copy all in."""
        for view, flat in self._pairs:
            np.copyto(flat, view)

    def scatter(self) -> None:
        """Copy all out."""
        for view, flat in self._pairs:
            np.copyto(view, flat)


def _pair(part: Buffer, address: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    flat = array_at(address, part.count, part.dtype)
    if part.strided is None:
        return array_at(part.address, part.count, part.dtype), flat
    view = strided_at(part.address, part.strided, part.dtype)
    return view, flat.reshape(view.shape)


class DeviceArea:
    """Memory on the GPU for one bucket after another, on any streams; freed when it is dropped."""

    def __init__(self, door: Any, nbytes: int) -> None:
        """Take it on the current device. Local."""
        self._door = door
        self._memory = door.DeviceMemory(-(-nbytes // _ROUND) * _ROUND)
        self.address: int = self._memory.address
        self.nbytes: int = self._memory.nbytes
        self._left = door.Event()
        self._stream: int | None = None
        weakref.finalize(self, _free, door, self.address, self._left).atexit = False

    def on(self, stream: int) -> None:
        """Order what ``stream`` does next after the last use."""
        if self._stream is not None and self._stream != stream:
            self._door.wait_event(stream, self._left)

    def leave(self, stream: int) -> None:
        """Say that its use ends with what ``stream`` has been given so far."""
        self._left.record(stream)
        self._stream = stream

    @property
    def unused(self) -> bool:
        """Whether the GPU has passed the last use."""
        return self._stream is None or bool(self._left.done())


def _free(door: Any, address: int, event: Any) -> None:
    with contextlib.suppress(RdmaKitError):  # the context may be gone, and the memory with it
        event.close()
        door.free(address)


class DeviceAreas:
    """Areas that are not in use, to be used again. Local."""

    def __init__(self, door: Any) -> None:
        self._door = door
        self._free: list[DeviceArea] = []

    def take(self, nbytes: int) -> DeviceArea:
        """Return one of at least so many bytes; those too small are freed where that is at once."""
        for index, area in enumerate(self._free):
            if area.nbytes >= nbytes:
                return self._free.pop(index)
        self._free = [area for area in self._free if not area.unused]
        return DeviceArea(self._door, nbytes)

    def give(self, area: DeviceArea) -> None:
        """Take one back whose use was ended by ``leave``."""
        self._free.append(area)


class DeviceFused:
    """A bucket on the GPU; see :class:`Fused`."""

    def __init__(self, bucket: Bucket, area: DeviceArea, gpu: Any, device: int) -> None:
        """Describe it. Local.

        Args:
            bucket: its arrays.
            area: where it lies, kept alive.
            gpu: has ``door``, ``pack`` and ``unpack``; see :class:`rdmakit.device_side.Gpu`.
            device: ordinal of the GPU.
        """
        self.area, self.stream = area, 0
        self._gpu, self._device = gpu, device
        self.flat = bucket.at(area.address)
        self._parts = list(bucket.parts)
        self._addresses: list[int] = []
        address = area.address
        for part in bucket.parts:
            self._addresses.append(address)
            address += part.nbytes

    @contextlib.contextmanager
    def ordered(self, stream: int) -> Iterator[None]:
        """Order what is copied, and done with the bucket, on ``stream``."""
        self.stream = stream
        self.area.on(stream)
        try:
            yield
        finally:
            self.area.leave(stream)

    def change(self, position: int, part: Buffer) -> None:
        """Let another array take the place of one."""
        self._parts[position] = part

    def put(self, position: int) -> None:
        """Copy an array in."""
        self._copy(position, out=False)

    def gather(self) -> None:
        """Copy all in."""
        for position in range(len(self._parts)):
            self._copy(position, out=False)

    def scatter(self) -> None:
        """Copy all out."""
        for position in range(len(self._parts)):
            self._copy(position, out=True)

    def _copy(self, position: int, *, out: bool) -> None:
        part, address = self._parts[position], self._addresses[position]
        if part.strided is not None:
            kernel = self._gpu.unpack if out else self._gpu.pack
            args = (address, part.address, part.strided, part.count, part.dtype.itemsize)
            kernel(self._device, *args)(self.stream)
            return
        dst, src = (part.address, address) if out else (address, part.address)
        self._gpu.door.copy_async(dst, src, part.nbytes, self.stream)
