"""REPORTS 16 and 17: arrays with any strides equal NumPy's result, or are refused by name.

On host arrays, and on a GPU made of host memory; ranks have different strides in one call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmakit.collectives import IN_PLACE
from rdmakit.communicator import Communicator
from rdmakit.datatypes import MAX, SUM
from rdmakit.errors import (
    CollectiveMismatch,
    InvalidArgument,
    TransferTimeout,
    UnsupportedError,
)
from rdmakit.plan.shape import Kind
from tests.conformance.fake_gpu import Array
from tests.conformance.test_collectives import with_comm
from tests.conformance.test_device import with_gpus
from tests.unit.test_buffer import of_cupy

SHAPE = (6, 5)
NUMBERS = np.arange(30).reshape(SHAPE)

# How an array of SHAPE can lie in a larger one: (shape of the larger one, the view of it).
LIES: dict[str, tuple[tuple[int, ...], Callable[[Any], Any]]] = {
    "contiguous": (SHAPE, lambda x: x),
    "step": ((12, 15), lambda x: x[::2, 1::3]),
    "transposed": ((5, 6), lambda x: x.T),
    "reversed": (SHAPE, lambda x: x[::-1, ::-1]),
    "columns": ((6, 9), lambda x: x[:, 2:7]),
    "one of three": ((6, 3, 5), lambda x: x[:, 1]),
    "inner": ((6, 5, 2), lambda x: x[..., 1]),
    "transposed step": ((10, 6), lambda x: x[::-2].T),
}


def lying(how: str, values: Any, dtype: str) -> tuple[Any, Any]:
    """Return an array that lies so, and the larger one, whose other elements are 77."""
    shape, view = LIES[how]
    whole = np.full(shape, 77, dtype)
    part = view(whole)
    assert part.shape == SHAPE
    part[...] = values
    return part, whole


def untouched(how: str, whole: Any) -> None:
    rest = np.ones(whole.shape, bool)
    LIES[how][1](rest)[...] = False
    assert (whole[rest] == 77).all(), "elements between were written"


def data(rank: int, dtype: str) -> Any:
    return ((NUMBERS * 7 + rank * 13) % 23).astype(dtype)


Wrap = Callable[[Any], Any]
WHERE = [
    ("host", [2]), ("host", [2, 1]),
    ("gpu", [1]), ("gpu", [2]), ("gpu", [2, 2]), ("gpu", [2, 1]), ("cupy", [2]),
]  # fmt: skip


def run(where: str, sizes: list[int], body: Callable[[Communicator, Wrap], None]) -> None:
    if where == "host":
        with_comm(sizes, lambda comm: body(comm, lambda x: x))
    else:
        wrap = of_cupy if where == "cupy" else Array
        with_gpus(sizes, lambda comm: body(comm, wrap))


@pytest.mark.parametrize(("where", "sizes"), WHERE, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16", "int64"])
def test_allreduce(where: str, sizes: list[int], dtype: str) -> None:
    """Each rank lies differently; out of place and in place."""

    def body(comm: Communicator, wrap: Wrap) -> None:
        n, rank = comm.size, comm.rank
        total = sum(data(r, "int64") for r in range(n)).astype(dtype)
        targets = [how for how in LIES if how != "transposed"]  # see test_fortran_order
        for turn, how in enumerate(LIES):
            to = targets[(turn * 3 + rank) % len(targets)]
            x, x_whole = lying(how, data(rank, dtype), dtype)
            before = x_whole.copy()
            y, y_whole = lying(to, 0, dtype)
            comm.Allreduce(wrap(x), wrap(y))
            if where != "host":
                comm.synchronize()
            np.testing.assert_array_equal(y, total, err_msg=f"{how} to {to}")
            untouched(to, y_whole)
            np.testing.assert_array_equal(x_whole, before, err_msg="the input was changed")
            for first in (IN_PLACE, "the same"):
                z, z_whole = lying(to, data(rank, dtype), dtype)
                z_ = wrap(z)
                comm.Allreduce(first if first is IN_PLACE else z_, z_)
                if where != "host":
                    comm.synchronize()
                np.testing.assert_array_equal(z, total, err_msg=f"in place {to}")
                untouched(to, z_whole)

    run(where, sizes, body)


@pytest.mark.parametrize(("where", "sizes"), WHERE, ids=str)
def test_the_other_kinds(where: str, sizes: list[int]) -> None:
    def body(comm: Communicator, wrap: Wrap) -> None:
        n, rank = comm.size, comm.rank

        def done() -> None:
            if where != "host":
                comm.synchronize()

        blocks = [data(r, "float32") for r in range(n)]
        for how in LIES:
            for root in range(n):
                x, whole = lying(how, data(rank, "float32"), "float32")
                comm.Bcast(wrap(x), root)
                done()
                np.testing.assert_array_equal(x, blocks[root])
                untouched(how, whole)
            # Blocks of a wider array: every second column of it, rows reversed.
            wide = np.full((n, 6, 10), 77, "float32")
            views = wide[:, ::-1, ::2]
            x, _ = lying(how, data(rank, "float32"), "float32")
            comm.Allgather(wrap(x), wrap(views))
            done()
            np.testing.assert_array_equal(views, np.stack(blocks), err_msg=how)
            assert (wide[:, :, 1::2] == 77).all()
            for first in (IN_PLACE, "block"):
                wide[...] = 77
                views[rank] = data(rank, "float32")
                own = wrap(views[rank])
                comm.Allgather(first if first is IN_PLACE else own, wrap(views))
                done()
                np.testing.assert_array_equal(views, np.stack(blocks))
                assert (wide[:, :, 1::2] == 77).all()
            views[...] = [(b + r) for r, b in enumerate(blocks)]
            want = n * (blocks[rank] + rank)
            y, whole = lying(how, 0, "float32")
            comm.Reduce_scatter_block(wrap(views), wrap(y))
            done()
            np.testing.assert_array_equal(y, want, err_msg=how)
            untouched(how, whole)
        comm.Reduce_scatter_block(wrap(views), wrap(views[rank]))  # in place, NCCL's rule
        done()
        np.testing.assert_array_equal(views[rank], want)

    run(where, sizes, body)


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
def test_fortran_order(where: str) -> None:
    """Both in Fortran order: as they lie, like MPI. Of either order: NumPy's result."""

    def body(comm: Communicator, wrap: Wrap) -> None:
        n, rank = comm.size, comm.rank
        total = sum(data(r, "float32") for r in range(n))
        f, c = np.asfortranarray(data(rank, "float32")), data(rank, "float32")
        for x in (f, c):
            for y in (np.zeros(SHAPE, "float32", order="F"), np.zeros(SHAPE, "float32")):
                call = comm.bind(Kind.ALLREDUCE, wrap(x), wrap(y))
                assert call.packed == (x.flags.f_contiguous != y.flags.f_contiguous)
                call()
                if where != "host":
                    comm.synchronize()
                np.testing.assert_array_equal(y, total)
        flat = np.zeros(30, "float32")
        comm.Allreduce(wrap(f), wrap(flat))
        if where != "host":
            comm.synchronize()
        np.testing.assert_array_equal(flat, total.ravel("F"))  # its memory
        blocks = np.zeros((6, 5 * n), "float32", order="F")
        blocks[:, 5 * rank : 5 * rank + 5] = f
        comm.Allgather(IN_PLACE, wrap(blocks))
        if where != "host":
            comm.synchronize()
        np.testing.assert_array_equal(blocks, np.hstack([data(r, "float32") for r in range(n)]))

    run(where, [3], body)


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


