"""How a node collective on device memory is done: algorithm, grid and pieces. Pure.

Every answer follows from facts that are equal on all ranks of the node.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rdmakit.drivers.cuda import DeviceFacts
from rdmakit.intra.device_kernels import MAX_TEAMS, TEAMS, THREADS
from rdmakit.plan.shape import Kind

__all__ = [
    "Grid",
    "Split",
    "algorithm_for",
    "grid_for",
    "pieces",
    "signature",
    "split",
    "zero_copy",
]

_ONESHOT_BYTES = {
    True: ((2, 2 << 20), (4, 2 << 20), (8, 512 << 10), (16, 256 << 10)),
    False: ((2, 2 << 20), (4, 512 << 10), (8, 128 << 10), (16, 64 << 10)),
}
"""(ranks up to, bytes up to) where one-shot is at least as fast as two-shot, by whether ranks share
a GPU. Shared: measured on one H200 under MPS. Own GPUs: measured on two over NVLink (2 MiB: 13.2 us
against 15.3; 4 MiB: 20.9 against 20.5); with more ranks not measured: one-shot saves a meeting
(3 us) and sends (ranks - 1) times the bytes in place of 2 * (ranks - 1) / ranks, at 365 GB/s."""
_DIRECT_BYTES = 256 << 10
"""From here registered memory is used in place: two meetings, but no copy through a window."""
_ZERO_COPY = {
    (Kind.ALLREDUCE, False): ("direct", (True, True)),
    (Kind.REDUCE_SCATTER, False): ("direct", (True, False)),
    (Kind.ALLREDUCE, True): ("push", (False, True)),
    (Kind.REDUCE_SCATTER, True): ("staged", (False, False)),
}
"""(kind, pushing): which algorithm takes arrays as they are, and whether it needs the input and the
output registered. Others: the output, by ``direct``."""
_WIDE_BYTES = 64 << 20
"""From here a rank with a GPU of its own takes nearly all SMs. Of two H200: all-reduce of 256 MiB
in 743 us against 775 by half of them, 64 MiB in 193 against 199, 8 MiB no faster."""
_LEAST_PIECE = THREADS // TEAMS * 16
"""Bytes below which a team's piece of a staged array is not cut: one pack for each thread."""


@dataclass(frozen=True)
class Grid:
    """How many blocks can wait for each other at once."""

    blocks: int
    """Largest grid of one rank."""
    sharing: int
    """Most ranks on one GPU."""
    resident: bool
    """Whether all ranks' kernels run at once: one rank on each GPU, or MPS. Otherwise the GPU
    is given to one process after another, and a meeting costs time slices."""


def grid_for(facts: Sequence[DeviceFacts], crowd: int = 0) -> Grid:
    """Return the grid for ranks with these devices: one block for each SM, all ranks together.

    A rank with a GPU of its own takes all SMs for large arrays alone, see :func:`blocks_for`.

    More would fit by their registers, but a smaller kernel that ended between two blocks can leave
    an SM's registers in pieces too small for the second; it then waits for the first, which waits
    for its peer: seen with two blocks for each SM. With one, some SM has none yet.

    Args:
        facts: each rank's device.
        crowd: ranks of the whole job on the busiest GPU, where other nodes' ranks are there too.
    """
    uuids = [entry.uuid for entry in facts]
    counts = [max(uuids.count(uuid), crowd) for uuid in uuids]
    sharing = max(counts)
    resident = sharing == 1 or all(entry.mps for entry in facts)
    blocks = min(entry.sms // n for entry, n in zip(facts, counts, strict=True))
    return Grid(max(1, min(blocks, MAX_TEAMS // TEAMS)), sharing, resident)


def zero_copy(kind: Kind, *, push: bool) -> tuple[str, tuple[bool, bool]]:
    """Return what takes arrays as they are, and which (input, output) must be registered for it."""
    return _ZERO_COPY.get((kind, push), ("direct", (False, True)))


def algorithm_for(
    kind: Kind, ranks: int, nbytes: int, *, registered: bool, push: bool, room: int
) -> str:
    """Return ``oneshot``, ``direct``, ``push`` or ``staged``.

    Args:
        kind: the collective.
        ranks: ranks of the node.
        nbytes: bytes of the whole array (of all ranks' blocks, for the kinds that have them).
        registered: whether the memory that :func:`zero_copy` names is registered.
        push: whether each rank has a GPU of its own, so that links are written and not read.
        room: bytes that one-shot has room for in a window.
    """
    if kind is Kind.ALLREDUCE:
        limit = next(limit for most, limit in _ONESHOT_BYTES[not push] if ranks <= most)
        if nbytes <= min(limit, room):
            return "oneshot"
    elif nbytes < _DIRECT_BYTES:
        return "staged"
    return zero_copy(kind, push=push)[0] if registered else "staged"


def blocks_for(nbytes: int, blocks: int, *, push: bool) -> int:
    """Return how many of ``blocks`` an array of ``nbytes`` takes.

    A rank with a GPU of its own leaves every second SM to other work: enough for its links, but
    where the array is large. Some SMs are always left: a block that waits for a peer fills its SM,
    and the peer may wait for a small kernel of this rank, such as one that packs a message.
    """
    if not push:
        return blocks
    return max(1, blocks // 2 if nbytes < _WIDE_BYTES else blocks - blocks // 32)


@dataclass(frozen=True)
class Split:
    """An array cut into elements before the first 16-byte boundary, whole packs, and the rest."""

    head: int
    packs: int


def split(addresses: Iterable[int], count: int, itemsize: int) -> Split:
    """Cut arrays at ``addresses`` alike; without packs where they are aligned differently."""
    over = {address % 16 for address in addresses}
    if len(over) > 1:
        return Split(0, 0)
    head = min((-over.pop() % 16) // itemsize, count)
    return Split(head, (count - head) * itemsize // 16)


def pieces(nbytes: int, blocks: int, tile: int) -> tuple[int, int]:
    """Return (bytes of a tile to use, blocks) for an array that goes through the windows."""
    share = -(-nbytes // (blocks * TEAMS))
    piece = min(tile, max(_LEAST_PIECE, -(-share // 16) * 16))
    return piece, max(1, min(blocks, -(-nbytes // (piece * TEAMS))))


def signature(*words: object) -> int:
    """Return 32 bits that differ, but for chance, where calls differ. Leaves room for a phase."""
    return zlib.crc32(repr(words).encode()) & 0xFFFFFFF0
