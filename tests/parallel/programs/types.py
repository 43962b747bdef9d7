"""What ranks do in tests/parallel/test_types.py: element types, operations, and MPI's own."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import numpy as np
import pytest

from rdmakit import Communicator, Config, Kind, ReduceOp, UnsupportedError
from rdmakit.baseline import why_not_mpi
from rdmakit.bootstrap import load_mpi
from rdmakit.datatypes import AVG, EXACT_SUM, TABLE, dtype_of
from rdmakit.reduction import on_the_way
from tests.conformance.values import ALL, COVER, DTYPES, check

MPI = load_mpi()
WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.Get_rank(), WORLD.Get_size()
REDUCES = (Kind.ALLREDUCE, Kind.REDUCE_SCATTER)


def say(*words: object) -> None:
    os.write(1, f"[{RANK}] {' '.join(map(str, words))}\n".encode())


def every_pair(comm: Communicator) -> None:
    """Small enough for MPI, which ``auto`` takes where it may; the same bits on all ranks."""
    results: list[bytes] = []
    for kind in REDUCES:
        for dtype, op in ALL:
            got = [check(comm, kind, 57, dtype, op)]
            if not why_not(kind, dtype, op, alike=False):
                got.append(check(comm, kind, 57, dtype, op, algorithm="mpi"))
            results += got if kind is Kind.ALLREDUCE else []
        for dtype, op in COVER:
            check(comm, kind, 57, dtype, op, algorithm="hierarchical")
            check(comm, kind, 5003, dtype, op, in_place=True)
    for kind in (Kind.ALLGATHER, Kind.BROADCAST):
        for dtype in DTYPES:
            for algorithm in ("auto", "mpi", "ring"):
                check(comm, kind, 57, dtype, ReduceOp.SUM, algorithm=algorithm, root=SIZE - 1)
    digest = hashlib.sha256(b"".join(results)).hexdigest()
    assert len(set(WORLD.allgather(digest))) == 1, "bits differ between ranks"


def why_not(kind: Kind, dtype: str, op: ReduceOp, *, alike: bool) -> str:
    return why_not_mpi(kind, *on_the_way(dtype_of(dtype), op), alike=alike)


def chosen(comm: Communicator) -> None:
    """``auto`` takes MPI for small arrays where it means the same, and only there."""
    for dtype, op in ALL:
        x = np.zeros(16, dtype_of(dtype))
        taken = comm.bind(Kind.ALLREDUCE, x, x, op).algorithm == "mpi"
        assert taken == (not why_not(Kind.ALLREDUCE, dtype, op, alike=True)), (dtype, op)
        if why_not(Kind.ALLREDUCE, dtype, op, alike=False):
            with pytest.raises(UnsupportedError, match=r"MPI has no type for|saturate"):
                comm.bind(Kind.ALLREDUCE, x, x, op, algorithm="mpi")
    for dtype in ("float16", "bfloat16"):
        x = np.full(9, 1 + RANK).astype(dtype_of(dtype))
        step = comm.bind(Kind.ALLREDUCE, x, x, EXACT_SUM)
        assert (step.algorithm, step.wire_dtype) == ("mpi", "float32")
        step()
        assert (x.astype(int) == SIZE * (SIZE + 1) // 2).all()


def nan(comm: Communicator) -> None:
    """NaN, wherever it is, is kept by the algorithm that ``auto`` takes."""
    for dtype in ("float32", "float64", "float16", "bfloat16"):
        for op in (ReduceOp.MIN, ReduceOp.MAX):
            for who in range(SIZE):
                x = np.arange(1.0, 9.0).astype(dtype_of(dtype))
                if who == RANK:
                    x[::2] = np.nan
                y = np.zeros_like(x)
                comm.Allreduce(x, y, op)
                assert np.isnan(y[::2].astype(float)).all()
                assert (y[1::2].astype(float) == np.arange(2.0, 9.0, 2)).all()


def wraps(comm: Communicator) -> None:
    """Sums and products of integers wrap as NumPy's do, also by MPI where it is let."""
    for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"):
        info, short = np.iinfo(name), np.dtype(name).itemsize < 4
        for count in (1, 7, 100):
            x = np.resize(np.array([info.max, info.min, info.max // 3], name), count)
            for op, ufunc in ((ReduceOp.SUM, np.add), (ReduceOp.PROD, np.multiply)):
                y = np.zeros_like(x)
                saturates = short and op is ReduceOp.SUM
                comm.Allreduce(x, y, op, algorithm="auto" if saturates else "mpi")
                want = ufunc.reduce(np.stack([x] * SIZE), axis=0, dtype=name)
                assert (y == want).all(), (name, op, y, want)


def rounding(comm: Communicator) -> None:
    """What ``auto`` gives of numbers that round has the same bits on all ranks, MPI's too."""
    out = []
    for dtype in ("float32", "float64", "complex64", "complex128", "float16", "bfloat16"):
        rng = np.random.default_rng(RANK)
        for op in ("sum", "prod", "avg"):
            x = rng.normal(size=2 * 501).astype(dtype_of(dtype))
            y = np.zeros_like(x)
            comm.Allreduce(x, y, op)
            out.append(y.tobytes())
    assert len(set(WORLD.allgather(hashlib.sha256(b"".join(out)).hexdigest()))) == 1


def operations_of_mpi(comm: Communicator) -> None:
    for op in ReduceOp:
        theirs: Any = getattr(MPI, op.name, None)
        assert (theirs is None) == (op in (AVG, EXACT_SUM))
        if theirs is None:
            continue
        dtype = "uint8" if TABLE["float32", op] else "float32"
        x = (np.arange(20) % 7 + RANK).astype(dtype)
        y, z = np.zeros_like(x), np.zeros_like(x)
        comm.Allreduce(x, y, theirs)
        comm.Allreduce(x, z, op)
        assert (y == z).all()
    for name in ("MINLOC", "MAXLOC", "REPLACE", "NO_OP"):
        with pytest.raises(UnsupportedError, match=f"MPI.{name}"):
            comm.Allreduce(np.zeros(4), np.zeros(4), getattr(MPI, name))
    own = MPI.Op.Create(lambda a, b, _: None, commute=True)
    with pytest.raises(UnsupportedError, match="a user's own MPI operation"):
        comm.Allreduce(np.zeros(4), np.zeros(4), own)
    own.Free()


for ranks_per_node in (0, 1):
    with Communicator(config=Config(ranks_per_node=ranks_per_node, timeout=30)) as comm:
        for case in (every_pair, chosen, nan, wraps, rounding, operations_of_mpi):
            case(comm)
            if RANK == 0:
                say("ok", case.__name__, comm.layout.describe())
say("end")
