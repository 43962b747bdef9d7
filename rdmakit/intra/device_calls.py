"""One node collective on device memory, made ready: which kernel, with which arguments. Pure.

The place in registered memory, the algorithm and all sizes are in the signature, which the kernels
compare: ranks that disagree end with an error and not with wrong data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rdmakit.datatypes import ReduceOp, check_reduction
from rdmakit.errors import InvalidArgument
from rdmakit.intra import device_kernels as kernels
from rdmakit.intra.device_kernels import Args, Variant, WindowLayout
from rdmakit.intra.device_plan import (
    algorithm_for,
    blocks_for,
    pieces,
    signature,
    split,
    zero_copy,
)
from rdmakit.intra.device_registry import Registration
from rdmakit.plan.shape import Kind

__all__ = ["DeviceArray", "Place", "Prepared", "plan_barrier", "plan_call"]

_REDUCES = (Kind.ALLREDUCE, Kind.REDUCE_SCATTER)


class DeviceArray(Protocol):
    """Contiguous device memory of one type. :class:`rdmakit.buffer.Buffer` is one."""

    @property
    def address(self) -> int:
        """First byte."""
        ...

    @property
    def count(self) -> int:
        """Elements."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type."""
        ...


@dataclass(frozen=True)
class Place:
    """What a call needs to know of its node."""

    rank: int
    size: int
    blocks: int
    """Largest grid."""
    layout: WindowLayout
    lookup: Callable[[int, int], Registration | None]
    """Returns the registration that holds (address, nbytes)."""
    unroll: int = 0


@dataclass(frozen=True)
class Prepared:
    """A kernel and its arguments, without window, limit and error words."""

    variant: Variant
    kernel: str
    blocks: int
    args: Args
    text: str
    """What the call is, for messages."""


def plan_barrier(rank: int, size: int, layout: WindowLayout) -> Prepared:
    """Return the barrier of all ranks."""
    args = Args()
    args.signature = signature("barrier")
    return Prepared(kernels.move_variant(1, rank, size, layout), "barrier", 1, args, "barrier")


def plan_call(
    place: Place, kind: Kind, send: DeviceArray, recv: DeviceArray, op: ReduceOp, root: int
) -> Prepared:
    """Return the call, made ready. Counts and types have been compared before.

    Raises:
        UnsupportedError: the type is not reduced by the operation.
        InvalidArgument: arrays of an all-to-all that are not equal blocks, or overlap.
    """
    rank, size = place.rank, place.size
    dtype = send.dtype.name
    if kind in _REDUCES:
        check_reduction(send.dtype, op)
    each = min(send.count, recv.count)
    if kind is Kind.ALLTOALL:
        _check_blocks(send, recv, size)
        each //= size
    nbytes = each * send.dtype.itemsize
    layout = place.layout
    _, needed = zero_copy(kind, push=layout.push)
    found = [
        place.lookup(array.address, array.count * array.dtype.itemsize) if used else None
        for array, used in zip((send, recv), needed, strict=True)
    ]
    in_blocks = (Kind.REDUCE_SCATTER, Kind.ALLGATHER, Kind.ALLTOALL)
    whole = nbytes * (size if kind in in_blocks else 1)
    blocks = blocks_for(whole, place.blocks, push=layout.push)
    algorithm = algorithm_for(
        kind,
        size,
        whole,
        registered=all(entry or not used for entry, used in zip(found, needed, strict=True)),
        push=layout.push,
        room=blocks * kernels.TEAMS * layout.oneshot(size),
    )
    pointers = [[0] * size, [0] * size]
    where = []
    for index, (entry, array) in enumerate(zip(found, (send, recv), strict=True)):
        if algorithm in ("direct", "push") and entry is not None:
            pointers[index] = entry.peers(array.address)
            where.append((entry.index, array.address - entry.address))
        pointers[index][rank] = array.address
    text = f"{kind.value} ({algorithm}) of {each} {dtype}"
    if kind in _REDUCES:
        unit, text = kernels.lowered(dtype, op)[2], f"{text} {op.value}"
        variant = kernels.reduce_variant(dtype, op, rank, size, layout, place.unroll)
    else:
        unit = kernels.unit_of(nbytes, *pointers[0], *pointers[1])
        text = f"{text} from rank {root}" if kind is Kind.BROADCAST else text
        variant = kernels.move_variant(unit, rank, size, layout)

    args = Args()
    args.send[:size], args.recv[:size] = pointers
    args.count, args.root = nbytes // unit, root
    args.signature = signature(text, nbytes, where)
    if algorithm == "direct":
        cut = split(_touched(kind, rank, nbytes, *pointers), args.count, unit)
        args.head, args.packs = cut.head, cut.packs
    else:
        tile = layout.oneshot(size) if algorithm == "oneshot" else layout.tile
        if kind in (Kind.REDUCE_SCATTER, Kind.ALLTOALL):
            tile = tile // size // 16 * 16
        piece, blocks = pieces(nbytes, blocks, tile)
        if algorithm == "oneshot":
            assert piece * blocks * kernels.TEAMS >= nbytes, "algorithm_for keeps to the room"
        elif layout.push and kind is Kind.ALLREDUCE:  # shards are whole packs
            shard = -(-piece // (16 * size)) * 16
            assert (size - 1) * shard <= layout.tile, "the slots of all others fit a tile"
        args.piece = piece // unit
    return Prepared(variant, f"{kind.value}_{algorithm}", blocks, args, text)


def _touched(kind: Kind, rank: int, nbytes: int, sends: list[int], recvs: list[int]) -> list[int]:
    """Return the addresses that one thread uses together."""
    block = rank * nbytes
    if kind is Kind.ALLREDUCE:
        return sends + recvs
    if kind is Kind.REDUCE_SCATTER:
        return [*(address + block for address in sends), recvs[rank]]
    if kind is Kind.ALLGATHER:
        return [*(address + block for address in recvs), sends[rank]]
    if kind is Kind.ALLTOALL:
        blocks = [sends[rank] + peer * nbytes for peer in range(len(recvs))]
        return [*(address + block for address in recvs), *blocks]
    return recvs


def _check_blocks(send: DeviceArray, recv: DeviceArray, size: int) -> None:
    """See that arrays of an all-to-all are equal blocks, apart from each other."""
    if send.count != recv.count or send.count % size:
        raise InvalidArgument(
            f"all-to-all: sendbuf has {send.count} elements and recvbuf {recv.count}; expected "
            f"equal counts, a multiple of {size} ranks"
        )
    nbytes = send.count * send.dtype.itemsize
    if abs(send.address - recv.address) < nbytes:
        raise InvalidArgument("all-to-all: sendbuf and recvbuf overlap; it cannot be in place")
