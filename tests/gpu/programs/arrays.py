"""Arrays of every type, shape and kind through the public calls; modes of calls.py."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np
import pytest

import rdmakit
from rdmakit import MAX, MIN, PROD, SUM, InvalidArgument, Kind, UnsupportedError
from tests.gpu.programs.job import (
    COMM,
    DEVICES,
    DTYPES,
    RANK,
    SIZE,
    Shown,
    dtype_of,
    get,
    put,
    reduced,
    same,
    say,
    values,
)


def types(which: str = "all") -> None:
    """Every type that is served, every reduction; closed-form values."""
    for group in (COMM, COMM.node):
        n, rank = group.size, group.rank
        for dtype in DTYPES:
            kind = dtype_of(dtype)
            for op in (SUM, PROD, MAX, MIN) if which == "all" else (SUM, MAX):
                for count in (7, 3001):
                    what = (group.label, dtype, op.value, count)
                    mine = values(rank, count, dtype, op).astype(kind)
                    want = reduced(n, count, dtype, op)
                    x, y = put(mine), put(np.zeros(count, kind))
                    group.Allreduce(x, y, op)
                    same(get(y), want, what)
                    same(get(x), mine, ("input", what))
                    group.Allreduce(rdmakit.IN_PLACE, x, op)
                    same(get(x), want, ("in place", what))
                    wide = values(rank, n * count, dtype, op).astype(kind)
                    part = put(np.zeros(count, kind))
                    group.Reduce_scatter_block(put(wide), part, op)
                    block = reduced(n, n * count, dtype, op)[rank * count : (rank + 1) * count]
                    same(get(part), block, ("reduce-scatter", what))
            count = 1003
            each = [values(r, count, dtype, SUM).astype(kind) for r in range(n)]
            gathered = put(np.zeros(n * count, kind))
            group.Allgather(put(each[rank]), gathered)
            same(get(gathered), np.concatenate(each), ("allgather", dtype))
            rows = [values(r, n * count, dtype, SUM).astype(kind) for r in range(n)]
            group.Alltoall(put(rows[rank]), gathered)
            part = slice(rank * count, (rank + 1) * count)
            same(get(gathered), np.concatenate([row[part] for row in rows]), ("alltoall", dtype))
            x = put(each[rank])
            group.Bcast(x, n - 1)
            same(get(x), each[-1], ("broadcast", dtype))


def cupys_bfloat16() -> None:
    """The same type as CuPy's own, where CuPy has it."""
    kind = dtype_of("bfloat16")
    raw = put(values(RANK, 1000, "bfloat16", SUM).astype(kind))
    assert isinstance(raw, Shown)
    try:
        x = cupy.ndarray((1000,), kind, raw.raw.data)
    except (TypeError, ValueError) as exc:
        if RANK == 0:
            say(f"CuPy {cupy.__version__} has no bfloat16: {exc}")
        return
    COMM.Allreduce(rdmakit.IN_PLACE, x)
    same(get(raw), reduced(SIZE, 1000, "bfloat16", SUM), "CuPy's bfloat16")


def views_of(whole: Any) -> dict[str, Any]:
    """Return views of a (60, 100) array that have gaps, and one that is contiguous."""
    return {
        "steps": whole[::2, ::5],
        "columns": whole[:, 3:70],
        "reversed": whole[::-1, ::-1],
        "transposed step": whole[1::3].T,
        "rows reversed": whole[::-1],
        "one column": whole[:, 17],
        "three dimensions": whole.reshape(60, 10, 10)[::3, :, ::-3],
        "contiguous": whole[10:20],
    }


