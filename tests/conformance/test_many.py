"""Many arrays in one call, and gradients in buckets: on in-memory parts, ranks being threads."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmakit import (
    CollectiveMismatch,
    Communicator,
    CommunicatorClosed,
    GradientBucketer,
    InvalidArgument,
    Request,
    TransferTimeout,
    UnsupportedError,
)
from rdmakit.datatypes import AVG, MAX, SUM
from rdmakit.fusion import HostFused
from tests.conformance.fake_gpu import Array
from tests.conformance.many_cases import (
    CHECKED,
    ITEMS,
    KINDS,
    ORDERED,
    SHAPES,
    check,
    given_to,
    laid,
    mine,
    total,
)
from tests.conformance.messages import raises
from tests.conformance.ranks import with_comm


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@pytest.mark.parametrize("most", [1, 100, 5000, 25 << 20])
def test_values(sizes: list[int], most: int) -> None:
    def body(comm: Communicator) -> None:
        for group in (comm, comm.node, comm.rail):
            for op, items in ((SUM, ITEMS), (MAX, ORDERED)):
                arrays = given_to(group, items)
                assert group.allreduce_many(arrays, op, bucket_bytes=most) is None
                check(arrays, items, group.size, op)
                arrays = given_to(group, items)
                request = group.iallreduce_many(iter(arrays), op.name, bucket_bytes=most)
                assert request.Wait()
                check(arrays, items, group.size, op)
        real = [item for item in ITEMS if np.dtype(item[1]).kind in "fc"]
        arrays = given_to(comm, real)
        comm.allreduce_many(arrays, "avg", bucket_bytes=most)
        check(arrays, real, comm.size, AVG)
        comm.allreduce_many([])
        comm.iallreduce_many([np.zeros((0, 3))]).Wait()

    with_comm(sizes, body, CHECKED if most == 5000 else None)


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.sampled_from([[1], [2, 1], [3], [2, 2]]),
    shapes=st.lists(
        st.tuples(
            st.lists(st.integers(0, 9), max_size=3).map(tuple),
            st.sampled_from(KINDS),
            st.sampled_from(["C", "F", "gaps", "back"]),
        ),
        max_size=9,
    ),
    most=st.integers(1, 3000),
)
def test_any_arrays_as_separate_calls(sizes: list[int], shapes: Any, most: int) -> None:
    def body(comm: Communicator) -> None:
        fused, single = given_to(comm, shapes), given_to(comm, shapes)
        comm.allreduce_many(fused, bucket_bytes=most)
        for array in single:
            comm.Allreduce(array, array)
        for a, b in zip(fused, single, strict=True):
            assert a.tobytes() == b.tobytes()
        check(fused, shapes, comm.size)

    with_comm(sizes, body)


def test_ranks_may_lie_differently() -> None:
    def body(comm: Communicator) -> None:
        for most in (1, 25 << 20):
            arrays = [
                laid(mine(i, (6, 8), np.float32, comm.rank), ("C", "gaps", "back")[comm.rank])
                for i in range(3)
            ]
            comm.allreduce_many(arrays, bucket_bytes=most)
            for i, array in enumerate(arrays):
                np.testing.assert_array_equal(array, total(i, (6, 8), np.float32, 3, SUM))

    with_comm([2, 1], body, CHECKED)


def test_many_requests_in_a_row_and_without_calls() -> None:
    """They share the bucket's memory, which grows meanwhile."""

    def body(comm: Communicator) -> None:
        begun: list[tuple[Request, Any, Any, int]] = []
        for turn in range(6):
            items = [((40 * 2**turn,), np.float32, "C")] * 3
            arrays = given_to(comm, items, turn)
            begun.append((comm.iallreduce_many(arrays), arrays, items, turn))
        x = np.full(9, comm.rank)
        comm.Allreduce(x, x)
        assert all(request.done for request, *_ in begun), "a blocking call comes after"
        for request, arrays, items, turn in reversed(begun):
            assert request.Test()
            check(arrays, items, comm.size, SUM, turn)
        arrays = given_to(comm, ITEMS)
        request = comm.iallreduce_many(arrays, bucket_bytes=3000)
        end = time.monotonic() + 30
        while not request.done:
            time.sleep(0.002)
            assert time.monotonic() < end, "the progress thread does not do it"
        check(arrays, ITEMS, comm.size)

    with_comm([2, 1], body)


def test_memory_is_used_again_and_large_arrays_are_not_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied: list[int] = []

    def counted(self: HostFused, bucket: Any, memory: Any) -> None:
        copied.append(bucket.nbytes)
        made(self, bucket, memory)

    made = HostFused.__init__
    monkeypatch.setattr(HostFused, "__init__", counted)

    def body(comm: Communicator) -> None:
        items = [((10,), np.float64, "C"), ((500,), np.float64, "C"), ((20,), np.float64, "C")]
        arrays = given_to(comm, items)
        comm.allreduce_many(arrays, bucket_bytes=4000)
        assert copied == [240], "the array of 4000 bytes goes alone"
        memory = comm._bucket_memory
        assert memory.nbytes == 240
        for turn in range(3):
            for i, array in enumerate(arrays):
                array[:] = mine(i, array.shape, float, comm.rank, turn)
            comm.allreduce_many(arrays, bucket_bytes=4000)
            check(arrays, items, 1, SUM, turn)
        assert comm._bucket_memory is memory
        assert copied == [240], "a repeated call is planned once"

    with_comm([1], body)


