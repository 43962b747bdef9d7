"""What ranks do in tests/parallel/test_communicator.py: communicator.py MODE."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import rdmakit
from rdmakit import (
    IN_PLACE,
    CollectiveMismatch,
    Communicator,
    CommunicatorClosed,
    Config,
    InvalidArgument,
    Kind,
    SetupError,
    TransferTimeout,
)
from rdmakit.bootstrap import load_mpi
from rdmakit.config import parse_size
from rdmakit.datatypes import AVG, MAX, MIN, PROD, SUM
from tests.conformance.values import COVER, DTYPES, check

WORLD = load_mpi().COMM_WORLD
RANK, SIZE = WORLD.Get_rank(), WORLD.Get_size()
BIG = 120_001


def say(*words: object) -> None:
    os.write(1, f"[{RANK}] {' '.join(map(str, words))}\n".encode())  # one write: one line


CHECKED_BESIDE_MPI = (
    Kind.REDUCE, Kind.GATHER, Kind.SCATTER, Kind.ALLTOALL, Kind.SCAN, Kind.EXSCAN,
)  # fmt: skip
"""Kinds of which the program blocks.py sees more."""


def segments() -> list[Path]:
    return list(Path("/dev/shm").glob(f"rdmakit-*-{os.getpid()}-*"))


def sizes_of(n: int, ranks_per_node: int) -> tuple[int, ...]:
    step = ranks_per_node or n
    return tuple(min(step, n - start) for start in range(0, n, step))


def results(comm: Communicator) -> None:
    """Every kind, algorithm, dtype and op; equal bits on all ranks."""
    digest = hashlib.sha256()
    for kind in Kind:
        scans = kind in (Kind.SCAN, Kind.EXSCAN)
        reduces = scans or kind in (Kind.ALLREDUCE, Kind.REDUCE_SCATTER, Kind.REDUCE)
        for algorithm in (*comm.algorithms(kind), "auto"):
            cases: list[Any] = [(count, "float32", SUM) for count in (0, 1, 7, 5003)]
            if algorithm != "one-shot":
                cases.append((BIG, "float32", SUM))
            pairs: Any = [(t, op) for t, op in COVER if not (scans and op is AVG)]
            pairs = pairs if reduces else [(dtype, SUM) for dtype in DTYPES]
            if algorithm != "hierarchical":
                pairs = [("int64", op) for op in (SUM, PROD, MIN, MAX)] if reduces else []
            if kind in CHECKED_BESIDE_MPI:
                pairs = pairs[::6]
            cases += [(1000, dtype, op) for dtype, op in pairs]
            for number, (count, dtype, op) in enumerate(cases):
                result = check(
                    comm, kind, count, dtype, op, algorithm=algorithm, root=number % comm.size,
                    in_place=number % 2 == 1,
                )  # fmt: skip
                if kind in (Kind.ALLREDUCE, Kind.ALLGATHER, Kind.BROADCAST):
                    digest.update(result)
    for group in (comm.node, comm.rail):
        for count in (3, 40_000):
            x = np.full(count, 1 + comm.rank, np.int64)
            group.Allreduce(x, x)
            assert (x == sum(1 + r for r in group._places.job)).all()
            group.Barrier()
    rounds = np.random.default_rng(comm.rank).normal(size=70_001)
    for algorithm in ("hierarchical", "ring"):
        first = np.empty_like(rounds)
        comm.Allreduce(rounds, first, algorithm=algorithm)
        again = np.empty_like(rounds)
        comm.Allreduce(rounds, again, algorithm=algorithm)
        assert first.tobytes() == again.tobytes(), "run to run"
        digest.update(first.tobytes())
    digests = WORLD.allgather(digest.digest())
    assert len(set(digests)) == 1, "bits differ between ranks"


def matrix() -> None:
    for ucx in ("auto", "none"):
        for ranks_per_node in (0, 1, 2, 3):
            if ranks_per_node > SIZE or (ucx == "none" and ranks_per_node in (0, SIZE)):
                continue
            start = time.monotonic()
            config = Config(
                ucx=ucx, ranks_per_node=ranks_per_node, timeout=30, window_bytes=1 << 17
            )
            with Communicator(config=config) as comm:
                assert comm.layout.ranks_per_node == sizes_of(SIZE, ranks_per_node)
                assert comm.virtual == (len(comm.layout.nodes) > 1)
                results(comm)
                lanes = set()
                if comm.channel is not None:
                    assert comm.channel.name == ("mpi" if ucx == "none" else "ucx"), comm.notes
                    for peer in range(SIZE):
                        if comm.layout.node_of(peer) != comm.layout.node_of(RANK):
                            lanes |= {name for name, _ in comm.channel.transports(peer)}
                    if ucx == "auto":
                        local = ("sysv", "posix", "cma", "knem", "xpmem", "memory")
                        assert not lanes & set(local), lanes
                        assert lanes, "nothing was told"
                    else:
                        assert any("RDMAKIT_UCX=none" in note for note in comm.notes)
                assert not segments()
            if RANK == 0:
                say("ok", ucx, ranks_per_node, *sorted(lanes), f"{time.monotonic() - start:.2f} s")


def refused(make: Callable[[], Communicator]) -> None:
    try:
        make()
    except SetupError as exc:
        say("SetupError:", exc)
        return
    raise AssertionError("no SetupError")


def version() -> None:
    if RANK == 1:
        rdmakit.__version__ = "9.9.9"
    refused(Communicator)


def settings() -> None:
    os.environ["RDMAKIT_TIMEOUT"] = "7" if RANK == SIZE - 1 else "8"
    refused(Communicator)


def node_id() -> None:
    """RDMAKIT_NODE_ID is per host, so it may differ."""
    os.environ["RDMAKIT_NODE_ID"] = "a" if RANK < 2 else "b"
    with Communicator() as comm:
        assert comm.layout.nodes == ((0, 1), (2,)), comm.layout
        x = np.full(100_000, 1.0 + RANK)
        comm.Allreduce(x, x)
        assert (x == 6).all()


def small_shm() -> None:
    """Each rank sees a /dev/shm of its own with 1 MiB; peers reach in through /proc."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, recursive_private = 0x20000, 0x4000 | 1 << 18
    if (
        libc.unshare(new_mounts)
        or libc.mount(None, b"/", None, recursive_private, None)
        or libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=1m")
    ):
        say("no namespace:", os.strerror(ctypes.get_errno()))
        return
    refused(Communicator)
    assert not segments()
    with Communicator(config=Config(window_bytes=parse_size("256K"))) as comm:
        x = np.full(100_000, 1.0 + RANK)
        comm.Allreduce(x, x)
        assert (x == SIZE * (SIZE + 1) / 2).all()


