"""What ranks do with streams and graphs in tests/gpu/test_device_node.py: streams.py MODE..."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np
import pytest

from rdmakit.datatypes import MAX, PROD, SUM
from rdmakit.errors import UnsupportedError
from tests.gpu.programs.common import RANK, SIZE, Array, forced, main, make_node, same


def chained() -> None:
    """REPORTS 11: 50 all-reduces in a row, every element looked at."""
    node = make_node()
    for register in (False, True):
        count = 1_000_003
        array = Array(count, "float64")
        array.put(np.arange(count) % 5 + RANK)
        entry = node.register(array.address, array.nbytes, array) if register else None
        stream = cupy.cuda.Stream(non_blocking=True)
        for _ in range(50):
            node.allreduce(array, array, SUM, stream)
        node.wait(stream)
        first = SIZE * (np.arange(count) % 5) + SIZE * (SIZE - 1) // 2
        same(array.get(), first * float(SIZE) ** 49, ("chained", register))
        if entry is not None:
            node.unregister(entry)
    node.close()


_SLOW = cupy.RawKernel(
    r"""
extern "C" __global__ void slow(float* x, int n, float value, long long cycles) {
  const long long until = clock64() + cycles;
  while (clock64() < until) {}
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    x[i] = value;
}
""",
    "slow",
)


def producer() -> None:
    """REPORTS 10: a long kernel writes the input, the collective is called at once."""
    node = make_node()
    for count, register in ((3001, False), (600_001, False), (600_001, True)):
        x, y = Array(count, "float32"), Array(count, "float32")
        entries = [node.register(a.address, a.nbytes, a) for a in (x, y) if register]
        stream = cupy.cuda.Stream(non_blocking=True)
        bad = cupy.zeros(1, cupy.int64)
        view = cupy.ndarray(count, cupy.float32, cupy.cuda.MemoryPointer(
            cupy.cuda.UnownedMemory(y.address, y.nbytes, y), 0))  # fmt: skip
        with stream:
            for turn in range(100):
                value = float(turn + RANK)
                cycles = 400_000 if turn % SIZE == RANK else 1000
                _SLOW((8,), (256,), (np.uint64(x.address), np.int32(count), np.float32(value),
                                     np.int64(cycles)))  # fmt: skip
                node.allreduce(x, y, SUM, stream)
                want = SIZE * turn + SIZE * (SIZE - 1) // 2
                bad += (view != want).sum()
        node.wait(stream)
        assert not int(bad[0]), (count, register, int(bad[0]))
        for entry in entries:
            node.unregister(entry)
    node.close()


def stale(rounds: str = "10000") -> None:
    """Poison, refill and reduce at once, many rounds, small and large, mixed with each other."""
    node = make_node()
    x, y = Array(70_001, "float32"), Array(70_001, "float32")
    z = Array(1001, "float32")
    entries = [node.register(a.address, a.nbytes, a) for a in (x, y)]
    stream = cupy.cuda.Stream(non_blocking=True)
    bad = cupy.zeros(1, cupy.int64)

    def view(array: Array) -> Any:
        memory = cupy.cuda.UnownedMemory(array.address, array.nbytes, array)
        return cupy.ndarray(array.count, cupy.float32, cupy.cuda.MemoryPointer(memory, 0))

    vx, vy, vz = view(x), view(y), view(z)
    check = cupy.ElementwiseKernel(
        "float32 y, float32 want", "raw int64 bad",
        "if (y != want) atomicAdd((unsigned long long*)&bad[0], 1ull)", "rdk_stale",
    )  # fmt: skip
    with stream, forced("direct"):
        node.allreduce(x, y, SUM, stream)
    with stream:
        for turn in range(int(rounds)):
            base = turn % 997
            vy.fill(-1.0)
            vx.fill(base + RANK)
            with forced("direct"):
                node.allreduce(x, y, SUM, stream)
            check(vy, SIZE * base + SIZE * (SIZE - 1) // 2, bad)
            vx.fill(-7.0)
            vz.fill(base - RANK)
            node.allreduce(z, z, SUM, stream)
            check(vz, SIZE * base - SIZE * (SIZE - 1) // 2, bad)
    node.wait(stream)
    assert not int(bad[0]), int(bad[0])
    for entry in entries:
        node.unregister(entry)
    node.close()


def _view(array: Array) -> Any:
    memory = cupy.cuda.UnownedMemory(array.address, array.nbytes, array)
    return cupy.ndarray(array.count, array.dtype, cupy.cuda.MemoryPointer(memory, 0))


_BLOCKS = cupy.RawModule(
    code=r"""
__device__ int element(int base, int source, int target, int size, long long at) {
  return base + (source * size + target) * 100003 + (int)at;
}
extern "C" __global__ void put(int* x, long long n, int base, int rank, int size) {
  const long long block = n / size;
  for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    x[i] = element(base, rank, (int)(i / block), size, i % block);
}
extern "C" __global__ void check(const int* y, long long n, int base, int rank, int size,
                                 unsigned long long* bad) {
  const long long block = n / size;
  for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    if (y[i] != element(base, (int)(i / block), rank, size, i % block)) atomicAdd(bad, 1ull);
}
"""
)
"""An all-to-all's input, another number for each element of each pair of ranks; and its output."""


