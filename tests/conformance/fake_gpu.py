"""A GPU made of host memory: streams that do nothing until they are looked at."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from rdmakit.buffer import Buffer, Strided, array_at, bytes_at
from rdmakit.communicator import Communicator
from rdmakit.config import Config
from rdmakit.datatypes import MemoryKind, ReduceOp
from rdmakit.device_side import Gpu
from rdmakit.errors import SetupError
from rdmakit.intra.cuda_ipc import Shared
from rdmakit.intra.device_local import strided_args
from rdmakit.intra.device_registry import Registry
from rdmakit.layout import RankLayout
from rdmakit.memory import MemoryBootstrap, MemoryChannel, MemoryWindow
from rdmakit.plan.pieces import FLAGS
from rdmakit.plan.shape import Form, Kind
from rdmakit.protocols import Arrived
from rdmakit.reduction import reducer


class Array:
    """A NumPy array that shows itself as GPU memory."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array, self.dtype = array, array.dtype
        self.__cuda_array_interface__ = {
            "shape": array.shape, "typestr": array.dtype.str, "version": 3,
            "data": (array.ctypes.data, not array.flags.writeable), "strides": array.strides,
        }  # fmt: skip


class _Memory:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.bytes = np.full(nbytes + 64, 0xA5, np.uint8)
        self.address = self.bytes.ctypes.data

    def array(self, shape: Any, dtype: Any) -> Array:
        return Array(array_at(self.address, int(np.prod(shape)), np.dtype(dtype)).reshape(shape))

    def close(self) -> None:
        assert (self.bytes[self.nbytes :] == 0xA5).all(), "written beyond its end"


class _Stream:
    def __init__(self) -> None:
        self.ptr = 1

    def close(self) -> None:
        pass


class DeviceMessages(MemoryChannel):
    """A channel that takes "GPU" memory as it is."""

    way = "gpu-direct"

    def wrap_device(self, address: int, nbytes: int) -> Any:
        return bytes_at(address, nbytes)

    def arrived(self, tag: int, mask: int) -> Arrived | None:
        found = super().arrived(tag, mask)
        if found is not None:
            receive = found.receive
            found.receive_device = lambda address, nbytes: receive(bytes_at(address, nbytes))
        return found


