"""The GPUs of a benchmark run: which each rank has, who shares one, and the doors to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from rdmakit.communicator import Communicator
from rdmakit.datatypes import dtype_of
from rdmakit.drivers import cuda, cuda_tools, nccl
from rdmakit.intra.cuda_ipc import share_window
from rdmakit.intra.posix_shm import PosixWindow
from rdmakit.plan.shape import Kind

__all__ = ["Doors", "GpuSide", "RankGpu", "find_gpus", "warm_up"]

_LARGE = 4 << 20
"""Bytes from which every collective takes its kernels for large arrays."""


@dataclass(frozen=True)
class Doors:
    """What stands between the benchmark and the GPUs; fakes in tests."""

    cuda: Any = cuda
    tools: Any = cuda_tools
    nccl: Any = nccl
    share_window: Callable[..., Any] = share_window
    """Makes GPU memory that all ranks of a node address."""
    host_window: Callable[..., Any] = PosixWindow.create
    """Makes host memory that all ranks of a node address."""


class RankGpu(msgspec.Struct, frozen=True):
    """The GPU of one rank."""

    rank: int
    host: str
    ordinal: int
    name: str
    uuid: str
    pci: str
    mps: bool
    mig: bool
    l2_bytes: int
    memory_bytes: int


@dataclass(frozen=True)
class GpuSide:
    """The GPUs of the job; equal on all ranks but for ``free``.

    Attributes:
        doors: to CUDA and NCCL.
        ranks: each rank's GPU.
        free: bytes that were free on this rank's GPU before the first row.
    """

    doors: Doors
    ranks: tuple[RankGpu, ...]
    free: int

    @cached_property
    def sharing(self) -> int:
        """Most ranks of the job on one GPU."""
        return max(Counter(gpu.uuid for gpu in self.ranks).values())

    @cached_property
    def name(self) -> str:
        """The model; several joined by ``+``."""
        return "+".join(dict.fromkeys(gpu.name for gpu in self.ranks))

    @cached_property
    def mps(self) -> bool:
        """Whether all contexts are shared through MPS."""
        return all(gpu.mps for gpu in self.ranks)

    @cached_property
    def cache(self) -> int:
        """Bytes of the smallest second-level cache."""
        return min(gpu.l2_bytes for gpu in self.ranks)

    @cached_property
    def row_fields(self) -> dict[str, Any]:
        """What every row says of the GPUs."""
        return {"gpu": self.name, "sharing": self.sharing, "mps": self.mps}

    def describe(self) -> list[str]:
        """Return a line for each GPU: which ranks have it."""
        users: dict[str, list[RankGpu]] = {}
        for gpu in self.ranks:
            users.setdefault(gpu.uuid, []).append(gpu)
        lines = []
        for those in users.values():
            first = those[0]
            ranks = ", ".join(str(gpu.rank) for gpu in those)
            mps = "with MPS" if first.mps else "without MPS"
            shared = f" share it {mps}" if len(those) > 1 else ""
            lines.append(
                f"rank{'s' if len(those) > 1 else ''} {ranks}{shared}: {first.name} at "
                f"{first.pci} of {first.host}"
            )
        return lines


def find_gpus(comm: Communicator, doors: Doors) -> GpuSide:
    """Return the GPUs of all ranks, each its current device. Collective, blocking.

    Raises:
        CudaError: this rank's driver tells nothing.
    """
    facts = doors.cuda.device_facts(doors.cuda.current_device())
    mine = RankGpu(
        comm.rank, comm.host, facts.ordinal, facts.name, facts.uuid, facts.pci, facts.mps,
        facts.mig, facts.l2_bytes, facts.memory_bytes,
    )  # fmt: skip
    told = comm.bootstrap.allgather(msgspec.json.encode(mine))
    ranks = tuple(msgspec.json.decode(entry, type=RankGpu) for entry in told)
    return GpuSide(doors, ranks, doors.tools.free_bytes())


def warm_up(comm: Communicator, dtype: str, op: str, doors: Doors) -> None:
    """Make windows and compile kernels, which is not what is measured. Collective, blocking."""
    kind = dtype_of(dtype)
    for group in (comm.node, comm):
        for count in (1, 64, _LARGE // kind.itemsize):  # elements alone, in packs, large arrays
            send, recv = (doors.tools.zeros(count * group.size, kind) for _ in range(2))
            part = doors.tools.zeros(count, kind)
            group.Allreduce(send, recv, op)
            group.Reduce_scatter_block(send, part, op)
            group.Allgather(part, recv)
            if group is comm.node:  # what is measured there alone
                group.Bcast(recv)
                group.Alltoall(send, recv)
            comm.synchronize()  # before the arrays go
    _warm_registered(comm, kind, op, doors)
    doors.tools.trim()


def _warm_registered(comm: Communicator, dtype: np.dtype[Any], op: str, doors: Doors) -> None:
    group = comm.node
    count = _LARGE // dtype.itemsize
    memory = [doors.cuda.DeviceMemory(count * group.size * dtype.itemsize) for _ in range(2)]
    whole = [part.array(count * group.size, dtype) for part in memory]
    entries = [group.register(array) for array in whole]
    if None not in entries:
        first = [part.array(count, dtype) for part in memory]
        group.bind(Kind.ALLREDUCE, whole[0], whole[1], op)()
        group.bind(Kind.REDUCE_SCATTER, whole[0], first[1], op)()
        group.bind(Kind.ALLGATHER, first[0], whole[1], op)()
        group.bind(Kind.BROADCAST, whole[1], whole[1], op)()
        group.bind(Kind.ALLTOALL, whole[0], whole[1], op)()
        comm.synchronize()
    for entry in entries:
        if entry is not None:
            group.unregister(entry)
    comm.bootstrap.barrier()
    for part in memory:
        part.close()