def test_refused() -> None:
    x = np.zeros(6)
    wide = np.zeros((4, 4))
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        ([x, x], {}, InvalidArgument, r"arrays\[0\] and arrays\[1\] share memory"),
        ([wide[1], x, wide[:, 2]], {}, InvalidArgument, r"arrays\[0\] and arrays\[2\] share"),
        ([x, frozen], {}, InvalidArgument, r"arrays\[1\] is read-only"),
        ([x, "text"], {}, InvalidArgument, r"arrays\[1\]: expected a NumPy array"),
        ([x, np.zeros(2, int)], {"op": "avg"}, UnsupportedError, r"arrays\[1\]: AVG of int64"),
        ([x, np.zeros(2, object)], {}, UnsupportedError, r"arrays\[1\]: dtype object"),
        ([x], {"bucket_bytes": 0}, InvalidArgument, "bucket_bytes 0"),
        ([x], {"bucket_bytes": "25M"}, InvalidArgument, "bucket_bytes '25M'"),
        ([x], {"op": "xor"}, InvalidArgument, "unknown op"),
        ([x, Array(np.zeros(3))], {}, InvalidArgument, r"arrays\[1\] in device memory"),
    ]

    def body(comm: Communicator) -> None:
        for arrays, more, kind, text in cases:
            for call in (comm.allreduce_many, comm.iallreduce_many):
                with pytest.raises(kind, match=text):
                    call(arrays, **more)
            with pytest.raises(kind, match=text):
                GradientBucketer(comm, arrays, **({"op": "sum"} | more))
        with pytest.raises(InvalidArgument, match="timeout -1"):
            comm.allreduce_many([x], timeout=-1)
        columns = [wide[:, i] for i in range(4)]  # share a stretch, not an element
        for i, column in enumerate(columns):
            column[:] = comm.rank * 10 + i
        comm.allreduce_many(columns)
        n = comm.size
        assert (wide == 10 * n * (n - 1) // 2 + n * np.arange(4)).all()

    with_comm([1], body)
    wide[:] = 0

    def refusals(comm: Communicator) -> None:
        for call in (comm.allreduce_many, comm.iallreduce_many):
            y = np.ones(3)
            with raises(InvalidArgument, "share memory"):
                call([y, y])
            call([y]) if call == comm.allreduce_many else call([y]).Wait()
            assert (y == comm.size).all()

    with_comm([2, 1], refusals, CHECKED)


@pytest.mark.parametrize("what", ["shape", "dtype", "order", "number", "bucket", "refused", "late"])
@pytest.mark.parametrize("blocking", [True, False])
def test_ranks_that_differ(what: str, blocking: bool) -> None:
    def body(comm: Communicator) -> None:
        odd, more = comm.rank == 2, {}
        arrays: list[Any] = [np.zeros((4, 6), np.float32) for _ in range(200)]
        if odd and what == "shape":
            arrays[1] = arrays[1].reshape(6, 4)
        elif odd and what == "late":
            arrays[190] = arrays[190].reshape(24)
        elif odd and what == "dtype":
            arrays[0] = np.zeros((4, 6), np.int32)
        elif odd and what == "order":
            arrays[0] = np.asfortranarray(arrays[0])
        elif odd and what == "number":
            arrays.pop()
        elif odd and what == "bucket":
            more = {"bucket_bytes": 1 << 10}
        elif odd and what == "refused":
            arrays[3] = arrays[2]
        refusal = InvalidArgument if odd and what == "refused" else CollectiveMismatch
        match = "share memory" if refusal is InvalidArgument else "rank 2"

        def call() -> None:
            if blocking:
                comm.allreduce_many(arrays, **more)
            else:
                comm.iallreduce_many(arrays, **more).Wait()

        with pytest.raises(refusal, match=match):
            call()
        with pytest.raises((CommunicatorClosed, CollectiveMismatch)):
            comm.Barrier()
        with pytest.raises(CommunicatorClosed):
            comm.allreduce_many(arrays)

    with_comm([2, 1], body, CHECKED)


def test_a_rank_that_does_not_come() -> None:
    def body(comm: Communicator) -> None:
        bucketer = GradientBucketer(comm, [np.ones(4)])
        if comm.rank:
            return
        bucketer.ready(0)
        with pytest.raises(TransferTimeout):
            bucketer.wait(timeout=0.3)
        with pytest.raises(CommunicatorClosed):
            bucketer.ready(0)
        with pytest.raises(CommunicatorClosed):
            comm.iallreduce_many([np.ones(3)])

    def alone(comm: Communicator) -> None:
        try:
            body(comm)
        finally:
            gate.wait(20)
            comm.release()

    gate = threading.Barrier(2)
    with_comm([1, 1], alone)
