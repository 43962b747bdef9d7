"""What a user of an MPI without CUDA does with GPU arrays: copy, MPI_Allreduce, copy."""

from __future__ import annotations

from rdmakit.baseline import mpi_call, why_not_mpi
from rdmakit.bench.arrays import Arrays
from rdmakit.bench.session import Case, Session
from rdmakit.buffer import Buffer, as_buffer
from rdmakit.collectives import Collectives
from rdmakit.datatypes import MemoryKind
from rdmakit.operation import Operation
from rdmakit.plan.shape import Kind

__all__ = ["STAGED_MPI", "over_mpi", "why_no_mpi"]

STAGED_MPI = ("host-staged MPI", "pipelined MPI")
PIECE = 4 << 20
"""Bytes of a piece of the pipelined way."""


def why_no_mpi(session: Session, comm: Collectives) -> str:
    """Return why MPI cannot reduce the run's type in ``comm``, or nothing; equal on all ranks."""
    if comm._mpi is None:
        return "this group has no MPI communicator"
    return why_not_mpi(Kind.ALLREDUCE, session.dtype, session.op, alike=False)


def over_mpi(
    session: Session, case: Case, comm: Collectives, kind: Kind, arrays: Arrays
) -> Operation:
    """Return the all-reduce over pinned memory and MPI, whole or in pieces. Local.

    In pieces, the copy of one goes on beside MPI's work on another. Where :func:`why_no_mpi` gives
    no reason.
    """
    dtype, mpi = session.dtype, comm._mpi
    door, itemsize = session.gpu.doors.cuda, dtype.itemsize
    to, of = as_buffer(arrays.recv, "recvbuf"), as_buffer(arrays.send, "sendbuf")
    send, recv = (arrays.keep(door.PinnedMemory(of.nbytes)) for _ in range(2))
    step = PIECE // itemsize if case.algorithm == "pipelined MPI" else of.count
    pieces = []
    for first in range(0, of.count, step):
        size, at = min(step, of.count - first), first * itemsize
        hosts = [
            Buffer(pinned.address + at, size, dtype, MemoryKind.HOST, False)
            for pinned in (send, recv)
        ]
        call, _ = mpi_call(mpi, kind, hosts[0], hosts[1], session.op, 0)
        pieces.append((at, size * itemsize, hosts, call, arrays.keep(door.Event())))
    waiter = session.comm.waiter

    def run() -> None:
        stream = door.current_stream().ptr
        for at, nbytes, hosts, _, event in pieces:
            door.copy_async(hosts[0].address, of.address + at, nbytes, stream)
            event.record(stream)
        for at, nbytes, hosts, call, event in pieces:
            waiter.until(event.done, (), lambda: "waiting for a copy")
            call()
            door.copy_async(to.address + at, hosts[1].address, nbytes, stream)

    return Operation("mpi", (), run)
