"""What ranks do with a Communicator and CuPy arrays in tests/gpu/test_communicator.py."""

from __future__ import annotations

import os
import sys
import time
import traceback
from typing import Any

import cupy
import numpy as np
import pytest

import rdmakit
from rdmakit import (
    MAX,
    CollectiveMismatch,
    Communicator,
    InvalidArgument,
    Kind,
    ReduceOp,
    SetupError,
    TransferTimeout,
    UnsupportedError,
)

COMM = Communicator()
# A GPU for each rank where there are several, before anything is allocated.
cupy.cuda.Device(COMM.local_rank % cupy.cuda.runtime.getDeviceCount()).use()
RANK, SIZE = COMM.rank, COMM.size


def say(*words: object) -> None:
    os.write(1, f"[{RANK}] {' '.join(map(str, words))}\n".encode())


def data(rank: int, count: int, dtype: str) -> Any:
    """Small integers: every sum of 8 is exact in every type."""
    return ((np.arange(count) * 7 + rank * 5) % 13).astype(dtype)


ALL = ("float32", "float16", "float64", "int32", "int64", "uint8", "int8")
FEW = ("float32", "float16", "int32")


def group_values(comm: Any, counts: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    n, rank = comm.size, comm.rank
    for count in counts:
        for dtype in dtypes:
            ins = [data(r, count, dtype) for r in range(n)]
            total = sum(x.astype("int64") for x in ins).astype(dtype)
            what = (comm.label, count, dtype)
            x = cupy.asarray(ins[rank])
            for y in (cupy.zeros_like(x), x.copy()):
                comm.Allreduce(x, y)
                assert (cupy.asnumpy(y) == total).all(), what
            z = x.copy()
            comm.Allreduce(rdmakit.IN_PLACE, z)
            assert (cupy.asnumpy(z) == total).all(), what
            comm.Allreduce(x, z, MAX)
            assert (cupy.asnumpy(z) == np.max(ins, axis=0)).all(), what
            comm.Bcast(z := x.copy(), n - 1)
            assert (cupy.asnumpy(z) == ins[-1]).all(), what
            comm.Allgather(x, wide := cupy.zeros(count * n, dtype))
            assert (cupy.asnumpy(wide) == np.concatenate(ins)).all(), what
            part = cupy.zeros(count, dtype)
            comm.Reduce_scatter_block(cupy.tile(x, n), part)
            assert (cupy.asnumpy(part) == total).all(), what
            exchanged(comm, count, dtype)
    COMM.Barrier()


def exchanged(comm: Any, count: int, dtype: str) -> None:
    """All-to-all: any arrays, views that are not aligned, in place, bound, and not blocking."""
    n, rank = comm.size, comm.rank
    index = np.arange(count) * 7
    blocks = [[((index + s + 8 * d) % 113).astype(dtype) for d in range(n)] for s in range(n)]
    mine, want = np.concatenate(blocks[rank]), np.concatenate([row[rank] for row in blocks])
    for shift in (0, 1):
        x, y = cupy.zeros(n * count + shift, dtype)[shift:], cupy.zeros(n * count + 2, dtype)[1:-1]
        x[:] = cupy.asarray(mine)
        for name, call in (
            ("Alltoall", lambda x=x, y=y: comm.Alltoall(x, y)),
            ("Ialltoall", lambda x=x, y=y: comm.Ialltoall(x, y).Wait()),
            ("bound", lambda x=x, y=y: comm.bind(Kind.ALLTOALL, x, y)()),
        ):
            y[:] = 99
            if name == "Ialltoall" and comm._on_device.way == "host":
                with pytest.raises(UnsupportedError, match="call the blocking form"):
                    call()
                continue
            call()
            assert (cupy.asnumpy(y) == want).all(), (comm.label, name, count, dtype, shift)
            assert (cupy.asnumpy(x) == mine).all(), (comm.label, name, "the input was changed")
    comm.Alltoall(rdmakit.IN_PLACE, x)
    assert (cupy.asnumpy(x) == want).all(), (comm.label, "in place", count, dtype)


def values(which: str = "all") -> None:
    dtypes = ALL if which == "all" else FEW
    group_values(COMM.node, (1, 1000, 70_003), dtypes)
    group_values(COMM, (1, 7, 1000, 70_003), dtypes)
    group_values(COMM.rail, (1000,), dtypes)
    big = 5_000_003
    x = cupy.asarray(data(RANK, big, "float32"))
    want = sum(data(r, big, "float32") for r in range(SIZE))
    for _ in range(3):
        y = cupy.zeros_like(x)
        COMM.Allreduce(x, y)
        assert (cupy.asnumpy(y) == want).all()
    if RANK == 0:
        say("notes", *COMM.notes, "nodes", COMM.layout.nodes)


def views() -> None:
    whole = cupy.asarray(data(RANK, 6000, "float32")).reshape(60, 100)
    want = sum(data(r, 6000, "float32") for r in range(SIZE)).reshape(60, 100)
    for view, right in ((whole[7:40], want[7:40]), (whole[3, 5:77], want[3, 5:77]),
                        (cupy.asfortranarray(whole), want), (whole.T, want.T)):  # fmt: skip
        out = cupy.zeros_like(view)
        assert out.flags.f_contiguous == view.flags.f_contiguous or view.ndim == 1
        COMM.Allreduce(view, out)
        assert (cupy.asnumpy(out) == right).all()
    with pytest.raises(InvalidArgument, match="both must be the same"):
        COMM.Allreduce(whole, np.zeros((60, 100), "float32"))
    COMM.Allreduce(whole, out := cupy.zeros_like(whole))  # usable after
    assert (cupy.asnumpy(out) == want).all()
    managed = cupy.ndarray(1000, "float32", cupy.cuda.malloc_managed(4000))
    managed[:] = 1
    COMM.Allreduce(managed, managed)
    assert (cupy.asnumpy(managed) == SIZE).all()


def memory() -> None:
    """Registered arrays: from us, and the user's own."""
    x, y = COMM.empty((1000, 1001), "float32"), COMM.empty((1000, 1001), "float32")
    x[:] = RANK + 1
    COMM.Allreduce(x, y)
    assert (cupy.asnumpy(y) == SIZE * (SIZE + 1) / 2).all()
    mine = cupy.cuda.Memory(4_000_000)  # a plain allocation, not the pool
    array = cupy.ndarray(1_000_000, "float32", cupy.cuda.MemoryPointer(mine, 0))
    _registered_blocks()
    array[:] = 2
    entry = COMM.register(array)
    COMM.Allreduce(array, array)
    assert (cupy.asnumpy(array) == 2 * SIZE).all()
    COMM.unregister(entry)
    COMM.Allreduce(array, array)
    assert (cupy.asnumpy(array) == 2 * SIZE * SIZE).all()
    pooled = cupy.ndarray(1000, "float32", cupy.cuda.MemoryAsyncPool().malloc(4000))
    if COMM.node.size > 1:
        with pytest.raises(SetupError, match="pool"):
            COMM.register(pooled)
    pooled[:] = 1
    COMM.Allreduce(pooled, pooled)
    assert (cupy.asnumpy(pooled) == SIZE).all()
    del x, y


def _registered_blocks() -> None:
    """All-to-all from and into memory of ours; large and small, even and odd blocks."""
    for count in (500_000, 100_003, 7, 0):
        x, y = COMM.empty(SIZE * count, "float32"), COMM.empty(SIZE * count, "float32")
        index = cupy.arange(SIZE * count)
        other, at = index // max(count, 1), index % max(count, 1) % 997
        x[:] = (RANK * SIZE + other) * 1000 + at
        y[:] = -1
        COMM.Alltoall(x, y)
        assert bool((y == (other * SIZE + RANK) * 1000 + at).all()), count


def streams() -> None:
    """Ordered on the stream that is current, or given; many in a row without a wait."""
    count = 300_001
    for given in (False, True):
        s = cupy.cuda.Stream(non_blocking=True)
        with s:
            x = cupy.zeros(count, "float64")
        for turn in range(20):
            with s:
                x += RANK + turn
            if given:
                COMM.Allreduce(x, x, stream=s)
            else:
                with s:
                    COMM.Allreduce(x, x)
            with s:
                x /= SIZE
        COMM.synchronize(s)
        mean = (SIZE - 1) / 2
        np.testing.assert_allclose(cupy.asnumpy(x), 20 * mean + 190, rtol=1e-12)
    x, y = cupy.zeros(5000, "float32"), cupy.zeros(5000, "float32")
    call = COMM.bind(Kind.ALLREDUCE, x, y)
    assert call.algorithm == "device"
    for turn in range(50):
        x[:] = turn
        call()
    assert (cupy.asnumpy(y) == 49 * SIZE).all()
    op = COMM.node.bind(Kind.ALLREDUCE, x, y, ReduceOp.MIN)
    op()
    assert (cupy.asnumpy(y) == 49).all()


def torch_arrays() -> None:
    torch = pytest.importorskip("torch")
    x = torch.full((1000,), float(RANK + 1), device="cuda")
    y = torch.zeros_like(x)
    COMM.Allreduce(x, y, stream=torch.cuda.current_stream())
    torch.cuda.synchronize()
    assert (y.cpu().numpy() == SIZE * (SIZE + 1) / 2).all()


def shared() -> None:
    """A few calls, where each meeting of the ranks may cost a time slice."""
    for count in (1000, 70_003):
        x = cupy.asarray(data(RANK, count, "float32"))
        COMM.Allreduce(x, y := cupy.zeros_like(x))
        assert (cupy.asnumpy(y) == sum(data(r, count, "float32") for r in range(SIZE))).all()
        COMM.Bcast(x, SIZE - 1)
        assert (cupy.asnumpy(x) == data(SIZE - 1, count, "float32")).all()
    say("notes", *COMM.notes)


def late() -> None:
    """A rank that does not come: the others are told within the call's own limit."""
    x = cupy.zeros(1000, "float32")
    COMM.node.Allreduce(x, x)
    COMM.node.synchronize()
    COMM.Barrier()
    if COMM.local_rank == 0:
        time.sleep(4)
        os._exit(0)
    began = time.perf_counter()
    COMM.node.Allreduce(x, x, timeout=1.0)
    with pytest.raises(TransferTimeout, match="local rank 0 did not come within 1 s"):
        COMM.node.synchronize()
    took = time.perf_counter() - began
    assert 0.8 < took < 3, took
    with pytest.raises(rdmakit.CommunicatorClosed):
        COMM.Allreduce(x, x)
    say(f"told after {took:.2f} s")
    time.sleep(3.5)
    os._exit(0)


def mismatched() -> None:
    """With RDMAKIT_CHECK=1: host arrays here and GPU arrays there."""
    x: Any = cupy.zeros(1000, "float32")
    with pytest.raises(CollectiveMismatch, match="algorithm=device"):
        COMM.Allreduce(*(x, x) if RANK else (np.zeros(1000, "float32"),) * 2)
    say("told")
    os._exit(0)


def main() -> None:
    modes = {
        f.__name__: f
        for f in (values, views, memory, streams, torch_arrays, shared, late, mismatched)
    }
    try:
        for argument in sys.argv[1:]:
            name, _, value = argument.partition("=")
            COMM.bootstrap.barrier()
            modes[name](*filter(None, [value]))
            COMM.bootstrap.barrier()
            if RANK == 0:
                say("ok", argument)
        COMM.close()
    except BaseException:
        say(traceback.format_exc())
        COMM.bootstrap.abort(3)


if __name__ == "__main__":
    main()
