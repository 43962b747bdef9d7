"""The trial of peers' GPU memory, on GPUs made of host memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rdmakit.communicator import Communicator
from rdmakit.doctor.ipc_trial import try_ipc
from rdmakit.doctor.model import Finding, Status
from tests.conformance.fake_gpu import Array
from tests.conformance.gpu_ranks import WAYS, with_gpus


def trial(comm: Communicator, spoil: bool = False) -> list[Finding]:
    def make(count: int, value: float) -> Array:
        return Array(np.full(count, value, np.float32))

    def read(array: Any) -> Any:
        comm.synchronize()
        if spoil and comm.rank == comm.size - 1:
            array.array[3:5] += 1
        return array.array

    return try_ipc(comm, make, read, f"host{comm.layout.node_of(comm.rank)}")


@pytest.mark.parametrize("sizes", [[2], [2, 2], [3, 1]], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_every_way(sizes: list[int], way: str) -> None:
    told = with_gpus(sizes, trial, **WAYS[way])
    assert all(found == told[0] for found in told)
    assert len(told[0]) == sum(size > 1 for size in sizes)
    for finding in told[0]:
        denied = bool(WAYS[way].get("denied"))
        assert finding.status is (Status.FAIL if denied else Status.OK), finding
        assert bool(finding.cure) == denied
        if denied:
            assert "host memory" in finding.found


def test_wrong_values_are_told_on_all_ranks() -> None:
    told = with_gpus([2, 2], lambda comm: trial(comm, spoil=True))
    assert all(found == told[0] for found in told)
    good, bad = told[0]
    assert good.status is Status.OK
    assert (bad.status, bad.subject) == (Status.FAIL, "host1")
    assert "2 elements of a sum over peer memory are wrong" in bad.found


def test_one_rank_on_each_node() -> None:
    ((finding,), _) = with_gpus([1, 1], trial)
    assert finding.status is Status.SKIPPED
