"""Arrays as mpi4py's calls take them: alone, or in a list with counts, displacements and type."""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from rdmakit.buffer import Buffer, as_buffer
from rdmakit.datatypes import MemoryKind
from rdmakit.errors import InvalidArgument, UnsupportedError

__all__ = ["Blocks", "absent", "array_of", "blocks_of", "gapless"]


@dataclass(frozen=True)
class _Spec:
    """The items of a list, before it is known whether each rank has a count of its own."""

    buffer: Buffer
    counts: Any = None
    displs: Any = None


@dataclass(frozen=True)
class Blocks:
    """An array and where in it each rank's block lies, in elements."""

    buffer: Buffer
    counts: tuple[int, ...]
    at: tuple[int, ...] = ()
    """Where each block begins; empty: one behind the other."""

    @property
    def starts(self) -> tuple[int, ...]:
        """Where each block begins."""
        return self.at or tuple(accumulate(self.counts, initial=0))[:-1]

    def block(self, rank: int) -> Buffer:
        """Return the block of ``rank``."""
        offset = self.starts[rank] * self.buffer.dtype.itemsize
        address = self.buffer.address + offset if self.buffer.address else 0
        return replace(self.buffer, address=address, count=self.counts[rank])

    def parts(self) -> list[tuple[int, int]]:
        """Return (first byte, first after it) of the blocks that are not empty, sorted."""
        item, base = self.buffer.dtype.itemsize, self.buffer.address
        return sorted(
            (base + at * item, base + (at + count) * item)
            for at, count in zip(self.starts, self.counts, strict=True)
            if count
        )


def absent(like: Buffer) -> Buffer:
    """Return what stands for the array that this rank has not."""
    return Buffer(0, 0, like.dtype, like.kind, False)


def gapless(buffer: Buffer, name: str) -> Buffer:
    """Return an array counted as it lies in memory; one with gaps is refused."""
    if buffer.order == "strided":
        raise UnsupportedError(
            f"{name} has gaps between its elements, and counts or a type with it: its elements "
            "cannot be counted as they lie; pass a contiguous copy"
        )
    return replace(buffer, strided=None) if buffer.strided is not None else buffer


def array_of(value: object, name: str, *, writable: bool = False, blocks: int = 1) -> Buffer:
    """Return the elements that are meant: an array, or ``[array, count, type]``. Local.

    Args:
        value: an array, or a list of it with a count, ``(count, displacement)``, a type.
        name: of the argument.
        writable: whether it is written.
        blocks: the count is that of one of so many blocks.

    Raises:
        InvalidArgument: no such list, or more elements than there are.
        UnsupportedError: a derived type, or an array with gaps in a list.
    """
    if not isinstance(value, list | tuple):
        return as_buffer(value, name, writable=writable)
    spec = _parsed(value, name, writable=writable)
    buffer = spec.buffer
    first = 0 if spec.displs is None else _number(spec.displs, f"displacement of {name}")
    if spec.counts is None:
        count = buffer.count - first
    else:
        count = blocks * _number(spec.counts, f"count of {name}")
    if first + count > buffer.count or count < 0:
        raise InvalidArgument(
            f"{name} has {buffer.count} elements; {count} from element {first} on were asked for"
        )
    address = buffer.address + first * buffer.dtype.itemsize if first else buffer.address
    return replace(buffer, address=address, count=count)


