"""What ranks do in tests/gpu/test_device_node.py: node.py MODE..."""

from __future__ import annotations

import time
from typing import Any

import cupy
import numpy as np
import pytest

from rdmakit.buffer import Strided
from rdmakit.datatypes import MAX, MIN, PROD, SUM, ReduceOp
from rdmakit.drivers.cuda import activate, current_device
from rdmakit.errors import (
    CollectiveMismatch,
    PeerLost,
    RdmaKitError,
    SetupError,
    TransferTimeout,
)
from rdmakit.intra import cuda_ipc
from rdmakit.intra.device_kernels import TEAMS
from rdmakit.intra.device_local import combine, pack, strided_args, unpack
from rdmakit.intra.device_node import DeviceNode
from rdmakit.intra.device_plan import blocks_for
from rdmakit.plan.shape import Kind
from tests.gpu.programs.common import (
    BOOT,
    RANK,
    SIZE,
    Array,
    forced,
    main,
    make_node,
    reduced,
    same,
    say,
    values,
)  # fmt: skip

DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64")
"""Types here; all of them with all operations are in types.py."""
SIZES = ("int8", "float16", "float32", "float64", "complex128")
"""One of each size, for what only moves elements."""
KINDS = (Kind.ALLREDUCE, Kind.REDUCE_SCATTER, Kind.ALLGATHER, Kind.BROADCAST, Kind.ALLTOALL)


def call(
    node: DeviceNode, kind: Kind, send: Any, recv: Any, op: ReduceOp, root: int, s: Any
) -> None:
    if kind is Kind.ALLREDUCE:
        node.allreduce(send, recv, op, s)
    elif kind is Kind.REDUCE_SCATTER:
        node.reduce_scatter(send, recv, op, s)
    elif kind is Kind.ALLGATHER:
        node.allgather(send, recv, s)
    elif kind is Kind.ALLTOALL:
        node.alltoall(send, recv, s)
    else:
        node.broadcast(recv, root, s)


def expected(kind: Kind, count: int, dtype: str, op: ReduceOp, root: int, seed: int) -> Any:
    total = count * SIZE if kind in (Kind.REDUCE_SCATTER, Kind.ALLTOALL) else count
    inputs = [values(r, total, dtype, op, seed=seed) for r in range(SIZE)]
    part = slice(RANK * count, (RANK + 1) * count)
    if kind is Kind.ALLREDUCE:
        return reduced(inputs, op)
    if kind is Kind.REDUCE_SCATTER:
        return reduced([x[part] for x in inputs], op)
    if kind is Kind.ALLTOALL:
        return np.concatenate([x[part] for x in inputs])
    return np.concatenate(inputs) if kind is Kind.ALLGATHER else inputs[root]


def one(
    node: DeviceNode, kind: Kind, algorithm: str, count: int, dtype: str, op: ReduceOp,
    offsets: tuple[int, int], *, in_place: bool, root: int = 0,
) -> None:  # fmt: skip
    """One collective on fresh arrays, bit by bit."""
    seed = count * 31 + len(dtype)
    outer = count * (SIZE if kind in (Kind.REDUCE_SCATTER, Kind.ALLTOALL) else 1)
    wide = count * (SIZE if kind in (Kind.ALLGATHER, Kind.ALLTOALL) else 1)
    mine = values(RANK, outer, dtype, op, seed=seed)
    owned = []
    if kind is Kind.BROADCAST:
        send = recv = Array(count, dtype, offsets[1])
        recv.put(mine)
        owned = [recv]
    elif in_place and kind is Kind.ALLREDUCE:
        send = recv = Array(count, dtype, offsets[0])
        send.put(mine)
        owned = [send]
    elif in_place and kind is Kind.REDUCE_SCATTER:
        send = Array(outer, dtype, offsets[0])
        send.put(mine)
        recv = send.part(RANK * count, count)
        owned = [send]
    elif in_place:
        recv = Array(wide, dtype, offsets[1])
        send = recv.part(RANK * count, count)
        send.put(mine)
        owned = [recv]
    else:
        send, recv = Array(outer, dtype, offsets[0]), Array(wide, dtype, offsets[1])
        send.put(mine)
        owned = [send, recv]
    entries = []
    if algorithm == "direct":
        outputs = owned[-1:] if kind is Kind.ALLTOALL else owned  # its input may be anywhere
        entries = [node.register(a.address, a.nbytes, a) for a in outputs]
    stream = cupy.cuda.Stream(non_blocking=True)
    with forced(algorithm):
        call(node, kind, send, recv, op, root, stream)
    node.wait(stream)
    want = expected(kind, count, dtype, op, root, seed)
    if in_place and kind is Kind.REDUCE_SCATTER:
        got = send.get()[RANK * count : (RANK + 1) * count]
    else:
        got = recv.get()
    same(got, want, (kind.value, algorithm, count, dtype, op.value, offsets, in_place, root))
    if send is not recv and not in_place:
        same(send.get(), mine, ("the input was changed", kind.value, algorithm))
    for entry in entries:
        node.unregister(entry)
    BOOT.barrier()
    for array in owned:
        array.memory.close()


