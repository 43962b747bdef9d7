"""Ranks that use cupyx.distributed and rdmakit together: beside.py MODE."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

import cupy
import numpy as np
from cupyx.distributed import init_process_group

from rdmakit import IN_PLACE, Communicator
from rdmakit.bootstrap import load_mpi

WORLD = load_mpi().COMM_WORLD
RANK, SIZE = WORLD.Get_rank(), WORLD.Get_size()
COUNT = 100_003
# NCCL wants a GPU for each rank, and it is that of the current device.
cupy.cuda.Device(RANK).use()


def say(*words: object) -> None:
    os.write(1, f"[{RANK}] {' '.join(map(str, words))}\n".encode())


def data(rank: int, turn: int) -> np.ndarray[Any, Any]:
    """Small integers: every sum is exact."""
    return ((np.arange(COUNT) * 7 + rank * 5 + turn) % 13).astype(np.float32)


def wanted(turn: int) -> np.ndarray[Any, Any]:
    return np.sum([data(rank, turn) for rank in range(SIZE)], axis=0)


def joined() -> Any:
    return init_process_group(SIZE, RANK, use_mpi=True)


def in_turn(group: Any, comm: Communicator) -> None:
    """Collectives of both on one stream, each on what the other has made; nobody waits between."""
    for turn in range(20):
        x = cupy.asarray(data(RANK, turn))
        y, z = cupy.zeros_like(x), cupy.zeros_like(x)
        group.all_reduce(x, y)
        comm.Allreduce(y, z)
        z += RANK  # only the root's comes through
        group.broadcast(z, root=SIZE - 1)
        z *= RANK + 1
        comm.Bcast(z, 0)
        assert (cupy.asnumpy(z) == SIZE * wanted(turn) + SIZE - 1).all(), turn
    out = cupy.zeros(COUNT * SIZE, np.float32)
    group.all_gather(cupy.asarray(data(RANK, 1)), out, COUNT)
    assert (cupy.asnumpy(out) == np.concatenate([data(r, 1) for r in range(SIZE)])).all()
    comm.synchronize()


def host() -> None:
    """NCCL works while an all-reduce on host arrays is moved by the progress thread."""
    with Communicator() as comm:
        on_the_host(joined(), comm)


def on_the_host(group: Any, comm: Communicator) -> None:
    for turn in range(10):
        host = data(RANK, turn)
        request = comm.Iallreduce(IN_PLACE, host, algorithm="hierarchical")
        x = cupy.asarray(data(RANK, turn + 1))
        group.all_reduce(x, x)
        group.barrier()
        assert (cupy.asnumpy(x) == wanted(turn + 1)).all()
        request.Wait()
        assert (host == wanted(turn)).all()


def first() -> None:
    """The process group is there before the communicator, and after it."""
    group = joined()
    with Communicator() as comm:
        in_turn(group, comm)
    x = cupy.asarray(data(RANK, 0))
    group.all_reduce(x, x)
    assert (cupy.asnumpy(x) == wanted(0)).all()


def second() -> None:
    """The communicator is there first, with its windows."""
    with Communicator() as comm:
        comm.Allreduce(IN_PLACE, cupy.zeros(10, np.float32))
        in_turn(joined(), comm)


if __name__ == "__main__":
    try:
        globals()[sys.argv[1]]()
        say("ok", sys.argv[1])
    except BaseException:
        say(traceback.format_exc())
        WORLD.Abort(3)
