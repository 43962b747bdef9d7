"""GPUs of host memory for whole runs of the benchmark: every door that it goes through."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from rdmakit.bench.gpus import Doors
from rdmakit.buffer import array_at, bytes_at
from rdmakit.device_side import Gpu
from rdmakit.errors import SetupError
from rdmakit.memory import MemoryBootstrap, MemoryChannel, MemoryWindow, Post
from rdmakit.plan.shape import Kind
from tests.conformance.fake_gpu import Array, Door, Node


class BenchDoor(Door):
    """What of :mod:`rdmakit.drivers.cuda` the benchmark uses, of one rank with GPU ``uuid``."""

    def __init__(self, uuid: str) -> None:
        super().__init__()
        self.uuid = uuid
        self.live: list[Any] = []
        door = self
        plain = self.DeviceMemory

        class Memory(plain):  # type: ignore[valid-type,misc]
            def __init__(self, nbytes: int, *, zero: bool = False) -> None:
                super().__init__(nbytes)
                if zero:
                    self.bytes[:nbytes] = 0
                door.live.append(self)

            def close(self) -> None:
                door.drain()
                super().close()
                if self in door.live:
                    door.live.remove(self)

        self.DeviceMemory = self.PinnedMemory = Memory

    def copy_now(self, dst: int, src: int, nbytes: int) -> None:
        self.drain()
        ctypes.memmove(dst, src, nbytes)

    def device_facts(self, device: int) -> SimpleNamespace:
        return SimpleNamespace(
            ordinal=0, uuid=self.uuid, pci="0000:00:06.0", name="Fake 1", mps=True, mig=False,
            l2_bytes=1 << 20, memory_bytes=1 << 30,
            gpudirect_ordering=100, gpudirect_flush=1,
        )  # fmt: skip


class Tools:
    """:mod:`rdmakit.drivers.cuda_tools`."""

    def __init__(self) -> None:
        self.pinned: set[int] = set()

    def free_bytes(self) -> int:
        return 1 << 30

    def link_between(self, mine: str, theirs: str) -> str:
        return "same-GPU" if mine == theirs else "NVLink"

    def zeros(self, count: int, dtype: Any) -> Array:
        return Array(np.zeros(count, dtype))

    def trim(self) -> None:
        pass

    def new_stream(self) -> SimpleNamespace:
        return SimpleNamespace(ptr=1)

    def pin(self, address: int, nbytes: int) -> None:
        assert nbytes
        self.pinned.add(address)

    def unpin(self, address: int) -> None:
        self.pinned.remove(address)


class Nccl:
    """:mod:`rdmakit.drivers.nccl`: one rank's module; all ranks share ``_worlds``."""

    DTYPES = ("float32", "float64", "int32", "int64", "float16")
    OPERATIONS = ("SUM", "PROD", "MAX", "MIN")
    _worlds: ClassVar[dict[bytes, list[MemoryBootstrap]]] = {}
    _lock = threading.Lock()

    def __init__(self, reason: str = "") -> None:
        self.reason = reason

    def why_not(self) -> str:
        return self.reason

    def version(self) -> str:
        return "2.28.9"

    def unique_id(self) -> bytes:
        with self._lock:
            identity = len(self._worlds).to_bytes(128, "big")
            self._worlds[identity] = []
        return identity

    def NcclGroup(self, size: int, identity: bytes, rank: int) -> _NcclGroup:
        with self._lock:
            if not self._worlds[identity]:
                self._worlds[identity] += MemoryBootstrap.world(size)
        return _NcclGroup(self._worlds[identity][rank])


class _NcclGroup:
    def __init__(self, boot: MemoryBootstrap) -> None:
        self.boot = boot

    def run(
        self, kind: Kind, send: int, recv: int, count: int, dtype: Any, op: Any, stream: int
    ) -> None:
        n, rank = self.boot.size, self.boot.rank
        sizes = {
            Kind.REDUCE_SCATTER: (count * n, count), Kind.ALLGATHER: (count, count * n),
            Kind.ALLTOALL: (count * n, count * n),
        }  # fmt: skip
        given, got = sizes.get(kind, (count, count))
        all_ = self.boot.share(array_at(send, given, dtype).copy())
        to = array_at(recv, got, dtype)
        if kind is Kind.ALLGATHER:
            to[:] = np.concatenate(all_)
            return
        if kind is Kind.ALLTOALL:
            part = slice(rank * count, (rank + 1) * count)
            to[:] = np.concatenate([sent[part] for sent in all_])
            return
        if kind is Kind.BROADCAST:
            to[:] = all_[0]
            return
        ufunc = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
        total = ufunc[op.value].reduce(all_)
        to[:] = total[rank * count : (rank + 1) * count] if kind is Kind.REDUCE_SCATTER else total

    def close(self) -> None:
        pass


class Shared:
    """Windows of all ranks in one process: an address is good everywhere."""

    room = True
    """Whether a GPU has any left."""

    def __init__(self, memory: Any, addresses: tuple[int, ...]) -> None:
        self.memory, self.addresses = memory, addresses

    def close(self, bootstrap: MemoryBootstrap) -> None:
        bootstrap.barrier()
        self.memory.close()


class DirectChannel(MemoryChannel):
    """A channel that takes GPU memory by its address."""

    why_no_device = ""

    def wrap_device(self, address: int, nbytes: int) -> Any:
        return bytes_at(address, nbytes)


class UcxLike(DirectChannel):
    """What the reference of one node opens, as :class:`rdmakit.inter.ucx.UcxChannel`."""

    shared = Post()
    address = b"here"
    opened = 0

    @classmethod
    def open(cls, rank: int, policy: str, *, virtual: bool, local: bool) -> UcxLike:
        assert local
        assert not virtual
        cls.opened += 1
        return cls(rank, cls.shared)

    def connect(self, addresses: Any) -> None:
        assert addresses == [b"here", b"here"]

    def greet(self, peers: Any, waiter: Any) -> None:
        assert peers == [1 - self.rank]

    def close(self) -> None:
        type(self).opened -= 1


def make(uuid: str, *, denied: bool = False, nccl: str = "") -> tuple[Gpu, Doors]:
    """Return one rank's GPU for a communicator, and the doors for the benchmark.

    Args:
        uuid: of its GPU.
        denied: memory cannot be mapped.
        nccl: why NCCL cannot be used.
    """
    door = BenchDoor(uuid)

    def create(boot: MemoryBootstrap, waiter: object, *, device: int, crowd: int) -> Node:
        if denied:
            raise SetupError("local rank 0: CUDA IPC is refused")
        return Node(door, boot, crowd)

    def share_window(boot: MemoryBootstrap, facts: Any, nbytes: int) -> Shared:
        assert [fact.uuid for fact in facts]
        if denied:
            raise SetupError("local rank 0: CUDA IPC is refused")
        if not Shared.room:
            raise SetupError("no window on this node's GPUs")
        memory = door.DeviceMemory(nbytes, zero=True)
        told = boot.allgather(str(memory.address).encode())
        return Shared(memory, tuple(int(text) for text in told))

    def host_window(boot: MemoryBootstrap, nbytes: int, flags: int, *, named: bool) -> Any:
        return MemoryWindow.create(boot, nbytes, flags)

    check: Callable[..., None] = lambda name, buffer, device: None  # noqa: E731
    doors = Doors(door, Tools(), Nccl(nccl), share_window, host_window)
    return Gpu(door, create, check, window=share_window, combine=door.combine), doors
