"""Ranks that are threads, each with a communicator over in-memory parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from rdmakit.communicator import Communicator
from rdmakit.config import Config
from rdmakit.intra.posix_shm import PosixWindow
from rdmakit.layout import RankLayout
from rdmakit.memory import MemoryBootstrap, MemoryChannel, MemoryWindow, run_threads
from rdmakit.plan.pieces import FLAGS

T = TypeVar("T")
SMALL_WINDOW = 1 << 16


def with_comm(
    sizes: list[int],
    body: Callable[[Communicator], T],
    config: Config | None = None,
    shm: bool = False,
) -> list[T]:
    """Run ``body`` on all ranks of a communicator over parts; close it where nothing was raised."""
    config = config or Config(window_bytes=SMALL_WINDOW, timeout=20)
    layout = RankLayout.of_sizes(sizes)

    def main(boot: MemoryBootstrap) -> T:
        node = boot.split(layout.node_of(boot.rank), boot.rank)
        window: Any = None
        if node.size > 1:
            make = PosixWindow.create if shm else MemoryWindow.create
            window = make(node, config.window_bytes, FLAGS)
        channel = MemoryChannel.create(boot) if len(sizes) > 1 else None
        comm = Communicator.from_parts(boot, layout, window, channel, config)
        result = body(comm)
        comm.close()
        return result

    return run_threads(layout.size, main)