def _put(array: Array, base: int) -> None:
    args = (np.uint64(array.address), np.int64(array.count), *map(np.int32, (base, RANK, SIZE)))
    _BLOCKS.get_function("put")((64,), (256,), args)


def _check(array: Array, base: int, bad: Any) -> None:
    args = (np.uint64(array.address), np.int64(array.count), *map(np.int32, (base, RANK, SIZE)))
    _BLOCKS.get_function("check")((64,), (256,), (*args, bad))


def exchanged(rounds: str = "3000") -> None:
    """All-to-all, as stale: poisoned, filled and moved at once; large and small blocks in turn.

    Even and odd blocks, outputs registered and not, and an all-reduce through the same windows
    between them; the host never waits, so that ranks run ahead of each other.
    """
    node = make_node()
    stream = cupy.cuda.Stream(non_blocking=True)
    bad = cupy.zeros(1, cupy.int64)
    calls, entries = [], []
    for block, register in (
        (70_004, True), (70_001, True), (70_004, False), (33_333, False), (1024, False), (1, False),
    ):  # fmt: skip
        x, y = Array(block * SIZE, "int32"), Array(block * SIZE, "int32")
        if register:
            entries.append(node.register(y.address, y.nbytes, y))
        calls.append((register, x, y, _view(x), _view(y)))
    z = Array(1001, "int32")
    vz = _view(z)
    cupy.cuda.Device().synchronize()
    with stream:
        for turn in range(int(rounds)):
            base = turn % 997
            register, x, y, vx, vy = calls[turn % len(calls)]
            vy.fill(-1)
            _put(x, base)
            with forced("direct" if register else "staged"):
                node.alltoall(x, y, stream)
            vx.fill(-7)
            _check(y, base, bad)
            if turn % 3 == 0:
                vz.fill(base - RANK)
                node.allreduce(z, z, SUM, stream)
                bad += (vz != SIZE * base - SIZE * (SIZE - 1) // 2).sum()
    node.wait(stream)
    assert not int(bad[0]), int(bad[0])
    for entry in entries:
        node.unregister(entry)
    node.close()


def graph_of_blocks(replays: str = "1000") -> None:
    """All-to-all captured, direct and staged, replayed with other inputs and mixed with calls."""
    node = make_node()
    block = 40_003
    x, y, z = (Array(block * SIZE, "int32") for _ in range(3))
    entry = node.register(y.address, y.nbytes, y)
    vx, vy, vz = map(_view, (x, y, z))
    stream = cupy.cuda.Stream(non_blocking=True)
    bad = cupy.zeros(1, cupy.int64)
    cupy.cuda.Device().synchronize()

    def calls() -> None:
        with forced("direct"):
            node.alltoall(x, y, stream)
        with forced("staged"):
            node.alltoall(y, z, stream)  # back: each block goes where it came from

    with stream:
        calls()
        node.wait(stream)
        stream.begin_capture()
        calls()
        captured = stream.end_capture()
        for turn in range(int(replays)):
            vy.fill(-1)
            vz.fill(-1)
            _put(x, turn)
            if turn % 10:
                captured.launch(stream)
            else:
                calls()
            _check(y, turn, bad)
            bad += (vz != vx).sum()
    node.wait(stream)
    assert not int(bad[0]), int(bad[0])
    node.unregister(entry)
    node.close()


def graph(replays: str = "1000") -> None:
    """Captured once, replayed with changed inputs, mixed with eager calls."""
    node = make_node()
    count = 100_003
    x, y, z = (Array(count, "float32") for _ in range(3))
    entries = [node.register(a.address, a.nbytes, a) for a in (x, y)]
    stream = cupy.cuda.Stream(non_blocking=True)

    def view(array: Array) -> Any:
        memory = cupy.cuda.UnownedMemory(array.address, array.nbytes, array)
        return cupy.ndarray(count, cupy.float32, cupy.cuda.MemoryPointer(memory, 0))

    vx, vy, vz = view(x), view(y), view(z)
    fresh = Array(17, "int64")
    with stream:
        with forced("direct"):
            node.allreduce(x, y, SUM, stream)
        node.allreduce(y, z, MAX, stream)
        node.wait(stream)
        stream.begin_capture()
        with forced("direct"):
            node.allreduce(x, y, SUM, stream)
        node.allreduce(y, z, MAX, stream)
        with pytest.raises(UnsupportedError, match="not compiled"):
            node.allreduce(fresh, fresh, PROD, stream)
        captured = stream.end_capture()
        bad = cupy.zeros(1, cupy.int64)
        for turn in range(int(replays)):
            vx.fill(turn + RANK)
            captured.launch(stream)
            want = SIZE * turn + SIZE * (SIZE - 1) // 2
            bad += (vy != want).sum() + (vz != want).sum()
            if turn % 10 == 0:
                vx.fill(RANK)
                node.allreduce(x, y, SUM, stream)
                bad += (vy != SIZE * (SIZE - 1) // 2).sum()
        node.wait(stream)
        assert not int(bad[0]), int(bad[0])
    for entry in entries:
        node.unregister(entry)
    node.close()


if __name__ == "__main__":
    modes = (chained, producer, stale, exchanged, graph, graph_of_blocks)
    main({mode.__name__: mode for mode in modes})
