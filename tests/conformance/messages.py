"""What messages between two ranks must do, as cases that run in threads and in processes.

A case is called on all ranks with their communicator; those of mpi4py's own tests of its
point-to-point calls are among them.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import rdmakit
from rdmakit import Communicator, InvalidArgument, MessageTruncated, UnsupportedError
from rdmakit.request import Request
from rdmakit.status import ANY_SOURCE, ANY_TAG, PROC_NULL, UNDEFINED, Status

DTYPES = ("i1", "u2", "i4", "i8", "f2", "f4", "f8", "c8", "c16", "?")
Array = np.ndarray[Any, Any]


def values(count: int, rank: int, dtype: str = "f8", salt: int = 0) -> Array:
    """Return elements that differ for each rank and place."""
    return (np.arange(count) * 7 + rank * 13 + salt * 101).astype(dtype)


@contextlib.contextmanager
def raises(kind: type[BaseException], text: str) -> Iterator[None]:
    try:
        yield
    except kind as exc:
        said = str(exc)
    else:
        raise AssertionError(f"no {kind.__name__}")
    assert text in said, said


def ring(comm: Communicator) -> tuple[int, int]:
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def sendrecv(comm: Communicator) -> None:
    after, before = ring(comm)
    for dtype in DTYPES:
        for count in (0, 1, 5, 1000):
            status = Status()
            recv = np.zeros(count, dtype)
            comm.Sendrecv(values(count, comm.rank, dtype), after, 0, recv, before, 0, status)
            assert (recv == values(count, before, dtype)).all()
            assert (status.source, status.tag, status.Get_count(dtype)) == (before, 0, count)
    for count in (9000, 70_000, 600_000):  # eager, and not
        recv = np.zeros(count)
        comm.Sendrecv(values(count, comm.rank), after, 3, recv, before, 3)
        assert (recv == values(count, before)).all()


def sendrecv_replace(comm: Communicator) -> None:
    after, before = ring(comm)
    for count in (0, 1, 100, 60_000):
        x = values(count, comm.rank)
        status = Status()
        comm.Sendrecv_replace(x, after, 5, before, 5, status)
        assert (x == values(count, before)).all()
        assert status.Get_source() == before
        assert status.Get_count(x.dtype) == count


def send_and_receive(comm: Communicator) -> None:
    for count in (0, 1, 300, 200_000):
        x = values(count, comm.rank)
        if comm.rank == 0:
            for peer in range(1, comm.size):
                comm.Send(x, peer, peer)
            for peer in range(1, comm.size):
                y = np.zeros(count)
                comm.Recv(y, peer, 100 + peer)
                assert (y == values(count, peer)).all()
        else:
            y = np.zeros(count)
            comm.Recv(y, 0, comm.rank)
            assert (y == values(count, 0)).all()
            comm.Send(x, 0, 100 + comm.rank)


def isend_and_irecv(comm: Communicator) -> None:
    """Everybody to everybody, itself too, receives first and last."""
    for first in (True, False):
        for count in (0, 3, 2000, 30_000):
            got = [np.full(count, -1.0) for _ in range(comm.size)]
            requests = []
            for receiving in (first, not first):
                for p in range(comm.size):
                    if receiving:
                        requests.append(comm.Irecv(got[p], p, 2))
                    else:
                        requests.append(comm.Isend(values(count, comm.rank, salt=p), p, 2))
            statuses: list[Status] = []
            assert Request.Waitall(requests, statuses)
            for peer, data in enumerate(got):
                assert (data == values(count, peer, salt=comm.rank)).all()
            if first:
                assert [s.source for s in statuses[: comm.size]] == list(range(comm.size))
            assert all(request.done for request in requests)
            assert all(request.Test() for request in requests)


def order_is_kept(comm: Communicator) -> None:
    """Long and short messages of one pair and tag, and wildcards that take them in turn."""
    after, before = ring(comm)
    counts = [40_000 if i % 5 == 2 else 10 + i for i in range(30)]
    sends = [comm.Isend(values(n, comm.rank, salt=i), after, 1) for i, n in enumerate(counts)]
    for i, n in enumerate(counts):
        y = np.zeros(n)
        if i % 3 == 0:
            comm.Recv(y, before, 1)
        elif i % 3 == 1:
            comm.Recv(y, before)
        else:
            comm.Irecv(y, before, ANY_TAG).Wait()
        assert (y == values(n, before, salt=i)).all(), i
    Request.Waitall(sends)


def tags_are_apart(comm: Communicator) -> None:
    after, before = ring(comm)
    tags = (0, 1, 7, 4096, comm.tag_ub)
    assert comm.tag_ub >= 32767
    sends = [comm.Isend(values(50, comm.rank, salt=t), after, t) for t in tags]
    for tag in reversed(tags):
        y, status = np.zeros(50), Status()
        comm.Recv(y, before, tag, status)
        assert (y == values(50, before, salt=tag)).all()
        assert status.tag == tag
    Request.Waitall(sends)


def posted_receives_match_in_their_order(comm: Communicator) -> None:
    """A wildcard that was posted first takes the first message, whatever comes for others."""
    after, before = ring(comm)
    one, two, three = np.zeros(4), np.zeros(4), np.zeros(4)
    requests = [
        comm.Irecv(one, before, ANY_TAG), comm.Irecv(two, before, 9), comm.Irecv(three, before, 8)
    ]  # fmt: skip
    comm.Barrier()
    comm.Send(values(4, comm.rank, salt=1), after, 9)
    comm.Send(values(4, comm.rank, salt=2), after, 8)
    comm.Send(values(4, comm.rank, salt=3), after, 9)
    statuses: list[Status] = []
    Request.Waitall(requests, statuses)
    assert (one == values(4, before, salt=1)).all()
    assert (two == values(4, before, salt=3)).all()
    assert (three == values(4, before, salt=2)).all()
    assert [s.tag for s in statuses] == [9, 9, 8]


def any_source(comm: Communicator) -> None:
    """Of all transports at once; each message once."""
    if comm.rank == 0:
        seen: dict[int, list[float]] = {peer: [] for peer in range(comm.size)}
        own = [comm.Isend(np.array([float(i)]), 0, i) for i in range(5)]
        for _ in range(5 * comm.size):
            y, status = np.zeros(1), Status()
            comm.Recv(y, ANY_SOURCE, ANY_TAG, status)
            assert status.tag == y[0]
            seen[status.source].append(y[0])
        assert all(got == [0, 1, 2, 3, 4] for got in seen.values()), seen
        Request.Waitall(own)
    else:
        for i in range(5):
            comm.Send(np.array([float(i)]), 0, i)


def shorter_and_longer(comm: Communicator) -> None:
    after, before = ring(comm)
    y, status = np.full(10, -1.0), Status()
    comm.Sendrecv(values(4, comm.rank), after, 0, y, before, 0, status)
    assert (y[:4] == values(4, before)).all()
    assert (y[4:] == -1).all()
    assert status.Get_count("f8") == 4
    assert status.count == status.nbytes == 32
    assert status.Get_count("c16") == 2
    assert status.Get_count(np.dtype("V24")) == UNDEFINED
    for count in (5, 300_000):  # and what comes after it is right
        send = comm.Isend(values(count, comm.rank), after, 1)
        more = comm.Isend(values(3, comm.rank, salt=9), after, 1)
        room = np.full(6, -1.0)
        with raises(MessageTruncated, f"message of {count * 8} bytes from rank {before}"):
            comm.Recv(room[:3], before, 1)
        assert (room == -1).all()
        comm.Recv(room[:3], before, 1)
        assert (room[:3] == values(3, before, salt=9)).all()
        Request.Waitall([send, more])
    request = comm.Irecv(room[:1], before, 2)
    comm.Send(values(2, comm.rank), after, 2)
    with raises(MessageTruncated, "the array of 8 bytes"):
        request.Wait()


def probes(comm: Communicator) -> None:
    after, before = ring(comm)
    assert not comm.Iprobe()
    assert not comm.Iprobe(before, 3)
    comm.Barrier()
    send = comm.Isend(values(20, comm.rank), after, 3)
    status = Status()
    assert comm.Probe(before, 3, status)
    assert (status.source, status.tag, status.nbytes) == (before, 3, 160)
    assert not comm.Iprobe(before, 4)
    for source in (before, ANY_SOURCE):
        for tag in (3, ANY_TAG):
            status = Status()
            assert comm.Iprobe(source, tag, status)
            assert (status.source, status.tag, status.Get_count("f8")) == (before, 3, 20)
    y = np.zeros(status.Get_count("f8"))
    comm.Recv(y, status.source, status.tag)
    assert (y == values(20, before)).all()
    assert not comm.Iprobe()
    send.Wait()


def nobody(comm: Communicator) -> None:
    x = np.full(3, 5.0)
    comm.Send(x, PROC_NULL)
    status = Status()
    comm.Recv(x, PROC_NULL, 3, status)
    assert (x == 5).all()
    assert status.source is PROC_NULL
    assert status.tag is ANY_TAG
    assert status.Get_count() == 0
    assert comm.Irecv(x, PROC_NULL).Test()
    assert comm.Isend(x, PROC_NULL).Wait()
    assert comm.Probe(PROC_NULL)
    assert comm.Iprobe(PROC_NULL)
    comm.Sendrecv(x, PROC_NULL, 0, x, PROC_NULL)
    # A chain whose ends are nobody.
    up = comm.rank + 1 if comm.rank + 1 < comm.size else PROC_NULL
    down = comm.rank - 1 if comm.rank else PROC_NULL
    y = np.full(3, -1.0)
    comm.Sendrecv(values(3, comm.rank), up, 0, y, down)
    assert (y == (values(3, comm.rank - 1) if comm.rank else -1)).all()


def to_oneself(comm: Communicator) -> None:
    me = comm.rank
    for count in (0, 5, 100_000):
        y = np.zeros(count)
        comm.Sendrecv(values(count, me), me, 1, y, me, 1)
        assert (y == values(count, me)).all()
        send = comm.Isend(values(count, me, salt=2), me, 2)
        comm.Recv(y, me, 2)
        send.Wait()
        assert (y == values(count, me, salt=2)).all()
        receive = comm.Irecv(y, me, 3)
        comm.Send(values(count, me, salt=3), me, 3)
        receive.Wait()
        assert (y == values(count, me, salt=3)).all()
    x = np.zeros(4)
    comm.Send(x, me, 4)  # short messages do not wait for their receive
    x[:] = 9
    comm.Recv(x, me, 4)
    assert (x == 0).all()


def cancelled(comm: Communicator) -> None:
    after, before = ring(comm)
    y = np.full(3, -1.0)
    request = comm.Irecv(y, before, 77)
    assert not request.Test()
    request.Cancel()
    status = Status()
    request.Wait(status)
    assert status.Is_cancelled()
    comm.Barrier()
    send = comm.Isend(values(3, comm.rank), after, 77)  # goes to the next
    z = np.zeros(3)
    comm.Recv(z, before, 77, status)
    assert (z == values(3, before)).all()
    assert (y == -1).all()
    assert not status.Is_cancelled()
    send.Wait()
    send = comm.Isend(z, after, 78)
    with raises(UnsupportedError, "only receives can be cancelled"):
        send.Cancel()
    receive = comm.Irecv(z, before, 78)
    receive.Wait()
    receive.Cancel()  # too late, which is no error
    send.Wait()


def any_and_some(comm: Communicator) -> None:
    after, before = ring(comm)
    got = [np.zeros(2) for _ in range(4)]
    requests = [comm.Irecv(y, before, tag) for tag, y in enumerate(got)]
    assert Request.Testany(requests) == (UNDEFINED, False)
    assert not Request.Testall(requests)
    assert Request.Testsome(requests) == []
    comm.Barrier()
    comm.Send(values(2, comm.rank, salt=2), after, 2)
    status = Status()
    assert Request.Waitany(requests, status) == 2
    assert status.tag == 2
    comm.Barrier()
    comm.Send(values(2, comm.rank, salt=0), after, 0)
    statuses: list[Status] = []
    assert Request.Waitsome(requests, statuses) == [0]
    assert [s.tag for s in statuses] == [0]
    comm.Barrier()
    comm.Send(values(2, comm.rank, salt=1), after, 1)
    comm.Send(values(2, comm.rank, salt=3), after, 3)
    end = time.monotonic() + 20
    while not Request.Testall(requests):
        assert time.monotonic() < end
        time.sleep(0)
    for tag, y in enumerate(got):
        assert (y == values(2, before, salt=tag)).all()
    assert Request.Waitany(requests) == UNDEFINED
    assert Request.Testany(requests) == (UNDEFINED, True)
    assert Request.Waitsome(requests) is None
    assert Request.Testsome(requests) is None


def persistent(comm: Communicator) -> None:
    after, before = ring(comm)
    x, y = np.zeros(5000), np.zeros(5000)
    send, receive = comm.Send_init(x, after, 6), comm.Recv_init(y, before, 6)
    assert send.Wait()
    assert receive.Test()
    for turn in range(4):
        x[:] = values(5000, comm.rank, salt=turn)
        receive.Start()
        send.Start()
        with raises(InvalidArgument, "started already"):
            send.Start()
        status = Status()
        receive.Wait(status)
        send.Wait()
        assert status.tag == 6
        assert (y == values(5000, before, salt=turn)).all()


def dropped_requests(comm: Communicator) -> None:
    """Nobody holds the request nor the array: both live until the message is there."""
    after, before = ring(comm)
    comm.Isend(values(100_000, comm.rank), after, 1)
    view = np.zeros(100_000)
    done = comm.Irecv(view, before, 1)
    comm.Irecv(np.zeros(5000), before, 2).Free()
    gc.collect()
    junk = [np.full(100_000, 99.0) for _ in range(10)]
    comm.Send(values(5000, comm.rank), after, 2)
    done.Wait()
    assert (view == values(100_000, before)).all()
    comm.Barrier()
    assert all((x == 99).all() for x in junk)


def mixed_with_collectives(comm: Communicator) -> None:
    after, before = ring(comm)
    for turn in range(6):
        big = 50_000 if turn % 2 else 40
        y = np.zeros(big)
        receive = comm.Irecv(y, before, turn)
        x = np.full(big, float(comm.rank + turn))
        total = np.zeros(big)
        reduce = comm.Iallreduce(x, total)
        send = comm.Isend(values(big, comm.rank, salt=turn), after, turn)
        now = np.full(300, comm.rank)
        comm.Allreduce(now, now)  # lets the other become complete first
        assert reduce.done
        n = comm.size
        assert (now == n * (n - 1) // 2).all()
        assert (total == n * turn + n * (n - 1) / 2).all()
        comm.Barrier()
        Request.Waitall([receive, send, reduce])
        assert (y == values(big, before, salt=turn)).all()


def wrong(comm: Communicator) -> None:
    x = np.zeros(4)
    frozen = np.zeros(4)
    frozen.flags.writeable = False
    for call, kind, text in (
        (lambda: comm.Send(x, comm.size), InvalidArgument, "dest"),
        (lambda: comm.Send(x, -5), InvalidArgument, "dest -5 is not in 0.."),
        (lambda: comm.Send(x, ANY_SOURCE), InvalidArgument, "cannot stand here"),
        (lambda: comm.Recv(x, comm.size), InvalidArgument, "source"),
        (lambda: comm.Send(x, 0, -2), InvalidArgument, "tag -2 is not in 0.."),
        (lambda: comm.Send(x, 0, comm.tag_ub + 1), InvalidArgument, "is not in 0.."),
        (lambda: comm.Send(x, 0, ANY_TAG), InvalidArgument, "cannot stand here"),
        (lambda: comm.Send(x, 0.5), InvalidArgument, "dest: expected an integer, got float 0.5"),
        (lambda: comm.Send([1.0], 0), InvalidArgument, "buf: expected"),
        (lambda: comm.Recv(frozen), InvalidArgument, "read-only"),
        (lambda: comm.Send(np.zeros(3, object), 0), UnsupportedError, "plain bytes"),
        (lambda: comm.Recv(x, 0, 0, timeout=0), InvalidArgument, "timeout 0"),
        (lambda: comm.Iprobe(comm.size), InvalidArgument, "source"),
    ):  # fmt: skip
        with raises(kind, text):
            call()
    assert rdmakit.UNDEFINED == UNDEFINED
    comm.Barrier()


CASES = (
    sendrecv,
    sendrecv_replace,
    send_and_receive,
    isend_and_irecv,
    order_is_kept,
    tags_are_apart,
    posted_receives_match_in_their_order,
    any_source,
    shorter_and_longer,
    probes,
    nobody,
    to_oneself,
    cancelled,
    any_and_some,
    persistent,
    dropped_requests,
    mixed_with_collectives,
    wrong,
)
