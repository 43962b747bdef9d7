"""Collectives on GPU arrays, on a GPU made of host memory: ways, right values, agreement."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rdmakit.communicator import Communicator
from rdmakit.datatypes import MAX
from rdmakit.errors import (
    UnsupportedError,
)
from rdmakit.plan.shape import Kind
from tests.conformance.fake_gpu import Array
from tests.conformance.gpu_ranks import SHAPES, WAYS, inputs, with_gpus
from tests.conformance.values import COVER, plain, reduced, values

pytestmark = pytest.mark.usefixtures("small_pieces")


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


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_results(sizes: list[int], way: str) -> None:
    def body(comm: Communicator) -> None:
        for group in (comm.node, comm.rail, comm):
            check_all(group, "float32", (1, 5, 700, 3001))
        check_all(comm, "float16", (257,))
        check_all(comm, "int64", (1000,))
        check_all(comm, "uint8", (0, 4001) if len(sizes) == 1 else (4001,))

    with_gpus(sizes, body, **WAYS[way])


@pytest.mark.parametrize("denied", [False, True], ids=["mapped", "denied"])
@pytest.mark.parametrize("sizes", [[2, 2], [3, 1]], ids=str)
def test_a_channel_for_host_memory_never_gets_gpu_memory(sizes: list[int], denied: bool) -> None:
    """A UCX without CUDA would end the process at the first GPU pointer."""

    def body(comm: Communicator) -> None:
        gpu: list[Any] = []
        door, channel = comm._gpus.gpu.door, comm.channel
        assert channel is not None
        wrap, memory = channel.wrap, door.DeviceMemory

        def made(nbytes: int) -> Any:
            gpu.append(memory(nbytes))
            return gpu[-1]

        def wrapped(data: Any) -> Any:
            low, high = data.ctypes.data, data.ctypes.data + data.nbytes
            for each in gpu:
                area = each.array if isinstance(each, Array) else each.bytes
                first, last = area.ctypes.data, area.nbytes
                assert high <= first or low >= first + last, "GPU memory in a message"
            return wrap(data)

        channel.wrap, door.DeviceMemory = wrapped, made  # type: ignore[method-assign]
        n, rank = comm.size, comm.rank
        for count in (3, 700, 4000):
            x, y, z = Array(np.full(count, 1.0 + rank)), Array(np.zeros(count)), comm.empty(count)
            wide, gaps = Array(np.zeros(count * n)), Array(np.zeros((count, 3))[:, 1])
            gpu += [x, y, z, wide, gaps]
            comm.Allreduce(x, y)
            comm.rail.Allreduce(x, gaps)
            comm.Allgather(x, wide)
            comm.Bcast(z, n - 1)
            comm.Reduce_scatter_block(wide, y)
            comm.synchronize()
            assert (y.array == n * (1.0 + rank)).all()
        channel.wrap = wrap  # type: ignore[method-assign]

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
        ([3, 1], False, "through pinned host memory: messages of this communicator"),
        ([2, 2], True, "whole: rank 0: local rank 0: CUDA IPC is refused"),
    ):

        def body(comm: Communicator, text: str = text) -> None:
            assert not comm.notes
            x = Array(np.ones(4))
            comm.Allreduce(x, x)
            assert any(text in note for note in comm.notes), comm.notes

        with_gpus(sizes, body, denied=denied)


@pytest.mark.parametrize("offered", [True, False])
def test_what_peers_read_after_a_nic_is_flushed(offered: bool) -> None:
    """Two GPUs in a node whose NIC orders its writes for the owner alone."""

    def body(comm: Communicator) -> None:
        door = comm._gpus.gpu.door
        door.flush_bits = int(offered)
        x, y = Array(np.full(500, comm.rank + 1.0)), Array(np.zeros(500 * 3))
        comm.Allgather(x, y)
        comm.synchronize()
        assert (y.array.reshape(3, 500) == [[1.0], [2.0], [3.0]]).all()
        flushed = comm.bootstrap.allgather(bytes([door.flushes > 0]))
        assert any(map(bool, map(int.from_bytes, flushed))) == offered

    with_gpus([2, 1], body, direct=True)


def test_crowd_counts_other_nodes_on_the_gpu() -> None:
    def body(comm: Communicator) -> None:
        x = Array(np.ones(4))
        comm.Allreduce(x, x)
        assert comm._gpus.node.crowd == 4  # type: ignore[union-attr]

    with_gpus([2, 2], body)
