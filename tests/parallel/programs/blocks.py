"""What ranks do in tests/parallel/test_blocks.py: every call beside mpi4py's own, bit by bit."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from rdmakit import Communicator, Config, InvalidArgument, UnsupportedError
from rdmakit.bootstrap import load_mpi
from tests.conformance.blocks import BLOCKING, CASES, Where, layouts, values

MPI = load_mpi()
WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.Get_rank(), WORLD.Get_size()
TYPES = {
    "int8": MPI.INT8_T, "uint16": MPI.UINT16_T, "int32": MPI.INT, "int64": MPI.INT64_T,
    "float32": MPI.FLOAT, "float64": MPI.DOUBLE, "complex128": MPI.C_DOUBLE_COMPLEX,
    "bool": MPI.C_BOOL,
}  # fmt: skip
ALGORITHMS = ("auto", "hierarchical", "mpi")
HOLE = 7


def say(*words: object) -> None:
    os.write(1, f"[{RANK}] {' '.join(map(str, words))}\n".encode())


class Both:
    """Does a call by MPI and by each algorithm of ours, and compares what is written."""

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.calls = comm, 0

    def __call__(self, name: str, send: Any, recv: Any, *rest: Any, **more: Any) -> None:
        """Each of ``send`` and ``recv`` is None, IN_PLACE, an array or a list of it and more."""
        ours: Any = self.comm
        wanted = self._copied(send), self._copied(recv)
        getattr(WORLD, name)(*wanted, *rest, **more)
        ways = [(algorithm, False) for algorithm in ALGORITHMS]
        for algorithm, later in (*ways, (ALGORITHMS[self.calls % 3], True)):
            got = self._copied(send), self._copied(recv)
            if later:
                call = getattr(ours, f"I{name.lower()}")
                call(*got, *rest, algorithm=algorithm, **more).Wait()
            else:
                getattr(ours, name)(*got, *rest, algorithm=algorithm, **more)
            what = f"rank {RANK}: {name} {algorithm} later={later} {rest} {more}"
            for mine, theirs in zip(got, wanted, strict=True):
                if self._array(mine) is not None:
                    a, b = self._array(mine), self._array(theirs)
                    np.testing.assert_array_equal(a, b, err_msg=what)
        self.calls += 1

    @staticmethod
    def _array(arg: Any) -> Any:
        if isinstance(arg, np.ndarray):
            return arg
        return arg[0] if isinstance(arg, list) else None

    def _copied(self, arg: Any) -> Any:
        if isinstance(arg, np.ndarray):
            return arg.copy()
        return [arg[0].copy(), *arg[1:]] if isinstance(arg, list) else arg


def made(count: int, *seed: int, dtype: str) -> Any:
    return values(count, *seed, dtype="int64").astype(dtype)


def beside_mpi(comm: Communicator) -> None:
    both = Both(comm)
    for number, (dtype, mpi_type) in enumerate(TYPES.items()):
        for count in (5, (0, 1, 3001)[number % 3]):
            _equal(both, dtype, mpi_type, count, number)
        for counts, at in layouts(SIZE)[number % 5 :: 5]:
            _vectors(both, dtype, mpi_type, counts, at, number)
    assert both.calls > 300, both.calls


def _equal(both: Both, dtype: str, mpi_type: Any, count: int, number: int) -> None:
    root, inside = number % SIZE, MPI.IN_PLACE
    own, every = made(count, RANK, dtype=dtype), made(SIZE * count, RANK, dtype=dtype)
    one, all_ = np.full(count, HOLE, dtype), np.full(SIZE * count, HOLE, dtype)
    at_root = root == RANK
    both("Gather", own, all_ if at_root else None, root=root)
    both("Gather", inside if at_root else own, every if at_root else None, root=root)
    both("Gather", [own, count, mpi_type], [all_, count, mpi_type] if at_root else None, root=root)
    both("Scatter", every if at_root else None, one, root=root)
    both("Scatter", every if at_root else None, inside if at_root else one, root=root)
    both("Scatter", [every, mpi_type] if at_root else None, [one, mpi_type], root=root)
    both("Allgather", [own, count, mpi_type], [all_, count, mpi_type])
    both("Alltoall", every, all_)
    both("Alltoall", [every, count, mpi_type], [all_, mpi_type])
    both("Alltoall", inside, every)
    for op in (MPI.SUM, MPI.MAX, MPI.LAND):
        if (op == MPI.LAND and own.dtype.kind in "fc") or (op == MPI.MAX and own.dtype.kind == "c"):
            continue
        if dtype == "bool" and op != MPI.LAND:
            continue  # MPI has logical operations of bool only
        if op == MPI.SUM and own.dtype.kind in "iu" and own.dtype.itemsize < 4:
            continue  # Open MPI's saturate
        both("Allreduce", [own, count, mpi_type], [one, mpi_type], op)
        both("Reduce", own, one if at_root else None, op, root)
        both("Reduce", inside if at_root else own, own if at_root else None, op, root)
        both("Scan", own, one, op)
        both("Scan", inside, [own, count, mpi_type], op)
        both("Exscan", own, one, op)
        both("Exscan", inside, own, op)
        both("Reduce_scatter_block", every, one, op)


def _vectors(
    both: Both, dtype: str, mpi_type: Any, counts: list[int], at: list[int], number: int
) -> None:
    root, inside = number % SIZE, MPI.IN_PLACE
    at_root, size = root == RANK, max(a + c for a, c in zip(at, counts, strict=True)) + 5
    own = made(counts[RANK], RANK, dtype=dtype)
    one, whole = np.full(counts[RANK], HOLE, dtype), made(size, RANK, dtype=dtype)
    for spec in ([whole, (counts, at)], [whole, counts, at, mpi_type]):
        both("Gatherv", own, spec if at_root else None, root=root)
        both("Gatherv", inside if at_root else own, spec if at_root else None, root=root)
        both("Scatterv", spec if at_root else None, [one, mpi_type], root=root)
        both("Scatterv", spec if at_root else None, inside if at_root else one, root=root)
        both("Allgatherv", [own, mpi_type], spec)
        both("Allgatherv", inside, spec)
    rows = [[(counts[s] + d) % 9 for d in range(SIZE)] for s in range(SIZE)]
    mine, theirs = rows[RANK], [row[RANK] for row in rows]
    send, recv = made(sum(mine), RANK, dtype=dtype), np.full(sum(theirs) + 3, HOLE, dtype)
    both("Alltoallv", [send, mine], [recv, theirs, mpi_type])
    pairs = [(s + RANK) % 4 for s in range(SIZE)]
    both("Alltoallv", inside, [made(sum(pairs), RANK, dtype=dtype), pairs])
    if dtype in ("int32", "int64", "float32", "float64", "complex128"):
        wide = made(sum(counts), RANK, dtype=dtype)
        both("Reduce_scatter", wide, one, counts, MPI.SUM)
        both("Reduce_scatter", wide, one, None, MPI.SUM)


def types_of_mpi(comm: Communicator) -> None:
    x, y = np.arange(12.0) + RANK, np.zeros(12)
    vector = MPI.DOUBLE.Create_vector(2, 1, 2).Commit()
    copy = MPI.DOUBLE.Dup()
    for kind, text, call in (
        (UnsupportedError, "is a derived type", lambda: comm.Allreduce([x, 1, vector], y)),
        (UnsupportedError, "is a derived type", lambda: comm.Scan([x, 1, copy], y)),
        (UnsupportedError, "is a derived type", lambda: comm.Alltoallv([x, 1, vector], [y, 1])),
        (UnsupportedError, "MPI_FLOAT_INT is a pair", lambda: comm.Gather([x, MPI.FLOAT_INT], y)),
        (InvalidArgument, "DATATYPE_NULL", lambda: comm.Bcast([x, MPI.DATATYPE_NULL])),
        (UnsupportedError, "BOTTOM", lambda: comm.Bcast([MPI.BOTTOM, 1, MPI.INT])),
        (UnsupportedError, "MPI.MINLOC", lambda: comm.Reduce(x, y, MPI.MINLOC)),
        (InvalidArgument, "no type 'qq'", lambda: comm.Bcast([x, "qq"])),
        (InvalidArgument, "12 elements; 13", lambda: comm.Bcast([x, 13, MPI.DOUBLE])),
    ):  # fmt: skip
        with pytest.raises(kind, match=text):
            call()
    vector.Free()
    copy.Free()
    comm.Bcast([x, MPI.BYTE], root=SIZE - 1)
    assert (x == np.arange(12.0) + SIZE - 1).all()
    comm.Bcast([x, (3, 2), "d"], root=0)


def cases(comm: Communicator) -> None:
    for case in (*CASES, *BLOCKING):
        case(Where(comm, later=comm.config.check))


for ranks_per_node in (0, 1, 2):
    config = Config(ranks_per_node=ranks_per_node, timeout=30, check=ranks_per_node == 2)
    with Communicator(config=config) as comm:
        for case in (cases, beside_mpi, types_of_mpi):
            case(comm)
            if RANK == 0:
                say("ok", case.__name__, comm.layout.describe())
with Communicator(MPI.COMM_SELF) as alone:
    cases(alone)
say("end")
