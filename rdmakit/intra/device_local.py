"""Kernels of one rank on its own device memory: reduce arrays into one, pack strided arrays.

Stream-ordered: the calls return when the kernel is enqueued.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod

from rdmakit.buffer import Strided
from rdmakit.datatypes import ITEMSIZES, TABLE, ReduceOp
from rdmakit.drivers import cuda, cuda_compile
from rdmakit.drivers.cuda_driver import Launch
from rdmakit.errors import UnsupportedError
from rdmakit.intra import device_kernels as kernels
from rdmakit.intra.device_plan import split

__all__ = ["combine", "merge_dims", "pack", "strided_args", "unpack"]


def combine(
    device: int, dst: int, srcs: Sequence[int], count: int, dtype: str, op: ReduceOp
) -> Launch:
    """Return the launch of ``dst = srcs[0] op srcs[1] op ...``. Local.

    float16 and bfloat16 are accumulated in float32 and rounded once. ``dst`` may be one of
    ``srcs``; other overlaps are not allowed. More than 16 sources need several calls.

    Args:
        device: the current device's ordinal.
        dst: address of the result.
        srcs: addresses of 1 to 16 sources; device memory, or a peer's that is mapped here.
        count: elements.
        dtype: name of the element type.
        op: the reduction; AVG divides by the number of these sources.

    Raises:
        UnsupportedError: the type is not served by the operation, or too many sources.
    """
    reason = TABLE.get((dtype, op), "there is no arithmetic for it")
    if reason:
        raise UnsupportedError(f"{op.name} of {dtype} is not served: {reason}")
    if not 1 <= len(srcs) <= kernels.MAX_RANKS:
        raise UnsupportedError(f"{len(srcs)} sources in one kernel; 1 to {kernels.MAX_RANKS}")
    args = kernels.Sources()
    unit = kernels.lowered(dtype, op)[2]
    count = count * ITEMSIZES[dtype] // unit
    cut = split((dst, *srcs), count, unit)
    args.dst, args.count, args.head, args.packs = dst, count, cut.head, cut.packs
    args.src[: len(srcs)] = srcs
    variant = kernels.local_variant(dtype, op, len(srcs))
    return _launch(device, variant, "combine", max(cut.packs, count - cut.packs), args)


def merge_dims(
    shape: Sequence[int], strides: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the same elements in the same order with as few dimensions as possible. Pure.

    Args:
        shape: elements of each dimension, C order.
        strides: bytes from one to the next; any sign, or 0.
    """
    merged: list[tuple[int, int]] = []
    for n, stride in zip(shape, strides, strict=True):
        if n == 1:
            continue
        if merged and merged[-1][1] == n * stride:
            merged[-1] = (merged[-1][0] * n, stride)
        else:
            merged.append((n, stride))
    merged = merged or [(1, 0)]
    return tuple(n for n, _ in merged), tuple(stride for _, stride in merged)


def pack(device: int, packed: int, at: int, strided: Strided, count: int, itemsize: int) -> Launch:
    """Return the launch that gathers elements of a strided array into contiguous memory. Local.

    In C order. A run without gaps is moved in units of up to 8 bytes, whatever the element.

    Args:
        device: the current device's ordinal.
        packed: address of the contiguous memory.
        at: address of element (0, 0, ...).
        strided: shape and strides, of any sign and 0, and the first element that is meant.
        count: elements that are meant.
        itemsize: bytes of one.

    Raises:
        UnsupportedError: more dimensions than 8 after merging.
    """
    return _move(device, "pack", packed, at, strided, count, itemsize)


def unpack(
    device: int, packed: int, at: int, strided: Strided, count: int, itemsize: int
) -> Launch:
    """Return the launch that scatters contiguous memory into a strided array. See :func:`pack`.

    An array with several elements in one place must have been refused before.
    """
    return _move(device, "unpack", packed, at, strided, count, itemsize)


def _move(
    device: int, name: str, packed: int, at: int, strided: Strided, count: int, itemsize: int
) -> Launch:
    unit, args = strided_args(packed, at, strided, count, itemsize)
    return _launch(device, kernels.pack_variant(unit), name, args.count, args)


def strided_args(
    packed: int, at: int, strided: Strided, count: int, itemsize: int
) -> tuple[int, kernels.Strided]:
    """Return the bytes of one unit to move, and the kernels' arguments in such units. Pure."""
    shape, strides = merge_dims((*strided.shape, itemsize), (*strided.strides, 1))
    run = 1
    if strides[-1] == 1:
        shape, strides, run = shape[:-1], strides[:-1], shape[-1]
    first, nbytes = strided.first * itemsize, count * itemsize
    unit = kernels.unit_of(run, packed, at, first, nbytes, *strides)
    shape, strides = merge_dims((*shape, run // unit), (*strides, unit))
    if len(shape) > kernels.MAX_DIMS:
        raise UnsupportedError(f"{len(shape)} strided dimensions; {kernels.MAX_DIMS} are served")
    args = kernels.Strided()
    args.packed, args.strided, args.dims = packed, at, len(shape)
    args.count, args.first = nbytes // unit, first // unit
    for index, (n, stride) in enumerate(zip(reversed(shape), reversed(strides), strict=True)):
        args.shape[index], args.stride[index] = n, stride
    args.wide = prod(shape) >> 32 != 0
    return unit, args


@cache
def _sms(device: int) -> int:
    return cuda.device_facts(device).sms


def _launch(
    device: int,
    variant: kernels.Variant,
    name: str,
    work: int,
    args: kernels.Sources | kernels.Strided,
) -> Launch:
    function = cuda_compile.get_kernel(device, variant.source, variant.options, name)
    most = 4 * _sms(device)  # four blocks of 512 threads fill an SM
    blocks = max(1, min(most, -(-work // kernels.THREADS)))
    return Launch(function, blocks, kernels.THREADS, args)