def blocks_of(value: object, name: str, ranks: int, *, writable: bool = False) -> Blocks:
    """Return an array with a block for each of ``ranks``: ``[array, counts, displs, type]``.

    As mpi4py has it: without counts the elements are dealt out as evenly as they can be, the first
    ranks having one more; one number is the count of all, or the step from block to block.
    Raises as :func:`array_of`; also where blocks that are written overlap.
    """
    if isinstance(value, list | tuple):
        spec = _parsed(value, name, writable=writable)
    else:
        spec = _Spec(gapless(as_buffer(value, name, writable=writable), name))
    size, counts, displs = spec.buffer.count, spec.counts, spec.displs
    if counts is None:
        counts = tuple(size // ranks + (rank < size % ranks) for rank in range(ranks))
    else:
        counts = _numbers(counts, f"counts of {name}", ranks)
    dense = tuple(accumulate(counts, initial=0))[:-1]
    if displs is None:
        at = dense
    elif _is_number(displs):
        at = tuple(_number(displs, f"displacement of {name}") * rank for rank in range(ranks))
    else:
        at = _numbers(displs, f"displacements of {name}", ranks)
    for rank, (start, count) in enumerate(zip(at, counts, strict=True)):
        if count and start + count > size:
            raise InvalidArgument(
                f"{name} has {size} elements; the block of rank {rank} ends at {start + count}"
            )
    blocks = Blocks(spec.buffer, counts, () if at == dense else at)
    parts = blocks.parts()
    if writable and any(a[1] > b[0] for a, b in pairwise(parts)):
        raise InvalidArgument(f"blocks of {name} overlap (counts {counts}, displacements {at})")
    return blocks


def _parsed(value: Sequence[Any], name: str, *, writable: bool) -> _Spec:
    """Take the items of a list: array [, counts [, displs]] [, type]."""
    items, dtype = list(value), None
    if len(items) > 1 and _is_type(items[-1]):
        dtype = _type_of(items.pop(), name)
    if not 1 <= len(items) <= 3:
        raise InvalidArgument(
            f"{name}: expected [array, count or counts, displacements, type], got "
            f"{len(value)} items"
        )
    array, counts, displs = (*items, None, None)[:3]
    if isinstance(counts, tuple) and len(items) == 2 and len(counts) == 2:
        counts, displs = counts  # as mpi4py reads it
    if array is None:
        buffer = Buffer(0, 0, dtype or np.dtype(np.uint8), MemoryKind.HOST, False)
        return _Spec(buffer, counts, displs)
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and array is mpi.BOTTOM:
        raise UnsupportedError(f"{name}: BOTTOM is for derived types, which are not served")
    buffer = gapless(as_buffer(array, name, writable=writable), name)
    if dtype is not None and dtype != buffer.dtype:
        if buffer.nbytes % dtype.itemsize:
            raise InvalidArgument(
                f"{name} has {buffer.nbytes} bytes, no multiple of {dtype.itemsize} ({dtype})"
            )
        buffer = replace(buffer, dtype=dtype, count=buffer.nbytes // dtype.itemsize)
    return _Spec(buffer, counts, displs)


def _is_type(value: object) -> bool:
    if isinstance(value, str):
        return True
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and isinstance(value, mpi.Datatype)


def _type_of(value: Any, name: str) -> np.dtype[Any]:
    if isinstance(value, str):
        try:
            return np.dtype(value)
        except TypeError as exc:
            raise InvalidArgument(f"{name}: no type {value!r}") from exc
    mpi = sys.modules["mpi4py.MPI"]
    if value == mpi.DATATYPE_NULL:
        raise InvalidArgument(f"{name}: the type is MPI.DATATYPE_NULL")
    what = value.name or "a type without a name"
    if not value.is_predefined:
        raise UnsupportedError(
            f"{name}: {what} is a derived type, which is not served: pass a view of the array "
            "(any strides are served), or counts and displacements"
        )
    dtype: np.dtype[Any] = np.dtype(value.typestr)
    if dtype.kind == "V" or dtype.itemsize != value.Get_size():
        raise UnsupportedError(f"{name}: {what} is a pair or a type of Fortran's; not served")
    return dtype


def _is_number(value: object) -> bool:
    return hasattr(value, "__index__") and not getattr(value, "shape", ())


def _number(value: Any, name: str) -> int:
    try:
        number = operator.index(value)
    except TypeError as exc:
        raise InvalidArgument(f"{name}: expected a number, got {value!r}") from exc
    if number < 0:
        raise InvalidArgument(f"{name} is {number}, below 0")
    return number


def _numbers(values: Any, name: str, ranks: int) -> tuple[int, ...]:
    if _is_number(values):
        return (_number(values, name),) * ranks
    try:
        numbers = tuple(_number(value, name) for value in values)
    except TypeError as exc:
        raise InvalidArgument(f"{name}: expected a number for each rank, got {values!r}") from exc
    if len(numbers) != ranks:
        raise InvalidArgument(f"{name}: expected {ranks} numbers, got {len(numbers)}")
    return numbers
