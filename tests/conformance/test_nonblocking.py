"""Calls that do not block on in-memory parts and over shared memory, ranks being threads."""

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
    Config,
    Kind,
    Request,
    TransferTimeout,
    family,
)
from rdmakit.memory import MemoryChannel
from tests.conformance.nonblocking import CASES, KINDS, begin
from tests.conformance.ranks import with_comm

SHAPES = ([1], [2], [3], [2, 2], [3, 1], [1, 1, 1])


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_nonblocking(case: Any, sizes: list[int]) -> None:
    with_comm(sizes, case)


@pytest.mark.parametrize("sizes", [[2], [2, 1]], ids=str)
def test_over_shared_memory(sizes: list[int]) -> None:
    for case in CASES[:3]:
        with_comm(sizes, case, shm=True)


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 2), min_size=1, max_size=3).filter(lambda x: sum(x) <= 4),
    calls=st.lists(
        st.tuples(
            st.sampled_from(KINDS),
            st.integers(0, 9000),
            st.booleans(),
            st.sampled_from(["job", "node", "rail"]),
        ),
        max_size=8,
    ),
)
def test_any_calls_mixed(sizes: list[int], calls: list[Any]) -> None:
    """Some are waited for at once, some at the end; in between there are blocking ones."""

    def body(comm: Communicator) -> None:
        groups = {"job": comm, "node": comm.node, "rail": comm.rail}
        left = []
        for salt, (kind, count, at_once, where) in enumerate(calls):
            request, check = begin(groups[where], kind, count, salt)
            if at_once:
                request.Wait()
                check()
            else:
                left.append((request, check))
        Request.Waitall([request for request, _ in left])
        for _, check in left:
            check()

    with_comm(sizes, body)


@pytest.mark.parametrize("sizes", [[2], [2, 2], [1, 1, 1]], ids=str)
def test_checked(sizes: list[int]) -> None:
    """With checking on ranks compare their calls in the order of these, without waiting in one."""

    def body(comm: Communicator) -> str:
        if comm.rank:
            time.sleep(1.0)
        started = time.monotonic()
        first, check = begin(comm, Kind.ALLREDUCE, 500, 0)
        assert time.monotonic() - started < 0.8, "the call waited for others"
        first.Wait()
        check()
        x = np.zeros(5)
        odd = comm.Ibcast(x) if comm.rank == 1 else comm.Iallreduce(x, x)
        with pytest.raises(CommunicatorClosed, match="CollectiveMismatch"):
            comm.Ibarrier().Wait()  # refused at the call where the difference was seen by then
        with pytest.raises(CollectiveMismatch) as caught:
            odd.Wait()
        with pytest.raises(CommunicatorClosed, match="CollectiveMismatch"):
            comm.Iallreduce(x, x)
        return str(caught.value)

    texts = with_comm(sizes, body, Config(check=True, timeout=10))
    assert len(set(texts)) == 1
    assert "but rank 1: call 2: broadcast" in texts[0]


def test_checked_refusals_are_told() -> None:
    def body(comm: Communicator) -> str:
        x = np.zeros(4)
        for _ in range(2):  # all alike: nothing happens
            with pytest.raises(ValueError, match="unknown op"):
                comm.Iallreduce(x, x, "xor")
        comm.Iallreduce(x, x).Wait()
        if comm.rank == 1:
            with pytest.raises(ValueError, match="unknown op"):
                comm.Iallreduce(x, x, "xor")
            end = time.monotonic() + 20
            while "CollectiveMismatch" not in comm._state.failure:
                assert time.monotonic() < end, "nobody told this rank"
                time.sleep(0.01)
            return ""
        with pytest.raises(CollectiveMismatch) as caught:
            comm.Iallreduce(x, x).Wait()
        return str(caught.value)

    text = with_comm([2], body, Config(check=True, timeout=10))[0]
    assert "rank 1: call 4: allreduce refused: unknown op" in text


def test_checked_bound_operations() -> None:
    def body(comm: Communicator) -> None:
        x = np.full(4, comm.rank)
        good = comm.bind(Kind.ALLREDUCE, x, x)
        for _ in range(3):
            good.Start()
            good.Wait()
        assert (x == 4).all()
        bad = comm.bind(Kind.ALLREDUCE, x[: 3 + comm.rank], x[: 3 + comm.rank])
        bad.Start()
        with pytest.raises(CollectiveMismatch):
            bad.Wait()

    with_comm([1, 1], body, Config(check=True, timeout=10))


