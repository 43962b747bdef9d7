"""Collectives on GPU arrays, on a GPU made of host memory: ways, order, agreement, errors."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest

from rdmakit import device_side, staging, stepped
from rdmakit.communicator import Communicator
from rdmakit.config import Config
from rdmakit.datatypes import MAX
from rdmakit.device_side import stream_of
from rdmakit.errors import (
    CollectiveMismatch,
    InvalidArgument,
    RdmaKitError,
    SetupError,
    UnsupportedError,
)
from rdmakit.inter import staged
from rdmakit.layout import RankLayout
from rdmakit.memory import MemoryBootstrap, MemoryChannel, MemoryWindow, run_threads
from rdmakit.plan.pieces import FLAGS
from rdmakit.plan.shape import Kind
from tests.conformance.fake_gpu import Array, DeviceMessages, make
from tests.conformance.values import COVER, plain, reduced, values

SHAPES = ([1], [3], [2, 2], [3, 1], [1, 1], [1, 1, 2], [2, 2, 2])


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging.Staging.__init__, "__defaults__", (None, 1 << 10, None, 1))
    monkeypatch.setattr(staged.StagedChannel.__init__, "__kwdefaults__", {"piece": 1 << 8})
    monkeypatch.setattr(stepped, "AREA", 1 << 15)
    monkeypatch.setattr(device_side, "AREA", 1 << 15)
    monkeypatch.setattr(stepped, "_CHUNK", 1 << 10)
    monkeypatch.setattr(stepped, "_SMALL", 1 << 8)


def with_gpus(
    sizes: list[int], body: Callable[[Communicator], T], *, denied: bool = False,
    check: bool = True, resident: bool = True, direct: bool = False, lent: bool = False,
) -> list[T]:  # fmt: skip
    """``lent``: a collective has come first, so that messages in a node are lent."""
    layout = RankLayout.of_sizes(sizes)

    def main(boot: MemoryBootstrap) -> T:
        node = boot.split(layout.node_of(boot.rank), boot.rank)
        window: Any = MemoryWindow.create(node, 1 << 16, FLAGS) if node.size > 1 else None
        kind = DeviceMessages if direct else MemoryChannel
        channel = kind.create(boot) if len(sizes) > 1 else None
        config = Config(window_bytes=1 << 16, timeout=20, check=check)
        comm = Communicator.from_parts(
            boot, layout, window, channel, config, gpu=make(denied=denied, resident=resident)
        )
        if direct:
            comm._gpus.why_staged = ""
        if lent:
            comm.Allreduce(Array(np.zeros(4)), Array(np.zeros(4)))
            assert (comm._gpus.lender is not None) == (node.size > 1)
        result = body(comm)
        comm.close()
        return result

    return run_threads(layout.size, main)


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


T = TypeVar("T")
WAYS = {
    "kernels": {},
    "denied": {"denied": True},
    "steps": {"resident": False},
    "direct": {"direct": True},
    "direct-steps": {"direct": True, "resident": False},
}


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


@pytest.mark.parametrize("sizes", [[2], [2, 2], [2, 1]], ids=str)
def test_bound_operations(sizes: list[int]) -> None:
    def body(comm: Communicator) -> None:
        x, y = Array(np.full(600, comm.rank + 1.0)), Array(np.zeros(600))
        call = comm.bind(Kind.ALLREDUCE, x, y)
        assert (call.algorithm, call.planned, call.sent_bytes) == ("device", (), None)
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
        assert comm._gpus.node.registered == 3  # type: ignore[union-attr]  # and the mail's slots
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


def test_an_array_on_another_device() -> None:
    def body(comm: Communicator) -> None:
        x, there = Array(np.ones(4)), Array(np.ones(4))
        there.device = SimpleNamespace(id=1)  # type: ignore[attr-defined]
        comm.Allreduce(x, x)
        with pytest.raises(UnsupportedError, match=r"recvbuf is on device 1; .* device is 0"):
            comm.Allreduce(x, there)
        with pytest.raises(UnsupportedError, match=r"sendbuf is on device 1"):
            comm.Allreduce(there, x)
        comm.Allreduce(x, x)
        comm.synchronize()
        assert (x.array == 4).all()

    with_gpus([2], body)


def test_an_array_that_is_ready_on_another_stream() -> None:
    """The call is ordered after it; in a capture, which knows nothing of it, it is refused."""

    def body(comm: Communicator) -> None:
        door = comm._gpus.gpu.door
        order: list[Any] = []
        door.wait_event = lambda stream, event: order.append((stream, event.recorded))
        record = door.Event.record

        def recorded(self: Any, stream: int) -> None:
            self.recorded = stream
            record(self, stream)

        door.Event.record = recorded
        x = Array(np.ones((4, 2))[:, 0])
        x.__cuda_array_interface__["stream"] = 2
        comm.Allreduce(x, y := Array(np.zeros(4)), stream=9)
        assert order[0] == (9, 2), "before the array is gathered"
        comm.Allreduce(x, y, stream=2)
        assert (2, 2) not in order, "its own stream need not wait for itself"
        comm.synchronize()
        assert (y.array == 2).all()
        x = Array(np.ones(4))
        x.__cuda_array_interface__["stream"] = 2
        door.capturing = True
        with pytest.raises(UnsupportedError, match="ready on stream 0x2, outside of the CUDA"):
            comm.Allreduce(x, y, stream=9)
        door.capturing = False
        comm.Allreduce(x, y, stream=9)

    with_gpus([2], body)


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


@pytest.mark.parametrize("way", ["kernels", "steps", "direct"])
@pytest.mark.parametrize("sizes", [[1], [3], [2, 2], [1, 1], [2, 1]], ids=str)
@pytest.mark.parametrize("check", [False, True])
def test_calls_that_do_not_block(sizes: list[int], check: bool, way: str) -> None:
    """In the order of the calls, of the node and of all, with calls on host arrays between."""

    def body(comm: Communicator) -> None:
        for group in (comm, comm.node):
            for count in (1, 3000):
                data = inputs(group.size, count, "float32")
                x, y = Array(data[group.rank].copy()), Array(np.zeros(count, "float32"))
                request = group.Iallreduce(x, y)
                spread = group.Ibcast(y, 0)
                host = np.ones(4)
                group.Allreduce(host, host)
                assert request.Wait()
                assert spread.Wait()
                np.testing.assert_array_equal(y.array, np.sum(data, axis=0))
                assert (host == group.size).all()
                run = group.bind(Kind.ALLREDUCE, x, y)
                y.array[:] = 0
                run.Start()
                run.Wait()
                np.testing.assert_array_equal(y.array, np.sum(data, axis=0))
        comm.Barrier()

    with_gpus(sizes, body, check=check, **WAYS[way])


def test_calls_that_do_not_block_through_host_memory_are_refused() -> None:
    def body(comm: Communicator) -> None:
        x = Array(np.ones(5, "float32"))
        with pytest.raises(UnsupportedError, match="host has to wait"):
            comm.Iallreduce(x, x)
        comm.Allreduce(x, x)

    with_gpus([2, 2], body, denied=True)


def test_an_error_of_the_gpu_is_told_by_the_request() -> None:
    def body(comm: Communicator) -> None:
        x = Array(np.ones(5, "float32"))
        comm.Iallreduce(x, x).Wait()

        def failed() -> None:
            raise RdmaKitError("a kernel said so")

        comm._gpus.node.check = failed  # type: ignore[union-attr]
        request = comm.Iallreduce(x, x)
        with pytest.raises(RdmaKitError, match="a kernel said so"):
            request.Wait()
        assert "a kernel said so" in comm._state.failure

    with_gpus([2], body, check=False)
