"""Ranks that close with receives to which nobody sent: late.py MODE."""

from __future__ import annotations

import os
import sys
import time

import numpy as np

import rdmakit
from rdmakit import IN_PLACE, Communicator, Config, TransferTimeout
from rdmakit.bootstrap import load_mpi

WORLD = load_mpi().COMM_WORLD
RANK, SIZE = WORLD.Get_rank(), WORLD.Get_size()


def say(*words: object) -> None:
    os.write(1, f"[{RANK}] {' '.join(map(str, words))}\n".encode())  # one write: one line


def alone() -> None:
    """A receive to which nobody sent: close names it after all have met, and none waits at exit."""
    comm = Communicator(config=Config(timeout=8))
    if RANK == 0:
        comm.Irecv(np.empty(5), 1, 9)
    try:
        comm.close()
    except TransferTimeout as exc:
        say("late:", exc)
    if RANK == 1:
        time.sleep(1.5)  # ends later than the other, who must not wait for it, nor blame it


def in_parts() -> None:
    """The same on a communicator split from it, and on one split from that: all others close."""
    comm = Communicator(config=Config(timeout=8, ranks_per_node=1))
    part, other = comm.Dup(), comm.Split(0, key=-RANK)
    assert other is not None
    below = part.Dup()
    late = None
    if RANK == 0:
        late = below.Irecv(np.empty(5), 1, 9)
        other.Irecv(np.empty(5), rdmakit.ANY_SOURCE, 7)
    x = np.full(1000, 1.0 + RANK)
    other.Allreduce(IN_PLACE, x, algorithm="hierarchical")
    assert (x == SIZE * (SIZE + 1) / 2).all()
    start = time.monotonic()
    try:
        comm.close()
    except TransferTimeout as exc:
        say("late:", exc, *exc.__notes__)
    assert time.monotonic() - start < 6, "a rank waited for the one that was late"
    assert all(c.closed for c in (comm, part, other, below))
    if late is not None:
        try:
            late.Wait()
        except TransferTimeout as exc:
            say("request:", exc)
    # What they shared was released well: the next ones work.
    with Communicator(config=Config(timeout=8, ranks_per_node=1)) as comm, comm.Dup() as part:
        part.Allreduce(IN_PLACE, x, algorithm="hierarchical")
        assert (x == SIZE * SIZE * (SIZE + 1) / 2).all()


def in_a_part() -> None:
    """A part is closed by hand: its parent and its sister go on."""
    comm = Communicator(config=Config(timeout=8, ranks_per_node=1))
    part, sister = comm.Dup(), comm.Dup()
    if RANK == SIZE - 1:
        part.Irecv(np.empty(5), 0, 3)
    try:
        part.close()
    except TransferTimeout as exc:
        say("late:", exc)
    for group in (comm, sister):
        x = np.full(30_000, 1.0 + RANK)
        group.Allreduce(IN_PLACE, x, algorithm="hierarchical")
        assert (x == SIZE * (SIZE + 1) / 2).all()
    comm.close()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    say("end")
