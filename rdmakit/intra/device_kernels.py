"""The node's CUDA kernels as data: sources, variants, compile options and argument layouts.

Pure: nothing here touches a device. The sources lie in ``kernels/*.cu``; a variant is one source
with its macros set, compiled when it is first needed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources

from rdmakit.datatypes import ITEMSIZES, TABLE, ReduceOp

__all__ = [
    "MAX_DIMS",
    "MAX_RANKS",
    "MAX_TEAMS",
    "PUSH_TILE",
    "STEPS",
    "TEAMS",
    "THREADS",
    "TILE",
    "Args",
    "Sources",
    "Strided",
    "Variant",
    "WindowLayout",
    "Word",
    "every_variant",
    "local_variant",
    "lowered",
    "move_variant",
    "pack_variant",
    "reduce_variant",
    "unit_of",
]

MAX_RANKS = 16
"""Ranks of a node that the kernels' argument block has room for."""
MAX_TEAMS = 1024
"""Teams of a grid that the window's flags have room for: four for each SM of the largest GPU."""
MAX_DIMS = 8
"""Dimensions of a strided array, after those that can be merged have been."""
THREADS = 512
"""Threads of a block: with 128 registers each, one block fits any SM."""
TEAMS = 2
"""Teams of a block in kernels that go through the window. Measured on one H200, in shares of its
copy rate: 1 is 4 to 9 % slower with 4 and 8 ranks and the same with 2; 4 is the same as 2."""
STEPS = 2
"""Rounds of packs a warp takes at a time. Measured there: 8 is 1 to 2.5 % slower, 16 up to 4 %."""
TILE = 48 << 10
"""Bytes of an array that a team passes through its window at a time: large enough that a meeting
(some 3 us) costs little beside the copying, small enough that the tiles of all teams of a GPU
stay, mostly, in an L2 cache of 50 MB. Measured there, 4 and 8 ranks: 32 KiB 49 to 50 % of the copy
rate, 48 KiB 54 %, 64 KiB 53 %."""
PUSH_TILE = 128 << 10
"""The same where each rank has a GPU of its own: the links are the limit, not the memory, so fewer
meetings count for more than the cache."""

_OPS = {
    ReduceOp.SUM: "Sum",
    ReduceOp.PROD: "Prod",
    ReduceOp.MIN: "Min",
    ReduceOp.MAX: "Max",
    ReduceOp.AVG: "Avg",
    ReduceOp.EXACT_SUM: "Sum",
    ReduceOp.LAND: "Land",
    ReduceOp.LOR: "Lor",
    ReduceOp.LXOR: "Lxor",
    ReduceOp.BAND: "Band",
    ReduceOp.BOR: "Bor",
    ReduceOp.BXOR: "Bxor",
}
_OF_BOOL = {
    "Sum": "Lor", "Max": "Lor", "Bor": "Lor", "Prod": "Land", "Min": "Land", "Band": "Land",
    "Bxor": "Lxor",
}  # fmt: skip
_COMMON = ("base.cuh", "numbers.cuh", "access.cuh", "common.cuh")
_REDUCE = (
    "allreduce_direct", "allreduce_oneshot", "allreduce_push", "allreduce_staged",
    "reduce_scatter_direct", "reduce_scatter_staged",
)  # fmt: skip
_MOVE = (
    "allgather_direct", "allgather_staged", "broadcast_direct", "broadcast_staged",
    "alltoall_direct", "alltoall_staged", "barrier",
)  # fmt: skip
_UNITS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}


class Word:
    """Indices of the 32-bit words in host memory that a kernel and its host share."""

    ABORT, STATE, PEER, PHASE, BLOCK, EPOCH, WANT, GOT = range(8)
    COUNT = 8
    TIMED_OUT, ABORTED, TOLD, MISMATCH = range(1, 5)
    """Values of STATE; 0 is no error."""


