"""The communicator over in-memory parts and over shared memory, ranks being threads."""

from __future__ import annotations

import array
import hashlib
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmakit.collectives import IN_PLACE
from rdmakit.communicator import Communicator
from rdmakit.config import Config
from rdmakit.datatypes import HALVES, MAX, SUM, ReduceOp
from rdmakit.errors import (
    CollectiveMismatch,
    CommunicatorClosed,
    InvalidArgument,
    PeerLost,
    RdmaKitError,
    TransferTimeout,
    UnsupportedError,
)
from rdmakit.layout import RankLayout
from rdmakit.memory import MemoryBootstrap, MemoryChannel, MemoryWindow, run_threads
from rdmakit.plan.pieces import FLAGS
from rdmakit.plan.shape import Kind
from rdmakit.request import Request
from tests.conformance.ranks import SMALL_WINDOW, with_comm
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


# -- wrong calls -------------------------------------------------------------------------------


class OnDevice:
    __cuda_array_interface__ = {"shape": (4,), "typestr": "<f4", "data": (4096, False)}  # noqa: RUF012


def _read_only(count: int) -> np.ndarray[Any, Any]:
    x = np.zeros(count)
    x.flags.writeable = False
    return x


WRONG: list[tuple[str, type[RdmaKitError], str, Callable[[Communicator], object]]] = [
    ("counts", InvalidArgument, "recvbuf has 5 elements; expected 4",
     lambda c: c.Allreduce(np.zeros(4), np.zeros(5))),
    ("dtypes", InvalidArgument, "float32 and recvbuf float64",
     lambda c: c.Allreduce(np.zeros(4, np.float32), np.zeros(4))),
    ("byte order", InvalidArgument, "sendbuf is >f4",
     lambda c: c.Allreduce(np.zeros(4, ">f4"), np.zeros(4, "<f4"))),
    ("foreign byte order", UnsupportedError, ">f4",
     lambda c: c.Allreduce(np.zeros(4, ">f4"), np.zeros(4, ">f4"))),
    ("no mean", UnsupportedError, "AVG of bool is not served: a mean of truth values",
     lambda c: c.Allreduce(np.zeros(4, bool), np.zeros(4, bool), "avg")),
    ("no order", UnsupportedError, "MAX of complex64 is not served: complex numbers have no order",
     lambda c: c.Reduce_scatter_block(np.zeros(2 * c.size, "c8"), np.zeros(2, "c8"), MAX)),
    ("dates", UnsupportedError, r"datetime64\[s\] is not reduced: .*int64",
     lambda c: c.Allreduce(np.zeros(4, "M8[s]"), np.zeros(4, "M8[s]"))),
    ("exact as it is", UnsupportedError, "EXACT_SUM of float64 is not served: .*take SUM",
     lambda c: c.Allreduce(np.zeros(4), np.zeros(4), "exact_sum")),
    ("pairs", UnsupportedError, "MAXLOC: pairs",
     lambda c: c.Allreduce(np.zeros(4), np.zeros(4), "MAXLOC")),
    ("objects", UnsupportedError, "plain bytes", lambda c: c.Bcast(np.array([None, 1], object))),
    ("no bytes", UnsupportedError, "plain bytes", lambda c: c.Bcast(np.zeros(3, "V0"))),
    ("overlap", InvalidArgument, "overlap",
     lambda c: (lambda x: c.Allreduce(x[:4], x[1:5]))(np.zeros(8))),
    ("overlap of blocks", InvalidArgument, "overlap",
     lambda c: (lambda x: c.Allgather(x[1:3], x))(np.zeros(2 * c.size))),
    ("overlap of scattered", InvalidArgument, "overlap",
     lambda c: (lambda x: c.Reduce_scatter_block(x, x[1:3]))(np.zeros(2 * c.size))),
    ("read-only", InvalidArgument, "recvbuf is read-only",
     lambda c: c.Allreduce(np.zeros(4), _read_only(4))),
    ("read-only bytes", InvalidArgument, "recvbuf is read-only",
     lambda c: c.Allgather(b"ab", bytes(2 * c.size))),
    ("several in one place", InvalidArgument, "recvbuf has several elements in one place",
     lambda c: c.Allreduce(np.zeros(4), np.lib.stride_tricks.as_strided(np.zeros(1), (4,), (0,)))),
    ("read-only view", InvalidArgument, "recvbuf is read-only",
     lambda c: c.Allreduce(np.zeros(4), np.broadcast_to(np.zeros(1), 4))),
    ("masked", UnsupportedError, "sendbuf has a mask",
     lambda c: c.Allreduce(np.ma.masked_equal(np.zeros(4), 0), np.zeros(4))),
    ("op", InvalidArgument, "unknown op 'xor'; one of sum, prod, min, max, avg, exact_sum, land",
     lambda c: c.Allreduce(np.zeros(4), np.zeros(4), "xor")),
    ("algorithm", InvalidArgument, "unknown algorithm 'fastest'; one of auto, hierarchical",
     lambda c: c.Allreduce(np.zeros(4), np.zeros(4), algorithm="fastest")),
    ("no mpi", UnsupportedError, "no MPI communicator",
     lambda c: c.Allreduce(np.zeros(4), np.zeros(4), algorithm="mpi")),
    ("device", InvalidArgument, r"sendbuf is GPU memory and recvbuf host memory",
     lambda c: c.Allreduce(OnDevice(), np.zeros(4, np.float32))),
    ("device output", InvalidArgument, r"sendbuf is host memory and recvbuf GPU memory",
     lambda c: c.Allreduce(np.zeros(4, np.float32), OnDevice())),
    ("no array", InvalidArgument, "sendbuf: expected a NumPy array, .* a buffer, got float",
     lambda c: c.Allreduce([1.0, 2.0], np.zeros(2))),
    ("nothing", InvalidArgument, "recvbuf: expected .* got NoneType",
     lambda c: c.Allreduce(np.zeros(2), None)),
    ("in place as output", InvalidArgument, "recvbuf: expected",
     lambda c: c.Allreduce(np.zeros(2), IN_PLACE)),
    ("broadcast of nothing", InvalidArgument, "expected", lambda c: c.Bcast(IN_PLACE)),
    ("root", InvalidArgument, "root 4 is not in 0..", lambda c: c.Bcast(np.zeros(4), 4)),
    ("negative root", InvalidArgument, "root -1 is not in 0..", lambda c: c.Bcast(np.zeros(4), -1)),
    ("not divisible", InvalidArgument, "no multiple of",
     lambda c: c.Reduce_scatter_block(np.zeros(2 * c.size + 1), np.zeros(2))),
    ("blocks", InvalidArgument, "expected", lambda c: c.Allgather(np.zeros(3), np.zeros(3))),
    ("timeout", InvalidArgument, "timeout 0",
     lambda c: c.Allreduce(np.zeros(4), np.zeros(4), timeout=0)),
    ("timeout nan", InvalidArgument, "timeout nan",
     lambda c: c.Allreduce(np.zeros(4), np.zeros(4), timeout=float("nan"))),
]  # fmt: skip


