"""Calls in blocks, reduces and scans over in-memory parts and on a GPU made of host memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmakit.arguments import IN_PLACE
from rdmakit.communicator import Communicator
from rdmakit.config import Config
from rdmakit.datatypes import SUM
from rdmakit.errors import CollectiveMismatch, InvalidArgument, RdmaKitError, UnsupportedError
from rdmakit.plan.shape import Kind
from rdmakit.refused import REFUSED
from tests.conformance.blocks import BLOCKING, CASES, Where
from tests.conformance.fake_gpu import Array
from tests.conformance.gpu_ranks import WAYS, with_gpus
from tests.conformance.ranks import SMALL_WINDOW, with_comm

SHAPES = ([1], [2], [3], [4], [2, 2], [3, 1], [1, 1, 2], [1, 1, 1])
pytestmark = pytest.mark.usefixtures("small_pieces")
CHECKED = Config(window_bytes=SMALL_WINDOW, timeout=20, check=True)


@pytest.mark.parametrize("later", [False, True], ids=["now", "later"])
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@pytest.mark.parametrize("case", [*CASES, *BLOCKING], ids=lambda case: case.__name__)
def test_on_host_arrays(case: Any, sizes: list[int], later: bool) -> None:
    with_comm(sizes, lambda comm: case(Where(comm, later=later)), CHECKED if later else None)


def test_of_a_node_and_a_rail() -> None:
    def body(comm: Communicator) -> None:
        for case in CASES:
            for group in (comm.node, comm.rail):
                case(Where(group))

    with_comm([2, 1], body, CHECKED)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sizes", [[1], [3], [2, 2], [2, 1], [1, 1]], ids=str)
def test_on_gpus(sizes: list[int], way: str) -> None:
    def body(comm: Communicator) -> None:
        for case in (*CASES, *BLOCKING):
            case(Where(comm, Array, comm.synchronize))
        if not WAYS[way].get("denied"):
            for case in CASES:
                case(Where(comm, Array, later=True))
        x = Array(np.ones(4))  # the other kinds go their way as before
        comm.Allreduce(x, x)
        comm.synchronize()
        assert (x.array == comm.size).all()

    with_gpus(sizes, body, **WAYS[way])


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("sizes", [[2], [2, 1]], ids=str)
def test_on_gpus_that_do_not_block_at_first(sizes: list[int], check: bool) -> None:
    """The first call of all makes windows; of a node and a rail, too."""

    def body(comm: Communicator) -> None:
        for group in (comm, comm.node, comm.rail):
            if group is comm.rail and len(sizes) > 1:
                continue  # through host memory: refused
            for case in CASES[:3]:
                case(Where(group, Array, later=True))

    with_gpus(sizes, body, check=check)


# -- any counts, any places ---------------------------------------------------------------------


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_any_counts_in_any_order(data: st.DataObject) -> None:
    sizes = data.draw(st.sampled_from(SHAPES[1:]))
    n = sum(sizes)
    rows = data.draw(st.lists(st.lists(st.integers(0, 40), min_size=n, max_size=n),
                              min_size=n, max_size=n))  # fmt: skip
    orders = [data.draw(st.permutations(range(n))) for _ in range(n)]
    gap = data.draw(st.integers(0, 3))
    algorithm = data.draw(st.sampled_from(["auto", "hierarchical", "flat"]))

    def placed(counts: list[int], order: list[int]) -> list[int]:
        at, place = [0] * n, gap
        for r in order:
            at[r] = place
            place += counts[r] + gap
        return at

    def body(comm: Communicator) -> None:
        r = comm.rank
        mine, theirs = rows[r], [row[r] for row in rows]
        to, of = placed(mine, orders[r]), placed(theirs, orders[r][::-1])
        send = np.full(sum(mine) + (n + 1) * gap, -1)
        for q in range(n):
            send[to[q] : to[q] + mine[q]] = np.arange(mine[q]) + 100 * r + 10_000 * q
        recv = np.full(sum(theirs) + (n + 1) * gap, -1)
        want = recv.copy()
        for q in range(n):
            want[of[q] : of[q] + theirs[q]] = np.arange(theirs[q]) + 100 * q + 10_000 * r
        comm.Alltoallv([send, mine, to], [recv, theirs, of], algorithm=algorithm)
        assert (recv == want).all()

    with_comm(sizes, body)


@pytest.mark.parametrize("kind", [k for k in Kind if k is not Kind.BROADCAST])
def test_bound(kind: Kind) -> None:
    from tests.conformance.values import buffers

    def body(comm: Communicator) -> None:
        for start in (False, True):
            send, recv, want = buffers(
                kind, comm.rank, comm.size, 50, "int64", SUM, root=1, in_place=False
            )
            step = comm.bind(kind, send, recv, root=1)
            for _ in range(2):
                if start:
                    step.Start()
                    step.Wait()
                else:
                    step()
            assert (recv == want).all()

    with_comm([2, 1], body, CHECKED)
    with_comm([2, 1], body)


# -- what is refused ----------------------------------------------------------------------------


def refuses(kind: type[Exception], text: str, call: Callable[[], object]) -> None:
    with pytest.raises(kind, match=text):
        call()


def test_arguments_that_do_not_fit() -> None:
    """On every rank alike: with counts that are told, also where they are not compared."""

    def body(comm: Communicator) -> None:
        x, y, n = np.zeros(6), np.zeros(6), comm.size
        three = np.zeros((6, 6))[:, 0]
        for kind, text, call in (
            (InvalidArgument, "no multiple of 2", lambda: comm.Alltoall(np.zeros(5), np.zeros(5))),
            (InvalidArgument, "expected 6, as in", lambda: comm.Alltoall(x, np.zeros(4))),
            (InvalidArgument, "overlap", lambda: comm.Alltoall(x, x)),
            (InvalidArgument, "root 7 is not", lambda: comm.Gather(x, None, 7)),
            (InvalidArgument, "expected 2 numbers", lambda: comm.Allgatherv(x, [y, [3, 2, 1]])),
            (InvalidArgument, "ends at 7", lambda: comm.Allgatherv(x[:3], [y, [3, 4]])),
            (InvalidArgument, "blocks of recvbuf overlap",
             lambda: comm.Allgatherv(x[:3], [y, [3, 3], [0, 2]])),
            (InvalidArgument, "below 0", lambda: comm.Alltoallv([x, [-1, 2]], [y, [1, 1]])),
            (InvalidArgument, "expected a number for each",
             lambda: comm.Allgatherv(x, [y, 1.5])),
            (InvalidArgument, "got 4 items", lambda: comm.Allgatherv(x, [y, 1, 2, 3])),
            (InvalidArgument, "float64 and recvbuf int64",
             lambda: comm.Scan(x, np.zeros(6, np.int64))),
            (InvalidArgument, "expected 3 and", lambda: comm.Reduce_scatter(x, y, [1, 2])),
            (InvalidArgument, "recvcounts: expected 2", lambda: comm.Reduce_scatter(x, y, [6.0])),
            (InvalidArgument, "must hold the input", lambda: comm.Reduce_scatter(IN_PLACE, y)),
            (UnsupportedError, "AVG of Scan", lambda: comm.Scan(x, y, "avg")),
            (UnsupportedError, "AVG of Exscan", lambda: comm.Iexscan(x, y, "avg")),
            (UnsupportedError, "has gaps", lambda: comm.Allgatherv(three[:3], [y, 3])),
            (UnsupportedError, "has gaps", lambda: comm.Alltoallv([three, 3], [y, 3])),
            (UnsupportedError, "flat reduce", lambda: comm.Reduce(x, y, algorithm="flat")),
            (UnsupportedError, "ring gather", lambda: comm.Gather(x, np.zeros(12),
                                                                  algorithm="ring")),
            (InvalidArgument, "unknown algorithm", lambda: comm.Scan(x, y, algorithm="quick")),
            (UnsupportedError, "needs equal blocks",
             lambda: comm.Allgatherv(x[:3], [y, 3], algorithm="tree")),
            (UnsupportedError, "plain bytes", lambda: comm.Scatter(np.zeros(2, object),
                                                                   np.zeros(1, object))),
            (UnsupportedError, "is not reduced", lambda: comm.Exscan(np.zeros(2, "S3"),
                                                                     np.zeros(2, "S3"))),
        ):  # fmt: skip
            refuses(kind, text, call)
            z = np.ones(n)
            comm.Alltoall(IN_PLACE, z)

    for config in (None, CHECKED):
        with_comm([1, 1], body, config)


def test_in_place_beside_the_root() -> None:
    def body(comm: Communicator) -> None:
        for name in ("Reduce", "Gather", "Scatter"):
            args = (np.zeros(4), IN_PLACE) if name == "Scatter" else (IN_PLACE, np.zeros(4))
            call = partial(getattr(comm, name), *args)
            if comm.rank:
                refuses(InvalidArgument, "only at the root", call)

    with_comm([2], body)


@pytest.mark.parametrize("later", [False, True], ids=["now", "later"])
def test_counts_that_differ_are_found_without_checking(later: bool) -> None:
    """On all ranks, before anything has moved."""

    def gatherv(comm: Communicator) -> Any:
        f = comm.Igatherv if later else comm.Gatherv
        return f(np.zeros(3 + comm.rank), [np.zeros(9), [3, 3]] if comm.rank == 0 else None)

    def scatterv(comm: Communicator) -> Any:
        f = comm.Iscatterv if later else comm.Scatterv
        return f([np.zeros(9), [3, 3]] if comm.rank == 0 else None, np.zeros(3 - comm.rank))

    def alltoallv(comm: Communicator) -> Any:
        f = comm.Ialltoallv if later else comm.Alltoallv
        return f([np.zeros(9), [1, 2]], [np.zeros(9), [1, 2]])

    def reduce_scatter(comm: Communicator) -> Any:
        f = comm.Ireduce_scatter if later else comm.Reduce_scatter
        return f(np.zeros(5 + comm.rank), np.zeros(3))

    def types(comm: Communicator) -> Any:
        f = comm.Igatherv if later else comm.Gatherv
        return f(np.zeros(3, "i4" if comm.rank else "i8"), [np.zeros(6, "i8"), 3])

    def one_refuses(comm: Communicator) -> Any:
        f = comm.Igatherv if later else comm.Gatherv
        return f(np.zeros(3), [np.zeros(6), [3, 9] if comm.rank == 0 else 3])

    for case, text in (
        (gatherv, "rank 1 has an array of 4 elements; root 0 has a count of 3"),
        (scatterv, "rank 1 has an array of 2 elements; root 0 has a count of 3"),
        (alltoallv, "rank 0 sends 2 elements to rank 1, which expects 1"),
        (reduce_scatter, "sendbuf of rank 0 has 5 elements; the results of all ranks have 6"),
        (types, "dtype=int64.*dtype=int32"),
        (one_refuses, "ends at 12"),
    ):

        def body(comm: Communicator, case: Any = case, text: str = text) -> None:
            def call() -> None:
                request = case(comm)
                if later:
                    request.Wait()

            with pytest.raises((CollectiveMismatch, InvalidArgument), match=text):
                call()
            with pytest.raises(RdmaKitError):
                comm.Barrier()

        with_comm([1, 1], body)


def test_calls_that_differ_are_named_with_checking() -> None:
    for one, other, text in (
        (lambda c: c.Reduce(_x(4), _x(4), "max"), lambda c: c.Reduce(_x(4), _x(4)), "op=max"),
        (lambda c: c.Reduce(_x(4), _x(4)), lambda c: c.Reduce(_x(5), _x(5)), "count=5"),
        (lambda c: c.Gather(_x(4), _x(8), 1), lambda c: c.Gather(_x(4), _x(8)), "root=1"),
        (lambda c: c.Scan(_x(4), _x(4)), lambda c: c.Exscan(_x(4), _x(4)), "exscan"),
        (lambda c: c.Iscan(_x(4), _x(4)).Wait(), lambda c: c.Iscan(_x(4, "i4"), _x(4, "i4")).Wait(),
         "dtype=int32"),
        (lambda c: c.Allgatherv(_x(3), [_x(6), [3, 3]]),
         lambda c: c.Allgatherv(_x(2), [_x(6), [4, 2]]), "counts=4,2"),
        (lambda c: c.Alltoall(IN_PLACE, _x(4)), lambda c: c.Alltoall(_x(4), _x(4)), "in place"),
        (lambda c: c.Alltoallv([_x(4), 2], [_x(4), 2]),
         lambda c: c.Allreduce(_x(4), _x(4)), "allreduce"),
    ):  # fmt: skip

        def body(comm: Communicator, one: Any = one, other: Any = other, text: str = text) -> None:
            with pytest.raises(CollectiveMismatch, match=text):
                (other if comm.rank else one)(comm)

        with_comm([2], body, CHECKED)


def _x(count: int, dtype: str = "f8") -> Any:
    return np.zeros(count, dtype)


def test_on_gpus_what_does_not_block_is_refused_by_name() -> None:
    def body(comm: Communicator) -> None:
        x, y = Array(np.ones(4, "float16")), Array(np.zeros(4, "float16"))
        refuses(UnsupportedError, "AVG of GPU arrays", lambda: comm.Ireduce(x, y, "avg"))
        gaps = Array(np.ones((4, 2), "float16")[:, 0])
        refuses(UnsupportedError, "arrays with gaps", lambda: comm.Iscan(gaps, y))
        refuses(InvalidArgument, "GPU memory and recvbuf host", lambda: comm.Scan(x, np.ones(4)))
        comm._gpus.gpu.door.capturing = True
        refuses(UnsupportedError, "be captured|cannot hold", lambda: comm.Scan(x, y))
        comm._gpus.gpu.door.capturing = False
        comm.Scan(x, y)
        comm._gpus.gpu.door.capturing = True
        refuses(UnsupportedError, "cannot hold", lambda: comm.Scan(x, y))
        refuses(UnsupportedError, "cannot hold", lambda: comm.Iscan(x, y))
        comm._gpus.gpu.door.capturing = False
        comm.Iscan(x, y).Wait()
        assert (y.array == comm.rank + 1).all()

    with_gpus([2, 1], body)


def test_on_gpus_through_host_memory_what_does_not_block_is_refused() -> None:
    def body(comm: Communicator) -> None:
        x, y = Array(np.ones(4)), Array(np.zeros(4))
        refuses(UnsupportedError, "host has to wait", lambda: comm.Iscan(x, y))
        comm.Scan(x, y)
        comm.synchronize()
        assert (y.array == comm.rank + 1).all()

    with_gpus([2, 1], body, denied=True)


def test_calls_that_are_not_served_say_so() -> None:
    def body(comm: Communicator) -> None:
        for name, reason in REFUSED.items():
            with pytest.raises(UnsupportedError) as error:
                getattr(comm, name)(np.zeros(3), recvbuf=None)
            assert str(error.value) == f"{name} is not served: {reason}"
        comm.Barrier()

    with_comm([1], body)