@dataclass(frozen=True)
class WindowLayout:
    """Where things are in each rank's window, in bytes; equal on all ranks."""

    teams: int
    """Teams that have tiles: those of the largest grid."""
    tile: int = TILE
    """Bytes of one tile. Each team has two for its input and two for its results."""
    push: bool = False
    """Whether reductions write what crosses a link into the windows of the ranks that need it, and
    read their own memory only. Of two H200 over NVLink, both ways at once, kernels write 365 GB/s
    and read 335 (copies: 390 and 385). On a shared GPU there is no link, and less to store."""

    failed: int = 0
    told: int = 64
    ticket: int = 128
    epochs: int = 4096
    flags: int = 8192
    tiles: int = 1 << 19

    def __post_init__(self) -> None:
        assert 0 < self.teams <= MAX_TEAMS
        assert self.tile % (16 * MAX_RANKS) == 0
        assert self.told + 4 * MAX_RANKS <= self.ticket
        assert self.ticket + 8 <= self.epochs
        assert self.epochs + 4 * MAX_TEAMS <= self.flags
        assert self.flags + 2 * MAX_TEAMS * MAX_RANKS * 8 <= self.tiles

    def oneshot(self, ranks: int) -> int:
        """Return the bytes of an array that a team can take in one meeting: what a region holds."""
        return 2 * self.tile // (ranks - 1) // 16 * 16 if self.push else self.tile

    @property
    def nbytes(self) -> int:
        """Bytes of one rank's window."""
        return self.tiles + self.teams * 4 * self.tile


@dataclass(frozen=True)
class Variant:
    """One source with its macros set: a unit of compilation."""

    files: tuple[str, ...]
    macros: tuple[tuple[str, object], ...]
    kernels: tuple[str, ...]
    """Names of the entry points, which have C linkage."""

    @property
    def source(self) -> str:
        """The text given to NVRTC; it includes no header."""
        return "".join(_text(name) for name in self.files)

    @property
    def options(self) -> tuple[str, ...]:
        """Compiler options, without the architecture."""
        wanted = (f"-DRDK_{kernel}" for kernel in self.kernels)
        return ("-std=c++17", *(f"-D{name}={value}" for name, value in self.macros), *wanted)

    def only(self, kernel: str) -> Variant:
        """Return the variant with nothing but ``kernel``, which compiles faster."""
        assert kernel in self.kernels
        return replace(self, kernels=(kernel,))

    @property
    def name(self) -> str:
        """A short name for messages: ``reduce float32 Sum 4 ranks``."""
        macros = dict(self.macros)
        words = [self.files[-1].removesuffix(".cu"), macros.get("RDK_T"), macros.get("RDK_OP")]
        return " ".join(str(w) for w in words if w) + f" {macros['RDK_RANKS']} ranks"


@cache
def _text(name: str) -> str:
    # Line numbers in the compiler's messages are those of the file.
    text = (resources.files("rdmakit.intra") / "kernels" / name).read_text(encoding="utf-8")
    return f'#line 1 "{name}"\n{text}'


def lowered(dtype: str, op: ReduceOp) -> tuple[str, str, int]:
    """Return the kernels' type and operation that do ``op`` of ``dtype``, and the type's bytes.

    bool is reduced as uint8, signed integers as unsigned ones where their bits come out alike, and
    sums of complex numbers as sums of twice as many floats: each kernel has to be compiled.

    Raises:
        KeyError: it is not served: see :data:`rdmakit.datatypes.TABLE`.
    """
    if TABLE[dtype, op]:
        raise KeyError((dtype, op))
    name, bytes_ = _OPS[op], ITEMSIZES[dtype]
    if dtype == "bool":
        return "uint8", _OF_BOOL.get(name, name), 1
    if dtype.startswith("int") and name not in ("Min", "Max"):
        return f"u{dtype}", name, bytes_
    if dtype.startswith("complex") and name != "Prod":
        return f"float{bytes_ * 4}", name, bytes_ // 2
    return dtype, name, bytes_