@pytest.mark.parametrize("sizes", [[3], [2, 1]], ids=str)
def test_wrong_calls_change_nothing(sizes: list[int]) -> None:
    """Each is refused on every rank before anything moves, and the communicator stays usable."""

    def body(comm: Communicator) -> None:
        for _, kind, text, wrong in WRONG:
            with pytest.raises(kind, match=text):
                wrong(comm)
            x = np.full(5, comm.rank)
            comm.Allreduce(x, x)
            assert (x == 3).all()
        with pytest.raises(UnsupportedError, match=r"node of its own|needs each"):
            comm.Allreduce(np.zeros(4), np.zeros(4), algorithm="tree")
        if len(sizes) > 1:
            with pytest.raises(UnsupportedError, match="one node"):
                comm.Allreduce(np.zeros(4), np.zeros(4), algorithm="one-shot")
        else:
            with pytest.raises(UnsupportedError, match=r"one-shot all-?reduce:? (it )?holds"):
                comm.Allreduce(np.zeros(50_000), np.zeros(50_000), algorithm="one-shot")
        comm.Barrier()

    with_comm(sizes, body)


def test_closed() -> None:
    def body(comm: Communicator) -> None:
        comm.close()
        comm.close()
        for use in (
            lambda: comm.Allreduce(np.zeros(1), np.zeros(1)),
            lambda: comm.Bcast(np.zeros(1)),
            lambda: comm.rail.Allgather(np.zeros(1), np.zeros(2)),
            lambda: comm.node.Barrier(),
            lambda: comm.bind(Kind.ALLREDUCE, np.zeros(1), np.zeros(1)),
        ):
            with pytest.raises(CommunicatorClosed, match="closed"):
                use()

    with_comm([1, 1], body)