def test_lengths_of_one_and_zero_have_no_stride() -> None:
    # REPORTS 16
    odd = np.lib.stride_tricks.as_strided
    for x, y in (
        (odd(np.array([3.0, 9]), (1,), (16,)), np.zeros(1)),
        (odd(np.arange(4.0), (1, 4, 1), (999, 8, -5)), np.zeros(4)),
        (np.empty((0,), complex).real, np.zeros(0)),
        (odd(np.zeros(1), (3, 0), (0, 8)), np.zeros((0, 3))),
        (np.array(7.0), np.zeros(())),
    ):
        for where in ("host", "gpu"):

            def body(comm: Communicator, wrap: Wrap, x: Any = x, y: Any = y) -> None:
                out = y.copy()
                call = comm.bind(Kind.ALLREDUCE, wrap(x), wrap(out))
                assert not call.packed
                call()
                if call.algorithm == "device":
                    comm.synchronize()
                np.testing.assert_array_equal(out.ravel(), comm.size * x.ravel())
                comm.Allreduce(wrap(out), wrap(out))

            run(where, [2], body)


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


@pytest.mark.parametrize("where", ["host", "gpu"])
def test_bound_operations_gather_in_each_call(where: str) -> None:
    def body(comm: Communicator, wrap: Wrap) -> None:
        x, y = np.zeros((50, 9)), np.zeros((50, 8))
        of, to = x[:, ::3], y[:, 1:4]
        calls = [comm.bind(Kind.ALLREDUCE, wrap(of), wrap(to))]
        if where == "host":
            calls.append(comm.bind(Kind.ALLREDUCE, of, to, algorithm="hierarchical"))
        for call in calls:
            assert call.packed
            for turn in range(4):
                x[:] = turn + comm.rank
                call()
                comm.Allreduce(wrap(x[:, :2]), wrap(np.zeros((50, 2))))  # uses scratch as well
                if where != "host":
                    comm.synchronize()
                assert (to == comm.size * turn + sum(range(comm.size))).all()
        assert not comm.bind(Kind.ALLREDUCE, wrap(x), wrap(np.zeros_like(x))).packed

    run(where, [2, 2], body)


