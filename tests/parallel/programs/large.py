"""Two ranks with arrays of more than 2^31 elements, in place, in one node and in two."""

from __future__ import annotations

import os
import time

import numpy as np

from rdmakit import IN_PLACE, SUM, Communicator, Config, Status
from rdmakit.bench.values import block, count_wrong, expected, fill

COUNT = (1 << 31) + 1_234_567
LOOK = 1 << 20


def wrong(array: np.ndarray, period: np.ndarray) -> int:
    """Count in the first elements, around the 2^31st, and in the last."""
    return sum(
        count_wrong(array[at : at + LOOK], period, at)
        for at in (0, (1 << 31) - LOOK // 2, len(array) - LOOK)
    )


def calls(memory: np.ndarray, ranks_per_node: int) -> None:
    config = Config(ranks_per_node=ranks_per_node, timeout=60)
    with Communicator(config=config) as comm:
        rank = comm.rank
        began = time.monotonic()

        def done(what: str) -> None:
            nonlocal began
            now = time.monotonic()
            layout = comm.layout.describe()
            os.write(1, f"[{rank}] ok {layout} {what} in {now - began:.1f} s\n".encode())
            began = now

        if rank == 0:
            fill(memory, 0)
            comm.Send(memory, 1, 5)
        else:
            status = Status()
            comm.Recv(memory, 0, 5, status=status)
            assert status.Get_count("i1") == COUNT, status
        assert wrong(memory, block(0, memory.dtype)) == 0, "message"
        done("message")

        truth = memory.view(bool)
        if rank == 1:
            fill(truth, 1)
        comm.Bcast(truth, 1)
        assert wrong(truth, block(1, truth.dtype)) == 0, "broadcast"
        done("broadcast")

        fill(memory, rank)
        comm.Allreduce(IN_PLACE, memory, SUM)
        assert wrong(memory, expected(2, memory.dtype, SUM)) == 0, "all-reduce"
        done("all-reduce")


if __name__ == "__main__":
    array = np.empty(COUNT, np.int8)  # once: its pages take longer than the calls
    for shape in (2, 1):
        calls(array, shape)
    os.write(1, b"end\n")
