"""Arrays with any strides: what is refused by name, and what an error leaves behind."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from rdmakit.collectives import IN_PLACE
from rdmakit.communicator import Communicator
from rdmakit.datatypes import MAX
from rdmakit.errors import (
    CollectiveMismatch,
    InvalidArgument,
    TransferTimeout,
    UnsupportedError,
)
from tests.conformance.fake_gpu import Array
from tests.conformance.gpu_ranks import with_gpus
from tests.conformance.ranks import with_comm
from tests.conformance.strided_arrays import (
    SHAPE,
    Wrap,
    run,
)


@pytest.mark.parametrize(("where", "sizes"), [("host", [3]), ("gpu", [2, 1])], ids=str)
def test_broadcast_views_are_input_only(where: str, sizes: list[int]) -> None:
    def body(comm: Communicator, wrap: Wrap) -> None:
        row = np.arange(5, dtype="float32") + comm.rank
        many = np.lib.stride_tricks.as_strided(row, SHAPE, (0, 4))  # writable, as CuPy's are
        y = np.zeros(SHAPE, "float32")
        comm.Allreduce(wrap(many), wrap(y), MAX)
        x = many if comm.rank == 1 else np.zeros(SHAPE, "float32")
        comm.Bcast(wrap(x), 1)
        if where != "host":
            comm.synchronize()
        want = np.broadcast_to(np.arange(5) + comm.size - 1, SHAPE)
        np.testing.assert_array_equal(y, want)
        np.testing.assert_array_equal(x, np.broadcast_to(np.arange(5) + 1, SHAPE))
        for wrong in (
            lambda: comm.Allreduce(wrap(y), wrap(many)),
            lambda: comm.Allreduce(IN_PLACE, wrap(many)),
            lambda: comm.Bcast(wrap(many), (comm.rank + 1) % comm.size),
        ):
            with pytest.raises(InvalidArgument, match=r"recvbuf has several elements in one place"):
                wrong()
        windows = np.lib.stride_tricks.as_strided(row, (3, 3), (4, 4))
        with pytest.raises(InvalidArgument, match="several elements"):
            comm.Allreduce(wrap(windows.copy()), wrap(windows))
        comm.Allreduce(wrap(windows), wrap(out := np.zeros((3, 3), "float32")))
        if where != "host":
            comm.synchronize()
        first = np.arange(3)[:, None] + np.arange(3)
        np.testing.assert_array_equal(out, comm.size * first + sum(range(comm.size)))

    run(where, sizes, body)


@pytest.mark.parametrize("where", ["host", "gpu"])
def test_orders_that_differ_between_ranks_are_found_when_checked(where: str) -> None:
    from rdmakit.config import Config

    def body(comm: Communicator, wrap: Wrap = lambda x: x) -> None:
        x = np.zeros(SHAPE, order="F" if comm.rank else "C")
        with pytest.raises(CollectiveMismatch, match=r"rank 1: .* order=F"):
            comm.Allreduce(wrap(x), wrap(x.copy(order="K")))

    if where == "host":
        with_comm([2], body, Config(window_bytes=1 << 16, timeout=20, check=True))
    else:
        with_gpus([2], lambda comm: body(comm, Array))


@pytest.mark.parametrize("where", ["host", "gpu"])
def test_overlaps(where: str) -> None:
    def body(comm: Communicator, wrap: Wrap) -> None:
        pairs = np.arange(40, dtype="float32") + comm.rank
        even, odd = pairs[::2], pairs[1::2]
        comm.Allreduce(wrap(even), wrap(odd))  # the same stretch, no common element
        if where != "host":
            comm.synchronize()
        want = 2 * np.arange(0, 40, 2) + 1
        np.testing.assert_array_equal(odd, want)
        np.testing.assert_array_equal(even, np.arange(0, 40, 2) + comm.rank)
        square = np.zeros((4, 4), "float32")
        for send, recv in (
            (pairs[:20:2], pairs[2:22:2]),
            (square, square.T),
            (square[:, :2], square[:, 1:3]),
            (square[::-1], square),
            (pairs[:10], pairs[:20:2]),
        ):
            with pytest.raises(InvalidArgument, match="overlap; only exactly in place"):
                comm.Allreduce(wrap(send), wrap(recv))
        with pytest.raises(InvalidArgument, match="overlap"):
            comm.Allgather(wrap(pairs[1:11:2]), wrap(pairs[1:21:2][::-1]))

    run(where, [2], body)


@pytest.mark.parametrize("sizes", [[2], [2, 1]], ids=str)
def test_not_in_a_cuda_graph(sizes: list[int]) -> None:
    def body(comm: Communicator) -> None:
        x, y = Array(np.ones((4, 4))[:, ::2]), Array(np.zeros((4, 2)))
        comm.Allreduce(x, y)
        comm.synchronize()
        comm._gpus.gpu.door.capturing = True
        for call, text in (
            (lambda: comm.Allreduce(x, y), "arrays with gaps .* contiguous"),
            (lambda: comm.synchronize(), "synchronize cannot be captured"),
            (lambda: comm.empty(4), "empty cannot be captured"),
            (lambda: comm.register(y), "register cannot be captured"),
        ):
            with pytest.raises(UnsupportedError, match=text):
                call()
        comm._gpus.gpu.door.capturing = False
        comm.Allreduce(x, y)
        comm.synchronize()
        assert (y.array == comm.size).all(), "usable after it"

    with_gpus(sizes, body)


def test_many_dimensions_are_named() -> None:
    x = np.zeros((2,) * 20)[(slice(None), slice(0, 1)) * 10]
    assert x.ndim == 20

    def body(comm: Communicator, wrap: Wrap) -> None:
        if wrap is Array:
            with pytest.raises(UnsupportedError, match=r"sendbuf has 1\d strided dimensions"):
                comm.Allreduce(wrap(x), wrap(np.zeros(x.shape)))
        else:
            comm.Allreduce(x, out := np.ones(x.shape))
            assert not out.any()

    for where in ("host", "gpu"):
        run(where, [2], body)


def test_a_view_is_not_registered() -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(UnsupportedError, match="has gaps"):
            comm.register(Array(np.zeros((4, 4))[:, :2]))
        comm.unregister(comm.register(Array(np.zeros((4, 4), order="F"))))

    with_gpus([2], body)


def test_an_error_in_the_middle_leaves_the_output() -> None:
    done = threading.Barrier(2)

    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            y = np.full((9, 40), 5.0)
            with pytest.raises(TransferTimeout):
                comm.Allreduce(
                    np.ones((40, 9))[:, ::3].T, y[::3], algorithm="hierarchical", timeout=0.2
                )
            assert (y == 5).all()
        done.wait(20)
        comm._state.failure = "the other gave up"  # so that close does not wait for it

    with_comm([2], body)
