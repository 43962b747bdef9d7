"""The gradient bucketer: order, overlap, misuse, threads."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import numpy as np
import pytest

from rdmakit import (
    CollectiveMismatch,
    Communicator,
    CommunicatorClosed,
    GradientBucketer,
    InvalidArgument,
)
from rdmakit.datatypes import SUM
from tests.conformance.fake_gpu import Array
from tests.conformance.many_cases import (
    CHECKED,
    ITEMS,
    SHAPES,
    check,
    given_to,
    laid,
    mine,
)
from tests.conformance.ranks import with_comm


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@pytest.mark.parametrize("most", [1, 600, 25 << 20])
def test_each_rank_in_its_own_order(sizes: list[int], most: int) -> None:
    def body(comm: Communicator) -> None:
        for group in (comm, comm.node, comm.rail):
            arrays = given_to(group, ITEMS)
            bucketer = GradientBucketer(group, arrays, bucket_bytes=most, op="sum")
            order = list(range(len(arrays)))
            for turn in range(4):
                random.Random(7 * group.rank + turn).shuffle(order)
                for i in order:
                    arrays[i][...] = mine(i, arrays[i].shape, arrays[i].dtype, group.rank, turn)
                    bucketer.ready(i)
                bucketer.wait()
                check(arrays, ITEMS, group.size, SUM, turn)

    with_comm(sizes, body, CHECKED if most == 600 else None)


def test_buckets_start_in_their_order() -> None:
    """Rank 1 fills the last bucket first; nothing of it starts before the first."""

    def body(comm: Communicator) -> None:
        arrays = [np.full(10, float(comm.rank + i)) for i in range(6)]
        bucketer = GradientBucketer(comm, arrays, bucket_bytes=160)
        assert bucketer.buckets == ((0, 1), (2, 3), (4, 5))
        started: list[int] = []
        begin = bucketer._start

        def start(slot: Any) -> None:
            started.append(slot.number)
            begin(slot)

        bucketer._start = start  # type: ignore[method-assign]
        if comm.rank:
            for i, want in ((5, []), (4, []), (1, []), (2, []), (0, [0]), (3, [0, 1, 2])):
                bucketer.ready(i)
                assert started == want
        else:
            for i in range(6):
                bucketer.ready(i)
            assert started == [0, 1, 2]
        bucketer.wait()
        for i, array in enumerate(arrays):
            assert (array == i + 0.5).all(), "the mean"

    with_comm([1, 1], body, CHECKED)


def test_done_while_the_program_computes() -> None:
    def body(comm: Communicator) -> None:
        arrays = [np.full(30_000, float(i + comm.rank)) for i in range(5)]
        bucketer = GradientBucketer(comm, arrays, bucket_bytes=500_000, op=SUM)
        assert bucketer.buckets == ((0, 1), (2, 3), (4,))
        for i in range(4):
            bucketer.ready(i)
        end = time.monotonic() + 30
        while not all(s.request and s.request.done for s in bucketer._slots[:2]):
            time.sleep(0.002)
            assert time.monotonic() < end, "nothing moves"
        n = comm.size
        for i in range(4):
            assert (arrays[i] == n * i + n * (n - 1) / 2).all()
        bucketer.ready(4)
        bucketer.wait()
        assert (arrays[4] == n * 4 + n * (n - 1) / 2).all()

    with_comm([2, 1], body)


def test_new_arrays_in_each_step() -> None:
    def body(comm: Communicator) -> None:
        items = [((3, 5), np.float32, "C"), ((), np.float32, "C"), ((900,), np.float32, "C")]
        bucketer = GradientBucketer(
            comm, [np.empty(shape, dtype) for shape, dtype, _ in items], bucket_bytes=3600, op=SUM
        )
        for turn in range(3):
            arrays = given_to(comm, items, turn)
            for i in (2, 0, 1):
                array = laid(arrays[i], "gaps") if turn == 1 else arrays[i]
                bucketer.ready(i, array)
                arrays[i] = array
            bucketer.wait()
            check(arrays, items, comm.size, SUM, turn)

    with_comm([2, 1], body, CHECKED)


def test_misuse_of_the_bucketer() -> None:
    def body(comm: Communicator) -> None:
        arrays = [np.full((2, 3), 1.0), np.full(4, 1.0), np.full((), 1.0), np.zeros(0)]
        bucketer = GradientBucketer(comm, arrays, op="sum")
        with pytest.raises(InvalidArgument, match="wait: 4 of 4 arrays are not ready on rank"):
            bucketer.wait()
        bucketer.ready(1)
        with pytest.raises(InvalidArgument, match=r"arrays\[1\] is ready already in this step"):
            bucketer.ready(1)
        for index in (4, -1):
            with pytest.raises(InvalidArgument, match=f"index {index}: there are arrays 0..3"):
                bucketer.ready(index)
        for wrong, text in (
            (np.zeros((3, 2)), r"expected float64 of shape \(2, 3\) in host memory, got float64"),
            (np.zeros((2, 3), np.float32), "got float32"),
            (np.zeros((2, 3), order="F"), "Fortran"),
            (Array(np.zeros((2, 3))), "device memory"),
            ("text", "expected a NumPy array"),
        ):
            with pytest.raises(InvalidArgument, match=text):
                bucketer.ready(0, wrong)
        with pytest.raises(InvalidArgument, match=r"3 of 4 arrays are not ready .*: 0, 2, 3; call"):
            bucketer.wait()
        for index in (0, 2, 3):
            bucketer.ready(index)
        bucketer.wait()
        for array in arrays:
            assert (array == comm.size).all()
        GradientBucketer(comm, []).wait()

    with_comm([2, 1], body)


def test_buckets_that_differ_between_ranks() -> None:
    def body(comm: Communicator) -> None:
        arrays = [np.zeros((2, 3 if comm.rank == 2 else 4), np.float32)]
        bucketer = GradientBucketer(comm, arrays)
        bucketer.ready(0)
        with pytest.raises(CollectiveMismatch, match=r"rank 2: .*gradients op=avg bucket 1 of 1"):
            bucketer.wait()
        with pytest.raises((CommunicatorClosed, CollectiveMismatch)):
            comm.Barrier()

    with_comm([2, 1], body, CHECKED)


def test_from_several_threads() -> None:
    def body(comm: Communicator) -> None:
        arrays = [np.full(200, float(i)) for i in range(40)]
        bucketer = GradientBucketer(comm, arrays, bucket_bytes=5000, op="sum")
        for _ in range(3):
            for i, array in enumerate(arrays):
                array[:] = i
            threads = [
                threading.Thread(target=lambda k=k: [bucketer.ready(i) for i in range(k, 40, 4)])
                for k in range(4)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
            bucketer.wait()
            assert all((array == i * comm.size).all() for i, array in enumerate(arrays))

    with_comm([1, 1], body)
