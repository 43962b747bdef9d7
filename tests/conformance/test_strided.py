"""REPORTS 16 and 17: arrays with any strides equal NumPy's result, or are refused by name.

On host arrays, and on a GPU made of host memory; ranks have different strides in one call.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmakit.collectives import IN_PLACE
from rdmakit.communicator import Communicator
from rdmakit.datatypes import SUM
from rdmakit.plan.shape import Kind
from tests.conformance.fake_gpu import Array
from tests.conformance.gpu_ranks import with_gpus
from tests.conformance.strided_arrays import (
    LIES,
    SHAPE,
    WHERE,
    Wrap,
    data,
    lying,
    run,
    untouched,
)


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
