"""Many arrays in one call, and gradients in buckets: on in-memory parts, ranks being threads."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmakit import (
    CollectiveMismatch,
    Communicator,
    CommunicatorClosed,
    Config,
    GradientBucketer,
    InvalidArgument,
    Request,
    TransferTimeout,
    UnsupportedError,
)
from rdmakit.datatypes import AVG, MAX, SUM, ReduceOp
from rdmakit.fusion import HostFused
from tests.conformance.fake_gpu import Array
from tests.conformance.messages import raises
from tests.conformance.ranks import with_comm
from tests.conformance.test_device import SHAPES as GPU_SHAPES
from tests.conformance.test_device import WAYS, with_gpus

SHAPES = ([1], [2], [3], [2, 2], [3, 1], [1, 1, 1], [1, 2])
CHECKED = Config(window_bytes=1 << 16, timeout=20, check=True)
KINDS = (np.float32, np.int64, np.complex128, np.uint8, np.float64)


def mine(index: int, shape: tuple[int, ...], dtype: Any, rank: int, turn: int = 0) -> Any:
    """Return this rank's values: small whole numbers, other for each array, rank and element."""
    places = np.arange(int(np.prod(shape))).reshape(shape)
    return ((places * 3 + index * 5 + turn) % 7 + (rank + 1) * (index % 3 + 1)).astype(dtype)


def total(
    index: int, shape: tuple[int, ...], dtype: Any, ranks: int, op: ReduceOp, turn: int = 0
) -> Any:
    """Return what all ranks' values make, in closed form."""
    places = np.arange(int(np.prod(shape))).reshape(shape)
    first, step = (places * 3 + index * 5 + turn) % 7, index % 3 + 1
    if op is MAX:
        return (first + ranks * step).astype(dtype)
    added = ranks * first + step * ranks * (ranks + 1) // 2
    return (added / ranks if op is AVG else added).astype(dtype)


def laid(array: Any, how: str) -> Any:
    """Return an array with these values that lies in another way in memory, and what is around."""
    array = np.array(array)
    if how == "F":
        return np.asfortranarray(array)
    if how == "gaps" and array.ndim:
        wide = np.full((*array.shape[:-1], array.shape[-1] * 2), 99, array.dtype)
        wide[..., ::2] = array
        return wide[..., ::2]
    if how == "back" and array.ndim:
        return np.ascontiguousarray(array[::-1])[::-1]
    return array


ITEMS: list[tuple[tuple[int, ...], Any, str]] = [
    ((3, 4), np.float32, "C"), ((), np.float32, "C"), ((7,), np.int64, "gaps"),
    ((0, 5), np.float32, "C"), ((2, 3, 4), np.float32, "F"), ((), np.int64, "C"),
    ((5, 6), np.complex128, "back"), ((4000,), np.float32, "C"), ((60, 70), np.float32, "gaps"),
    ((1,), np.uint8, "C"), ((50, 20), np.float32, "F"), ((9, 9), np.float32, "back"),
]  # fmt: skip

ORDERED = [item for item in ITEMS if item[1] is not np.complex128]


def given_to(comm: Any, items: Any, turn: int = 0) -> list[Any]:
    return [
        laid(mine(i, shape, dtype, comm.rank, turn), how)
        for i, (shape, dtype, how) in enumerate(items)
    ]


def check(arrays: Any, items: Any, ranks: int, op: ReduceOp = SUM, turn: int = 0) -> None:
    for i, (array, (shape, dtype, _)) in enumerate(zip(arrays, items, strict=True)):
        np.testing.assert_array_equal(array, total(i, shape, dtype, ranks, op, turn), f"array {i}")
        if array.base is not None and array.ndim and array.strides[-1] == 2 * array.itemsize:
            assert (array.base[..., 1::2] == 99).all(), "what lies between is not touched"


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


# -- gradients --------------------------------------------------------------------------------


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


# -- on a GPU made of host memory -------------------------------------------------------------

SMALL: list[tuple[tuple[int, ...], Any, str]] = [
    ((3, 4), np.float32, "C"), ((), np.float32, "C"), ((7,), np.int64, "gaps"),
    ((0, 5), np.float32, "C"), ((2, 3, 4), np.float32, "F"), ((900,), np.float32, "C"),
    ((30, 40), np.float32, "gaps"), ((9, 9), np.int64, "back"),
]  # fmt: skip


def gpu_arrays(comm: Any, items: Any, turn: int = 0) -> list[Array]:
    return [Array(array) for array in given_to(comm, items, turn)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sizes", GPU_SHAPES[:5], ids=str)
def test_gpu_arrays(sizes: list[int], way: str) -> None:
    def body(comm: Communicator) -> None:
        for most in (1, 700, 25 << 20):
            for group in (comm, comm.node):
                arrays = gpu_arrays(group, SMALL)
                group.allreduce_many(arrays, bucket_bytes=most)
                group.synchronize()
                check([a.array for a in arrays], SMALL, group.size)
            arrays = gpu_arrays(comm, SMALL, most)
            if way == "denied" and comm._on_device and comm._on_device.way == "host":
                with raises(UnsupportedError, "call the blocking form"):
                    comm.iallreduce_many(arrays, bucket_bytes=most)
                continue
            comm.iallreduce_many(arrays, bucket_bytes=most).Wait()
            comm.synchronize()
            check([a.array for a in arrays], SMALL, comm.size, SUM, most)

    with_gpus(sizes, body, **WAYS[way])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sizes", GPU_SHAPES[:5], ids=str)
def test_gpu_gradients(sizes: list[int], way: str) -> None:
    """A mean, which the ways where the host steps through it do in wait."""
    items = [item for item in SMALL if item[1] is np.float32]

    def body(comm: Communicator) -> None:
        for most in (1, 700):
            arrays = gpu_arrays(comm, items)
            for op in (AVG, SUM):
                bucketer = GradientBucketer(comm, arrays, bucket_bytes=most, op=op)
                order = list(range(len(items)))
                for turn in range(3):
                    random.Random(comm.rank + turn).shuffle(order)
                    for i in order:
                        shape, dtype, _ = items[i]
                        arrays[i].array[...] = mine(i, shape, dtype, comm.rank, turn)
                        bucketer.ready(i)
                    bucketer.wait()
                    comm.synchronize()
                    check([a.array for a in arrays], items, comm.size, op, turn)

    with_gpus(sizes, body, **WAYS[way])


def test_gpu_arrays_in_a_capture() -> None:
    def body(comm: Communicator) -> None:
        arrays = gpu_arrays(comm, SMALL)
        door: Any = comm._gpus.gpu.door
        calls: tuple[Callable[[Any], object], ...] = (comm.allreduce_many, comm.iallreduce_many)
        for call in calls:
            door.capturing = True
            with raises(UnsupportedError, "CUDA graph"):
                call(arrays)
            door.capturing = False
        comm.allreduce_many(arrays)
        comm.synchronize()
        check([a.array for a in arrays], SMALL, comm.size)

    with_gpus([2], body, check=False)