@pytest.mark.parametrize("sizes", [[2], [1, 1], [2, 1]], ids=str)
def test_a_rank_that_does_not_come(sizes: list[int]) -> None:
    n = sum(sizes)
    done = threading.Barrier(n)

    def body(comm: Communicator) -> str:
        text = ""
        comm.Iallreduce(np.zeros(9), np.zeros(9)).Wait()
        if comm.rank != n - 1:
            request, _ = begin(comm, Kind.ALLREDUCE, 9000, 0)
            behind, _ = begin(comm, Kind.ALLREDUCE, 9000, 0)
            with pytest.raises(TransferTimeout) as caught:
                request.Wait(timeout=0.4)
            text = str(caught.value)
            with pytest.raises(CommunicatorClosed, match="TransferTimeout"):
                behind.Wait()
            with pytest.raises(TransferTimeout):
                request.Test()
            with pytest.raises(CommunicatorClosed, match="TransferTimeout"):
                comm.Allreduce(np.zeros(1), np.zeros(1))
        done.wait(20)
        if comm.rank == n - 1:
            comm._state.failure = "the others gave up"
        return text

    texts = with_comm(sizes, body)[:-1]
    assert all("allreduce/hierarchical" in text for text in texts), texts
    assert any(f"waiting for rank {n - 1}" in text for text in texts), texts
    assert all("limit 0.4 s" in text for text in texts)


def test_a_blocking_call_behind_one_that_never_ends() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            begin(comm, Kind.ALLREDUCE, 9000, 0)
            with pytest.raises(TransferTimeout, match="allreduce/hierarchical"):
                comm.Bcast(np.zeros(3))
        else:
            time.sleep(1)
            comm._state.failure = "the other gave up"

    with_comm([1, 1], body, Config(timeout=0.4, window_bytes=1 << 16))


def test_close_waits() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank:
            time.sleep(1.0)
        request, check = begin(comm, Kind.ALLREDUCE, 100_000, 3)
        comm.close()
        assert request.done
        check()
        request.Wait()
        with pytest.raises(CommunicatorClosed):
            comm.Ibarrier()
        assert not [t for t in threading.enumerate() if t is comm._engine._thread]

    for sizes in ([2], [2, 1]):
        with_comm(sizes, body)


def test_a_closed_one_is_no_source_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the channel still held bytes: the next communicator has the same engine."""

    def body(comm: Communicator) -> None:
        receive = comm.Irecv(np.zeros(3), 1 - comm.rank)
        comm.Send(np.ones(3), 1 - comm.rank)
        receive.Wait()
        comm._engine.poke()
        assert comm._state in comm._engine.active
        comm.close()
        assert not comm._engine.active

    monkeypatch.setattr(family, "_FLUSH_SECONDS", 60.0)
    monkeypatch.setattr(MemoryChannel, "flush", lambda self: False)
    with_comm([1, 1], body)


def test_without_a_progress_thread() -> None:
    """Where MPI allows no second thread, things move inside of calls."""

    def body(comm: Communicator) -> None:
        comm._engine.threaded = False
        started = [begin(comm, kind, 30_000, 1) for kind in KINDS]
        comm.Barrier()
        for request, check in started:
            assert request.done
            check()
        assert comm._engine._thread is None

    with_comm([2, 1], body)


def test_an_interrupt_ends_what_it_meets() -> None:
    """KeyboardInterrupt while another call's step is done: raised here and told to its waiter."""

    def body(comm: Communicator) -> None:
        if comm.rank:
            comm._state.failure = "the other was interrupted"
            return
        comm._engine.threaded = False
        request, _ = begin(comm, Kind.ALLREDUCE, 9000, 0)
        receive = comm.Irecv(np.zeros(2), 1)

        def interrupted() -> bool:
            raise KeyboardInterrupt

        comm._state.works[0].advance = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            receive.Test()
        with pytest.raises(KeyboardInterrupt):
            request.Wait()
        with pytest.raises(CommunicatorClosed, match=r"KeyboardInterrupt: .*out of step"):
            comm.Barrier()

    with_comm([1, 1], body)
