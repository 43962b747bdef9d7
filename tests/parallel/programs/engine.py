"""What ranks do in tests/parallel/test_engine.py: engine.py MODE."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mpi4py

if "single" in sys.argv[1]:
    mpi4py.rc.thread_level = "serialized"

import numpy as np

import rdmakit
from rdmakit import (
    Communicator,
    CommunicatorClosed,
    Config,
    InvalidArgument,
    Status,
    TransferTimeout,
)
from rdmakit.bootstrap import load_mpi
from rdmakit.inter import mpi as inter_mpi
from tests.conformance import messages, nonblocking, parts

MPI = load_mpi()
WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.Get_rank(), WORLD.Get_size()


def say(*words: object) -> None:
    os.write(1, f"[{RANK}] {' '.join(map(str, words))}\n".encode())  # one write: one line


def configs() -> list[Config]:
    found = []
    for ucx in ("auto", "none"):
        for ranks_per_node in (0, 1, 2):
            if ranks_per_node < SIZE and not (ucx == "none" and not ranks_per_node):
                found.append(Config(ucx=ucx, ranks_per_node=ranks_per_node, timeout=30,
                                    window_bytes=1 << 17))  # fmt: skip
    return found


def run_cases(cases: Sequence[Callable[[Communicator], None]]) -> None:
    for config in configs():
        with Communicator(config=config) as comm:
            for case in cases:
                start = time.monotonic()
                try:
                    case(comm)
                except BaseException:
                    say("FAILED", case.__name__, config)
                    traceback.print_exc()
                    sys.stderr.flush()
                    time.sleep(1)  # the others may have something to say
                    WORLD.Abort(1)
                comm.Barrier()
                if RANK == 0:
                    say("ok", config.ucx, config.ranks_per_node, case.__name__,
                        f"{time.monotonic() - start:.2f} s")  # fmt: skip


def cases() -> None:
    """All of each kind, with communicators of their own."""
    run_cases((*messages.CASES, mpi4py_words))
    run_cases(nonblocking.CASES)
    run_cases((*parts.CASES, mpi4py_groups))


def single() -> None:
    """MPI lets one thread in at a time: no progress thread, the same results."""
    assert MPI.Query_thread() < MPI.THREAD_MULTIPLE
    cases = [c for c in nonblocking.CASES if c is not nonblocking.done_without_calls]
    run_cases([*cases, *messages.CASES])
    with Communicator() as comm:
        assert any("MPI_THREAD_MULTIPLE" in note for note in comm.notes)
        assert not [t for t in threading.enumerate() if t.name == "rdmakit-progress"]


def mpi4py_words(comm: Communicator) -> None:
    """mpi4py's own constants and Status, whose numbers differ between MPI libraries."""
    after, before = messages.ring(comm)
    y, status = np.zeros(7), MPI.Status()
    comm.Sendrecv(np.full(7, 1.0 + comm.rank), after, 3, y, MPI.ANY_SOURCE, MPI.ANY_TAG, status)
    assert (y == 1 + before).all()
    assert (status.Get_source(), status.Get_tag()) == (before, 3)
    assert status.Get_count(MPI.DOUBLE) == 7
    assert not status.Is_cancelled()
    comm.Recv(y, MPI.PROC_NULL, MPI.ANY_TAG, status)
    assert status.Get_source() == MPI.PROC_NULL
    assert status.Get_tag() == MPI.ANY_TAG
    comm.Send(y, MPI.PROC_NULL)
    own = Status()
    send = comm.Isend(y, after)
    comm.Probe(MPI.ANY_SOURCE, status=own)
    assert own.Get_count(MPI.DOUBLE) == 7
    comm.Recv(y, own.source)
    send.Wait()
    x = np.ones(3)
    comm.Allreduce(MPI.IN_PLACE, x)
    comm.Iallreduce(MPI.IN_PLACE, x).Wait()
    assert (x == comm.size**2).all()
    assert comm.Split(MPI.UNDEFINED) is None
    # The user's own messages on the communicator that was given are nobody else's.
    sent = comm.mpi.Isend(np.array([comm.rank]), after, 9)
    z = np.zeros(1, int)
    comm.mpi.Recv(z, before, 9)
    sent.Wait()
    assert z[0] == before


def mpi4py_groups(comm: Communicator) -> None:
    world = comm.mpi.Get_group()
    group = world.Incl(list(reversed(range(comm.size))))
    part = comm.Create_group(group)
    assert part.rank == comm.size - 1 - comm.rank
    assert part.mpi.Get_rank() == part.rank
    parts.works(part)
    x = np.array([float(part.rank)])
    part.mpi.Allreduce(MPI.IN_PLACE, x)
    assert x[0] == sum(range(comm.size))
    part.close()
    group.Free()
    world.Free()


def large() -> None:
    """Messages that MPI cannot count: with small limits, so that the same code runs."""
    inter_mpi._LARGEST, inter_mpi._UNIT = 1000, 64
    with Communicator() as comm:
        after, before = messages.ring(comm)
        for count in (125, 126, 1000, 70_001):
            y, status = np.zeros(count), Status()
            comm.Sendrecv(messages.values(count, comm.rank), after, 0, y, before, 0, status)
            assert (y == messages.values(count, before)).all()
            assert status.nbytes == count * 8