def two() -> None:
    """Two communicators at once, of different shapes; then others after they are closed."""
    first = Communicator(config=Config(ranks_per_node=2))
    second = Communicator(config=Config(ranks_per_node=1))
    for turn in range(30):
        x, y = np.full(20_000, turn + RANK), np.full(9000, 1.0 + RANK)
        first.Allreduce(x, x)
        second.Allreduce(y, y)
        second.rail.Allreduce(y, y, algorithm="hierarchical")
        assert (x == SIZE * turn + SIZE * (SIZE - 1) // 2).all()
        assert (y == SIZE * SIZE * (SIZE + 1) / 2).all()
    first.close()
    y = np.full(9000, 1.0 + RANK)
    second.Allreduce(y, y)
    second.close()
    for _ in range(8):
        with Communicator(config=Config(ranks_per_node=2)) as comm:
            x = np.full(20_000, RANK)
            comm.Allreduce(x, x)
            assert (x == SIZE * (SIZE - 1) // 2).all()


def part() -> None:
    """Only some ranks make a communicator, over a part of the job; the others do not take part."""
    members = WORLD.Split(0 if RANK < 2 else 1, -RANK)
    if RANK < 2:
        comm = Communicator(members, config=Config(ranks_per_node=1, timeout=20))
        assert (comm.rank, comm.size) == (1 - RANK, 2)
        x = np.full(50_000, 1.0 + RANK)
        comm.Allreduce(x, x)
        assert (x == 3).all()
        if RANK == 0:
            time.sleep(0.5)
        # Left open: its two ranks wait for each other at exit, and for nobody else.


def left_open() -> None:
    comm = Communicator(config=Config(ranks_per_node=1))
    other = Communicator(config=Config(ranks_per_node=2, ucx="none"))
    x = np.full(BIG, 1.0 + RANK)
    comm.Allreduce(x, x)
    other.Allreduce(x, x)
    if RANK == SIZE - 1:
        time.sleep(0.2)


def descriptors() -> None:
    """A closed communicator holds nothing any more, though the object is still there."""
    held, counts = [], []
    for _ in range(4):
        comm = Communicator(config=Config(ranks_per_node=1 + len(counts) % 2))
        x = np.full(BIG, 1.0)
        comm.Allreduce(x, x, algorithm="hierarchical")
        comm.close()
        held.append(comm)
        counts.append(len(list(Path("/proc/self/fd").iterdir())))
    assert max(counts[1:]) <= counts[0] + 1, counts


def dropped() -> None:
    """Communicators that nobody closes and nobody holds."""
    for _ in range(3):
        comm = Communicator(config=Config(ranks_per_node=1))
        x = np.full(BIG, 1.0 + RANK)
        comm.Allreduce(x, x)
        assert (x == SIZE * (SIZE + 1) / 2).all()
        comm.Barrier()
        del comm
        gc.collect()
    assert not segments()


def bound_mpi() -> None:
    """MPI's own algorithm bound to arrays: kept alive, in place each time, refused when closed."""
    comm = Communicator(config=Config(check=True))
    n = comm.size
    recv = np.zeros(4000)
    run = comm.bind(Kind.ALLREDUCE, np.full(4000, RANK + 1.0), recv, algorithm="mpi")
    gc.collect()
    junk = [np.full(4000, 99.0) for _ in range(50)]
    run()
    assert (recv == n * (n + 1) / 2).all()
    whole = np.zeros(4 * n)
    block = whole[4 * RANK : 4 * RANK + 4]
    run_scatter = comm.bind(Kind.REDUCE_SCATTER, whole, block, algorithm="mpi")
    for turn in range(3):
        whole[:] = turn * 10 + RANK
        run_scatter()
        assert (block == n * turn * 10 + n * (n - 1) / 2).all(), (turn, block)
    bad = comm.bind(Kind.ALLREDUCE, np.zeros(3 + RANK), np.zeros(3 + RANK), algorithm="mpi")
    try:
        bad()
    except CollectiveMismatch as exc:
        say("mismatch:", exc)
    else:
        raise AssertionError("no CollectiveMismatch")
    del junk
    comm.close()
    for use in (run, run_scatter, comm.Barrier):
        try:
            use()
        except CommunicatorClosed:
            continue
        raise AssertionError("a closed communicator served")
    # After an error close is local: nobody else needs to come.
    with Communicator() as comm:
        late = comm.bind(Kind.ALLREDUCE, recv, recv, algorithm="mpi")
    try:
        late()
    except CommunicatorClosed:
        return
    raise AssertionError("a closed communicator served")


def mismatch() -> None:
    """With the MPI channel; one rank closes after the error, long before the others."""
    for ucx in ("none", "auto"):
        comm = Communicator(config=Config(check=True, ranks_per_node=2, ucx=ucx, timeout=20))
        x, y = np.full(10, 1.0), np.full(10, -1.0)
        comm.Allreduce(x, y)
        assert (y == SIZE).all()
        try:
            comm.Allreduce(x, y, MAX if RANK == 2 else MIN)
        except CollectiveMismatch as exc:
            say("mismatch:", exc)
        else:
            raise AssertionError("no CollectiveMismatch")
        if RANK:
            time.sleep(0.5)
        start = time.monotonic()
        comm.close()
        assert time.monotonic() - start < 0.4, "close waited for others"


def timeout() -> None:
    """The last rank does not come: the others say so, close, and end with status 0."""
    for number, config in enumerate(
        (Config(ranks_per_node=1), Config(ranks_per_node=1, ucx="none"), Config(),
         Config(ranks_per_node=2))
    ):  # fmt: skip
        comm = Communicator(config=config)
        x = np.full(BIG, 1.0 + RANK)
        comm.Allreduce(x, x)
        WORLD.Barrier()
        if RANK != SIZE - 1:
            for _ in range(2):  # of two nodes the first notices only at its second call
                try:
                    comm.Allreduce(x, x, algorithm="hierarchical", timeout=0.4)
                except TransferTimeout as exc:
                    say(f"timeout {number}:", exc)
                    break
            try:
                comm.Allreduce(x, x)
            except CommunicatorClosed as exc:
                say(f"closed {number}:", exc)
            comm.close()
        else:
            time.sleep(0.9)
        # Where the last rank is, nothing has failed: it leaves the communicator open.
        WORLD.Barrier()


def memory() -> None:
    """Arrays that are unmapped and mapped again, mostly at the same address."""
    with Communicator(config=Config(ranks_per_node=1)) as comm:
        places = set()
        for turn in range(25):
            nbytes = (4 << 20) + 4096 * (turn % 3)
            x = np.full(nbytes // 8, float(turn + RANK))
            places.add(x.__array_interface__["data"][0])
            comm.Allreduce(x, x, algorithm=("hierarchical", "ring")[turn % 2])
            assert (x == SIZE * turn + SIZE * (SIZE - 1) / 2).all(), turn
            if turn % 2 == 0:
                comm.Bcast(x, turn % SIZE)
            del x
        say("places", len(places))


def quiet() -> None:
    """Overflow and NaN inside collectives, with warnings as errors."""
    with Communicator(config=Config(ranks_per_node=2)) as comm:
        for dtype in ("float16", "float32", "float64"):
            for count in (5, 50_000):
                x = np.full(count, np.finfo(dtype).max, dtype)
                comm.Allreduce(IN_PLACE, x, PROD, algorithm="hierarchical")
                assert np.isposinf(x).all()
                x = np.full(count, np.nan if RANK == 1 else 1, dtype)
                comm.Allreduce(IN_PLACE, x, MAX, algorithm="hierarchical")
                assert np.isnan(x).all()


def variables() -> None:
    for name in ("RDMAKIT_UCX", "RDMAKIT_WINDOW", "RDMAKIT_CHECK"):
        os.environ[name] = "perhaps"
        try:
            Communicator()
        except InvalidArgument as exc:
            say("InvalidArgument:", exc)
        del os.environ[name]
    Communicator().close()


def open_and_close() -> None:
    for turn in range(6):
        with Communicator(config=Config(ranks_per_node=(1, 5)[turn % 2], timeout=20)) as comm:
            x = np.full(100, turn + RANK)
            comm.Allreduce(x, x, algorithm="hierarchical")
            assert (x == SIZE * turn + SIZE * (SIZE - 1) // 2).all()


def forked() -> None:
    """A forked child is no rank: it is told so, at once, and the ranks go on."""
    comm = Communicator()
    x, y = np.full(BIG, 1.0 + RANK), np.empty(BIG)
    request = comm.Iallreduce(x, y)
    receive = comm.Irecv(np.empty(3), (RANK + 1) % SIZE, 5)
    child = os.fork()
    if child == 0:
        for name, call in (
            ("call", lambda: comm.Barrier()),
            ("new", lambda: Communicator()),
            ("wait", lambda: receive.Wait(timeout=5)),
            ("test", lambda: receive.Test()),
            ("all", lambda: rdmakit.Request.Waitall([receive, receive])),
        ):
            try:
                call()
            except (CommunicatorClosed, SetupError) as exc:
                say(f"child {name}:", exc)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    request.Wait()
    comm.Send(np.arange(3.0), (RANK - 1) % SIZE, 5)
    receive.Wait()
    comm.close()
    assert (y == SIZE * (SIZE + 1) / 2).all()


def debian() -> None:
    with Communicator(config=Config(ranks_per_node=2, timeout=30)) as comm:
        results(comm)
        if RANK == 0:
            say("vendor", load_mpi().get_vendor())
            say("channel", comm.channel.name if comm.channel else None)
            say("notes", comm.notes)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    say("end")