def strided(rounds: str = "2") -> None:
    """REPORTS 16, 17: views of every kind, other strides on other ranks, in and out of place."""
    base = np.arange(6000).reshape(60, 100)
    data = [(base * 7 + r * 13) % 23 for r in range(SIZE)]
    for dtype in ("float32", "float16", "int8", "float64"):
        for turn in range(int(rounds)):
            for name in views_of(base):
                want = sum(views_of(d)[name] for d in data).astype(dtype)
                whole = cupy.asarray(data[RANK].astype(dtype))
                view = views_of(whole)[name]
                # The result lies in another way, and otherwise on each rank.
                room = cupy.full((*view.shape, 2 + RANK % 2), 77, dtype)
                out = room[..., RANK % 2]
                COMM.Allreduce(view, out)
                same(get(out), want, (name, dtype, turn))
                rest = [c for c in range(room.shape[-1]) if c != RANK % 2]
                assert (get(room)[..., rest] == 77).all(), (name, "others were written")
                assert (get(whole) == data[RANK].astype(dtype)).all(), "the input was changed"
                call = COMM.bind(Kind.ALLREDUCE, rdmakit.IN_PLACE, view)
                assert call.packed == (name != "contiguous")
                call()
                same(get(view), want, ("in place", name, dtype))
    wide = cupy.zeros((SIZE, 50, 40), "float32")
    blocks = wide[:, :, ::2]
    own = cupy.arange(1000, dtype="float32").reshape(20, 50).T + RANK
    COMM.Allgather(own, blocks)
    each = np.arange(1000).reshape(20, 50).T
    same(get(blocks), np.stack([each + r for r in range(SIZE)]), "allgather")
    wide[:] = 5
    blocks[RANK] = own
    COMM.Allgather(rdmakit.IN_PLACE, blocks)
    same(get(blocks), np.stack([each + r for r in range(SIZE)]), "allgather in place")
    assert bool((wide[:, :, 1::2] == 5).all())
    part = cupy.zeros((20, 50), "float32").T[::-1]
    COMM.Reduce_scatter_block(blocks, part)
    same(get(part), SIZE * (each + RANK), "reduce-scatter")
    wide[:] = 5
    blocks[:] = cupy.arange(SIZE).reshape(SIZE, 1, 1) * 1000 + own
    COMM.Alltoall(blocks, into := cupy.full((SIZE, 50, 20), -1, "float32"))
    want = np.stack([each + r + RANK * 1000 for r in range(SIZE)])
    same(get(into), want, "alltoall out of gaps")
    wide[:] = 5
    COMM.Alltoall(into, blocks)
    same(get(blocks), np.stack([each + RANK + r * 1000 for r in range(SIZE)]), "and back")
    assert bool((wide[:, :, 1::2] == 5).all())
    x = cupy.zeros((50, 2 * SIZE), "float32")[:, RANK::SIZE]
    x[:] = RANK + cupy.arange(100).reshape(50, 2)
    COMM.Bcast(x, SIZE - 1)
    same(get(x), np.arange(100).reshape(50, 2) + SIZE - 1, "broadcast")
    large = cupy.zeros((3000, 2001), "float32")
    large[:] = RANK + cupy.arange(2001)
    COMM.Allreduce(large[:, ::3], out := cupy.zeros((3000, 667), "float32"))
    wanted = SIZE * np.arange(0, 2001, 3) + sum(range(SIZE))
    same(get(out), np.broadcast_to(wanted, (3000, 667)), "larger than the scratch was")
    _input_only()


def _input_only() -> None:
    row = cupy.arange(40, dtype="float32") + RANK
    many = cupy.broadcast_to(row, (30, 40))
    COMM.Allreduce(many, out := cupy.zeros((30, 40), "float32"), MAX)
    same(get(out), np.broadcast_to(np.arange(40) + SIZE - 1, (30, 40)), "broadcast view")
    with pytest.raises(InvalidArgument, match="several elements in one place"):
        COMM.Allreduce(out, many)
    COMM.Bcast(many if RANK == 0 else out, 0)  # read on the root, written elsewhere
    if RANK:
        same(get(out), np.broadcast_to(np.arange(40), (30, 40)), "broadcast of a broadcast view")
    whole = cupy.zeros((8, 8), "float32")
    for send, recv in ((whole, whole.T), (whole[:, :4], whole[:, 1:5]), (whole[::-1], whole)):
        with pytest.raises(InvalidArgument, match="overlap"):
            COMM.Allreduce(send, recv)
    with pytest.raises(UnsupportedError, match="has gaps"):
        COMM.register(whole[:, ::2])


