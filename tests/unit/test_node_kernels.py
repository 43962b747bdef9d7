"""The node's reduction kernels on this CPU: what each rank puts where, and what comes out.

The kernels' own source, with a few threads for a block and what only a GPU has replaced: memory
access, and meetings, which are barriers here. The arguments are those of the real plans.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rdmakit.datatypes import SUM
from rdmakit.intra import device_calls
from rdmakit.intra.cuda_ipc import Shared
from rdmakit.intra.device_calls import Place, plan_call
from rdmakit.intra.device_kernels import Args, Variant, WindowLayout, reduce_variant
from rdmakit.intra.device_plan import blocks_for, zero_copy
from rdmakit.intra.device_registry import Registration
from rdmakit.plan.shape import Kind
from tests.unit.test_kernel_numbers import BASE

BLOCKS, THREADS, TEAMS = 2, 6, 2
KERNELS = ("allreduce_oneshot", "allreduce_staged", "allreduce_push", "reduce_scatter_staged")
ACCESS = """
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
#define KERNEL static void
struct Index { u32 x; };
static thread_local Index threadIdx, blockIdx;
static Index gridDim;
static u32 atomicAdd(u32*, u32) { abort(); }
static u32 atomicInc(u32*, u32) { abort(); }
static u32 atomicExch(u32*, u32) { abort(); }
static u32 __shfl_sync(u32, u32, int) { abort(); }
struct alignas(16) Vec { u32 x, y, z, w; };
static Vec load16(u64 at) { if (at & 15) abort(); return *(const Vec*)at; }
static void store16(u64 at, Vec v) { if (at & 15) abort(); *(Vec*)at = v; }
static Vec load16_once(u64 at) { return load16(at); }
static void store16_once(u64 at, Vec v) { store16(at, v); }
struct Args {
  u64 send[RDK_MAX_RANKS], recv[RDK_MAX_RANKS], window[RDK_MAX_RANKS];
  u64 count, head, packs, limit, words;
  u32 signature, root, piece, unused;
};
static const u32 RANKS = RDK_RANKS;
struct Meeting {  // of one team of all ranks
  std::mutex lock;
  std::condition_variable all;
  u32 here = 0, turn = 0;
  void join(u32 size) {
    std::unique_lock<std::mutex> held(lock);
    const u32 mine = turn;
    if (++here == size) { here = 0; ++turn; all.notify_all(); }
    else all.wait(held, [&] { return turn != mine; });
  }
};
static Meeting meetings[64];
static u32 epochs[64];  // of each team; equal on all ranks
template <u32 TEAMS>
struct Sync {
  static const u32 SIZE = RDK_THREADS / TEAMS;
  const Args& a;
  const u32 tid, team;
  u32 epoch;
  explicit Sync(const Args& args)
      : a(args), tid(threadIdx.x % SIZE), team(blockIdx.x * TEAMS + threadIdx.x / SIZE) {
    epoch = epochs[team];
  }
  static u32 teams() { return gridDim.x * TEAMS; }
  u64 tile() const { return at(epoch); }
  u64 other_tile() const { return at(epoch + 1); }
  u64 at(u32 when) const { return RDK_TILES + (2ull * team + (when & 1)) * 2 * RDK_TILE; }
  bool meet(u32) {
    meetings[team].join(RANKS * SIZE);
    ++epoch;
    return true;
  }
  void done() {
    meetings[team].join(RANKS * SIZE);  // all have read the old one
    epochs[team] = epoch;
  }
};
"""
LAUNCH = """
extern "C" void launch(u32 which, const void* const* args, u32 blocks) {
  typedef void (*Kernel)(const Args);
  static const Kernel kernels[][RDK_RANKS] = {TABLE};
  gridDim.x = blocks;
  std::vector<std::thread> threads;
  for (u32 rank = 0; rank < RDK_RANKS; ++rank)
    for (u32 block = 0; block < blocks; ++block)
      for (u32 thread = 0; thread < RDK_THREADS; ++thread)
        threads.emplace_back([=] {
          blockIdx.x = block;
          threadIdx.x = thread;
          kernels[which][rank](*(const Args*)args[rank]);
        });
  for (auto& thread : threads) thread.join();
}
"""


@dataclass(frozen=True)
class Built:
    """Kernels of all ranks of a node."""

    library: ctypes.CDLL
    ranks: int
    dtype: np.dtype[Any]
    layout: WindowLayout


def build(
    where: Path, ranks: int, dtype: str, push: bool,
    make: Callable[[WindowLayout], Variant] | None = None, kernels: tuple[str, ...] = KERNELS,
) -> Built:  # fmt: skip
    """Compile them, or those of another variant; every rank's in a namespace of its own."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler (c++, g++, clang++)")
    layout = replace(WindowLayout(BLOCKS * TEAMS, 256, push))
    files = resources.files("rdmakit.intra") / "kernels"
    variant = make(layout) if make else reduce_variant(dtype, SUM, 0, ranks, layout)
    macros = dict(variant.macros) | {"RDK_THREADS": THREADS, "RDK_TEAMS": TEAMS}
    del macros["RDK_RANK"]
    numbers, common, source = (
        (files / name).read_text() for name in ("numbers.cuh", "common.cuh", variant.files[-1])
    )
    parts = [BASE, ACCESS, numbers]
    for rank in range(ranks):
        parts += [
            f"namespace rank{rank} {{\n#undef RDK_RANK\n#define RDK_RANK {rank}\n",
            "static const u32 RANK = RDK_RANK;\n", common, source, "}\n",
        ]  # fmt: skip
    rows = (
        "{" + ", ".join(f"rank{rank}::{kernel}" for rank in range(ranks)) + "}"
        for kernel in kernels
    )
    parts.append(LAUNCH.replace("TABLE", ", ".join(rows)))
    (where / "kernels.cpp").write_text("\n".join(parts))
    options = [f"-D{name}={value}" for name, value in macros.items()]
    options += [f"-DRDK_{kernel}" for kernel in kernels]
    options += ["-std=c++17", "-O1", "-ffp-contract=off", "-w", "-fPIC", "-shared", "-pthread"]
    out = where / "kernels.so"
    command = [compiler, *options, "-o", str(out), str(where / "kernels.cpp")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert not done.returncode, done.stderr[:3000]
    return Built(ctypes.CDLL(str(out)), ranks, np.dtype(dtype), layout)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((ranks, dtype, push), id=f"{ranks}-{dtype}-{'push' if push else 'pull'}")
        for ranks, dtype in ((2, "float32"), (3, "uint8"), (5, "float64"))
        for push in (True, False)
    ],
)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("kernels"), *request.param)


