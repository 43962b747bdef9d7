"""All-to-all of GPU arrays, on a GPU made of host memory: when it is one kernel, and agreement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rdmakit.arguments import IN_PLACE
from rdmakit.communicator import Communicator
from rdmakit.errors import CollectiveMismatch, InvalidArgument, RdmaKitError, UnsupportedError
from rdmakit.plan.shape import Kind
from tests.conformance.fake_gpu import Array
from tests.conformance.gpu_ranks import WAYS, with_gpus

pytestmark = pytest.mark.usefixtures("small_pieces")


def sent(source: int, size: int, count: int, dtype: str = "int32") -> np.ndarray[Any, Any]:
    """Return a rank's input: each element of each block of each rank is another number."""
    target, index = np.divmod(np.arange(size * count), max(count, 1))
    return ((source * size + target) * 7919 + index).astype(dtype)


def wanted(rank: int, size: int, count: int, dtype: str = "int32") -> np.ndarray[Any, Any]:
    """Return its output, by the formula for what each source has for this rank."""
    source, index = np.divmod(np.arange(size * count), max(count, 1))
    return ((source * size + rank) * 7919 + index).astype(dtype)


def kernels(comm: Any) -> list[Kind]:
    """Return what the node's kernels have done."""
    node = comm._gpus.node
    return list(node.ran) if node is not None else []


Call = Callable[[Any, Any, Any], object]


def bound(comm: Any, send: Any, recv: Any) -> None:
    comm.bind(Kind.ALLTOALL, send, recv)()


def started(comm: Any, send: Any, recv: Any) -> None:
    step = comm.bind(Kind.ALLTOALL, send, recv)
    step.Start()
    step.Wait()