ODD: dict[str, tuple[Callable[[Communicator], object], str]] = {
    "count": (lambda c: c.Allreduce(np.zeros(5), np.zeros(5)), "count=5"),
    "dtype": (lambda c: c.Allreduce(np.zeros(4, "f4"), np.zeros(4, "f4")), "dtype=float32"),
    "op": (lambda c: c.Allreduce(np.zeros(4), np.zeros(4), MAX), "op=max"),
    "algorithm": (
        lambda c: c.Allreduce(np.zeros(4), np.zeros(4), algorithm="ring"), "algorithm=ring"
    ),
    "kind": (lambda c: c.Bcast(np.zeros(4)), "broadcast"),
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("sizes", [[2], [3], [2, 2], [1, 1, 1]], ids=str)
def test_checked_calls_that_differ(sizes: list[int], odd: str) -> None:
    def body(comm: Communicator) -> str:
        x = np.full(4, comm.rank + 1.0)
        comm.Allreduce(x, x, algorithm="hierarchical")
        before = np.full(4, -1.0)

        def usual(comm: Communicator) -> None:
            comm.Allreduce(x, before, algorithm="hierarchical")

        with pytest.raises(CollectiveMismatch) as caught:
            (ODD[odd][0] if comm.rank == 1 else usual)(comm)
        assert (before == -1).all(), "nothing was written"
        with pytest.raises(CommunicatorClosed, match="CollectiveMismatch"):
            comm.Allreduce(x, x)
        return str(caught.value)

    texts = with_comm(sizes, body, Config(check=True, timeout=10))
    assert len(set(texts)) == 1, texts
    assert "but rank 1: " in texts[0]
    assert ODD[odd][1] in texts[0]
    assert "call 2" in texts[0]


def test_checked_roots_that_differ() -> None:
    def body(comm: Communicator) -> str:
        with pytest.raises(CollectiveMismatch) as caught:
            comm.Bcast(np.zeros(4), 1 if comm.rank == 2 else 0)
        return str(caught.value)

    texts = with_comm([3], body, Config(check=True, timeout=10))
    assert len(set(texts)) == 1
    assert "rank 2: " in texts[0]
    assert "root=1" in texts[0]


def test_checked_calls_in_another_order() -> None:
    def body(comm: Communicator) -> str:
        first, second = np.zeros(3), np.zeros(3)
        calls = [lambda: comm.Allreduce(first, first), lambda: comm.Bcast(second)]
        with pytest.raises(CollectiveMismatch) as caught:
            calls[0 if comm.rank == 0 else 1]()  # the other would be next
        return str(caught.value)

    texts = with_comm([2, 1], body, Config(check=True, timeout=10))
    assert len(set(texts)) == 1
    assert "rank 0: call 1: allreduce" in texts[0]


def test_bound_operations_are_compared_at_their_first_call() -> None:
    def body(comm: Communicator) -> str:
        x = np.full(4, comm.rank)
        good = comm.bind(Kind.ALLREDUCE, x, x)
        good()
        good()
        assert (x == 2).all()
        bad = comm.bind(Kind.ALLREDUCE, x[: 3 + comm.rank], x[: 3 + comm.rank])
        with pytest.raises(CollectiveMismatch) as caught:
            bad()
        return str(caught.value)

    texts = with_comm([1, 1], body, Config(check=True, timeout=10))
    assert len(set(texts)) == 1
    assert "rank 1: call 2" in texts[0]


def _bad_bind(comm: Communicator) -> None:
    x = np.zeros(4)
    comm.bind(Kind.ALLREDUCE, x, np.zeros(4 - (comm.rank == 0)))()


REFUSED_BY_ONE: dict[str, tuple[Any, str]] = {
    "split": (lambda c: c.Split(-1 if c.rank == 0 else 0), "color -1"),
    "key": (lambda c: c.Split(0, "a" if c.rank == 0 else 0), "key: expected an integer, got str"),
    "create": (lambda c: c.Create([0, 99 if c.rank == 0 else 1]), "ranks .99. are not in"),
    "bind": (_bad_bind, "recvbuf has 3 elements"),
    "root": (lambda c: c.Bcast(np.zeros(4), None if c.rank == 0 else 0), "root: .*NoneType"),
    "gather": (lambda c: c.Gather(_ones(4), _ones(8), 0.0 if c.rank == 0 else 0), "root: .*0.0"),
    "later": (lambda c: c.Ibcast(_ones(4), 1.0 if c.rank == 0 else 0).Wait(), "root: .*1.0"),
    "timeout": (lambda c: c.Bcast(_ones(4), timeout="a" if c.rank == 0 else 9), "timeout: .*str"),
}


def _ones(count: int) -> Any:
    return np.ones(count)


@pytest.mark.parametrize("case", REFUSED_BY_ONE)
def test_checked_what_one_rank_refuses_reaches_the_others(case: str) -> None:
    call, text = REFUSED_BY_ONE[case]

    def body(comm: Communicator) -> None:
        kind = InvalidArgument if comm.rank == 0 else CollectiveMismatch
        with pytest.raises(kind, match=text):
            call(comm)
        with pytest.raises(CommunicatorClosed):
            comm.Barrier()

    with_comm([2], body, Config(window_bytes=SMALL_WINDOW, check=True, timeout=10))


def test_checked_what_all_ranks_refuse_leaves_it_usable() -> None:
    def body(comm: Communicator) -> None:
        request = comm.Ibcast(np.zeros(4))  # under way: what is refused waits for its turn
        for call in (
            lambda: comm.Split(-1 - comm.rank),
            lambda: comm.Create([comm.rank, comm.rank]),
            lambda: comm.bind(Kind.ALLREDUCE, _ones(4), _ones(3)),
            lambda: comm.Bcast(_ones(4), "0"),
        ):
            with pytest.raises(InvalidArgument):
                call()
        request.Wait()
        comm.Barrier()

    with_comm([2, 1], body, Config(window_bytes=SMALL_WINDOW, check=True, timeout=10))


def test_arguments_of_a_wrong_type_are_named() -> None:
    """Without checking: refused before anything moves, and the communicator stays usable."""

    def body(comm: Communicator) -> None:
        x, y = _ones(4), _ones(4 * comm.size)
        later = comm.bind(Kind.ALLREDUCE, x, x)
        for call, text in (
            (lambda: comm.Bcast(x, 0.0), "root: expected an integer, got float 0.0"),
            (lambda: comm.Ibcast(x, None), "root: expected an integer, got NoneType"),
            (lambda: comm.Gather(x, y, "0"), "root: expected an integer, got str"),
            (lambda: comm.Igather(x, y, 1.0), "root: expected an integer, got float"),
            (lambda: comm.bind(Kind.BROADCAST, x, x, root=0.5), "root: expected an integer"),
            (lambda: comm.Split(0.5), "color: expected an integer, got float 0.5"),
            (lambda: comm.Split("a"), "color: expected an integer, got str"),
            (lambda: comm.Split(0, None), "key: expected an integer"),
            (lambda: comm.Split(2**63), "color 9223372036854775808"),
            (lambda: comm.Split(0, -(2**63)), "it must fit 64 bits"),
            (lambda: comm.Create_group("x"), "ranks: expected an integer, got str 'x'"),
            (lambda: comm.Create_group(3), "ranks: expected several or a Group, got 3"),
            (lambda: comm.Create([0.0]), "ranks: expected an integer, got float"),
            (lambda: comm.Allreduce(x, x, timeout="a"), "timeout: expected seconds"),
            (lambda: comm.Scan(x, y[:4], timeout="a"), "timeout: expected seconds"),
            (lambda: comm.allreduce_many([x], timeout="a"), "timeout: expected seconds"),
            (lambda: comm.Allreduce(x, x, timeout=float("nan")), "timeout nan"),
            (lambda: Request.Waitall([None]), r"requests\[0\]: .*got builtins.NoneType"),
            (lambda: Request.Waitany([later]), r"requests\[0\]: .*rdmakit.operation.Operation"),
        ):
            with pytest.raises(InvalidArgument, match=text):
                call()
        comm.Bcast(x, np.int64(0))
        comm.Bcast(x, False)
        assert comm.Split(np.int64(-32766)) is None
        later.Start()
        Request.Waitall(request for request in (comm.Ibarrier(), later))
        assert (x == comm.size).all()

    with_comm([2, 1], body)


def test_a_closed_communicator_is_not_entered() -> None:
    def body(comm: Communicator) -> None:
        comm.close()
        with pytest.raises(CommunicatorClosed, match="it was closed"), comm:
            raise AssertionError("its block was run")

    with_comm([2], body)


# -- ranks that do not come --------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["hierarchical", "ring"])
@pytest.mark.parametrize("sizes", [[2], [3], [2, 2], [1, 1, 1]], ids=str)
def test_a_rank_that_does_not_come(sizes: list[int], algorithm: str) -> None:
    n = sum(sizes)
    done = threading.Barrier(n)

    def body(comm: Communicator) -> str:
        x = np.full(9000, comm.rank + 1.0)
        comm.Allreduce(x, x, algorithm=algorithm)
        text = ""
        if comm.rank != n - 1:
            start = time.monotonic()
            with pytest.raises(TransferTimeout) as caught:
                comm.Allreduce(x, x, algorithm=algorithm, timeout=0.4)
            assert 0.4 <= time.monotonic() - start < 5
            text = str(caught.value)
            with pytest.raises(CommunicatorClosed, match="TransferTimeout"):
                comm.Allreduce(x, x)
            with pytest.raises(CommunicatorClosed, match="TransferTimeout"):
                comm.node.Allreduce(x, x)
        done.wait(20)
        if comm.rank == n - 1:
            comm._state.failure = "the others gave up"  # so that its close does not wait for them
        comm.close()
        return text

    texts = with_comm(sizes, body)
    for rank, text in enumerate(texts[:-1]):
        assert text.startswith(f"rank {rank} (host "), text
        assert f"allreduce/{algorithm} " in text
        assert "limit 0.4 s" in text
    assert any(f"rank {n - 1}" in text for text in texts), texts


def test_the_deadline_of_one_call_is_not_kept() -> None:
    def body(comm: Communicator) -> None:
        x = np.zeros(10)
        comm.Allreduce(x, x, timeout=0.3)
        if comm.rank == 1:
            time.sleep(1)
        comm.Allreduce(x, x)

    with_comm([2], body)
    with_comm([1, 1], body)


def test_a_dead_peer_ends_the_wait() -> None:
    def main(boot: MemoryBootstrap) -> None:
        layout = RankLayout.of_sizes([1, 1])
        channel = MemoryChannel.create(boot)
        comm = Communicator.from_parts(boot, layout, None, channel, Config(timeout=30))
        if boot.rank == 0:
            channel.lose(1)
            with pytest.raises(PeerLost, match="rank 1"):
                comm.Allreduce(np.zeros(5), np.zeros(5))
            with pytest.raises(CommunicatorClosed, match="PeerLost"):
                comm.Barrier()
            comm.close()

    run_threads(2, main)


def test_closing_does_not_ask_for_peers_that_may_have_left() -> None:
    """Who sees the last barrier first takes its endpoints down while others still wait for it."""

    def main(boot: MemoryBootstrap) -> None:
        layout = RankLayout.of_sizes([1, 1])
        channel = MemoryChannel.create(boot)
        comm = Communicator.from_parts(boot, layout, None, channel, Config(timeout=30))
        if boot.rank == 1:
            channel.lose(1)
            time.sleep(0.5)
        comm.close()

    run_threads(2, main)


class LateChannel(MemoryChannel):
    """Tells a send done at once, but holds it back: only ``progress`` lets it go, after a while."""

    def __init__(self, rank: int, post: Any) -> None:
        super().__init__(rank, post)
        self._held: list[tuple[float, int, Any, int]] = []

    def send(self, peer: int, handle: Any, tag: int) -> Any:
        self._held.append((time.monotonic() + 0.05, peer, handle.copy(), tag))
        return Done()

    def progress(self) -> None:
        while self._held and self._held[0][0] < time.monotonic():
            _, peer, handle, tag = self._held.pop(0)
            super().send(peer, handle, tag)

    def flush(self) -> bool:
        return not self._held


class Done:
    def done(self) -> bool:
        return True


@pytest.mark.parametrize("algorithm", ["hierarchical", "ring"])
def test_messages_held_back_leave_while_the_rank_waits_for_its_node(algorithm: str) -> None:
    def main(boot: MemoryBootstrap) -> None:
        layout = RankLayout.of_sizes([2, 2])
        node = boot.split(layout.node_of(boot.rank), boot.rank)
        window = MemoryWindow.create(node, SMALL_WINDOW, FLAGS)
        channel = LateChannel.create(boot)
        comm = Communicator.from_parts(boot, layout, window, channel, Config(timeout=3))
        for turn in range(3):
            for root in range(4):
                x = np.full(100, float(turn if boot.rank == root else -1))
                comm.Bcast(x, root, algorithm=algorithm)
                assert (x == turn).all()
                comm.node.Allreduce(x, x)
                assert (x == 2 * turn).all()
        comm.close()

    run_threads(4, main)


def test_a_close_that_others_do_not_call() -> None:
    def main(boot: MemoryBootstrap) -> None:
        layout = RankLayout.of_sizes([1, 1])
        channel = MemoryChannel.create(boot)
        comm = Communicator.from_parts(boot, layout, None, channel, Config(timeout=0.3))
        if boot.rank == 0:
            with pytest.raises(TransferTimeout, match="close: waiting for the other ranks"):
                comm.close()

    run_threads(2, main)


def test_an_error_inside_with_does_not_wait_for_the_others() -> None:
    def main(boot: MemoryBootstrap) -> None:
        layout = RankLayout.of_sizes([1, 1])
        channel = MemoryChannel.create(boot)
        comm = Communicator.from_parts(boot, layout, None, channel, Config(timeout=30))
        if boot.rank == 0:
            start = time.monotonic()
            with pytest.raises(ZeroDivisionError), comm:
                _ = 1 // 0
            assert time.monotonic() - start < 5

    run_threads(2, main)
