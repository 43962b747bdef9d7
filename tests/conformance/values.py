"""Inputs that differ for each rank and element, and what every collective must make of them.

All values are small integers in closed form, and all results but means are exactly representable
in the type, so that results are compared bit by bit with arithmetic on int64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rdmakit.arguments import IN_PLACE
from rdmakit.datatypes import HALVES, ITEMSIZES, TABLE, ReduceOp, dtype_of, kind_of
from rdmakit.plan.shape import Kind

Array = npt.NDArray[Any]
Integers = npt.NDArray[np.int64]
O = ReduceOp  # noqa: E741
DTYPES = tuple(ITEMSIZES)
ALL = tuple(pair for pair, reason in TABLE.items() if not reason)
"""Every type with every operation that it has."""
COVER = (
    ("bool", O.SUM), ("bool", O.LXOR), ("int8", O.PROD), ("int16", O.MIN), ("int32", O.SUM),
    ("int32", O.BOR), ("int64", O.SUM), ("int64", O.LAND), ("uint8", O.BXOR), ("uint16", O.BAND),
    ("uint32", O.LOR), ("uint64", O.MAX), ("float16", O.SUM), ("float16", O.AVG),
    ("bfloat16", O.SUM), ("bfloat16", O.AVG), ("bfloat16", O.EXACT_SUM), ("float32", O.SUM),
    ("float32", O.AVG),
    ("float32", O.MIN), ("float64", O.PROD), ("float64", O.MAX), ("complex64", O.SUM),
    ("complex64", O.PROD), ("complex128", O.AVG),
)  # fmt: skip
"""Every type, every operation, and every way in which they are done."""
KINDS = (Kind.ALLREDUCE, Kind.REDUCE_SCATTER, Kind.ALLGATHER, Kind.BROADCAST)
"""Kinds that ``check`` can call and compare."""


def integers(rank: int, count: int, dtype: str, op: ReduceOp) -> Integers:
    """Return rank's input (of complex numbers a part of it) as integers; for up to 4 ranks."""
    i = np.arange(count, dtype=np.int64)
    if op is O.PROD and dtype != "bool":
        # 6**4 < 2**11; bfloat16 holds 8 bits.
        return 1 + (i * (rank + 1) + rank) % (2 if dtype == "bfloat16" else 6)
    if op in (O.LAND, O.LOR, O.LXOR) or dtype == "bool":
        often = {O.LAND: 11, O.PROD: 11, O.MIN: 11, O.BAND: 11, O.LXOR: 2, O.BXOR: 2}.get(op, 0)
        data = i * 7 + rank * 97 + i * rank
        return data % often if often else (data % 11 == 0) * (1 + i % 5)
    wide = {"bfloat16": 61, "float16": 251}.get(dtype) or {1: 251, 2: 30_011}.get(
        ITEMSIZES[dtype], 99_991
    )
    data = (i * 7 + rank * 97 + i * rank) % wide
    if op in (O.MAX, O.MIN) and not dtype.startswith("uint"):
        data -= wide // 2
    # More than a float64 holds, and bits everywhere.
    return data * ((1 << 40) + 1) if dtype in ("int64", "uint64") else data


def values(rank: int, count: int, dtype: str, op: ReduceOp) -> Array:
    """Return rank's input."""
    real = integers(rank, count, dtype, op)
    if kind_of(dtype) == "complex":
        if op is O.PROD:
            return np.array([1, 1j, -1, -1j, 1 + 1j, 2])[real - 1].astype(dtype)
        return (real + 1j * integers(rank + 11, count, dtype, op)).astype(dtype)
    return real.astype(dtype_of(dtype))


def reduced(n: int, count: int, dtype: str, op: ReduceOp) -> Array:
    """Return what all ranks' inputs come to."""
    if kind_of(dtype) == "complex":
        if op is O.PROD:
            return np.prod([values(r, count, dtype, op) for r in range(n)], axis=0)
        parts = [_reduced(start, n, count, dtype, op) for start in (0, 11)]
        return _rounded(parts[0], n, dtype, op) + 1j * _rounded(parts[1], n, dtype, op)
    return _rounded(_reduced(0, n, count, dtype, op), n, dtype, op)


def _reduced(start: int, n: int, count: int, dtype: str, op: ReduceOp) -> Integers:
    """Return the exact result, or of a mean the sum."""
    rows = np.stack([integers(start + r, count, dtype, op) for r in range(n)])
    if op in (O.LAND, O.LOR, O.LXOR) and n > 1:
        rows = (rows != 0).astype(np.int64)
        return {O.LAND: rows.min(0), O.LOR: rows.max(0), O.LXOR: rows.sum(0) % 2}[op]
    if dtype == "bool":
        rows = (rows != 0).astype(np.int64)
    ufunc = {
        O.SUM: np.add, O.EXACT_SUM: np.add, O.AVG: np.add, O.PROD: np.multiply,
        O.MAX: np.maximum, O.MIN: np.minimum,
        O.BAND: np.bitwise_and, O.BOR: np.bitwise_or, O.BXOR: np.bitwise_xor,
        O.LAND: np.minimum, O.LOR: np.maximum, O.LXOR: np.add,
    }[op]  # fmt: skip
    return ufunc.reduce(rows, axis=0)