def edges() -> None:
    """Empty and 0-d arrays, read-only and null memory, memory of the wrong kind."""
    for shape in ((0,), (3, 0), (0, 4)):
        x = cupy.zeros(shape, "float32")
        COMM.Allreduce(x, cupy.zeros(shape, "float32"))
        COMM.Bcast(x)
        COMM.Allgather(x, cupy.zeros((SIZE, *shape), "float32"))
        COMM.Reduce_scatter_block(cupy.zeros((SIZE, *shape), "float32"), x)
        COMM.Alltoall(*(cupy.zeros((SIZE, *shape), "float32") for _ in range(2)))
    COMM.Allreduce(x := cupy.array(3.0 + RANK), y := cupy.zeros((), "float64"))
    same(get(y), 3 * SIZE + sum(range(SIZE)), "0-d")
    half = cupy.empty((0,), complex).real
    COMM.Allreduce(half, half)
    # REPORTS 16: one element, any stride
    memory = cupy.cuda.alloc(64)
    odd = cupy.ndarray((1,), "float64", memory, (48,))
    odd[:] = RANK + 1
    COMM.Allreduce(rdmakit.IN_PLACE, odd)
    same(get(odd), [SIZE * (SIZE + 1) / 2], "size 1")

    class Other:
        """An array with other facts than its memory's."""

        def __init__(self, array: Any, **facts: Any) -> None:
            self.array = array
            self.__cuda_array_interface__ = array.__cuda_array_interface__ | facts

    w, z = cupy.ones(100, "float32"), cupy.ones(100, "float32")
    address = z.data.ptr
    host = np.ones(100, "float32")
    pinned = cupy.cuda.alloc_pinned_memory(400)
    for recv, kind, text in (
        (Other(z, data=(address, True)), InvalidArgument, "recvbuf is read-only"),
        (Other(z, data=(0, False)), InvalidArgument, "recvbuf is a null pointer with 100"),
        (Other(z, data=(host.ctypes.data, False)), InvalidArgument, "host memory, not GPU memory"),
        (Other(z, data=(pinned.ptr, False)), InvalidArgument, "pinned memory, not GPU memory"),
        (Other(z, data=(address + 1, False)), UnsupportedError, "not aligned to its 4-byte"),
        (Other(z, mask=z), UnsupportedError, "has a mask"),
        (host, InvalidArgument, "both must be the same"),
    ):
        with pytest.raises(kind, match=text):
            COMM.Allreduce(w, recv)
        if "read-only" in text:
            COMM.Bcast(recv if RANK == 0 else z, 0)  # as input it is good
    COMM.Allreduce(Other(z, stream=2), z2 := cupy.zeros_like(z))
    same(get(z2), np.full(100, SIZE), "ready on the thread's own stream")
    COMM.Allreduce(z, z2)
    same(get(z2), np.full(100, SIZE), "usable after all that")


def staged_kinds() -> None:
    """REPORTS 7, 8: managed memory and the asynchronous pool: served through the window."""
    for name, allocator in (
        ("managed", cupy.cuda.malloc_managed), ("pool", cupy.cuda.MemoryAsyncPool().malloc),
    ):  # fmt: skip
        for count in (1000, 300_000):
            x = cupy.ndarray(count, "float32", allocator(4 * count))
            x[:] = RANK + cupy.arange(count) % 100
            COMM.Allreduce(rdmakit.IN_PLACE, x)
            want = SIZE * (np.arange(count) % 100) + sum(range(SIZE))
            same(get(x), want, (name, count))
            COMM.Allreduce(x[::2], y := cupy.zeros(count // 2, "float32"), MAX)
            same(get(y), want[::2], (name, "view"))
        del x


def another_device() -> None:
    """An array on another GPU than the communicator's."""
    assert DEVICES > 1
    x = cupy.ones(100, "float32")
    COMM.Allreduce(x, x)
    own = x.device.id
    with cupy.cuda.Device((own + 1) % DEVICES):
        there = cupy.ones(100, "float32")
    with pytest.raises(UnsupportedError, match=rf"is on device {(own + 1) % DEVICES}; .* {own}"):
        COMM.Allreduce(there, there)
    COMM.Allreduce(x, x)
    same(get(x), np.full(100, SIZE**2), "usable after it")