CALLS: dict[str, Call] = {
    "now": lambda comm, send, recv: comm.Alltoall(send, recv),
    "later": lambda comm, send, recv: comm.Ialltoall(send, recv).Wait(),
    "bound": bound,
    "started": started,
}


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("form", CALLS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sizes", [[1], [2], [4], [2, 1], [1, 1]], ids=str)
def test_values_and_way(sizes: list[int], way: str, form: str, check: bool) -> None:
    """The first call of all, too; one kernel a call where a group is a node with kernels."""

    def body(comm: Communicator) -> None:
        for group in (comm, comm.node):
            size, rank = group.size, group.rank
            for count in (3, 0, 1, 701):
                before = kernels(comm)
                send, recv = Array(sent(rank, size, count)), Array(np.full(size * count, -1, "i4"))
                alone = group is comm and size == 1
                if form in ("later", "started") and WAYS[way].get("denied") and not alone:
                    with pytest.raises(UnsupportedError, match="host has to wait"):
                        CALLS[form](group, send, recv)
                    return  # no way to do it later, in any group here
                CALLS[form](group, send, recv)
                comm.synchronize()
                np.testing.assert_array_equal(recv.array, wanted(rank, size, count))
                np.testing.assert_array_equal(send.array, sent(rank, size, count))
                one = group._gpu().way == "kernels"
                assert one == (way in ("kernels", "direct") and _is_node(group, comm))
                assert kernels(comm)[len(before) :] == [Kind.ALLTOALL] * one

    with_gpus(sizes, body, check=check, **WAYS[way])


def _is_node(group: Any, comm: Communicator) -> bool:
    return group is comm.node or (len(comm.layout.nodes) == 1 and comm.size > 1)


@pytest.mark.parametrize("later", [False, True])
def test_counts_and_in_place_go_by_steps(later: bool) -> None:
    def body(comm: Communicator) -> None:
        size, rank = comm.size, comm.rank
        send, recv = Array(sent(rank, size, 5)), Array(np.zeros(5 * size, "i4"))
        do = "I{}" if later else "{}"

        def call(name: str, *args: Any) -> None:
            request = getattr(comm, do.format(name.lower() if later else name))(*args)
            if later:
                request.Wait()
            comm.synchronize()

        call("Alltoallv", [send, 5], [recv, 5])
        np.testing.assert_array_equal(recv.array, wanted(rank, size, 5))
        call("Alltoall", IN_PLACE, send)
        np.testing.assert_array_equal(send.array, wanted(rank, size, 5))
        assert kernels(comm) == []
        send.array[:] = sent(rank, size, 5)
        recv.array[:] = 0
        call("Alltoall", send, recv)
        np.testing.assert_array_equal(recv.array, wanted(rank, size, 5))
        assert kernels(comm) == [Kind.ALLTOALL]

    with_gpus([3], body)


@pytest.mark.parametrize("later", [False, True])
def test_arrays_with_gaps_are_packed_around_the_kernel(later: bool) -> None:
    """Other gaps on other ranks: the kernel sees contiguous memory on each."""

    def body(comm: Communicator) -> None:
        size, rank = comm.size, comm.rank
        room = np.full((6 * size, 2 + rank), 9, "i4")
        room[:, rank] = sent(rank, size, 6)
        to = np.full((6 * size, 3), 9, "i4")
        send, recv = Array(room[:, rank]), Array(to[:, 1])
        if later:
            comm.Ialltoall(send, recv).Wait()
        else:
            comm.Alltoall(send, recv)
        comm.synchronize()
        np.testing.assert_array_equal(to[:, 1], wanted(rank, size, 6))
        assert (to[:, ::2] == 9).all()
        assert kernels(comm) == [Kind.ALLTOALL]
        assert comm._gpus.gpu.door.launched == ["pack", "unpack"]

    with_gpus([3], body)


def test_in_a_capture() -> None:
    """One kernel a call can be captured, once windows are made; what goes by steps cannot."""

    def body(comm: Communicator) -> None:
        size, rank, door = comm.size, comm.rank, comm._gpus.gpu.door
        send, recv = Array(sent(rank, size, 5)), Array(np.zeros(5 * size, "i4"))
        door.capturing = True
        for first in (comm.Alltoall, comm.Ialltoall):
            with pytest.raises(UnsupportedError, match="cannot be captured"):
                first(send, recv)
        door.capturing = False
        comm.Alltoall(send, recv)
        door.capturing = True
        recv.array[:] = 0
        comm.Alltoall(send, recv)
        with pytest.raises(UnsupportedError, match="outside the capture"):
            comm.Alltoallv([send, 5], [recv, 5])
        with pytest.raises(UnsupportedError, match="outside the capture"):
            comm.Alltoall(IN_PLACE, recv)
        door.capturing = False
        comm.synchronize()
        np.testing.assert_array_equal(recv.array, wanted(rank, size, 5))
        assert kernels(comm) == [Kind.ALLTOALL] * 2

    with_gpus([2], body, check=False)


@pytest.mark.parametrize("form", CALLS)
def test_calls_that_differ_are_told_before_the_kernel(form: str) -> None:
    """On every rank, and nothing has been written."""
    cases: tuple[tuple[str, Callable[[Any, Any, Any], object]], ...] = (
        ("count=4", lambda comm, x, y: CALLS[form](comm, Array(x[:8]), Array(y[:8]))),
        ("dtype=uint32",
         lambda comm, x, y: CALLS[form](comm, Array(x.view("u4")), Array(y.view("u4")))),
        ("in place", lambda comm, x, y: CALLS[form](comm, IN_PLACE, Array(x))),
    )  # fmt: skip
    for text, odd in cases:

        def body(comm: Communicator, text: str = text, odd: Any = odd) -> None:
            x, y = sent(comm.rank, 2, 6), np.full(12, -1, "i4")
            comm.Allreduce(z := Array(np.ones(4)), z)  # the way is known
            with pytest.raises(CollectiveMismatch, match=text):
                odd(comm, x, y) if comm.rank else CALLS[form](comm, Array(x), Array(y))
            comm._gpus.gpu.door.drain()
            assert (y == -1).all()
            assert Kind.ALLTOALL not in kernels(comm)

        with_gpus([2], body)


@pytest.mark.parametrize("form", ["now", "later"])
def test_a_rank_that_refuses_tells_the_others(form: str) -> None:
    def body(comm: Communicator) -> None:
        x, y = Array(sent(comm.rank, 2, 6)), Array(np.zeros(12, "i4"))
        comm.Alltoall(x, y)
        short = Array(np.zeros(10, "i4"))
        want: type[RdmaKitError] = InvalidArgument if comm.rank else CollectiveMismatch
        with pytest.raises(want, match="recvbuf has 10 elements; expected 12"):
            CALLS[form](comm, x, short if comm.rank else y)
        with pytest.raises(RdmaKitError, match="expected 12"):  # also where it was told later
            comm.Barrier()

    with_gpus([2], body)


def test_in_order_with_calls_on_host_arrays() -> None:
    """Begun one after the other, waited for in any order."""

    def body(comm: Communicator) -> None:
        size, rank = comm.size, comm.rank
        host, total = np.full(3, rank + 1.0), np.zeros(3)
        requests = []
        arrays = [(Array(sent(rank, size, n)), Array(np.zeros(n * size, "i4"))) for n in (4, 90)]
        for send, recv in arrays:
            requests.append(comm.Iallreduce(host, total))
            requests.append(comm.Ialltoall(send, recv))
        for request in reversed(requests):
            request.Wait()
        comm.synchronize()
        assert (total == size * (size + 1) / 2).all()
        for n, (_, recv) in zip((4, 90), arrays, strict=True):
            np.testing.assert_array_equal(recv.array, wanted(rank, size, n))

    for check in (False, True):
        with_gpus([3], body, check=check)