def _rounded(total: Integers, n: int, dtype: str, op: ReduceOp) -> Array:
    kind = dtype_of(dtype) if kind_of(dtype) != "complex" else np.empty(0, dtype).real.dtype
    if op is not O.AVG or n == 1:
        return total.astype(kind)
    wide = np.dtype(np.float32) if dtype in HALVES else kind
    return (total.astype(wide) / wide.type(n)).astype(kind)


def plain(array: Array) -> Array:
    """Return it in a type that NumPy's own tests know."""
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


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
        return values(of, length, dtype, op)

    def unset(length: int) -> Array:
        return np.full(length, -77, np.int64).astype(dtype_of(dtype))

    if kind is Kind.ALLREDUCE:
        send = made(rank, count)
        return send, send if in_place else unset(count), reduced(n, count, dtype, op)
    if kind is Kind.REDUCE_SCATTER:
        send, block = made(rank, n * count), slice(rank * count, (rank + 1) * count)
        want = reduced(n, n * count, dtype, op)[block]
        return send, send[block] if in_place else unset(count), want
    if kind is Kind.ALLGATHER:
        want = np.concatenate([made(of, count) for of in range(n)])
        recv, block = unset(n * count), slice(rank * count, (rank + 1) * count)
        if in_place:
            recv[block] = made(rank, count)
            return recv[block], recv, want
        return made(rank, count), recv, want
    if kind is Kind.BROADCAST:
        buf = made(root, count) if rank == root else unset(count)
        return buf, buf, made(root, count)
    if kind in (Kind.REDUCE, Kind.SCAN, Kind.EXSCAN):
        terms = {Kind.REDUCE: n if rank == root else 0, Kind.SCAN: rank + 1, Kind.EXSCAN: rank}
        send = made(rank, count)
        recv = send if in_place and (kind is not Kind.REDUCE or rank == root) else unset(count)
        want = reduced(terms[kind], count, dtype, op) if terms[kind] else recv.copy()
        return send, recv, want
    return _blocks(kind, rank, n, count, made, unset, root=root, in_place=in_place)


def _blocks(
    kind: Kind, rank: int, n: int, count: int, made: Any, unset: Any, *, root: int, in_place: bool
) -> tuple[Array, Array, Array]:
    own = slice(rank * count, (rank + 1) * count)
    if kind is Kind.GATHER:
        send, recv = made(rank, count), unset(n * count)
        if rank != root:
            return send, recv, recv.copy()
        if in_place:
            recv[own] = send
        want = np.concatenate([made(of, count) for of in range(n)])
        return recv[own] if in_place else send, recv, want
    if kind is Kind.SCATTER:
        send = made(root, n * count) if rank == root else unset(n * count)
        recv = send[own] if in_place and rank == root else unset(count)
        return send, recv, made(root, n * count)[own]
    assert kind is Kind.ALLTOALL
    send = made(rank, n * count)
    want = np.concatenate([made(of, n * count)[own] for of in range(n)])
    return send, send if in_place else unset(n * count), want


def call(
    comm: Any, kind: Kind, send: Array, recv: Array, op: ReduceOp, root: int, **more: Any
) -> None:
    if kind is Kind.ALLREDUCE:
        comm.Allreduce(send, recv, op, **more)
    elif kind is Kind.REDUCE_SCATTER:
        comm.Reduce_scatter_block(send, recv, op, **more)
    elif kind is Kind.ALLGATHER:
        comm.Allgather(send, recv, **more)
    elif kind is Kind.REDUCE:
        comm.Reduce(send, recv, op, root, **more)
    elif kind is Kind.GATHER:
        comm.Gather(send, recv, root, **more)
    elif kind is Kind.SCATTER:
        comm.Scatter(send, recv, root, **more)
    elif kind is Kind.ALLTOALL:
        comm.Alltoall(IN_PLACE if send is recv else send, recv, **more)
    elif kind is Kind.SCAN:
        comm.Scan(send, recv, op, **more)
    elif kind is Kind.EXSCAN:
        comm.Exscan(send, recv, op, **more)
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
    **more: Any,
) -> bytes:
    """Do one collective, compare it with its closed form and return the result's bytes."""
    send, recv, want = buffers(
        kind, comm.rank, comm.size, count, dtype, op, root=root, in_place=in_place
    )
    before = send.copy()
    call(comm, kind, send, recv, op, root, algorithm=algorithm, **more)
    what = (kind.value, algorithm, count, dtype, op.value, root, in_place)
    message = f"rank {comm.rank} {what}"
    np.testing.assert_array_equal(plain(recv), plain(want), err_msg=message)
    if not in_place and kind is not Kind.BROADCAST:
        assert send.tobytes() == before.tobytes(), f"sendbuf was changed: {what}"
    return recv.tobytes()