class Memory:
    """``nbytes`` at an address of a given remainder by 16, between guards."""

    GUARD = 64

    def __init__(self, nbytes: int, over: int) -> None:
        self._raw = np.full(nbytes + 2 * self.GUARD + 32, 0xA5, np.uint8)
        start = self._raw.ctypes.data + self.GUARD
        self.first = self.GUARD + (over - start) % 16
        self.nbytes = nbytes
        self.address = self._raw.ctypes.data + self.first

    @property
    def bytes(self) -> Any:
        return self._raw[self.first : self.first + self.nbytes]

    def check_guards(self) -> None:
        assert (self._raw[: self.first] == 0xA5).all(), "bytes before it were written"
        assert (self._raw[self.first + self.nbytes :] == 0xA5).all(), "bytes after it were written"


@dataclass(frozen=True)
class Array:
    memory: Memory
    address: int
    count: int
    dtype: np.dtype[Any]

    @property
    def values(self) -> Any:
        at = self.address - self.memory.address
        return self.memory.bytes[at : at + self.count * self.dtype.itemsize].view(self.dtype)


def made(count: int, dtype: np.dtype[Any], over: int) -> Array:
    memory = Memory(count * dtype.itemsize, over * dtype.itemsize)
    return Array(memory, memory.address, count, dtype)


def value(rank: int, index: Any) -> Any:
    """What an element is: another for each rank, and for its neighbours."""
    return (index * 7 + rank * 11) % 37 + rank


def lookup_of(groups: list[list[Array]], rank: int) -> Callable[[int, int], Any]:
    """Return what finds the arrays that all ranks have registered together."""
    entries = [
        Registration(
            index, group[rank].memory.address,
            Shared(tuple(a.memory.address for a in group), group[rank].memory.nbytes, group),
        )
        for index, group in enumerate(groups)
    ]  # fmt: skip

    def lookup(address: int, nbytes: int) -> Any:
        held = (e for e in entries if e.address <= address and address + nbytes <= e.end)
        return next(held, None)

    return lookup


