"""Communicators of threads whose GPUs are made of host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from rdmakit.communicator import Communicator
from rdmakit.config import Config
from rdmakit.layout import RankLayout
from rdmakit.memory import MemoryBootstrap, MemoryChannel, MemoryWindow, run_threads
from rdmakit.plan.pieces import FLAGS
from tests.conformance.fake_gpu import Array, DeviceMessages, make

SHAPES = ([1], [3], [2, 2], [3, 1], [1, 1], [1, 1, 2], [2, 2, 2])


T = TypeVar("T")
WAYS = {
    "kernels": {},
    "denied": {"denied": True},
    "steps": {"resident": False},
    "direct": {"direct": True},
    "direct-steps": {"direct": True, "resident": False},
}


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
