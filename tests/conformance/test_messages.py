"""Messages between two ranks on in-memory parts, ranks being threads."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmakit import Communicator, CommunicatorClosed, Config, PeerLost, Request, TransferTimeout
from rdmakit.layout import RankLayout
from rdmakit.memory import MemoryBootstrap, MemoryChannel, run_threads
from tests.conformance.messages import CASES, values
from tests.conformance.ranks import with_comm

SHAPES = ([1], [2], [3], [2, 2], [3, 1], [1, 1, 1])


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_message(case: Any, sizes: list[int]) -> None:
    with_comm(sizes, case)


@settings(max_examples=20, deadline=None)
@given(data=st.data(), n=st.integers(2, 3))
def test_any_messages_in_any_order(data: st.DataObject, n: int) -> None:
    """Sends and receives of one schedule, receives in another order for each rank."""
    kinds = st.tuples(
        st.integers(0, n - 1), st.integers(0, n - 1), st.integers(0, 2), st.integers(0, 9000)
    )
    messages = data.draw(st.lists(kinds, max_size=12))
    orders = [data.draw(st.permutations(range(len(messages)))) for _ in range(n)]

    def body(comm: Communicator) -> None:
        sends = [
            comm.Isend(values(count, comm.rank, salt=i), dest, tag)
            for i, (source, dest, tag, count) in enumerate(messages)
            if source == comm.rank
        ]
        # Of one source and tag the first posted receive gets the first message.
        waiting: dict[tuple[int, int], list[int]] = {}
        for i, (source, dest, tag, _) in enumerate(messages):
            if dest == comm.rank:
                waiting.setdefault((source, tag), []).append(i)
        receives = []
        for i in orders[comm.rank]:
            source, dest, tag, _ = messages[i]
            if dest == comm.rank:
                first = waiting[source, tag].pop(0)
                y = np.zeros(messages[first][3])
                receives.append((first, y, comm.Irecv(y, source, tag)))
        Request.Waitall([request for _, _, request in receives] + sends)
        for first, y, _ in receives:
            assert (y == values(len(y), messages[first][0], salt=first)).all()
        comm.Barrier()

    with_comm([1] * n, body)


def test_a_message_that_does_not_come() -> None:
    def body(comm: Communicator) -> str:
        other = 1 - comm.rank
        if comm.rank == 0:
            pending = comm.Irecv(np.zeros(3), other, 5)
            start = time.monotonic()
            with pytest.raises(TransferTimeout) as caught:
                comm.Recv(np.zeros(3), other, 4, timeout=0.3)
            assert 0.3 <= time.monotonic() - start < 5
            assert pending.done
            with pytest.raises(TransferTimeout):
                pending.Wait()
            with pytest.raises(CommunicatorClosed, match="TransferTimeout"):
                comm.Send(np.zeros(3), other)
            return str(caught.value)
        comm._state.failure = "the other gave up"
        return ""

    text = with_comm([1, 1], body)[0]
    assert text.startswith("rank 0 (host ")
    assert "receive from rank 1 (tag 4)" in text
    assert "limit 0.3 s" in text


def test_a_probe_that_finds_nothing() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            with pytest.raises(TransferTimeout, match="probe of any rank"):
                comm.Probe(timeout=0.2)
        else:
            comm._state.failure = "the other gave up"

    with_comm([2], body)


def test_a_dead_peer_ends_receives() -> None:
    def main(boot: MemoryBootstrap) -> None:
        channel = MemoryChannel.create(boot)
        layout = RankLayout.of_sizes([1, 1])
        comm = Communicator.from_parts(boot, layout, None, channel, Config(timeout=30))
        if boot.rank == 0:
            background = comm.Irecv(np.zeros(2), 1)
            channel.lose(1)
            end = time.monotonic() + 20
            while not background.done:  # by the thread alone
                assert time.monotonic() < end
                time.sleep(0.01)
            with pytest.raises(PeerLost, match="rank 1"):
                background.Wait()
            comm.close()
        else:
            comm._state.failure = "dead"
            comm.close()

    run_threads(2, main)


def test_close_names_a_receive_without_a_message() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.Irecv(np.zeros(2), 1, 17)
            with pytest.raises(
                TransferTimeout, match=r"not complete: receive from rank 1 \(tag 17"
            ):
                comm.close()

    with_comm([2], body, Config(window_bytes=1 << 16, timeout=3))


def test_close_waits_for_what_is_under_way() -> None:
    def body(comm: Communicator) -> None:
        y = np.zeros(100_000)
        comm.Irecv(y, 1 - comm.rank, 0)
        if comm.rank:
            time.sleep(0.2)
        comm.Isend(values(100_000, comm.rank), 1 - comm.rank, 0)
        comm.close()
        assert (y == values(100_000, 1 - comm.rank)).all()

    with_comm([1, 1], body)
    with_comm([2], body)
