"""A call that blocks on one rank and does not on another: told on all ranks, not waited for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rdmakit import (
    CollectiveMismatch,
    Communicator,
    CommunicatorClosed,
    InvalidArgument,
    UnsupportedError,
)
from tests.conformance.fake_gpu import Array
from tests.conformance.gpu_ranks import with_gpus

pytestmark = pytest.mark.usefixtures("small_pieces")


def told(sizes: list[int], call: Callable[[Communicator], Any]) -> list[str]:
    """Return what each rank raised in ``call``."""
    texts = [""] * sum(sizes)

    def body(comm: Communicator) -> None:
        comm.Allreduce(Array(np.ones(8)), Array(np.zeros(8)))
        try:
            call(comm)
        except (CollectiveMismatch, InvalidArgument, UnsupportedError) as exc:
            texts[comm.rank] = f"{type(exc).__name__}: {exc}"

    with contextlib.suppress(CommunicatorClosed):  # by close: the communicator has failed
        with_gpus(sizes, body, check=True)
    return texts


def same(x: Any) -> Any:
    return x


@pytest.mark.parametrize("sizes", [[2], [1, 1], [2, 1]], ids=str)
@pytest.mark.parametrize("kind", [Array, same], ids=["gpu", "host"])
def test_one_rank_does_not_block(sizes: list[int], kind: Any) -> None:
    def call(comm: Communicator) -> None:
        x, y = kind(np.ones(8)), kind(np.zeros(8))
        if comm.rank:
            comm.Allreduce(x, y)
        else:
            comm.Iallreduce(x, y).Wait()

    texts = told(sizes, call)
    assert all(text.startswith("CollectiveMismatch: ") for text in texts), texts
    assert all("not blocking" in text for text in texts)


@pytest.mark.parametrize("sizes", [[2], [2, 1]], ids=str)
def test_a_refusal_meets_calls_on_gpu_arrays(sizes: list[int]) -> None:
    """Over MPI what a refusing rank tells is received by those that compare."""

    def call(comm: Communicator) -> None:
        comm.Iallreduce(Array(np.ones(8)), Array(np.zeros(8 if comm.rank else 9))).Wait()

    texts = told(sizes, call)
    assert texts[0].startswith("InvalidArgument: recvbuf has 9 elements"), texts
    assert all("recvbuf has 9 elements" in text for text in texts[1:]), texts


def test_gaps_on_one_rank_are_told_before_the_others_begin() -> None:
    """Between unequal nodes the host steps through it, which takes no arrays with gaps."""

    def call(comm: Communicator) -> None:
        comm.Iallreduce(Array(np.ones(8)), Array(np.zeros(8))).Wait()
        x = np.ones((8, 2))[:, 0] if comm.rank == 2 else np.ones(8)
        comm.Iallreduce(Array(x), Array(np.zeros(8))).Wait()

    texts = told([2, 1], call)
    assert texts[2].startswith("UnsupportedError: arrays with gaps"), texts
    assert all(text.startswith("CollectiveMismatch: ") for text in texts[:2]), texts
