"""A job on several hosts, hosts.py ALGORITHM...: right values, then the bytes of each algorithm."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np

from rdmakit import SUM, Communicator, Kind
from rdmakit.datatypes import HALVES
from tests.conformance.values import COVER, check

LINK = Path("/sys/class/net/link0/statistics")
NBYTES = 16 << 20
CALLS = 6


def say(*words: object) -> None:
    os.write(1, f"{' '.join(map(str, words))}\n".encode())


def sent() -> int:
    return int((LINK / "tx_bytes").read_text())


def results(comm: Communicator) -> None:
    say("rank", comm.rank, "host", comm.host, "nodes", comm.layout.describe())
    # Half precision holds the sums of four ranks, not of eight.
    exact = [(d, op) for d, op in COVER if comm.size <= 4 or d not in HALVES]
    for dtype, op in exact:
        for count in (7, 50_001):
            check(comm, Kind.ALLREDUCE, count, dtype, op, algorithm="hierarchical")
        check(comm, Kind.REDUCE_SCATTER, 999, dtype, op, algorithm="ring", in_place=True)
    for kind in (Kind.ALLGATHER, Kind.BROADCAST):
        for algorithm in comm.algorithms(kind):
            check(comm, kind, 30_001, "float32", SUM, algorithm=algorithm, root=comm.size - 1)
    assert comm.channel is not None
    lanes = set()
    for peer in range(comm.size):
        if comm.layout.node_of(peer) != comm.layout.node_of(comm.rank):
            lanes |= set(comm.channel.transports(peer))
    say("rank", comm.rank, "channel", comm.channel.name, "lanes", *sorted(map("/".join, lanes)))


def count(comm: Communicator, algorithm: str) -> None:
    x = np.full(NBYTES // 4, 1.0 + comm.rank, np.float32)
    y = np.empty_like(x)
    run = comm.bind(Kind.ALLREDUCE, x, y, algorithm=algorithm)
    run()
    comm.Barrier()
    before = sent()
    comm.Barrier()
    for _ in range(CALLS):
        run()
    comm.Barrier()
    after = sent()
    comm.Barrier()
    assert (y == comm.size * (comm.size + 1) / 2).all()
    if comm.local_rank == 0:
        say("bytes", algorithm, comm.host, (after - before) / CALLS)


with Communicator() as comm:
    results(comm)
    for name in sys.argv[1:]:
        count(comm, name)
