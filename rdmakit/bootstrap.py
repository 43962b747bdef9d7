"""The control plane over MPI: ranks, small bytes, barriers, abort. The only door to mpi4py.

mpi4py.MPI is imported when a communicator is made, after the launcher was compared with the
library it would load (see ``process.launcher``).
"""

from __future__ import annotations

import ctypes
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import parent_process
from types import ModuleType
from typing import Any

import numpy as np

from rdmakit.errors import SetupError
from rdmakit.process.launcher import (
    check_before_mpi,
    check_world,
    launcher_of,
    mpi_family_to_load,
)
from rdmakit.process.origin import forked, forked_with_mpi

__all__ = ["FORKED", "Letters", "MpiBootstrap", "cuda_aware", "load_mpi", "may_be_threaded"]

FORKED = (
    "this process was forked from a rank and is none; start processes with multiprocessing's spawn"
)
"""Why a forked child can do nothing here: MPI, UCX and the progress thread are its parent's."""
_STARTED = (
    "this process was started by multiprocessing in rank {rank} and is none: it has inherited the "
    "launcher's variables of that rank; communicate in the rank itself"
)

_checked = False
_owner = 0
"""Process that imported MPI."""
_NAP_AFTER, _NAP = 0.02, 1e-4
"""Seconds: a long wait must not take the core from ranks that work."""


def load_mpi() -> ModuleType:
    """Import mpi4py.MPI (which calls MPI_Init) and return it. Idempotent.

    Raises:
        SetupError: no MPI library, one that does not fit the launcher, or MPI sees one rank
            where the launcher started several; or this is a child of a rank.
    """
    global _checked, _owner
    if _owner != os.getpid() and (reason := _why_no_rank()):
        raise SetupError(reason)
    launcher = None if _checked else check_before_mpi()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as exc:
        raise SetupError(f"mpi4py cannot load MPI: {exc}") from exc
    _owner = os.getpid()
    if launcher is not None:
        check_world(launcher, MPI.COMM_WORLD.Get_size())
        _checked = True
    return MPI


def _why_no_rank() -> str:
    """Return why MPI must not be loaded here, or nothing.

    A child that was made before MPI was loaded has the launcher's variables: MPI_Init would answer
    for a rank that is there already. One forked before ``import rdmakit`` cannot be told apart.
    """
    if _owner or forked_with_mpi():
        return FORKED
    launcher = launcher_of(os.environ)
    if launcher.kind is None:
        return ""  # no rank's child: MPI makes a world of one
    if forked():
        return FORKED
    return _STARTED.format(rank=launcher.rank) if parent_process() is not None else ""


def may_be_threaded() -> bool:
    """Return whether several threads may call MPI at once. Local, after ``load_mpi``."""
    mpi = load_mpi()
    return bool(mpi.Query_thread() >= mpi.THREAD_MULTIPLE)


