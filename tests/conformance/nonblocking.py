"""What calls that do not block must do, as cases that run in threads and in processes.

A case is called on all ranks with their communicator.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from rdmakit import IN_PLACE, Communicator, InvalidArgument, Kind, UnsupportedError
from rdmakit.collectives import Collectives
from rdmakit.datatypes import MAX, SUM
from rdmakit.request import Request
from tests.conformance.messages import raises, values

Check = Callable[[], None]


def begin(
    comm: Collectives, kind: Kind, count: int, salt: int, algorithm: str = "auto"
) -> tuple[Request, Check]:
    """Start one; return its request and what checks every element of the result."""
    n, rank = comm.size, comm.rank
    mine = values(count, rank, salt=salt)
    everybody = [values(count, r, salt=salt) for r in range(n)]
    more: dict[str, Any] = {"algorithm": algorithm}
    if kind is Kind.ALLREDUCE:
        op = MAX if salt % 2 else SUM
        total = np.zeros(count)
        request = comm.Iallreduce(mine, total, op, **more)
        want = np.max(everybody, axis=0) if op is MAX else np.sum(everybody, axis=0)
    elif kind is Kind.REDUCE_SCATTER:
        blocks = [np.concatenate([values(count, r + 5 * b, salt=salt) for b in range(n)])
                  for r in range(n)]  # fmt: skip
        total = np.zeros(count)
        request = comm.Ireduce_scatter_block(blocks[rank], total, **more)
        want = np.sum([values(count, r + 5 * rank, salt=salt) for r in range(n)], axis=0)
    elif kind is Kind.ALLGATHER:
        total = np.zeros(n * count)
        request = comm.Iallgather(mine, total, **more)
        want = np.concatenate(everybody)
    else:
        root = salt % n
        total = mine if rank == root else np.zeros(count)
        request = comm.Ibcast(total, root, **more)
        want = everybody[root]

    def check() -> None:
        np.testing.assert_array_equal(total, want)

    return request, check


KINDS = (Kind.ALLREDUCE, Kind.REDUCE_SCATTER, Kind.ALLGATHER, Kind.BROADCAST)


def every_kind(comm: Communicator) -> None:
    for kind in KINDS:
        for algorithm in (*comm.algorithms(kind), "auto"):
            for number, count in enumerate((0, 1, 7, 900, 40_003)):
                if algorithm == "one-shot" and count > 1000:
                    continue
                request, check = begin(comm, kind, count, number, algorithm)
                assert request.Wait()
                check()
                assert request.Test()
                assert request.Wait()


def many_at_once(comm: Communicator) -> None:
    """Waited for from the last to the first."""
    started = [
        begin(group, kind, count, salt)
        for salt, count in enumerate((3, 30_000, 500))
        for kind in KINDS
        for group in (comm, comm.node, comm.rail, comm)
    ]
    for request, check in reversed(started):
        request.Wait()
        check()


def done_without_calls(comm: Communicator) -> None:
    """Complete while the program sleeps, or computes, and calls nothing."""
    for busy in (False, True):
        for count in (10, 50_000):
            started = [begin(comm, kind, count, 1) for kind in KINDS]
            barrier = comm.Ibarrier()
            matrix = np.ones((40, 40))
            end = time.monotonic() + 30
            while not barrier.done:
                assert time.monotonic() < end, "the progress thread does not do it"
                if busy:
                    for _ in range(20):
                        matrix = matrix @ matrix / 40
                else:
                    time.sleep(0.002)
            assert all(request.done for request, _ in started), "earlier ones are complete"
            for request, check in started:
                check()
                assert request.Test()


def by_tests_alone(comm: Communicator) -> None:
    request, check = begin(comm, Kind.ALLREDUCE, 50_000, 0)
    end = time.monotonic() + 30
    while not request.Test():
        assert time.monotonic() < end
        time.sleep(0)
    check()


def blocking_calls_come_after(comm: Communicator) -> None:
    for count in (4, 60_000):
        x = np.full(count, float(comm.rank))
        first = comm.Iallreduce(IN_PLACE, x)
        second = comm.Iallreduce(IN_PLACE, x)
        comm.Allreduce(IN_PLACE, x)
        assert first.done
        assert second.done
        n = comm.size
        assert (x == n * n * n * (n - 1) / 2).all()
        third = comm.Ibcast(x, n - 1)
        comm.Barrier()
        assert third.done
        comm.node.Allreduce(np.zeros(1), np.zeros(1))


def bound_and_started(comm: Communicator) -> None:
    for count in (6, 50_000):
        x, y = np.zeros(count), np.zeros(count)
        step = comm.bind(Kind.ALLREDUCE, x, y)
        other = comm.bind(Kind.BROADCAST, x[:3], x[:3], root=comm.size - 1)
        assert step.Wait()
        for turn in range(4):
            x[:] = values(count, comm.rank, salt=turn)
            step.Start()
            with raises(InvalidArgument, "started already"):
                step.Start()
            if turn % 2:
                step.Wait()
            else:
                end = time.monotonic() + 30
                while not step.Test():
                    assert time.monotonic() < end
                    time.sleep(0)
            want = np.sum([values(count, r, salt=turn) for r in range(comm.size)], axis=0)
            assert (y == want).all()
            other()
            assert (x[:3] == values(3, comm.size - 1, salt=turn)).all()
            other.Start()
            other.Wait()


def dropped(comm: Communicator) -> None:
    """Nobody holds request or arrays."""
    for _ in range(20):
        comm.Iallreduce(np.full(30_000, 1.0), np.zeros(30_000))
    comm.Ibarrier()
    x = np.full(30_000, 1.0)
    junk = [np.full(30_000, 77.0) for _ in range(20)]
    comm.Allreduce(IN_PLACE, x)
    assert (x == comm.size).all()
    assert all((y == 77).all() for y in junk)


def refused(comm: Communicator) -> None:
    """What cannot be served is refused at the call, on every rank, and nothing happens."""
    x = np.zeros(4)
    for call, kind, text in (
        (lambda: comm.Iallreduce(x, np.zeros(5)), InvalidArgument, "recvbuf has 5 elements"),
        (lambda: comm.Iallreduce(x, x, "xor"), InvalidArgument, "unknown op"),
        (lambda: comm.Ibcast(x, comm.size), InvalidArgument, "root"),
        (lambda: comm.Iallgather(x, np.zeros(3)), InvalidArgument, "expected"),
        (lambda: comm.Iallreduce(x, x, algorithm="fastest"), InvalidArgument, "fastest"),
        (lambda: comm.Ibcast(np.zeros(2, object)), UnsupportedError, "plain bytes"),
        (lambda: comm.Iallreduce(x, x).Wait(timeout=-1), InvalidArgument, "timeout -1"),
    ):  # fmt: skip
        with raises(kind, text):
            call()
        y = np.full(3, 1)
        comm.Iallreduce(IN_PLACE, y).Wait()
        assert (y == comm.size).all()


CASES = (
    every_kind,
    many_at_once,
    done_without_calls,
    by_tests_alone,
    blocking_calls_come_after,
    bound_and_started,
    dropped,
    refused,
)