def very_large() -> None:
    """2^31 elements and more, in one message."""
    config = Config(ranks_per_node=int(sys.argv[2]), timeout=120)
    with Communicator(config=config) as comm:
        count = (1 << 31) + 12_345
        x = np.full(count, 3, np.uint8)
        if comm.rank == 0:
            x[-3:] = (7, 8, 9)
            comm.Send(x, 1, 4)
        else:
            status = Status()
            comm.Recv(x, 0, 4, status)
            assert status.Get_count("u1") == count
            assert (x[-4:] == (3, 7, 8, 9)).all()


def left_open() -> None:
    """Requests under way at exit, on communicators that nobody closes."""
    comm = Communicator(config=Config(ranks_per_node=1))
    part = comm.Split(RANK % 2)
    assert part is not None
    kept = [comm.Iallreduce(np.ones(100_000), np.zeros(100_000)) for _ in range(3)]
    part.Iallreduce(np.ones(1000), np.zeros(1000))
    comm.Isend(np.ones(100_000), (RANK + 1) % SIZE)
    comm.Irecv(np.zeros(100_000), (RANK - 1) % SIZE)
    assert kept
    if RANK == SIZE - 1:
        time.sleep(0.2)


def dropped() -> None:
    for _ in range(3):
        comm = Communicator(config=Config(ranks_per_node=1))
        comm.Iallreduce(np.ones(50_000), np.zeros(50_000)).Wait()
        part = comm.Dup()
        part.Barrier()
        del comm, part
        gc.collect()


def descriptors() -> None:
    """Closed parts hold nothing any more."""
    counts = []
    with Communicator(config=Config(ranks_per_node=2)) as comm:
        for _ in range(5):
            part = comm.Dup()
            parts.works(part)
            part.close()
            counts.append(len(list(Path("/proc/self/fd").iterdir())))
    assert max(counts[1:]) <= counts[0] + 1, counts
    assert not [t for t in threading.enumerate() if t.name == "rdmakit-progress"]


def one_line() -> None:
    comm = rdmakit.init(ranks_per_node=1)
    assert rdmakit.init() is comm
    try:
        rdmakit.init(ranks_per_node=2)
    except InvalidArgument as exc:
        say("refused:", exc)
    x = np.ones(3)
    rdmakit.init().Allreduce(rdmakit.IN_PLACE, x)
    assert (x == SIZE).all()
    comm.close()
    again = rdmakit.init()
    assert again is not comm
    again.Barrier()


def timeout() -> None:
    """The last rank does not come to what the others started."""
    for number, config in enumerate(
        (Config(ranks_per_node=1), Config(ranks_per_node=1, ucx="none"), Config())
    ):
        comm = Communicator(config=config)
        comm.Iallreduce(np.ones(9), np.ones(9)).Wait()
        WORLD.Barrier()
        if RANK != SIZE - 1:
            request = comm.Iallreduce(np.ones(120_001), np.ones(120_001), algorithm="ring")
            receive = comm.Irecv(np.ones(3), SIZE - 1)
            try:
                request.Wait(timeout=0.5)
            except TransferTimeout as exc:
                say(f"timeout {number}:", exc)
            try:
                receive.Wait()
            except TransferTimeout:
                say(f"receive {number}: ended")
            try:
                comm.Send(np.ones(3), 0)
            except CommunicatorClosed as exc:
                say(f"closed {number}:", exc)
            comm.close()
        else:
            time.sleep(1.2)
        WORLD.Barrier()


def fork() -> None:
    with Communicator(config=Config(ranks_per_node=1)) as comm:
        comm.Iallreduce(np.ones(9), np.ones(9)).Wait()
        request = comm.Iallreduce(np.ones(100_000), np.ones(100_000))
        pid = os.fork()
        if not pid:
            status = 1
            try:
                comm.Ibarrier()
            except CommunicatorClosed as exc:
                status = 0 if "spawn" in str(exc) else 2
            os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        request.Wait()
        comm.Barrier()


def threads() -> None:
    """Several threads of one rank, each with its own communicator or tags."""
    config = Config(ranks_per_node=1, timeout=30)
    problems: list[Any] = []
    with Communicator(config=config) as comm:
        copies = [comm.Dup() for _ in range(3)]

        def body(number: int) -> None:
            try:
                after, before = messages.ring(comm)
                for turn in range(20):
                    y = np.zeros(2000)
                    mine = messages.values(2000, RANK, salt=turn)
                    comm.Sendrecv(mine, after, number, y, before, number)
                    assert (y == messages.values(2000, before, salt=turn)).all()
                    x = np.full(3000, RANK + turn)
                    copies[number].Allreduce(x, x, algorithm="hierarchical")
                    assert (x == SIZE * turn + SIZE * (SIZE - 1) // 2).all()
            except BaseException as exc:
                problems.append(exc)
                traceback.print_exc()

        workers = [threading.Thread(target=body, args=(i,)) for i in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
        assert not problems
        assert not any(worker.is_alive() for worker in workers)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    say("end")
