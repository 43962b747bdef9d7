"""One description of anything array-like, made once where it enters the package."""

from __future__ import annotations

import ctypes
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
    """Describe ``array``: a NumPy array or anything with the buffer protocol.

    Raises:
        InvalidArgument: not an array, or read-only where it is written.
        UnsupportedError: GPU memory, or elements that are not contiguous.
    """
    if not isinstance(array, np.ndarray):
        if hasattr(array, "__cuda_array_interface__"):
            raise UnsupportedError(
                f"{name} is GPU memory ({type(array).__module__}.{type(array).__name__}); this "
                "version moves host arrays: pass a NumPy array"
            )
        try:
            array = np.asarray(memoryview(array))  # type: ignore[arg-type]
        except TypeError as exc:
            raise InvalidArgument(
                f"{name}: expected a NumPy array or a buffer, got {type(array).__name__}"
            ) from exc
    interface = array.__array_interface__
    address, readonly = interface["data"]
    if writable and readonly:
        raise InvalidArgument(f"{name} is read-only and would be written")
    if array.size > 1 and not (array.flags.c_contiguous or array.flags.f_contiguous):
        raise UnsupportedError(
            f"{name} is not contiguous (shape {array.shape}, strides {array.strides}); pass "
            "numpy.ascontiguousarray of it"
        )
    return Buffer(address, array.size, array.dtype, MemoryKind.HOST, readonly)


def bytes_at(address: int, nbytes: int) -> Bytes:
    """Return the memory at ``address`` as bytes, owning nothing: it must outlive every use."""
    if not nbytes:
        return np.empty(0, np.uint8)
    memory = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
    return np.frombuffer(memory, np.uint8)


def array_at(address: int, count: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return ``count`` elements at ``address``, owning nothing."""
    return bytes_at(address, count * dtype.itemsize).view(dtype)