def run(
    built: Built, windows: list[Memory], kind: Kind, algorithm: str, count: int,
    overs: list[int], monkeypatch: pytest.MonkeyPatch, *, in_place: bool,
) -> None:  # fmt: skip
    """Do one call on all ranks, and see that every element is right and nothing else written."""
    n, dtype = built.ranks, built.dtype
    outer = count * n if kind is Kind.REDUCE_SCATTER else count
    sends = [made(outer, dtype, overs[2 * r]) for r in range(n)]
    recvs = [made(count, dtype, overs[2 * r + 1]) for r in range(n)]
    if in_place:
        at = count * dtype.itemsize if kind is Kind.REDUCE_SCATTER else 0
        recvs = [Array(a.memory, a.address + r * at, count, dtype) for r, a in enumerate(sends)]
    index = np.arange(outer)
    for rank, array in enumerate(sends):
        array.values[:] = value(rank, index)
    groups = [recvs] if algorithm == "push" and not in_place else []
    groups = [sends] if algorithm == "push" and in_place else groups
    monkeypatch.setattr(device_calls, "algorithm_for", lambda *_, **__: algorithm)
    arguments = []
    for rank in range(n):
        lookup = lookup_of(groups, rank) if groups else lambda *_: None
        place = Place(rank, n, BLOCKS, built.layout, lookup)
        prepared = plan_call(place, kind, sends[rank], recvs[rank], SUM, 0)
        prepared.args.window[:n] = [w.address for w in windows]
        arguments.append(prepared)
    kernels = {p.kernel for p in arguments}
    assert kernels == {f"{kind.value}_{algorithm}"}
    assert len({(p.blocks, p.args.piece, p.args.signature) for p in arguments}) == 1
    pointers = (ctypes.c_void_p * n)(*(ctypes.addressof(p.args) for p in arguments))
    built.library.launch(KERNELS.index(kernels.pop()), pointers, arguments[0].blocks)
    for rank in range(n):
        mine = index[rank * count : (rank + 1) * count] if outer != count else index
        want = sum(value(r, mine) for r in range(n)).astype(dtype)
        assert (recvs[rank].values == want).all(), (kind, algorithm, count, overs, in_place, rank)
        if not in_place:
            assert (sends[rank].values == value(rank, index).astype(dtype)).all()
        for array in (sends[rank], recvs[rank]):
            array.memory.check_guards()
    for window in windows:
        window.check_guards()


def test_every_element(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts around packs and tiles, alike and unlike alignment, in place, one call after another.

    The windows are kept from call to call: what an earlier one left must not be taken for new.
    """
    n, lanes = built.ranks, 16 // built.dtype.itemsize
    windows = [Memory(built.layout.nbytes, 0) for _ in range(n)]
    tile = built.layout.tile // built.dtype.itemsize * BLOCKS * TEAMS
    counts = [1, 2, lanes, lanes + 1, 3 * lanes * n - 1, tile - 1, tile, tile + lanes + 1]
    counts += [3 * tile + 5, 5 * tile]
    alike, ragged = [0] * 2 * n, [r % lanes for r in range(2 * n)]
    for kind, algorithms in (
        (Kind.ALLREDUCE, ("oneshot", "staged", "push")), (Kind.REDUCE_SCATTER, ("staged",)),
    ):  # fmt: skip
        for algorithm in algorithms:
            for count in counts:
                used = blocks_for(0, BLOCKS, push=built.layout.push)
                room = built.layout.oneshot(n) * used * TEAMS
                if algorithm == "oneshot" and count * built.dtype.itemsize > room:
                    continue
                for overs in (alike, ragged):
                    for in_place in (False, True):
                        run(built, windows, kind, algorithm, count, overs, monkeypatch,
                            in_place=in_place)  # fmt: skip


def test_arguments_are_laid_out_as_the_kernels_have_them() -> None:
    assert ctypes.sizeof(Args) == 3 * 16 * 8 + 5 * 8 + 4 * 4


def test_what_takes_arrays_as_they_are() -> None:
    assert zero_copy(Kind.ALLREDUCE, push=True) == ("push", (False, True))
    assert zero_copy(Kind.REDUCE_SCATTER, push=True) == ("staged", (False, False))
    for kind in (Kind.ALLGATHER, Kind.BROADCAST):
        for push in (True, False):
            assert zero_copy(kind, push=push) == ("direct", (False, True))