class Door:
    """Of one rank: copies happen when an event is asked for the second time, or the node calls."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], object]] = deque()
        self._working = threading.RLock()  # the progress thread looks at events too
        self.launched: list[str] = []
        self.capturing = False
        self.DeviceMemory = self.PinnedMemory = _Memory
        door = self

        class Event:
            def __init__(self) -> None:
                self.asked = 0

            def record(self, stream: int) -> None:
                self.asked = 0

            def done(self) -> bool:
                self.asked += 1
                if self.asked > 1:
                    door.drain()
                return self.asked > 1

            def close(self) -> None:
                pass

        self.Event = Event
        self.Stream = _Stream
        self.flushes, self.flush_bits = 0, 1

    def drain(self) -> None:
        with self._working:
            while self.queue:
                self.queue.popleft()()

    def copy_async(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        self.queue.append(lambda: ctypes.memmove(dst, src, nbytes))

    def why_not(self) -> str:
        return ""

    def current_device(self) -> int:
        return 0

    def current_stream(self) -> SimpleNamespace:
        return SimpleNamespace(ptr=0)

    def activate(self, device: int) -> None:
        pass

    def device_facts(self, device: int) -> SimpleNamespace:
        return SimpleNamespace(
            uuid="GPU-0", gpudirect_ordering=100, gpudirect_flush=self.flush_bits
        )

    def is_capturing(self, stream: int) -> bool:
        return self.capturing

    def wait_event(self, stream: int, event: object) -> None:
        pass

    def free(self, address: int) -> None:
        self.drain()  # as the device does: what is under way may use it

    def flush_nic_writes(self, *, all_devices: bool) -> None:
        assert all_devices
        self.flushes += 1

    def combine(
        self, device: int, dst: int, srcs: Sequence[int], count: int, dtype: str, op: ReduceOp
    ) -> Callable[[int], object]:
        """Reduce when the queue is worked off, as a kernel would."""
        kind = np.dtype(dtype)
        reduce = reducer(kind, op)

        def later() -> None:
            reduce(array_at(dst, count, kind), [array_at(src, count, kind) for src in srcs])

        return lambda stream: self.queue.append(later)


class Node:
    """A node's collectives, done on the host at once."""

    notes = ("fake GPU",)

    def __init__(
        self, door: Door, boot: MemoryBootstrap, crowd: int, *, resident: bool = True
    ) -> None:
        self.grid = SimpleNamespace(resident=resident)
        self.facts = [SimpleNamespace(uuid=f"GPU-{rank}") for rank in range(boot.size)]
        window = MemoryWindow.create(boot, 1 << 16, FLAGS) if boot.size > 1 else None
        self._comm = Communicator.from_parts(
            boot, RankLayout.of_sizes([boot.size]), window, None, Config(timeout=20)
        )
        self.size, self.crowd, self.door, self.registered = boot.size, crowd, door, 0
        self.registry = Registry()
        self.ran: list[Kind] = []

    def run(self, kind: Kind, send: Any, recv: Any, op: Any, root: int, stream: Any) -> None:
        self.door.drain()
        self.ran.append(kind)
        form = Form(send.count // self.size) if kind is Kind.ALLTOALL else None
        self._comm._on_host(kind, _host(send), _host(recv), op, root, form=form)

    def register(self, address: int, nbytes: int, owner: object) -> object:
        sizes = {int(x) for x in self._comm.bootstrap.allgather(str(nbytes).encode())}
        if len(sizes) > 1:
            raise SetupError("sizes differ")
        self.registered += 1
        addresses = tuple(self._comm.bootstrap.share(address))
        return self.registry.add(address, Shared(addresses, nbytes, owner))

    def unregister(self, entry: Any) -> None:
        self.registered -= 1
        self.registry.remove(entry)

    def registration(self, address: int, nbytes: int) -> Any:
        return self.registry.find(address, nbytes)

    def check(self) -> None:
        pass

    def abort(self) -> None:
        pass

    def wait(self, stream: int, polls: Any = ()) -> None:
        self.door.drain()

    def close(self) -> None:
        self.door.drain()
        self._comm.close()
        for entry in self.registry:  # as the real one: after all have unmapped it
            if isinstance(entry.shared.owner, _Memory):
                entry.shared.owner.close()


def _host(buffer: Any) -> Buffer:
    return Buffer(buffer.address, buffer.count, buffer.dtype, MemoryKind.HOST, False)


class _Shared:
    """Windows that a node's threads address."""

    def __init__(self, boot: MemoryBootstrap, nbytes: int) -> None:
        self.own = _Memory(nbytes)
        self.addresses = tuple(memory.address for memory in boot.share(self.own))

    def close(self, boot: MemoryBootstrap) -> None:
        boot.barrier()
        self.own.close()


def places(args: Any) -> Any:
    """Return the address of each unit, as the kernels pack and unpack find it."""
    index = np.arange(args.first, args.first + args.count, dtype=np.int64)
    at = np.full(args.count, args.strided, dtype=np.int64)
    for d in range(args.dims - 1):
        index, rest = np.divmod(index, args.shape[d])
        at += rest * args.stride[d]
    return at + index * args.stride[args.dims - 1]


def copy_strided(
    packed: int, at: int, strided: Strided, count: int, itemsize: int, *, out: bool
) -> None:
    """Do what the kernel pack, or with ``out`` unpack, does."""
    unit, args = strided_args(packed, at, strided, count, itemsize)
    where = places(args)
    low = int(where.min())
    assert args.count * unit == count * itemsize
    assert not packed % unit
    assert not (where % unit).any(), "the kernels load whole units"
    memory = bytes_at(low, int(where.max()) + unit - low)
    rows = (where - low)[:, None] + np.arange(unit)
    flat = bytes_at(packed, count * itemsize).reshape(-1, unit)
    if out:
        memory[rows] = flat
    else:
        flat[:] = memory[rows]


def make(*, denied: bool = False, resident: bool = True) -> Gpu:
    """Return one rank's GPU; ``denied``: memory cannot be mapped; ``resident``: kernels are."""
    door = Door()

    def create(boot: MemoryBootstrap, waiter: object, *, device: int, crowd: int) -> Node:
        if denied:
            raise SetupError("local rank 0: CUDA IPC is refused")
        return Node(door, boot, crowd, resident=resident)

    def window(boot: MemoryBootstrap, facts: object, nbytes: int) -> _Shared:
        return _Shared(boot, nbytes)

    def kernel(*, out: bool) -> Any:
        def bind(device: int, *args: Any) -> Callable[[int], None]:
            def launch(stream: int) -> None:
                door.launched.append("unpack" if out else "pack")
                door.queue.append(lambda: copy_strided(*args, out=out))

            return launch

        return bind

    return Gpu(
        door,
        create,
        lambda name, buffer, device: None,
        kernel(out=False),
        kernel(out=True),
        window,
        door.combine,
    )


__all__ = ["Array", "DeviceMessages", "Door", "Node", "copy_strided", "make", "places"]