def conformance(which: str = "some") -> None:
    """Every kind, algorithm, dtype and op; counts and offsets that leave ragged ends.

    ``all``: every op with every dtype; ``few``: each kernel a few times, for slow tools; ``push``:
    as between GPUs, whoever shares one.
    """
    push = True if which == "push" else None
    node = make_node(tile=4096, timeout=100.0 if which == "few" else 20.0, push=push)  # many tiles
    big = 8 * node.grid.blocks * 4096 // 8 + 5 if which == "all" else 30_011
    room = blocks_for(0, node.grid.blocks, push=node.layout.push) * TEAMS
    room *= node.layout.oneshot(max(2, SIZE))
    cases = 0
    for kind in KINDS:
        reduces = kind in (Kind.ALLREDUCE, Kind.REDUCE_SCATTER)
        pairs: list[tuple[str, ReduceOp]]
        if which == "few":
            pairs = [("float32", SUM)]
        elif kind is Kind.ALLTOALL:
            pairs = [(dtype, SUM) for dtype in SIZES]
        elif not reduces:
            pairs = [("float32", SUM), ("int8", SUM)]
        elif which == "all":
            pairs = [(dtype, op) for dtype in DTYPES for op in (SUM, PROD, MAX, MIN)]
        else:
            pairs = [(dtype, SUM) for dtype in DTYPES]
            pairs += [("float32", op) for op in (PROD, MAX, MIN)]
        algorithms = ("oneshot", "direct", "staged") if kind is Kind.ALLREDUCE else (
            "direct", "staged"
        )  # fmt: skip
        for dtype, op in pairs:
            for algorithm in algorithms:
                settings: list[tuple[int, tuple[int, int], bool]] = [
                    (1, (0, 0), False), (7, (1, 1), True), (1000, (3, 3), False),
                    (4099, (0, 1), False), (big if dtype == "float32" else 5003, (0, 0), True),
                ]  # fmt: skip
                if which == "few":
                    settings = settings[2:4]
                elif dtype == "float32" and op is SUM:
                    settings += [(big, (2, 2), False), (big, (1, 2), False), (16, (0, 0), True)]
                for count, offsets, in_place in settings:
                    if algorithm == "oneshot" and count * 8 > room:
                        continue
                    root, possible = cases % SIZE, kind is not Kind.ALLTOALL
                    one(node, kind, algorithm, count, dtype, op, offsets,
                        in_place=in_place and possible, root=root)  # fmt: skip
                    cases += 1
    node.close()
    if RANK == 0:
        say(cases, "cases", node.grid, *node.notes)


