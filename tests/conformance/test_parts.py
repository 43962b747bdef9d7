"""Communicators split from another on in-memory parts, ranks being threads."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from rdmakit import CollectiveMismatch, Communicator, CommunicatorClosed, Config, TransferTimeout
from rdmakit.errors import UnsupportedError
from rdmakit.inter.tags import COMMUNICATORS, Numbers
from rdmakit.layout import RankLayout
from rdmakit.memory import MemoryBootstrap, run_threads
from tests.conformance.parts import CASES, numbers_come_round
from tests.conformance.ranks import with_comm

SHAPES = ([1], [2], [3], [2, 2], [3, 1], [1, 1, 2])


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_part(case: Any, sizes: list[int]) -> None:
    with_comm(sizes, case)


def test_more_parts_than_numbers() -> None:
    with_comm([1, 1], numbers_come_round)


def test_numbers() -> None:
    def main(boot: MemoryBootstrap) -> list[int]:
        numbers = Numbers()
        if boot.rank:
            numbers._taken |= 1 << 2
        found = [numbers.agree(boot) for _ in range(3)]
        numbers.give_back(found[0])
        while len(found) < COMMUNICATORS // 2 - 2:
            found.append(numbers.agree(boot))
        with pytest.raises(UnsupportedError, match="close some"):
            numbers.agree(boot)
        return found

    one, two = run_threads(2, main)
    assert one == two
    assert one[:3] == [2, 6, 8], "4 is in use on one of them"
    assert one.count(2) == 2, "given back, and used again at the end"
    assert max(one) < COMMUNICATORS - 2
    assert all(number % 2 == 0 for number in one)


@pytest.mark.parametrize("node", [[0, 1, 2, 3], [3, 1, 0]])
def test_part_of_a_layout(node: list[int]) -> None:
    part = RankLayout.of_sizes([2, 2]).part(node)
    assert part.nodes == {4: ((0, 1), (2, 3)), 3: ((0,), (1, 2))}[len(node)]


def test_errors_of_a_part_call_ranks_as_the_part_does() -> None:
    """And say which rank of the job this one is."""

    def body(comm: Communicator) -> None:
        part = comm.Split(comm.rank % 2)
        if comm.rank == 1:
            x = np.ones(1 << 14)
            with pytest.raises(TransferTimeout) as error:
                part.Allreduce(x, x, algorithm="hierarchical", timeout=0.3)
            text = str(error.value)
            assert text.startswith("rank 0 of a part (rank 1 (host "), text
            assert "waiting for rank 1 " in text, text
        else:
            time.sleep(0.6)
            comm._state.failure = "another gave up"

    with_comm([1, 1, 1, 1], body, Config(timeout=10))


def test_a_failure_spreads_over_the_channel() -> None:
    """A lost message ends all that use the channel, a wrong call its communicator alone."""

    def body(comm: Communicator) -> None:
        wrong, lost = comm.Dup(), comm.Dup()
        with pytest.raises(CollectiveMismatch):
            wrong.Bcast(np.zeros(2 + comm.rank))
        x = np.zeros(2)
        comm.Allreduce(x, x)
        lost.Barrier()
        if comm.rank == 0:
            with pytest.raises(TransferTimeout):
                lost.Recv(x, 1, timeout=0.3)
            with pytest.raises(CommunicatorClosed, match="TransferTimeout"):
                comm.Allreduce(x, x)
        else:
            time.sleep(0.6)
            comm._state.failure = "the other gave up"

    with_comm([1, 1], body, Config(check=True, timeout=10))


def test_checked_splits() -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(CollectiveMismatch, match="dup"):
            (comm.Dup if comm.rank else comm.Split)()

    with_comm([2], body, Config(check=True, timeout=10))