class MpiBootstrap:
    """Control plane of the ranks of one MPI communicator, on a duplicate of it."""

    def __init__(self, comm: Any = None, *, duplicate: bool = True) -> None:
        """Make it. Collective over ``comm`` (default: COMM_WORLD)."""
        mpi = load_mpi()
        comm = mpi.COMM_WORLD if comm is None else comm
        self.comm: Any = comm.Dup() if duplicate else comm
        self.rank: int = self.comm.Get_rank()
        self.size: int = self.comm.Get_size()
        self.host = socket.gethostname()
        self.meanwhile: Callable[[], None] | None = None
        """Called while others are waited for: a channel that only moves when it is polled."""

    def allgather(self, data: bytes) -> list[bytes]:
        """Return every rank's ``data``, by rank."""
        self._gather_ranks()
        return list(self.comm.allgather(data))

    def barrier(self) -> None:
        """Return when all ranks have called."""
        if self.meanwhile is None:
            self.comm.Barrier()
        else:
            self._gather_ranks()

    def _gather_ranks(self) -> None:
        """Let the channel move until all ranks are here: then none needs this one's messages."""
        if self.meanwhile is None or self.size == 1:
            return
        request = self.comm.Ibarrier()
        nap_from = time.monotonic() + _NAP_AFTER
        while not request.Test():
            self.meanwhile()
            if time.monotonic() < nap_from:
                os.sched_yield()
            else:
                time.sleep(_NAP)

    def start_barrier(self) -> Callable[[], bool]:
        """Start a barrier and return its test."""
        request = self.comm.Ibarrier()
        return lambda: bool(request.Test())

    def start_gather(self, data: bytes) -> Callable[[], list[bytes] | None]:
        """Start an all-gather and return its test."""
        steps = self._gather(data)
        result: list[bytes] | None = None

        def test() -> list[bytes] | None:
            nonlocal result
            if result is None:
                result = next(steps)
            return result

        test()  # the first step is started now
        return test

    def _gather(self, data: bytes) -> Iterator[list[bytes] | None]:
        byte = load_mpi().BYTE
        counts = np.zeros(self.size, np.int64)
        request = self.comm.Iallgather(np.array([len(data)], np.int64), counts)
        while not request.Test():
            yield None
        places = np.cumsum(counts) - counts
        told = np.empty(int(counts.sum()), np.uint8)
        mine = np.frombuffer(data, np.uint8)
        request = self.comm.Iallgatherv(
            [mine, len(data), byte], [told, (counts.tolist(), places.tolist()), byte]
        )
        while not request.Test():
            yield None
        yield [told[p : p + n].tobytes() for p, n in zip(places, counts, strict=True)]

    def split(self, color: int, key: int) -> MpiBootstrap:
        """Return the control plane of the ranks with equal ``color``, ordered by ``key``."""
        return MpiBootstrap(self.comm.Split(color, key), duplicate=False)

    def subset(self, ranks: Sequence[int]) -> MpiBootstrap:
        """Return the control plane of ``ranks``, in that order. Collective in these alone."""
        group = self.comm.Get_group()
        part = group.Incl(list(ranks))
        try:
            return MpiBootstrap(self.comm.Create_group(part), duplicate=False)
        finally:
            part.Free()
            group.Free()

    def abort(self, code: int) -> None:
        """End every rank of the job."""
        self.comm.Abort(code)

    def free(self) -> None:
        """Release the communicator. Collective in MPI's sense."""
        if self.comm:
            self.comm.Free()

    @staticmethod
    def describe() -> dict[str, object]:
        """Return what this MPI is: library text, standard, mpi4py's version and thread level."""
        mpi = load_mpi()
        import mpi4py

        vendor, version = mpi.get_vendor()
        return {
            "vendor": vendor,
            "version": ".".join(map(str, version)),
            "library": mpi.Get_library_version().strip().splitlines()[0].strip("\x00 "),
            "standard": ".".join(map(str, mpi.Get_version())),
            "mpi4py": mpi4py.__version__,
            "pid": os.getpid(),
        }


class Letters:
    """Small messages between single ranks of COMM_WORLD; no call waits for another rank.

    For work in which some ranks may hang: nothing here is collective.
    """

    _TAG = 0x2D0C

    def __init__(self) -> None:
        """Make it. Local, blocking only where MPI is not up yet (MPI_Init)."""
        self._mpi = load_mpi()
        self.comm: Any = self._mpi.COMM_WORLD
        self.rank: int = self.comm.Get_rank()
        self.size: int = self.comm.Get_size()
        self._sent: list[tuple[Any, int, bytes]] = []

    def send(self, rank: int, data: bytes) -> None:
        """Start to send ``data``; it moves while :meth:`receive` is called."""
        request = self.comm.Isend([data, self._mpi.BYTE], rank, self._TAG)
        self._sent.append((request, rank, data))

    def receive(self) -> tuple[int, bytes] | None:
        """Return a message that has arrived and its sender, or None."""
        self._sent = [entry for entry in self._sent if not entry[0].Test()]
        status = self._mpi.Status()
        message = self.comm.Improbe(self._mpi.ANY_SOURCE, self._TAG, status)
        if message is None:
            return None
        data = bytearray(status.Get_count(self._mpi.BYTE))
        message.Recv([data, self._mpi.BYTE])
        return status.Get_source(), bytes(data)

    def abort(self, code: int) -> None:
        """End every rank of the job."""
        self.comm.Abort(code)

    @property
    def unsent(self) -> set[int]:
        """Ranks to whom something is still under way from here; ask after :meth:`receive`."""
        return {rank for _, rank, _ in self._sent}


def cuda_aware() -> str:
    """Return whether the MPI library takes GPU memory, by its own word: yes, no or unknown.

    Local, after ``load_mpi``. MPIX_Query_cuda_support is an extension of Open MPI and MPICH.
    """
    load_mpi()
    _, library = mpi_family_to_load()
    try:
        query = ctypes.CDLL(str(library)).MPIX_Query_cuda_support
    except (OSError, AttributeError):
        return "unknown"
    return "yes" if query() else "no"
