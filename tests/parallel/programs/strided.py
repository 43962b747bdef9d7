"""Host arrays with any strides, over shared memory, messages and MPI itself: strided.py."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from rdmakit import IN_PLACE, Communicator, Kind

BASE = np.arange(120_000, dtype=np.float64).reshape(300, 400)


def views(x: Any) -> list[Any]:
    return [x[::2, 1::3], x[::-1, ::-1], x[:, 5:60].T[::-2], x.reshape(100, 3, 400)[:, 1], x[:7, 0]]


with Communicator() as comm:
    n, rank = comm.size, comm.rank
    for algorithm in comm.algorithms(Kind.ALLREDUCE):
        if algorithm == "one-shot":
            continue  # for smaller arrays than the largest here
        for index, part in enumerate(views(BASE)):
            want = n * part + sum(range(n))
            whole = BASE + rank
            mine = views(whole)[index]
            room = np.full((*part.shape, 2), -1.0)
            out = room[..., rank % 2]
            comm.Allreduce(mine, out, algorithm=algorithm)
            np.testing.assert_array_equal(out, want, err_msg=f"{algorithm} {index}")
            assert (room[..., 1 - rank % 2] == -1).all()
            np.testing.assert_array_equal(whole, BASE + rank)
            call = comm.bind(Kind.ALLREDUCE, IN_PLACE, mine, algorithm=algorithm)
            assert call.packed
            call()
            np.testing.assert_array_equal(mine, want)
    blocks = np.zeros((n, 40, 60))[:, ::2, ::3]
    own = views(BASE + rank)[0][:20, :20]
    for algorithm in comm.algorithms(Kind.ALLGATHER):
        blocks[...] = -1
        comm.Allgather(own, blocks, algorithm=algorithm)
        want = np.stack([views(BASE + r)[0][:20, :20] for r in range(n)])
        np.testing.assert_array_equal(blocks, want, err_msg=algorithm)
        blocks[...] = -1
        blocks[rank] = own
        comm.Allgather(IN_PLACE, blocks, algorithm=algorithm)
        np.testing.assert_array_equal(blocks, want, err_msg=algorithm)
    for algorithm in comm.algorithms(Kind.REDUCE_SCATTER):
        part = np.zeros((20, 40)).T[::2]
        comm.Reduce_scatter_block(blocks, part, algorithm=algorithm)
        np.testing.assert_array_equal(part, n * blocks[rank], err_msg=algorithm)
    for algorithm in comm.algorithms(Kind.BROADCAST):
        x = (BASE + rank)[::3, ::7] if rank == n - 1 else np.zeros((58, 101)).T[:100]
        comm.Bcast(x, n - 1, algorithm=algorithm)
        np.testing.assert_array_equal(x, (BASE + n - 1)[::3, ::7], err_msg=algorithm)
    if rank == 0:
        os.write(1, b"ok strided\n")
