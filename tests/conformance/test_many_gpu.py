"""Many arrays and gradients on GPUs made of host memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rdmakit import (
    Communicator,
    GradientBucketer,
    UnsupportedError,
)
from rdmakit.datatypes import AVG, SUM
from tests.conformance.fake_gpu import Array
from tests.conformance.gpu_ranks import SHAPES as GPU_SHAPES
from tests.conformance.gpu_ranks import WAYS, with_gpus
from tests.conformance.many_cases import (
    SMALL,
    check,
    given_to,
    mine,
)
from tests.conformance.messages import raises


def gpu_arrays(comm: Any, items: Any, turn: int = 0) -> list[Array]:
    return [Array(array) for array in given_to(comm, items, turn)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sizes", GPU_SHAPES[:5], ids=str)
def test_gpu_arrays(sizes: list[int], way: str) -> None:
    def body(comm: Communicator) -> None:
        for most in (1, 700, 25 << 20):
            for group in (comm, comm.node):
                arrays = gpu_arrays(group, SMALL)
                group.allreduce_many(arrays, bucket_bytes=most)
                group.synchronize()
                check([a.array for a in arrays], SMALL, group.size)
            arrays = gpu_arrays(comm, SMALL, most)
            if way == "denied" and comm._on_device and comm._on_device.way == "host":
                with raises(UnsupportedError, "call the blocking form"):
                    comm.iallreduce_many(arrays, bucket_bytes=most)
                continue
            comm.iallreduce_many(arrays, bucket_bytes=most).Wait()
            comm.synchronize()
            check([a.array for a in arrays], SMALL, comm.size, SUM, most)

    with_gpus(sizes, body, **WAYS[way])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sizes", GPU_SHAPES[:5], ids=str)
def test_gpu_gradients(sizes: list[int], way: str) -> None:
    """A mean, which the ways where the host steps through it do in wait."""
    items = [item for item in SMALL if item[1] is np.float32]

    def body(comm: Communicator) -> None:
        for most in (1, 700):
            arrays = gpu_arrays(comm, items)
            for op in (AVG, SUM):
                bucketer = GradientBucketer(comm, arrays, bucket_bytes=most, op=op)
                order = list(range(len(items)))
                for turn in range(3):
                    random.Random(comm.rank + turn).shuffle(order)
                    for i in order:
                        shape, dtype, _ = items[i]
                        arrays[i].array[...] = mine(i, shape, dtype, comm.rank, turn)
                        bucketer.ready(i)
                    bucketer.wait()
                    comm.synchronize()
                    check([a.array for a in arrays], items, comm.size, op, turn)

    with_gpus(sizes, body, **WAYS[way])


def test_gpu_arrays_in_a_capture() -> None:
    def body(comm: Communicator) -> None:
        arrays = gpu_arrays(comm, SMALL)
        door: Any = comm._gpus.gpu.door
        calls: tuple[Callable[[Any], object], ...] = (comm.allreduce_many, comm.iallreduce_many)
        for call in calls:
            door.capturing = True
            with raises(UnsupportedError, "CUDA graph"):
                call(arrays)
            door.capturing = False
        comm.allreduce_many(arrays)
        comm.synchronize()
        check([a.array for a in arrays], SMALL, comm.size)

    with_gpus([2], body, check=False)
