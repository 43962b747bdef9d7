"""Inputs that differ for each rank and element, and what every collective must make of them.

All values and results are exactly representable in the type, so that results are compared bit
by bit with int64 arithmetic.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rdmakit.datatypes import ReduceOp
from rdmakit.plan.shape import Kind

Array = npt.NDArray[Any]
KINDS = (Kind.ALLREDUCE, Kind.REDUCE_SCATTER, Kind.ALLGATHER, Kind.BROADCAST)
"""Kinds that ``check`` can call and compare."""
DTYPES = ("float16", "float32", "float64", "int32", "int64")
OPS = tuple(ReduceOp)

_COMBINE = {
    ReduceOp.SUM: np.add,
    ReduceOp.PROD: np.multiply,
    ReduceOp.MAX: np.maximum,
    ReduceOp.MIN: np.minimum,
}


def values(rank: int, count: int, dtype: str, op: ReduceOp) -> npt.NDArray[np.int64]:
    """Return rank's input as integers: small enough for float16 with up to 4 ranks."""
    i = np.arange(count, dtype=np.int64)
    if op is ReduceOp.PROD:
        return 1 + (i * (rank + 1) + rank) % 6  # 6**4 < 2**11
    wide = 251 if dtype == "float16" else 99_991
    data = (i * 7 + rank * 97 + i * rank) % wide
    if op in (ReduceOp.MAX, ReduceOp.MIN):
        data -= wide // 2
    return data * ((1 << 40) + 1) if dtype == "int64" else data  # more than a float64 holds


def reduced(n: int, count: int, dtype: str, op: ReduceOp) -> npt.NDArray[np.int64]:
    total = values(0, count, dtype, op)
    for rank in range(1, n):
        total = _COMBINE[op](total, values(rank, count, dtype, op))
    return total


def buffers(
    kind: Kind,
    rank: int,
    n: int,
    count: int,
    dtype: str,
    op: ReduceOp,
    *,
    root: int,
    in_place: bool,
) -> tuple[Array, Array, Array]:
    """Return sendbuf, recvbuf and the wanted recvbuf of ``rank``, ``count`` as MPI counts."""

    def made(of: int, length: int) -> Array:
        return values(of, length, dtype, op).astype(dtype)

    def unset(length: int) -> Array:
        return np.full(length, -77, dtype)

    if kind is Kind.ALLREDUCE:
        send = made(rank, count)
        return send, send if in_place else unset(count), reduced(n, count, dtype, op).astype(dtype)
    if kind is Kind.REDUCE_SCATTER:
        send, block = made(rank, n * count), slice(rank * count, (rank + 1) * count)
        want = reduced(n, n * count, dtype, op).astype(dtype)[block]
        return send, send[block] if in_place else unset(count), want
    if kind is Kind.ALLGATHER:
        want = np.concatenate([made(of, count) for of in range(n)])
        recv, block = unset(n * count), slice(rank * count, (rank + 1) * count)
        if in_place:
            recv[block] = made(rank, count)
            return recv[block], recv, want
        return made(rank, count), recv, want
    buf = made(root, count) if rank == root else unset(count)
    return buf, buf, made(root, count)


def call(
    comm: Any, kind: Kind, send: Array, recv: Array, op: ReduceOp, root: int, **more: Any
) -> None:
    if kind is Kind.ALLREDUCE:
        comm.Allreduce(send, recv, op, **more)
    elif kind is Kind.REDUCE_SCATTER:
        comm.Reduce_scatter_block(send, recv, op, **more)
    elif kind is Kind.ALLGATHER:
        comm.Allgather(send, recv, **more)
    else:
        comm.Bcast(recv, root, **more)


def check(
    comm: Any,
    kind: Kind,
    count: int,
    dtype: str,
    op: ReduceOp,
    *,
    algorithm: str = "auto",
    root: int = 0,
    in_place: bool = False,
) -> bytes:
    """Do one collective, compare it with its closed form and return the result's bytes."""
    send, recv, want = buffers(
        kind, comm.rank, comm.size, count, dtype, op, root=root, in_place=in_place
    )
    before = send.copy()
    call(comm, kind, send, recv, op, root, algorithm=algorithm)
    what = (kind.value, algorithm, count, dtype, op.value, root, in_place)
    np.testing.assert_array_equal(recv, want, err_msg=f"rank {comm.rank} {what}")
    if not in_place and kind is not Kind.BROADCAST:
        np.testing.assert_array_equal(send, before, err_msg=f"sendbuf was changed: {what}")
    return recv.tobytes()