def test_types_that_only_move() -> None:
    record = np.dtype([("a", "i1"), ("b", "f8")])
    three = np.dtype("S3")
    for dtype in (record, three, np.dtype("c16"), np.dtype(bool), np.dtype("u1")):
        for where in ("host", "gpu"):

            def body(
                comm: Communicator, wrap: Wrap, dtype: Any = dtype, where: str = where
            ) -> None:
                raw = np.random.default_rng(5).integers(0, 2, 36 * dtype.itemsize, "u1")
                whole = raw.view(dtype).reshape(12, 3)
                x = whole[::2, ::-2] if comm.rank == 0 else np.zeros((6, 2), dtype)
                comm.Bcast(wrap(x), 0)
                if where != "host":
                    comm.synchronize()
                if comm.rank:
                    want = raw.reshape(12, 3, -1)[::2, ::-2]
                    np.testing.assert_array_equal(x.view("u1").reshape(6, 2, -1), want)

            run(where, [2], body)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_views(given_data: st.DataObject) -> None:
    """Any slices and transposes of arrays of up to four dimensions, one for each rank."""
    draw = given_data.draw
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))

    def view() -> Any:
        order = draw(st.permutations(range(len(shape))))
        steps = [draw(st.sampled_from([1, 2, 3, -1, -2])) for _ in shape]
        pads = [draw(st.integers(0, 2)) for _ in shape]
        outer = [0] * len(shape)
        for axis, n in enumerate(shape):
            outer[order[axis]] = n * abs(steps[axis]) + pads[axis]
        whole = np.full(outer, 99, np.int32)
        part = whole.transpose(order)
        index = []
        for n, step in zip(shape, steps, strict=True):
            index.append(
                slice(None, n * step, step) if step > 0 else slice(n * -step - 1, None, step)
            )
        return part[tuple(index)][tuple(slice(0, n) for n in shape)], whole

    views = [(view(), view()) for _ in range(2)]
    values = [np.arange(np.prod(shape)).reshape(shape) * 3 + 100 * r for r in range(2)]

    for where in ("host", "gpu"):

        def body(comm: Communicator, wrap: Wrap) -> None:
            (x, _), (y, whole) = views[comm.rank]
            assert x.shape == y.shape == shape
            whole[...] = 99
            x[...] = values[comm.rank]
            f = {a.flags.c_contiguous for a in (x, y)} == {False} and all(
                a.flags.f_contiguous for a in (x, y)
            )
            call = comm.bind(Kind.ALLREDUCE, wrap(x), wrap(y), SUM)
            assert call.packed == (
                not f and not (x.flags.c_contiguous and y.flags.c_contiguous)
                and not (x.flags.f_contiguous and y.flags.f_contiguous)
            )  # fmt: skip
            others = comm.bootstrap.allgather(b"F" if f else b"C")
            if len(set(others)) > 1:
                return  # memory order on one rank only: see test_fortran_order
            call()
            if call.algorithm == "device":
                comm.synchronize()
            np.testing.assert_array_equal(y, values[0] + values[1])
            assert int((whole != 99).sum()) <= y.size

        run(where, [2], body)


def test_gpu_scratch_is_reused_and_grows() -> None:
    def body(comm: Communicator) -> None:
        door = comm._gpus.gpu.door
        comm.Allreduce(Array(np.zeros(1)), Array(np.zeros(1)))  # makes what stays
        made = []
        memory = door.DeviceMemory
        door.DeviceMemory = lambda nbytes: made.append(nbytes) or memory(nbytes)
        x = Array(np.ones((100, 4))[:, ::2])
        for _ in range(3):
            comm.Allreduce(x, Array(np.zeros((100, 2))))
        large = Array(np.ones((200_000, 4))[:, ::2])
        comm.Allreduce(large, Array(out := np.zeros((200_000, 2))))
        comm.synchronize()
        assert (out == 2).all()
        scratch = [n for n in made if n >= 2 << 20]
        assert scratch == [2 << 20, 4 << 20], made
        assert door.launched == ["pack"] * 4

    with_gpus([2], body)


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
