"""Dask in ranks whose communicator is open and busy: dask_beside.py MODE.

Nothing of MPI is loaded by the import: Dask's spawned processes import this file too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import dask
import dask.array as da
import numpy as np

import rdmakit

COUNT = 300_001


def say(rank: int, *words: object) -> None:
    os.write(1, f"[{rank}] {' '.join(map(str, words))}\n".encode())


def squares(first: int, count: int) -> int:
    """What a worker computes."""
    return int((np.arange(first, first + count, dtype=np.int64) ** 2).sum())


def sum_of_squares(count: int) -> int:
    return (count - 1) * count * (2 * count - 1) // 6


def to_be_a_rank() -> str:
    """Try it in a worker, and return what was said."""
    try:
        rdmakit.Communicator()
    except rdmakit.SetupError as exc:
        return str(exc)
    return "a worker became a rank"


def beside(comm: rdmakit.Communicator, compute: Callable[[], None], turns: int = 1) -> None:
    """Compute while an all-reduce is under way, and look at its result."""
    for turn in range(turns):
        x = np.arange(COUNT, dtype=np.float64) + comm.rank * turn
        y = np.empty_like(x)
        request = comm.Iallreduce(x, y, algorithm="hierarchical")
        compute()
        request.Wait()
        n = comm.size
        assert (y == n * np.arange(COUNT) + turn * n * (n - 1) / 2).all(), turn


def threads(comm: rdmakit.Communicator) -> None:
    """Dask's threads compute arrays; then tasks send and receive themselves."""

    def compute() -> None:
        numbers = da.arange(200_000, chunks=10_000, dtype=np.int64)
        total = (numbers**2).sum().compute(scheduler="threads", num_workers=3)
        assert total == sum_of_squares(200_000)

    beside(comm, compute, turns=5)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    @dask.delayed
    def exchange(tag: int) -> int:
        out, into = np.full(5000, 100 * comm.rank + tag), np.zeros(5000, int)
        comm.Sendrecv(out, right, tag, into, left, tag)
        assert (into == 100 * left + tag).all()
        return int(into[0])

    def talk() -> None:
        told = dask.compute(*map(exchange, range(8)), scheduler="threads", num_workers=8)
        assert list(told) == [100 * left + tag for tag in range(8)]

    beside(comm, talk)


def processes(comm: rdmakit.Communicator, way: str) -> None:
    """Dask's process pool, spawned or forked: it computes, and cannot be a rank."""

    def compute() -> None:
        tasks = [dask.delayed(squares)(first, 1000) for first in range(0, 10_000, 1000)]
        with dask.config.set({"multiprocessing.context": way}):
            *sums, told = dask.compute(
                *tasks, dask.delayed(to_be_a_rank)(), scheduler="processes", num_workers=2
            )
        assert sum(sums) == sum_of_squares(10_000)
        say(comm.rank, "worker:", told)

    beside(comm, compute)


def cluster(comm: rdmakit.Communicator) -> None:
    """A LocalCluster of processes on rank 0, and one of threads on the others."""
    from distributed import Client, LocalCluster

    def compute() -> None:
        with (
            LocalCluster(
                n_workers=1, threads_per_worker=2, processes=comm.rank == 0, dashboard_address=None
            ) as made,
            Client(made) as client,
        ):
            sums = client.map(squares, range(0, 10_000, 1000), count=1000)
            assert sum(client.gather(sums)) == sum_of_squares(10_000)
            if comm.rank == 0:
                say(comm.rank, "worker:", client.submit(to_be_a_rank).result())

    beside(comm, compute)


def main(mode: str) -> None:
    name, _, way = mode.partition("=")
    config = rdmakit.Config(ranks_per_node=1, timeout=60)
    with rdmakit.Communicator(config=config) as comm:
        globals()[name](comm, *filter(None, [way]))
        comm.Barrier()
    say(comm.rank, "end")


if __name__ == "__main__":
    main(sys.argv[1])