def local(which: str = "all") -> None:
    """Combine and pack on this rank alone."""
    device = current_device()
    activate(device)
    for dtype in DTYPES if which == "all" else ("float16", "float32"):
        for n, count, offset in ((2, 1000, 0), (3, 777, 1), (16, 5000, 0)):
            inputs = [values(r, count, dtype, SUM) for r in range(n)]
            arrays = [Array(count, dtype, offset) for _ in range(n)]
            for array, data in zip(arrays, inputs, strict=True):
                array.put(data)
            combine(device, arrays[0].address, [a.address for a in arrays], count, dtype, SUM)(0)
            same(arrays[0].get(), reduced(inputs, SUM), (dtype, n, count))
    for dtype in ("int8", "int16", "int32", "int64", "complex128")[:: 1 if which == "all" else 2]:
        whole = cupy.arange(6 * 10 * 14).astype(dtype).reshape(6, 10, 14)
        views = (whole[::2], whole.T, whole[::-1, 1:9:3], whole[:, :, ::-2], whole[1:2, 3, ::5],
                 whole[:, 2:9], whole[:, :, 3:11], whole[::2, :, 1:])  # fmt: skip
        for view in views:
            _pack_and_back(device, whole, view, 0)
            _pack_and_back(device, whole, view, view.size // 3)


def wide_index() -> None:
    """Pack where the index of an element needs more than 32 bits; takes 6 GB twice."""
    device = current_device()
    activate(device)
    wide = cupy.zeros((3, 1 << 31), "int8")
    view = wide[::-1, (1 << 31) - 3 :: -1000]
    view[:] = cupy.arange(view.size).reshape(view.shape) % 101
    _pack_and_back(device, wide, view, view.size // 2)
    layout = Strided((3, (1 << 31) - 1), (1 << 31, 1), 3 * ((1 << 31) - 1) - 1000)
    packed = cupy.zeros(1000, "int8")
    at = wide.data.ptr + 1
    assert strided_args(packed.data.ptr, at, layout, 1000, 1)[1].wide
    wide[2, -1000:] = cupy.arange(1000) % 97
    pack(device, packed.data.ptr, at, layout, 1000, 1)(0)
    assert (packed.get() == np.arange(1000) % 97).all()


def _pack_and_back(device: int, whole: Any, view: Any, first: int) -> None:
    """Pack the elements of a view from ``first`` on, and unpack them into an empty copy."""
    itemsize, count, what = view.itemsize, view.size - first, (view.shape, view.strides, first)
    layout = Strided(view.shape, view.strides, first)
    packed = cupy.zeros(count + 2, view.dtype)[1:-1]
    pack(device, packed.data.ptr, view.data.ptr, layout, count, itemsize)(0)
    want = view.get().ravel()
    assert (packed.get() == want[first:]).all(), what
    back = cupy.zeros_like(whole)
    at = back.data.ptr + view.data.ptr - whole.data.ptr
    unpack(device, packed.data.ptr, at, layout, count, itemsize)(0)
    memory = back.data + (at - back.data.ptr)
    got = cupy.ndarray(view.shape, view.dtype, memory, view.strides).get().ravel()
    assert (got[first:] == want[first:]).all(), what
    assert not got[:first].any(), what
    assert int((back != 0).sum()) == int((want[first:] != 0).sum()), (what, "others were written")


class Piece:
    """A CuPy array as the node takes it."""

    def __init__(self, array: Any) -> None:
        self.address, self.count, self.dtype = array.data.ptr, array.size, array.dtype


def registered() -> None:
    """REPORTS 2, 4, 5: pieces of one pool block, views of views; each block opened once."""
    node = make_node()
    a = cupy.full((3, 3), 1000 + RANK, cupy.float32)
    b = cupy.arange(20, dtype=cupy.float32).reshape(4, 5) + 100 * RANK
    c = (cupy.arange(100_000, dtype=cupy.float32) + RANK)[10:][5:]
    cupy.cuda.Stream.null.synchronize()
    before = len(cuda_ipc._handles())
    entries = [node.register(x.data.ptr, x.nbytes, x) for x in (a, b, c)]
    blocks = 1 if a.data.mem.ptr == b.data.mem.ptr else 2
    opened = len(cuda_ipc._handles()) - before
    assert opened <= (blocks + 1) * (SIZE - 1), opened
    for peer in range(SIZE):
        for entry, x, want in (
            (entries[1], b, np.arange(20, dtype=np.float32) + 100 * peer),
            (entries[2], c, np.arange(100_000, dtype=np.float32)[15:] + peer),
        ):
            at = entry.peers(x.data.ptr)[peer]
            memory = cupy.cuda.UnownedMemory(at, x.nbytes, entry)
            seen = cupy.ndarray(x.size, cupy.float32, cupy.cuda.MemoryPointer(memory, 0))
            same(seen.get(), want, ("peer", peer))
    BOOT.barrier()
    assert len(cuda_ipc._handles()) - before == opened
    with forced("direct"):  # REPORTS 5: all-reduces on two pieces of one block
        for x in (a, b, c):
            node.allreduce(Piece(x), Piece(x), SUM)
    node.wait()
    rank_sum = sum(range(SIZE))
    same(a.get(), np.full((3, 3), 1000 * SIZE + rank_sum, np.float32), "a")
    want = SIZE * np.arange(20, dtype=np.float32).reshape(4, 5) + 100 * rank_sum
    same(b.get(), want.astype(np.float32), "b")
    want = SIZE * np.arange(100_000, dtype=np.float32)[15:] + rank_sum
    same(c.get(), want.astype(np.float32), "c")
    for entry in reversed(entries):
        node.unregister(entry)
    assert len(cuda_ipc._handles()) == before
    # The same address again, in a new allocation.
    first = Array(1000, "float32")
    old = first.address
    entry = node.register(first.address, first.nbytes, first)
    node.unregister(entry)
    first.memory.close()
    again = Array(1000, "float32")
    again.put(np.full(1000, RANK + 1))
    entry = node.register(again.address, again.nbytes, again)
    with forced("direct"):
        node.allreduce(again, again)
    node.wait()
    same(
        again.get(),
        np.full(1000, SIZE * (SIZE + 1) / 2, np.float32),
        ("again", old == again.address),
    )
    node.unregister(entry)
    node.close()


def kinds() -> None:
    """REPORTS 7, 8: pool and managed memory have no handle; named, and right when staged."""
    node = make_node()
    for name, allocator in (
        ("stream-ordered", cupy.cuda.MemoryAsyncPool().malloc),
        ("managed", cupy.cuda.malloc_managed),
    ):
        memory = allocator(4 * 300_000)
        x = cupy.ndarray(300_000, cupy.float32, memory)
        x.fill(RANK + 1)
        if SIZE > 1:
            with pytest.raises(SetupError, match=name):
                node.register(x.data.ptr, x.nbytes, x)

        node.allreduce(Piece(x), Piece(x), SUM, cupy.cuda.get_current_stream())
        node.wait(cupy.cuda.get_current_stream())
        assert (x.get() == SIZE * (SIZE + 1) // 2).all(), name
    node.close()


def absent() -> None:
    """One rank does not come: the kernels of the others end within the limit and say who."""
    node = make_node(timeout=1.0)
    x = Array(1000, "float32")
    began = time.monotonic()
    if RANK:
        node.allreduce(x, x)
        try:
            node.wait()
            raise AssertionError("no error")
        except (TransferTimeout, PeerLost) as exc:
            say("reported:", type(exc).__name__, exc)
        assert time.monotonic() - began < 5
    BOOT.barrier()


def aborted() -> None:
    """The abort word ends a waiting kernel long before its limit."""
    node = make_node(timeout=30.0)
    x = Array(1000, "float32")
    if RANK == SIZE - 1:
        node.allreduce(x, x)
        began = time.monotonic()
        time.sleep(0.2)
        node.abort()
        try:
            node.wait()
            raise AssertionError("no error")
        except RdmaKitError as exc:
            say("reported:", type(exc).__name__, exc, round(time.monotonic() - began, 2))
        assert time.monotonic() - began < 3
    BOOT.barrier()


def mismatched() -> None:
    """Another count, type, op or place on one rank: an error on every rank, nothing written."""
    for odd in ("count", "dtype", "op", "kind", "registered"):
        node = make_node(timeout=2.0)
        count = 1001 if odd == "count" and RANK == 1 else 1000
        dtype = "int32" if odd == "dtype" and RANK == 1 else "float32"
        op = MAX if odd == "op" and RANK == 1 else SUM
        big = 1_000_000 if odd == "registered" else count
        x, y = Array(big, dtype), Array(big, dtype)
        y.put(np.full(big, 77))
        if odd == "registered":
            for a in (x, y):
                node.register(a.address, a.nbytes, a)
            if RANK == 1:
                x, y = Array(big, dtype), Array(big, dtype)
                y.put(np.full(big, 77))
        if odd == "kind" and RANK == 1:
            node.barrier()
        else:
            node.allreduce(x, y, op)
        try:
            node.wait()
            raise AssertionError(f"{odd}: no error")
        except (CollectiveMismatch, PeerLost, TransferTimeout) as exc:
            if RANK == 0:
                say("reported:", odd, type(exc).__name__, exc)
        same(y.get(), np.full(big, 77, y.dtype), odd)
        BOOT.barrier()


if __name__ == "__main__":
    main(
        {
            "conformance": conformance,
            "local": local,
            "wide_index": wide_index,
            "registered": registered,
            "kinds": kinds,
            "absent": absent,
            "aborted": aborted,
            "mismatched": mismatched,
        }
    )
