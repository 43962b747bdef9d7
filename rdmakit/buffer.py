"""One description of anything array-like, made once where it enters the package.

GPU memory is taken from CuPy arrays and from all that has ``__cuda_array_interface__`` or, on a
CUDA device, DLPack. Nothing of CUDA is loaded for host arrays.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rdmakit.datatypes import MemoryKind
from rdmakit.errors import InvalidArgument, UnsupportedError
from rdmakit.protocols import Bytes

__all__ = ["Buffer", "Strided", "array_at", "as_buffer", "bytes_at", "gpu_key", "strided_at"]


@dataclass(frozen=True, slots=True)
class Strided:
    """Where the elements lie of an array that is not in C order without gaps."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Bytes from one element to the next in each dimension; any sign, or 0."""
    first: int = 0
    """Elements of the array, in C order, before the first that is meant."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """Elements of one type in memory. Does not keep the array alive."""

    address: int
    """First element; of a strided array the one with all indices 0."""
    count: int
    dtype: np.dtype[Any]
    kind: MemoryKind
    readonly: bool
    device: int = -1
    """Ordinal of the GPU that holds it, where the array tells; -1 for host memory or unknown."""
    stream: int = 0
    """CUDA stream after whose present work the data are there, where the array names one."""
    order: str = ""
    """How the elements lie: ``C`` or ``F`` without gaps, empty where both are true (one
    dimension), ``strided`` otherwise."""
    strided: Strided | None = None
    """Where they lie, if they are to be counted in C order and do not lie so."""

    @property
    def nbytes(self) -> int:
        """Size of the elements in bytes."""
        return self.count * self.dtype.itemsize

    @property
    def extent(self) -> tuple[int, int]:
        """The first byte that may belong to it, and the first after it."""
        if self.strided is None:
            return self.address, self.address + self.nbytes
        low, high = _reach(self.strided)
        return self.address + low, self.address + high + self.dtype.itemsize

    def overlaps(self, other: Buffer) -> bool:
        """Return whether the two share any byte, or a stretch in which both have gaps."""
        mine, theirs = self.extent, other.extent
        return mine[0] < theirs[1] and theirs[0] < mine[1]


def _reach(strided: Strided) -> tuple[int, int]:
    """Return the bytes from element 0 to the lowest and the highest one."""
    steps = [(n - 1) * s for n, s in zip(strided.shape, strided.strides, strict=True)]
    return sum(min(step, 0) for step in steps), sum(max(step, 0) for step in steps)


def as_buffer(array: object, name: str, *, writable: bool = False) -> Buffer:
    """Describe ``array``: a NumPy array, a GPU array, or anything with the buffer protocol.

    Any strides are taken, as long as an array that is written has each element in its own place.

    Raises:
        InvalidArgument: not an array, a null pointer, read-only where it is written, or written
            with several elements in one place.
        UnsupportedError: masked.
    """
    if isinstance(array, np.ndarray):
        return _of_host(array, name, writable=writable)
    if type(array).__module__.partition(".")[0] == "cupy":
        return _of_cupy(array, name, writable=writable)
    if hasattr(array, "__cuda_array_interface__"):
        return _of_interface(array, name, writable=writable)
    where = getattr(array, "__dlpack_device__", None)
    if where is not None and where()[0] in _DLPACK_CUDA:
        cupy_array = importlib.import_module("cupy").from_dlpack(array)
        return _of_cupy(cupy_array, name, writable=writable)
    try:
        array = np.asarray(memoryview(array))  # type: ignore[arg-type]
    except TypeError as exc:
        raise InvalidArgument(
            f"{name}: expected a NumPy array, a GPU array or a buffer, got {type(array).__name__}"
        ) from exc
    return _of_host(array, name, writable=writable)


def gpu_key(array: Any) -> tuple[Any, ...] | None:
    """Return what :func:`as_buffer` goes by in a CuPy array, hashable; None for other objects.

    A second call with an equal key may use what the first found: a tenth of the time.
    """
    if type(array).__module__ != "cupy":
        return None
    data = array.data
    return data.ptr, array.shape, array.strides, array.dtype, data.device_id


_DLPACK_CUDA = (2, 13)  # plain and managed


def _of_host(array: npt.NDArray[Any], name: str, *, writable: bool) -> Buffer:
    address, readonly = array.__array_interface__["data"]
    if writable and readonly:
        raise _read_only(name)
    if type(array) is not np.ndarray and isinstance(array, np.ma.MaskedArray):
        raise UnsupportedError(f"{name} has a mask")
    order, strided = _layout(array, name, writable=writable)
    return Buffer(
        address, array.size, array.dtype, MemoryKind.HOST, readonly, order=order, strided=strided
    )


def _of_cupy(array: Any, name: str, *, writable: bool) -> Buffer:
    """Describe a CuPy array; its interface would cost several microseconds."""
    data: Any = getattr(array, "data", None)
    if not hasattr(data, "ptr"):
        raise InvalidArgument(f"{name}: expected an array, got {type(array).__name__} of CuPy")
    size: int = array.size
    order, strided = _layout(array, name, writable=writable)
    if size and not data.ptr:
        raise InvalidArgument(f"{name} is a null pointer with {size} elements")
    return Buffer(
        data.ptr, size, array.dtype, MemoryKind.DEVICE, False, data.device_id, 0, order, strided
    )


def _layout(array: Any, name: str, *, writable: bool) -> tuple[str, Strided | None]:
    """Return how a NumPy or CuPy array lies in memory."""
    flags = array.flags
    if flags.c_contiguous:
        return ("" if flags.f_contiguous else "C"), None
    return _lies(array.shape, array.strides, array.dtype.itemsize, name, writable=writable)


def _of_interface(array: Any, name: str, *, writable: bool) -> Buffer:
    facts = array.__cuda_array_interface__
    address, readonly = facts["data"]
    shape: tuple[int, ...] = tuple(facts["shape"])
    dtype = getattr(array, "dtype", None)
    if not isinstance(dtype, np.dtype):
        dtype = np.dtype(facts["typestr"])
    count = 1
    for n in shape:
        count *= n
    if facts.get("mask") is not None:
        raise UnsupportedError(f"{name} has a mask")
    if writable and readonly:
        raise _read_only(name)
    if count and not address:
        raise InvalidArgument(f"{name} is a null pointer with {count} elements")
    strides = facts.get("strides")
    if strides is None:
        order, strided = ("C" if sum(n > 1 for n in shape) > 1 else ""), None
    else:
        order, strided = _lies(shape, tuple(strides), dtype.itemsize, name, writable=writable)
    device = getattr(getattr(array, "device", None), "id", -1)
    ready = facts.get("stream")
    return Buffer(
        address or 0,
        count,
        dtype,
        MemoryKind.DEVICE,
        readonly,
        device if isinstance(device, int) else -1,
        # None: nothing to wait for. The interface forbids 0; where it is given, the legacy default
        # stream is meant, which the driver knows as 1.
        0 if ready is None else int(ready) or 1,
        order,
        strided,
    )


def _read_only(name: str) -> InvalidArgument:
    return InvalidArgument(f"{name} is read-only and would be written")


def _lies(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, name: str, *, writable: bool
) -> tuple[str, Strided | None]:
    """Return how elements with these strides lie in memory; lengths of 1 and 0 have no say."""
    c, f = (_is_contiguous(shape, strides, itemsize, step) for step in (-1, 1))
    if c:
        return ("" if f else "C"), None
    if not f and writable and _collide(shape, strides, itemsize):
        raise InvalidArgument(
            f"{name} has several elements in one place (shape {shape}, strides {strides}) and "
            "would be written; pass a copy"
        )
    return ("F" if f else "strided"), Strided(shape, strides)


def _is_contiguous(
    shape: Sequence[int], strides: Sequence[int], itemsize: int, direction: int
) -> bool:
    """Return whether elements lie without gaps, the last (-1) or first (1) dimension fastest."""
    if 0 in shape:
        return True
    step = itemsize
    for n, stride in list(zip(shape, strides, strict=True))[::direction]:
        if n != 1:
            if stride != step:
                return False
            step *= n
    return True


def _collide(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Return whether elements may share bytes.

    Sufficient, not exact: each dimension must step over all that the shorter steps reach, which is
    so for whatever slices, transposes and reversals make of an ordinary array.
    """
    reach = itemsize
    for stride, n in sorted((abs(s), n) for n, s in zip(shape, strides, strict=True) if n > 1):
        if stride < reach:
            return True
        reach += stride * (n - 1)
    return False


