"""Calls that are wrong or differ between ranks are refused by name, on all, before data moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rdmakit.collectives import IN_PLACE
from rdmakit.communicator import Communicator
from rdmakit.config import Config
from rdmakit.datatypes import MAX
from rdmakit.errors import (
    CollectiveMismatch,
    CommunicatorClosed,
    InvalidArgument,
    RdmaKitError,
    UnsupportedError,
)
from rdmakit.plan.shape import Kind
from rdmakit.request import Request
from tests.conformance.ranks import SMALL_WINDOW, with_comm


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
