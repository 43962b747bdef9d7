"""Ranks that do not come, end or close: the others say so in time and keep what is in flight."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from rdmakit.communicator import Communicator
from rdmakit.config import Config
from rdmakit.errors import (
    CommunicatorClosed,
    PeerLost,
    TransferTimeout,
)
from rdmakit.layout import RankLayout
from rdmakit.memory import MemoryBootstrap, MemoryChannel, MemoryWindow, run_threads
from rdmakit.plan.pieces import FLAGS
from tests.conformance.ranks import SMALL_WINDOW, with_comm


@pytest.mark.parametrize("algorithm", ["hierarchical", "ring"])
@pytest.mark.parametrize("sizes", [[2], [3], [2, 2], [1, 1, 1]], ids=str)
def test_a_rank_that_does_not_come(sizes: list[int], algorithm: str) -> None:
    n = sum(sizes)
    done = threading.Barrier(n)

    def body(comm: Communicator) -> str:
        x = np.full(9000, comm.rank + 1.0)
        comm.Allreduce(x, x, algorithm=algorithm)
        text = ""
        if comm.rank != n - 1:
            start = time.monotonic()
            with pytest.raises(TransferTimeout) as caught:
                comm.Allreduce(x, x, algorithm=algorithm, timeout=0.4)
            assert 0.4 <= time.monotonic() - start < 5
            text = str(caught.value)
            with pytest.raises(CommunicatorClosed, match="TransferTimeout"):
                comm.Allreduce(x, x)
            with pytest.raises(CommunicatorClosed, match="TransferTimeout"):
                comm.node.Allreduce(x, x)
        done.wait(20)
        if comm.rank == n - 1:
            comm._state.failure = "the others gave up"  # so that its close does not wait for them
        comm.close()
        return text

    texts = with_comm(sizes, body)
    for rank, text in enumerate(texts[:-1]):
        assert text.startswith(f"rank {rank} (host "), text
        assert f"allreduce/{algorithm} " in text
        assert "limit 0.4 s" in text
    assert any(f"rank {n - 1}" in text for text in texts), texts


def test_the_deadline_of_one_call_is_not_kept() -> None:
    def body(comm: Communicator) -> None:
        x = np.zeros(10)
        comm.Allreduce(x, x, timeout=0.3)
        if comm.rank == 1:
            time.sleep(1)
        comm.Allreduce(x, x)

    with_comm([2], body)
    with_comm([1, 1], body)


def test_a_dead_peer_ends_the_wait() -> None:
    def main(boot: MemoryBootstrap) -> None:
        layout = RankLayout.of_sizes([1, 1])
        channel = MemoryChannel.create(boot)
        comm = Communicator.from_parts(boot, layout, None, channel, Config(timeout=30))
        if boot.rank == 0:
            channel.lose(1)
            with pytest.raises(PeerLost, match="rank 1"):
                comm.Allreduce(np.zeros(5), np.zeros(5))
            with pytest.raises(CommunicatorClosed, match="PeerLost"):
                comm.Barrier()
            comm.close()

    run_threads(2, main)


def test_closing_does_not_ask_for_peers_that_may_have_left() -> None:
    """Who sees the last barrier first takes its endpoints down while others still wait for it."""

    def main(boot: MemoryBootstrap) -> None:
        layout = RankLayout.of_sizes([1, 1])
        channel = MemoryChannel.create(boot)
        comm = Communicator.from_parts(boot, layout, None, channel, Config(timeout=30))
        if boot.rank == 1:
            channel.lose(1)
            time.sleep(0.5)
        comm.close()

    run_threads(2, main)


class LateChannel(MemoryChannel):
    """Tells a send done at once, but holds it back: only ``progress`` lets it go, after a while."""

    def __init__(self, rank: int, post: Any) -> None:
        super().__init__(rank, post)
        self._held: list[tuple[float, int, Any, int]] = []

    def send(self, peer: int, handle: Any, tag: int) -> Any:
        self._held.append((time.monotonic() + 0.05, peer, handle.copy(), tag))
        return Done()

    def progress(self) -> None:
        while self._held and self._held[0][0] < time.monotonic():
            _, peer, handle, tag = self._held.pop(0)
            super().send(peer, handle, tag)

    def flush(self) -> bool:
        return not self._held


class Done:
    def done(self) -> bool:
        return True


@pytest.mark.parametrize("algorithm", ["hierarchical", "ring"])
def test_messages_held_back_leave_while_the_rank_waits_for_its_node(algorithm: str) -> None:
    def main(boot: MemoryBootstrap) -> None:
        layout = RankLayout.of_sizes([2, 2])
        node = boot.split(layout.node_of(boot.rank), boot.rank)
        window = MemoryWindow.create(node, SMALL_WINDOW, FLAGS)
        channel = LateChannel.create(boot)
        comm = Communicator.from_parts(boot, layout, window, channel, Config(timeout=3))
        for turn in range(3):
            for root in range(4):
                x = np.full(100, float(turn if boot.rank == root else -1))
                comm.Bcast(x, root, algorithm=algorithm)
                assert (x == turn).all()
                comm.node.Allreduce(x, x)
                assert (x == 2 * turn).all()
        comm.close()

    run_threads(4, main)


def test_a_close_that_others_do_not_call() -> None:
    def main(boot: MemoryBootstrap) -> None:
        layout = RankLayout.of_sizes([1, 1])
        channel = MemoryChannel.create(boot)
        comm = Communicator.from_parts(boot, layout, None, channel, Config(timeout=0.3))
        if boot.rank == 0:
            with pytest.raises(TransferTimeout, match="close: waiting for the other ranks"):
                comm.close()

    run_threads(2, main)


def test_an_error_inside_with_does_not_wait_for_the_others() -> None:
    def main(boot: MemoryBootstrap) -> None:
        layout = RankLayout.of_sizes([1, 1])
        channel = MemoryChannel.create(boot)
        comm = Communicator.from_parts(boot, layout, None, channel, Config(timeout=30))
        if boot.rank == 0:
            start = time.monotonic()
            with pytest.raises(ZeroDivisionError), comm:
                _ = 1 // 0
            assert time.monotonic() - start < 5

    run_threads(2, main)
