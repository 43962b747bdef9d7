"""Calls on GPU arrays, on a GPU made of host memory: bound, refused, on streams, not blocking."""

from __future__ import annotations

import gc
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rdmakit.communicator import Communicator
from rdmakit.device_side import stream_of
from rdmakit.errors import (
    CollectiveMismatch,
    InvalidArgument,
    RdmaKitError,
    SetupError,
    TransferTimeout,
    UnsupportedError,
)
from rdmakit.layout import RankLayout
from rdmakit.memory import MemoryBootstrap, run_threads
from rdmakit.plan.shape import Kind
from tests.conformance.fake_gpu import Array
from tests.conformance.gpu_ranks import WAYS, inputs, with_gpus

pytestmark = pytest.mark.usefixtures("small_pieces")


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
        assert comm._gpus.node.registered == 3  # type: ignore[union-attr]  # and slots
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


GIVEN_UP = {
    "blocking": lambda comm, x, y: comm.Allreduce(x, y, timeout=0.2),
    "many": lambda comm, x, y: comm.allreduce_many([x, y], timeout=0.2),
    "later": lambda comm, x, y: comm.Iallreduce(x, y).Wait(timeout=0.2),
}


@pytest.mark.parametrize("way", ["steps", "direct-steps", "direct"])
@pytest.mark.parametrize("call", GIVEN_UP)
def test_arrays_of_a_call_that_was_given_up_stay(call: str, way: str) -> None:
    """A message that comes after the timeout may still be written to them."""
    gone = threading.Barrier(2)

    def body(comm: Communicator) -> list[bool]:
        comm.Allreduce(Array(np.ones(3000)), Array(np.ones(3000)))
        alive = []
        if comm.rank == 0:
            x, y = Array(np.ones(3000)), Array(np.ones(3000))
            alive = [weakref.ref(x), weakref.ref(y)]
            with pytest.raises(TransferTimeout):
                GIVEN_UP[call](comm, x, y)
            del x, y
            gc.collect()
        gone.wait(20)
        comm._state.failure = "given up"
        return [ref() is not None for ref in alive]

    assert with_gpus([1, 1], body, check=False, **WAYS[way])[0] == [True, True]
