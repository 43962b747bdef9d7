"""The communicator over in-memory parts and over shared memory, ranks being threads."""

from __future__ import annotations

import array
import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmakit.collectives import IN_PLACE
from rdmakit.communicator import Communicator
from rdmakit.config import Config
from rdmakit.datatypes import HALVES, SUM, ReduceOp
from rdmakit.errors import (
    CommunicatorClosed,
    InvalidArgument,
)
from rdmakit.layout import RankLayout
from rdmakit.memory import MemoryBootstrap, MemoryChannel, run_threads
from rdmakit.plan.shape import Kind
from tests.conformance.ranks import with_comm
from tests.conformance.values import ALL, COVER, DTYPES, check

SHAPES = ([1], [2], [3], [4], [2, 2], [3, 1], [1, 1, 2], [1, 1, 1])
REDUCES = (Kind.ALLREDUCE, Kind.REDUCE_SCATTER, Kind.REDUCE, Kind.SCAN, Kind.EXSCAN)
SCANS = (Kind.SCAN, Kind.EXSCAN)
ALIKE = (Kind.ALLREDUCE, Kind.ALLGATHER, Kind.BROADCAST)
"""Kinds that give all ranks the same."""


# -- results -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@pytest.mark.parametrize("kind", Kind)
def test_results(kind: Kind, sizes: list[int]) -> None:
    """Every algorithm, dtype, op, count and root; twice, for equal bits on all ranks and runs."""

    def body(comm: Communicator) -> list[str]:
        digests = []
        for algorithm in (*comm.algorithms(kind), "auto"):
            if algorithm == "one-shot":
                counts = (0, 1, 7, 1000)
            else:
                counts = (0, 1, 7, 1000, 30_011)
            cases = [(count, "float32", SUM) for count in counts]
            if kind in REDUCES:
                no = ("avg",) if kind in SCANS else ()
                cases += [(193, dtype, op) for dtype, op in COVER if op.value not in no]
            else:
                cases += [(193, dtype, SUM) for dtype in DTYPES]
            for number, (count, dtype, op) in enumerate(cases):
                for in_place in (False, True):
                    result = check(
                        comm,
                        kind,
                        count,
                        dtype,
                        op,
                        algorithm=algorithm,
                        root=number % comm.size,
                        in_place=in_place,
                    )
                    digests.append(hashlib.sha256(result).hexdigest())
        return digests

    results = with_comm(sizes, body)
    if kind in ALIKE:
        assert all(digests == results[0] for digests in results)


@pytest.mark.parametrize("sizes", [[2], [3], [2, 2], [3, 1]], ids=str)
def test_results_over_shared_memory(sizes: list[int]) -> None:
    def body(comm: Communicator) -> None:
        for kind in Kind:
            for algorithm in comm.algorithms(kind):
                for count in (1, 1000, 30_011):
                    if algorithm != "one-shot" or count < 5000:
                        check(comm, kind, count, "float32", SUM, algorithm=algorithm)

    with_comm(sizes, body, shm=True)


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3).filter(lambda x: sum(x) <= 5),
    kind=st.sampled_from(list(Kind)),
    pair=st.sampled_from([(d, op) for d, op in ALL if d not in HALVES]),
    calls=st.lists(st.tuples(st.integers(0, 9000), st.booleans(), st.integers(0, 4)), max_size=4),
    window=st.sampled_from([1 << 16, (1 << 16) + 24, 100_001]),
)
def test_any_calls_in_a_row(
    sizes: list[int], kind: Kind, pair: tuple[str, ReduceOp], calls: list[Any], window: int
) -> None:
    dtype, op = pair
    op = SUM if kind in SCANS and op.value == "avg" else op

    def body(comm: Communicator) -> None:
        for count, in_place, root in calls:
            for algorithm in [a for a in ("hierarchical", "ring") if a in comm.algorithms(kind)]:
                check(
                    comm,
                    kind,
                    count,
                    dtype,
                    op,
                    algorithm=algorithm,
                    root=root % comm.size,
                    in_place=in_place,
                )

    with_comm(sizes, body, Config(window_bytes=window, timeout=20))