def reduce_variant(
    dtype: str, op: ReduceOp, rank: int, ranks: int, layout: WindowLayout, unroll: int = 0
) -> Variant:
    """Return the all-reduce and reduce-scatter kernels of ``rank``.

    They count elements of the type that :func:`lowered` returns.
    """
    # About 16 packs under way in each thread: 256 bytes of 132 SMs * 512 threads are four times
    # the bandwidth-delay product of HBM (4 TB/s * 1 us).
    unroll = unroll or max(1, 16 // ranks)
    type_, operation, _ = lowered(dtype, op)
    own = (("RDK_T", type_), ("RDK_OP", operation), ("RDK_UNROLL", unroll))
    files = (*_COMMON, "sync.cuh", "reduce.cu")
    return Variant(files, own + _node_macros(rank, ranks, layout), _REDUCE)


def move_variant(unit: int, rank: int, ranks: int, layout: WindowLayout) -> Variant:
    """Return the kernels that only move, and the barrier, for elements of ``unit`` bytes."""
    own = (("RDK_T", _UNITS[unit]),)
    files = (*_COMMON, "sync.cuh", "move.cu")
    return Variant(files, own + _node_macros(rank, ranks, layout), _MOVE)


def local_variant(dtype: str, op: ReduceOp, sources: int) -> Variant:
    """Return the kernel that reduces ``sources`` arrays of this rank into one, lowered."""
    type_, operation, _ = lowered(dtype, op)
    macros = (("RDK_T", type_), ("RDK_OP", operation), *_local_macros(sources))
    return Variant((*_COMMON, "local.cu"), macros, ("combine",))


def pack_variant(unit: int) -> Variant:
    """Return the kernels that gather and scatter strided elements of ``unit`` bytes."""
    macros = (("RDK_T", _UNITS[unit]), *_local_macros(1))
    return Variant((*_COMMON, "local.cu"), macros, ("pack", "unpack"))


def _local_macros(sources: int) -> tuple[tuple[str, object], ...]:
    return (
        ("RDK_RANKS", sources), ("RDK_THREADS", THREADS), ("RDK_MAX_RANKS", MAX_RANKS),
        ("RDK_MAX_DIMS", MAX_DIMS),
    )  # fmt: skip


def _node_macros(rank: int, ranks: int, layout: WindowLayout) -> tuple[tuple[str, object], ...]:
    assert 0 <= rank < ranks
    assert 2 <= ranks <= MAX_RANKS
    return (
        ("RDK_RANK", rank), ("RDK_RANKS", ranks), ("RDK_THREADS", THREADS), ("RDK_TEAMS", TEAMS),
        ("RDK_STEPS", STEPS), ("RDK_MAX_RANKS", MAX_RANKS), ("RDK_MAX_TEAMS", MAX_TEAMS),
        ("RDK_TILE", layout.tile), ("RDK_FAILED", layout.failed), ("RDK_TOLD", layout.told),
        ("RDK_TICKET", layout.ticket), ("RDK_EPOCHS", layout.epochs), ("RDK_FLAGS", layout.flags),
        ("RDK_TILES", layout.tiles), ("RDK_PUSH", "true" if layout.push else "false"),
    )  # fmt: skip


def every_variant(ranks: int, rank: int, layout: WindowLayout) -> Iterator[Variant]:
    """Yield all variants of a node of ``ranks`` ranks, each once, for tests that compile them."""
    served = [pair for pair, reason in TABLE.items() if not reason]
    for dtype, op in {lowered(*pair): pair for pair in served}.values():
        yield reduce_variant(dtype, op, rank, ranks, layout)
        yield local_variant(dtype, op, ranks)
    for unit in _UNITS:
        yield move_variant(unit, rank, ranks, layout)
        yield pack_variant(unit)


def unit_of(*values: int) -> int:
    """Return the largest of 8, 4, 2, 1 that divides all ``values`` (addresses, lengths)."""
    bits = 8
    for value in values:
        bits |= value
    return bits & -bits


_Pointers = ctypes.c_uint64 * MAX_RANKS
_Dims = ctypes.c_uint64 * MAX_DIMS
_Strides = ctypes.c_int64 * MAX_DIMS


class Args(ctypes.Structure):
    """``struct Args`` of sync.cuh."""

    _fields_ = (
        ("send", _Pointers), ("recv", _Pointers), ("window", _Pointers),
        ("count", ctypes.c_uint64), ("head", ctypes.c_uint64), ("packs", ctypes.c_uint64),
        ("limit", ctypes.c_uint64), ("words", ctypes.c_uint64),
        ("signature", ctypes.c_uint32), ("root", ctypes.c_uint32),
        ("piece", ctypes.c_uint32), ("unused", ctypes.c_uint32),
    )  # fmt: skip


class Sources(ctypes.Structure):
    """``struct Sources`` of local.cu."""

    _fields_ = (
        ("dst", ctypes.c_uint64), ("src", _Pointers), ("count", ctypes.c_uint64),
        ("head", ctypes.c_uint64), ("packs", ctypes.c_uint64),
    )  # fmt: skip


class Strided(ctypes.Structure):
    """``struct Strided`` of local.cu."""

    _fields_ = (
        ("strided", ctypes.c_uint64), ("packed", ctypes.c_uint64), ("count", ctypes.c_uint64),
        ("first", ctypes.c_uint64),
        ("shape", _Dims), ("stride", _Strides), ("dims", ctypes.c_uint32),
        ("wide", ctypes.c_uint32),
    )  # fmt: skip
