"""Collectives on GPU arrays, on a GPU made of host memory: ways, order, agreement, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rdmakit import staging
from rdmakit.communicator import Communicator
from rdmakit.config import Config
from rdmakit.datatypes import MAX
from rdmakit.device import stream_of
from rdmakit.errors import (
    CollectiveMismatch,
    InvalidArgument,
    RdmaKitError,
    SetupError,
    UnsupportedError,
)
from rdmakit.layout import RankLayout
from rdmakit.memory import MemoryBootstrap, MemoryChannel, MemoryWindow, run_threads
from rdmakit.plan.pieces import FLAGS
from rdmakit.plan.shape import Kind
from tests.conformance.fake_gpu import Array, make
from tests.conformance.values import COVER, plain, reduced, values

SHAPES = ([1], [3], [2, 2], [3, 1], [1, 1], [1, 1, 2], [2, 2, 2])


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging.Staging.__init__, "__defaults__", (None, 1 << 10, 1))


def with_gpus(
    sizes: list[int], body: Callable[[Communicator], None], *, denied: bool = False,
    check: bool = True,
) -> None:  # fmt: skip
    layout = RankLayout.of_sizes(sizes)

    def main(boot: MemoryBootstrap) -> None:
        node = boot.split(layout.node_of(boot.rank), boot.rank)
        window: Any = MemoryWindow.create(node, 1 << 16, FLAGS) if node.size > 1 else None
        channel = MemoryChannel.create(boot) if len(sizes) > 1 else None
        config = Config(window_bytes=1 << 16, timeout=20, check=check)
        comm = Communicator.from_parts(
            boot, layout, window, channel, config, gpu=make(denied=denied)
        )
        body(comm)
        comm.close()

    run_threads(layout.size, main)


def inputs(size: int, count: int, dtype: str) -> list[np.ndarray[Any, Any]]:
    return [((np.arange(count) * 7 + r * 3) % 11).astype(dtype) for r in range(size)]


def check_all(comm: Any, dtype: str, counts: tuple[int, ...]) -> None:
    n, rank = comm.size, comm.rank
    for count in counts:
        data = inputs(n, count, dtype)
        total = sum(x.astype("float64") for x in data).astype(dtype)
        for in_place in (False, True):
            x = Array(data[rank].copy())
            y = x if in_place else Array(np.zeros_like(data[rank]))
            comm.Allreduce(x, y)
            comm.synchronize()
            np.testing.assert_array_equal(y.array, total)
        y = Array(np.zeros_like(data[rank]))
        comm.Allreduce(x := Array(data[rank].copy()), y, MAX)
        comm.synchronize()
        np.testing.assert_array_equal(y.array, np.max(data, axis=0))
        root = n - 1
        comm.Bcast(x, root)
        comm.synchronize()
        np.testing.assert_array_equal(x.array, data[root])
        z = Array(np.zeros(count * n, dtype))
        comm.Allgather(own := Array(data[rank].copy()), z)  # alive until the stream is done
        comm.synchronize()
        np.testing.assert_array_equal(z.array, np.concatenate(data))
        assert (own.array == data[rank]).all()
        wide = inputs(n, count * n, dtype)
        part = Array(np.zeros(count, dtype))
        comm.Reduce_scatter_block(own := Array(wide[rank].copy()), part)
        comm.synchronize()
        summed = sum(x.astype("float64") for x in wide).astype(dtype)
        np.testing.assert_array_equal(part.array, summed[rank * count : (rank + 1) * count])


@pytest.mark.parametrize("denied", [False, True], ids=["mapped", "denied"])
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_results(sizes: list[int], denied: bool) -> None:
    def body(comm: Communicator) -> None:
        for group in (comm.node, comm.rail, comm):
            check_all(group, "float32", (1, 5, 700, 3001))
        check_all(comm, "float16", (257,))
        check_all(comm, "int64", (1000,))
        check_all(comm, "uint8", (0, 4001) if len(sizes) == 1 else (4001,))

    with_gpus(sizes, body, denied=denied)


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_types_and_operations(sizes: list[int]) -> None:
    """Also means, which are divided in the node, on the rail, or on the host."""

    def body(comm: Communicator) -> None:
        for group in (comm.node, comm) if len(sizes) > 1 else (comm,):
            n, rank = group.size, group.rank
            for dtype, op in COVER if n <= 4 else COVER[:1]:
                for count in (7, 700):
                    x = Array(values(rank, count, dtype, op))
                    y = Array(np.zeros_like(x.array))
                    group.Allreduce(x, y, op)
                    comm.synchronize()
                    want = reduced(n, count, dtype, op)
                    np.testing.assert_array_equal(
                        plain(y.array), plain(want), err_msg=f"{dtype} {op} {count}"
                    )
                    x = Array(values(rank, count * n, dtype, op))
                    z = Array(np.zeros(count, want.dtype))
                    group.Reduce_scatter_block(x, z, op)
                    comm.synchronize()
                    want = reduced(n, count * n, dtype, op)[rank * count :][:count]
                    np.testing.assert_array_equal(plain(z.array), plain(want))

    with_gpus(sizes, body)


@pytest.mark.parametrize("sizes", [[4], [2, 2], [3, 1], [2, 2, 2]], ids=str)
def test_half_precision(sizes: list[int]) -> None:
    """Means do not overflow between nodes; exact sums are rounded once."""
    n = sum(sizes)

    def body(comm: Communicator) -> None:
        x = Array(np.full(700, 60000, np.float16))
        comm.Allreduce(x, x, "avg")
        comm.synchronize()
        assert (x.array == 60000).all()
        inputs = [np.random.default_rng(r).integers(-4096, 4096, 3000) for r in range(n)]
        mine = inputs[comm.rank].astype(np.float16)
        want = np.sum([i.astype(np.float16).astype(np.float32) for i in inputs], axis=0)
        x, y = Array(mine), Array(np.zeros_like(mine))
        comm.Allreduce(x, y, "exact_sum")
        comm.synchronize()
        assert (y.array == want.astype(np.float16)).all()
        step = comm.bind(Kind.ALLREDUCE, x, y, "exact_sum")
        y.array[:] = 0
        step()
        comm.synchronize()
        assert (y.array == want.astype(np.float16)).all()

    with_gpus(sizes, body)


def test_pairs_without_a_kernel_are_refused_by_name() -> None:
    def body(comm: Communicator) -> None:
        for dtype, op, text in (
            ("int32", "avg", "AVG of int32 is not served: the quotient"),
            ("complex64", "min", "complex numbers have no order"),
            ("float32", "band", "BAND of float32 is not served"),
            ("M8[s]", "max", "pass a view as int64"),
        ):
            x = Array(np.zeros(4, dtype))
            with pytest.raises(UnsupportedError, match=text):
                comm.Allreduce(x, x, op)

    with_gpus([2, 1], body)


def test_the_way_is_noted() -> None:
    for sizes, denied, text in (
        ([2], False, "fake GPU"),
        ([2], True, "pinned host memory: local rank 0: CUDA IPC is refused"),
        ([3, 1], False, "whole: nodes of 1 to 3 ranks"),
        ([2, 2], True, "whole: rank 0: local rank 0: CUDA IPC is refused"),
    ):

        def body(comm: Communicator, text: str = text) -> None:
            assert not comm.notes
            x = Array(np.ones(4))
            comm.Allreduce(x, x)
            assert any(text in note for note in comm.notes), comm.notes

        with_gpus(sizes, body, denied=denied)


def test_crowd_counts_other_nodes_on_the_gpu() -> None:
    def body(comm: Communicator) -> None:
        x = Array(np.ones(4))
        comm.Allreduce(x, x)
        assert comm._gpus.node.crowd == 4  # type: ignore[union-attr]

    with_gpus([2, 2], body)


@pytest.mark.parametrize("sizes", [[2], [2, 2], [2, 1]], ids=str)
def test_bound_operations(sizes: list[int]) -> None:
    def body(comm: Communicator) -> None:
        x, y = Array(np.full(600, comm.rank + 1.0)), Array(np.zeros(600))
        call = comm.bind(Kind.ALLREDUCE, x, y)
        assert (call.algorithm, call.program) == ("device", None)
        for turn in range(3):
            x.array[:] = turn + comm.rank
            call()
            comm.synchronize()
            assert (y.array == comm.size * turn + sum(range(comm.size))).all()

    with_gpus(sizes, body)


@pytest.mark.parametrize("sizes", [[2], [2, 2]], ids=str)
def test_memory(sizes: list[int]) -> None:
    def body(comm: Communicator) -> None:
        x = comm.empty((3, 5), "float64")
        x.array[:] = 1
        comm.Allreduce(x, x)
        comm.synchronize()
        assert (x.array == comm.size).all()
        entry = comm.node.register(Array(np.zeros(8)))
        assert comm._gpus.node.registered == 2  # type: ignore[union-attr]
        comm.node.unregister(entry)
        with pytest.raises(InvalidArgument, match="host memory"):
            comm.register(np.zeros(4))
        other = Communicator.from_parts(comm.bootstrap, comm.layout, None, None)
        del other

    with_gpus(sizes, body, check=False)


def test_register_of_different_sizes() -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(SetupError, match="sizes differ"):
            comm.register(Array(np.zeros(4 + comm.rank)))
        x = Array(np.ones(4))
        comm.Allreduce(x, x)

    with_gpus([2], body, check=False)


@pytest.mark.parametrize("sizes", [[2], [1, 1]], ids=str)
def test_some_ranks_pass_host_arrays(sizes: list[int]) -> None:
    def body(comm: Communicator) -> None:
        x: Any = np.ones(4)
        with pytest.raises(CollectiveMismatch, match="algorithm=device"):
            comm.Allreduce(x, x) if comm.rank else comm.Allreduce(Array(x), Array(x))

    def one(comm: Communicator) -> None:
        x = Array(np.ones(4))
        want: type[RdmaKitError] = InvalidArgument if comm.rank else CollectiveMismatch
        with pytest.raises(want, match="GPU memory"):
            comm.Allreduce(x, np.zeros(4) if comm.rank else x)

    for case in (body, one):
        with pytest.raises(RdmaKitError):  # close of a failed communicator is local, and quiet
            with_gpus(sizes, lambda comm, case=case: (case(comm), comm.Barrier()))  # type: ignore[misc]


def test_refused_and_usable_after() -> None:
    def body(comm: Communicator) -> None:
        x = Array(np.ones(4))
        with pytest.raises(UnsupportedError, match="auto or device"):
            comm.Allreduce(x, x, algorithm="ring")
        with pytest.raises(InvalidArgument, match="expected a CUDA stream"):
            comm.Allreduce(x, x, stream="fast")
        comm._gpus.gpu.door.capturing = True
        with pytest.raises(UnsupportedError, match="cannot be captured"):
            comm.Allreduce(x, x)
        comm._gpus.gpu.door.capturing = False
        comm.Allreduce(x, x)
        comm._gpus.gpu.door.capturing = True
        with pytest.raises(UnsupportedError, match="outside the capture"):
            comm.Allreduce(x, x)
        comm._gpus.gpu.door.capturing = False
        comm.Allreduce(x, x)
        comm.synchronize()
        assert (x.array == 16).all()

    with_gpus([2, 2], body)


def test_without_a_gpu() -> None:
    def main(boot: MemoryBootstrap) -> None:
        comm = Communicator.from_parts(boot, RankLayout.of_sizes([2]), None, None)
        x = Array(np.ones(4))
        with pytest.raises(UnsupportedError, match="recvbuf is GPU memory, which cannot be used"):
            comm.Allreduce(x, x)
        comm.close()

    from rdmakit.drivers import cuda

    if not cuda.why_not():
        pytest.skip("there is a GPU")
    run_threads(2, main)


def test_streams() -> None:
    class Ptr:
        ptr = 5

    class Torch:
        cuda_stream = 6

    class Standard:
        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, 7)

    streams = [4, Ptr(), Torch(), Standard()]
    held = [stream_of(stream) for stream in streams]
    assert [stream.ptr for stream in held] == [4, 5, 6, 7]
    assert held[1] is streams[1], "kept alive as it is"
    assert [stream.owner for stream in held[2:]] == streams[2:]
