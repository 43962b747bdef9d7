"""Host arrays with any strides, over shared memory, messages and MPI itself: strided.py."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from rdmakit import ANY_SOURCE, ANY_TAG, IN_PLACE, Communicator, Kind, Request, Status

BASE = np.arange(120_000, dtype=np.float64).reshape(300, 400)


def views(x: Any) -> list[Any]:
    return [x[::2, 1::3], x[::-1, ::-1], x[:, 5:60].T[::-2], x.reshape(100, 3, 400)[:, 1], x[:7, 0]]


def collectives(comm: Communicator) -> None:
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


def messages(comm: Communicator) -> None:
    """Over MPI and over the channel."""
    n, rank = comm.size, comm.rank
    for peer in range(n):  # every pair, both ways at once, other strides on each side
        for index, part in enumerate(views(BASE)):
            room = np.full((*part.shape, 2), -1.0)
            out = room[..., rank % 2]
            if (rank + index) % 3 == 0:
                out = np.full(part.shape[::-1], -1.0).T
            mine = views(BASE + rank)[index]
            status = Status()
            other = (peer - rank) % n
            comm.Sendrecv(mine, other, index, out, other, index, status)
            np.testing.assert_array_equal(out, part + other, err_msg=f"{peer} {index}")
            assert status.nbytes == part.nbytes
            if out.base is room:
                assert (room[..., 1 - rank % 2] == -1).all()
    after, before = (rank + 1) % n, (rank - 1) % n
    halo = np.full((50, 60), -1.0)
    halo[:, 1:-1] = rank
    Request.Waitall(
        [
            comm.Irecv(halo[:, 0], before, 1), comm.Irecv(halo[:, -1], after, 2),
            comm.Isend(halo[:, -2], after, 1), comm.Isend(halo[:, 1], before, 2),
        ]
    )  # fmt: skip
    assert (halo[:, 0] == before).all()
    assert (halo[:, -1] == after).all()
    assert (halo[:, 1:-1] == rank).all()
    # Any source, several in their order, shorter than the array.
    if rank == 0:
        turns = [0] * n
        for _ in range(5 * (n - 1)):
            wide = np.full((40, 3), -1.0)
            status = Status()
            comm.Recv(wide[::-1, 1], ANY_SOURCE, ANY_TAG, status)
            source = int(status.source)  # type: ignore[arg-type]
            turn, turns[source] = turns[source], turns[source] + 1
            want = np.full(40, -1.0)
            want[: 20 + turn] = np.arange(20 + turn) + 100 * source
            np.testing.assert_array_equal(wide[::-1, 1], want)
    else:
        for turn in range(5):
            line = np.zeros((20 + turn, 2))
            line[:, 0] = np.arange(20 + turn) + 100 * rank
            comm.Send(line[:, 0], 0, turn)
    comm.Barrier()
    if rank == 0:
        os.write(1, b"ok strided messages\n")


with Communicator() as comm:
    collectives(comm)
    messages(comm)