@pytest.mark.parametrize("sizes", [[3], [2, 2], [3, 1], [1, 1, 2], [1, 1, 1]], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_rounded_sums_are_bitwise_equal(sizes: list[int], dtype: str) -> None:
    """Sums that round: the same bits on all ranks and from run to run, and near the truth."""

    def body(comm: Communicator) -> list[bytes]:
        mine = np.random.default_rng(comm.rank).normal(size=20_011).astype(dtype)
        out = []
        for algorithm in ("hierarchical", "ring", "auto"):
            for _ in range(3):
                recv = np.empty_like(mine)
                comm.Allreduce(mine, recv, algorithm=algorithm)
                out.append(recv.tobytes())
        return out

    results = with_comm(sizes, body)
    n = sum(sizes)
    inputs = [np.random.default_rng(r).normal(size=20_011).astype(dtype) for r in range(n)]
    truth = np.sum([x.astype(np.longdouble) for x in inputs], axis=0)
    bound = np.sum([np.abs(x.astype(np.longdouble)) for x in inputs], axis=0)
    for out in results:
        assert out == results[0]
        for first in (0, 3, 6):
            assert out[first] == out[first + 1] == out[first + 2]
            error = np.abs(np.frombuffer(out[first], dtype) - truth)
            assert (error <= (n - 1) * np.finfo(dtype).eps * bound).all()


@pytest.mark.parametrize("sizes", [[3], [2, 2], [1, 1, 1]], ids=str)
def test_node_and_rail_alone(sizes: list[int]) -> None:
    def body(comm: Communicator) -> None:
        layout = comm.layout
        for count in (7, 20_000):
            x = np.full(count, 1 + comm.rank, np.int64)
            comm.node.Allreduce(x, x)
            assert (x == sum(1 + r for r in layout.nodes[layout.node_of(comm.rank)])).all()
            x = np.full(count, 1 + comm.rank, np.int64)
            comm.rail.Allreduce(x, x)
            assert (x == sum(1 + r for r in layout.rails[comm.local_rank])).all()
            x = np.full(count, 1 + comm.rank, np.int64)
            comm.Allreduce(x, x)
            assert (x == sum(range(comm.size + 1))).all()
            comm.Barrier()
            comm.node.Barrier()
            comm.rail.Barrier()

    with_comm(sizes, body)


def test_types_that_only_move() -> None:
    def body(comm: Communicator) -> None:
        record = np.dtype([("a", "i2"), ("b", "f8")])
        for dtype in (
            np.dtype(bool),
            np.dtype("S5"),
            np.dtype(">i4"),
            np.dtype("c16"),
            record,
            np.dtype("M8[s]"),
            np.dtype("u1"),
        ):
            raw = (np.arange(60 * dtype.itemsize) % 2).astype(np.uint8)
            x = raw.view(dtype) if comm.rank == 1 else np.zeros(60, dtype)
            comm.Bcast(x, 1)
            assert x.tobytes() == raw.tobytes()
            block = np.full(4 * dtype.itemsize, comm.rank % 2, np.uint8).view(dtype)
            gathered = np.zeros(12, dtype)
            comm.Allgather(block, gathered)
            want = np.repeat(np.array([0, 1, 0], np.uint8), 4 * dtype.itemsize)
            assert gathered.tobytes() == want.tobytes()

    with_comm([2, 1], body)


def test_anything_with_the_buffer_protocol() -> None:
    def body(comm: Communicator) -> None:
        recv = array.array("d", [0.0] * 5)
        comm.Allreduce(array.array("d", [1.0, 2, 3, 4, 5 + comm.rank]), recv)
        assert list(recv) == [2, 4, 6, 8, 11]
        data = bytearray(b"hello" if comm.rank == 0 else 5)
        comm.Bcast(data)
        assert data == b"hello"
        comm.Bcast(b"again" if comm.rank == 0 else data)  # read-only memory of the root is sent
        assert data == (b"hello" if comm.rank == 0 else b"again")
        scalar = np.array(3.0 + comm.rank)
        comm.Allreduce(IN_PLACE, scalar)
        assert scalar == 7
        fortran = np.asfortranarray(np.arange(6.0).reshape(2, 3))
        comm.Allreduce(IN_PLACE, fortran)
        assert (fortran == 2 * np.arange(6.0).reshape(2, 3)).all()

    with_comm([2], body)


# -- forms of a call ---------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[3], [2, 1]], ids=str)
def test_in_place_forms(sizes: list[int]) -> None:
    def body(comm: Communicator) -> None:
        n, rank = comm.size, comm.rank
        x = np.arange(10.0) + rank
        view = x[:]
        comm.Allreduce(view, x)
        assert (x == n * np.arange(10.0) + 3).all()
        x = np.arange(10.0) + rank
        comm.Allreduce(IN_PLACE, x, "SUM")
        assert (x == n * np.arange(10.0) + 3).all()
        gathered = np.zeros(n * 4, np.int32)
        gathered[rank * 4 : rank * 4 + 4] = rank + 1
        comm.Allgather(IN_PLACE, gathered)
        assert (gathered == np.repeat(np.arange(n) + 1, 4)).all()
        front = np.arange(n * 4.0)
        comm.Reduce_scatter_block(IN_PLACE, front)
        assert (front[:4] == n * np.arange(rank * 4.0, rank * 4 + 4)).all()
        with pytest.raises(InvalidArgument, match="no multiple of"):
            comm.Reduce_scatter_block(IN_PLACE, np.zeros(4 * n + 1))
        with pytest.raises(InvalidArgument, match=r"multiple|expected"):
            comm.Allgather(IN_PLACE, np.zeros(n * 4 + 1))
        comm.Barrier()

    with_comm(sizes, body)


def test_bound_operations() -> None:
    def body(comm: Communicator) -> None:
        send, recv = np.zeros(5000), np.zeros(5000)
        run = comm.bind(Kind.ALLREDUCE, send, recv, algorithm="hierarchical")
        assert run.algorithm == "hierarchical"
        # Half of the vector, as a shard of it, goes to the other node's rank and one half back.
        assert run.sent_bytes == 5000 * 8 // 2
        for turn in range(5):
            send[:] = turn + comm.rank
            run()
            assert (recv == 4 * turn + 6).all()
            run.call()
            assert (recv == 4 * turn + 6).all()
        address = recv.__array_interface__["data"][0]
        del recv
        fresh = np.zeros(5000)  # the operation holds its arrays: this is not the old place
        assert fresh.__array_interface__["data"][0] != address
        run()
        assert not fresh.any()
        comm.Barrier()
        comm.close()
        with pytest.raises(CommunicatorClosed):
            run()
        with pytest.raises(CommunicatorClosed):
            comm.node.Barrier()

    with_comm([2, 2], body)


def test_freed_and_reallocated_arrays() -> None:
    """The plan kept for an address serves whatever array is there now."""

    def body(comm: Communicator) -> int:
        places = set()
        for turn in range(40):
            x = np.full(3000, turn + comm.rank, np.float32)
            places.add(x.__array_interface__["data"][0])
            comm.Allreduce(x, x)
            assert (x == 2 * turn + 1).all()
            del x
        return len(places)

    assert min(with_comm([1, 1], body)) < 40


def test_more_calls_than_are_remembered() -> None:
    def body(comm: Communicator) -> None:
        arrays = [np.zeros(100 + i) for i in range(50)]
        for _ in range(2):
            for i, x in enumerate(arrays):
                x[:] = comm.rank + i
                comm.Allreduce(x, x)
                assert (x == 1 + 2 * i).all()

    with_comm([1, 1], body)


def test_more_calls_than_sequence_numbers() -> None:
    def body(comm: Communicator) -> None:
        x = np.zeros(3)
        for turn in range(2100):
            x[:] = turn + comm.rank
            comm.Allreduce(x, x)
            assert (x == 2 * turn + 1).all()

    with_comm([1, 1], body)


def test_two_communicators_on_one_channel() -> None:
    """Their tags keep them apart."""
    layout = RankLayout.of_sizes([1, 1])

    def main(boot: MemoryBootstrap) -> None:
        channel = MemoryChannel.create(boot)
        first, second = (
            Communicator.from_parts(boot, layout, None, channel, Config(timeout=10))
            for _ in range(2)
        )
        for turn in range(20):
            x, y = np.full(10, turn + boot.rank), np.full(10, 100 * boot.rank)
            first.Allreduce(x, x)
            second.Allreduce(y, y)
            assert (x == 2 * turn + 1).all()
            assert (y == 100).all()
        first.close()
        z = np.full(10, boot.rank)
        second.Allreduce(z, z)
        assert (z == 1).all()
        second.close()

    run_threads(2, main)
