"""Messages between two ranks of CuPy arrays, for tests/gpu/test_message_arrays.py."""

from __future__ import annotations

import os
import traceback
from typing import Any

import cupy
import numpy as np

from rdmakit import ANY_SOURCE, Communicator, MessageTruncated, Request, Status, UnsupportedError

cupy.cuda.Device(int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0"))
                 % cupy.cuda.runtime.getDeviceCount()).use()  # fmt: skip
COUNTS = (0, 1, 1000, 8192, 8193, 131_071, 131_072, 131_073, 1_000_003)


def data(rank: int, count: int, salt: int = 0) -> Any:
    return (np.arange(count) * 7 + rank * 13 + salt * 101).astype("float64")


def ring(comm: Communicator) -> tuple[int, int]:
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def sizes_and_sides(comm: Communicator) -> None:
    """GPU and host memory on either side; all sizes under way at once with one tag."""
    after, before = ring(comm)
    for sends_gpu in (True, False):
        for recvs_gpu in (True, False):
            out = [data(comm.rank, n, i) for i, n in enumerate(COUNTS)]
            into = [np.full(n, -1.0) for n in COUNTS]
            if sends_gpu:
                out = [cupy.asarray(x) for x in out]
            if recvs_gpu:
                into = [cupy.asarray(x) for x in into]
            requests = [comm.Irecv(y, before, 3) for y in into]
            requests += [comm.Isend(x, after, 3) for x in out]
            Request.Waitall(requests)
            for i, (n, y) in enumerate(zip(COUNTS, into, strict=True)):
                got = cupy.asnumpy(y) if recvs_gpu else y
                np.testing.assert_array_equal(got, data(before, n, i))


def halo(comm: Communicator) -> None:
    """Columns and rows of a field, on a stream of one's own whose kernels are not waited for."""
    after, before = ring(comm)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        field = cupy.full((2050, 1030), -1.0)
        for turn in range(20):
            field[:, 1:-1] = comm.rank + 1000 * turn  # runs when the sends begin
            Request.Waitall(
                [
                    comm.Irecv(field[:, 0], before, 1), comm.Irecv(field[:, -1], after, 2),
                    comm.Isend(field[:, -2], after, 1), comm.Isend(field[:, 1], before, 2),
                ]
            )  # fmt: skip
            assert bool((field[:, 0] == before + 1000 * turn).all())
            assert bool((field[:, -1] == after + 1000 * turn).all())
            assert bool((field[:, 1:-1] == comm.rank + 1000 * turn).all())
    other = cupy.zeros((1030, 2050))
    comm.Sendrecv(field[::-2, 3::5].T, after, 4, got := cupy.zeros((206, 1025)), before, 4)
    assert bool((got == before + 19_000).all())
    comm.Sendrecv(field, after, 5, other.T, before, 5, stream=stream)
    assert bool((other.T[:, 1:-1] == before + 19_000).all())


def semantics(comm: Communicator) -> None:
    after, before = ring(comm)
    x = cupy.asarray(data(comm.rank, 300_000))
    comm.Sendrecv_replace(x, after, 1, before, 1)
    np.testing.assert_array_equal(cupy.asnumpy(x), data(before, 300_000))
    y, status = cupy.full((300, 2), -1.0), Status()
    send = comm.Isend(cupy.asarray(data(comm.rank, 100)), after, 2)
    assert comm.Probe(before, 2, status)
    assert status.nbytes == 800
    comm.Recv(y[:, 1], ANY_SOURCE, 2, status)
    send.Wait()
    want = np.full((300, 2), -1.0)
    want[:100, 1] = data(before, 100)
    np.testing.assert_array_equal(cupy.asnumpy(y), want)
    send = comm.Isend(x, after, 3)
    try:
        comm.Recv(y, before, 3)
    except MessageTruncated:
        send.Wait()
    else:
        raise AssertionError("not truncated")
    mine = cupy.zeros(300_000)  # to oneself
    comm.Sendrecv(x, comm.rank, 4, mine, comm.rank, 4)
    assert bool((mine == x).all())
    send_init, recv_init = comm.Send_init(x, after, 5), comm.Recv_init(mine, before, 5)
    for turn in range(5):
        x[:] = turn + comm.rank
        recv_init.Start()
        send_init.Start()
        recv_init.Wait()
        send_init.Wait()
        assert bool((mine == turn + before).all())
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        said = ""
        stream.begin_capture()
        try:
            comm.Isend(x, after, 6)
        except UnsupportedError as exc:
            said = str(exc)
        finally:
            stream.end_capture()
    assert "cannot be captured" in said, said


def beside_collectives(comm: Communicator) -> None:
    after, before = ring(comm)
    x, y = cupy.full(5000, comm.rank + 1.0), cupy.zeros(5000)
    for turn in range(10):
        got = cupy.zeros((5000, 2))
        receive = comm.Irecv(got[:, turn % 2], before, 1)
        comm.Allreduce(x, y)
        send = comm.Isend(y, after, 1)  # behind the kernel that waits for the others
        Request.Waitall([receive, send])
        assert bool((got[:, turn % 2] == comm.size * (comm.size + 1) / 2).all())
    comm.synchronize()


def lent(comm: Communicator) -> None:
    """After a collective: inside a node GPU memory is lent, registered arrays as they lie."""
    after, before = ring(comm)
    for count in (8192, 1_000_003, 6_000_001):
        shared = comm.empty(count + 100, "float64")
        own = cupy.zeros(count + 100)
        for array, part in ((shared, slice(0, count)), (shared, slice(37, count + 37)),
                            (own, slice(5, count + 5))):  # fmt: skip
            for host in (False, True):
                array[part] = cupy.asarray(data(comm.rank, count, int(host)))
                into = np.full(count, -1.0) if host else cupy.full(count, -1.0)
                comm.Sendrecv(array[part], after, 8, into, before, 8)
                np.testing.assert_array_equal(cupy.asnumpy(into), data(before, count, int(host)))
    many = [cupy.full(200_000, 100.0 * comm.rank + i) for i in range(20)]  # more than slots
    sends = [comm.Isend(x, after, i) for i, x in enumerate(many)]
    for i in reversed(range(20)):
        got = cupy.zeros(200_000)
        comm.Recv(got, before, i)
        assert bool((got == 100.0 * before + i).all())
    Request.Waitall(sends)
    if len(comm.layout.nodes) < comm.size:
        assert comm._gpus.lender is not None, comm.notes


def main() -> None:
    with Communicator() as comm:
        cases = (sizes_and_sides, halo, semantics, beside_collectives)
        for case in (*cases, lent, *cases[:3]):
            case(comm)
            comm.Barrier()
            if comm.rank == 0:
                os.write(1, f"ok {case.__name__}\n".encode())
        if comm.rank == 0:
            os.write(1, f"direct {comm._gpus.direct}\n".encode())


try:
    main()
except BaseException:
    traceback.print_exc()
    os._exit(1)  # the other ranks wait for this one
