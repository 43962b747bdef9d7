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

__all__ = ["Buffer", "array_at", "as_buffer", "bytes_at"]


@dataclass(frozen=True, slots=True)
class Buffer:
    """Contiguous memory of one type. Does not keep the array alive."""

    address: int
    count: int
    dtype: np.dtype[Any]
    kind: MemoryKind
    readonly: bool
    device: int = -1
    """Ordinal of the GPU that holds it, where the array tells; -1 for host memory or unknown."""
    stream: int = 0
    """CUDA stream after whose present work the data are there, where the array names one."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.count * self.dtype.itemsize

    def overlaps(self, other: Buffer) -> bool:
        """Return whether the two share any byte."""
        return (
            self.address < other.address + other.nbytes
            and other.address < self.address + self.nbytes
        )


def as_buffer(array: object, name: str, *, writable: bool = False) -> Buffer:
    """Describe ``array``: a NumPy array, a GPU array, or anything with the buffer protocol.

    Raises:
        InvalidArgument: not an array, a null pointer, or read-only where it is written.
        UnsupportedError: elements that are not contiguous, or masked.
    """
    if isinstance(array, np.ndarray):
        return _of_host(array, name, writable=writable)
    if type(array).__module__.partition(".")[0] == "cupy":
        return _of_cupy(array, name)
    if hasattr(array, "__cuda_array_interface__"):
        return _of_interface(array, name, writable=writable)
    where = getattr(array, "__dlpack_device__", None)
    if where is not None and where()[0] in _DLPACK_CUDA:
        return _of_cupy(importlib.import_module("cupy").from_dlpack(array), name)
    try:
        array = np.asarray(memoryview(array))  # type: ignore[arg-type]
    except TypeError as exc:
        raise InvalidArgument(
            f"{name}: expected a NumPy array, a GPU array or a buffer, got {type(array).__name__}"
        ) from exc
    return _of_host(array, name, writable=writable)


_DLPACK_CUDA = (2, 13)  # plain and managed


def _of_host(array: npt.NDArray[Any], name: str, *, writable: bool) -> Buffer:
    address, readonly = array.__array_interface__["data"]
    if writable and readonly:
        raise InvalidArgument(f"{name} is read-only and would be written")
    if array.size > 1 and not (array.flags.c_contiguous or array.flags.f_contiguous):
        raise UnsupportedError(
            f"{name} is not contiguous (shape {array.shape}, strides {array.strides}); pass "
            "numpy.ascontiguousarray of it"
        )
    return Buffer(address, array.size, array.dtype, MemoryKind.HOST, readonly)


def _of_cupy(array: Any, name: str) -> Buffer:
    """Describe a CuPy array; its interface would cost several microseconds."""
    data: Any = getattr(array, "data", None)
    if not hasattr(data, "ptr"):
        raise InvalidArgument(f"{name}: expected an array, got {type(array).__name__} of CuPy")
    size: int = array.size
    if size > 1 and not (array.flags.c_contiguous or array.flags.f_contiguous):
        raise _not_contiguous(name, array.shape, array.strides)
    if size and not data.ptr:
        raise InvalidArgument(f"{name} is a null pointer with {size} elements")
    return Buffer(data.ptr, size, array.dtype, MemoryKind.DEVICE, False, data.device_id)


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
        raise InvalidArgument(f"{name} is read-only and would be written")
    if count and not address:
        raise InvalidArgument(f"{name} is a null pointer with {count} elements")
    strides = facts.get("strides")
    if strides is not None and count > 1 and not _is_contiguous(shape, strides, dtype.itemsize):
        raise _not_contiguous(name, shape, strides)
    device = getattr(getattr(array, "device", None), "id", -1)
    ready = facts.get("stream") or 0
    return Buffer(
        address or 0,
        count,
        dtype,
        MemoryKind.DEVICE,
        readonly,
        device if isinstance(device, int) else -1,
        ready,
    )


def _is_contiguous(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Return whether the elements lie without gaps in C or in Fortran order."""
    for order in (1, -1):
        step = itemsize
        for n, stride in list(zip(shape, strides, strict=True))[::-order]:
            if n != 1 and stride != step:
                break
            step *= n
        else:
            return True
    return False


def _not_contiguous(name: str, shape: object, strides: object) -> UnsupportedError:
    return UnsupportedError(
        f"{name} is not contiguous (shape {shape}, strides {strides}); pass "
        "cupy.ascontiguousarray of it"
    )


def bytes_at(address: int, nbytes: int) -> Bytes:
    """Return the memory at ``address`` as bytes, owning nothing: it must outlive every use."""
    if not nbytes:
        return np.empty(0, np.uint8)
    memory = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
    return np.frombuffer(memory, np.uint8)


def array_at(address: int, count: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return ``count`` elements at ``address``, owning nothing."""
    return bytes_at(address, count * dtype.itemsize).view(dtype)