def bytes_at(address: int, nbytes: int) -> Bytes:
    """Return the memory at ``address`` as bytes, owning nothing: it must outlive every use."""
    if not nbytes:
        return np.empty(0, np.uint8)
    memory = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
    return np.frombuffer(memory, np.uint8)


def array_at(address: int, count: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return ``count`` elements at ``address``, owning nothing."""
    return bytes_at(address, count * dtype.itemsize).view(dtype)


def strided_at(
    address: int, strided: Strided, dtype: np.dtype[Any], *, touched: bool = True
) -> npt.NDArray[Any]:
    """Return the whole strided array whose first element is at ``address``, owning nothing.

    Args:
        address: of the element with all indices 0.
        strided: where the others are; not empty.
        dtype: their type.
        touched: False where nothing but the addresses matter: the memory may be a GPU's.
    """
    if not touched:
        facts = {"shape": strided.shape, "strides": strided.strides, "version": 3,
                 "typestr": f"|V{dtype.itemsize}", "data": (address, True)}  # fmt: skip
        return np.asarray(type("Place", (), {"__array_interface__": facts})())
    low, high = _reach(strided)
    memory = bytes_at(address + low, high - low + dtype.itemsize)
    return np.ndarray(strided.shape, dtype, memory, -low, strided.strides)
