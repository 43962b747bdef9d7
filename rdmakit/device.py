"""The GPU side of a communicator: found at the first call on GPU arrays, shared by its groups.

A group of one node runs its collectives as kernels (:class:`~rdmakit.intra.device_node.DeviceNode`)
and never waits on the host. A group that spans nodes, or a node whose GPU memory cannot be mapped,
goes through pinned host memory (:mod:`rdmakit.staging`), where the host waits for the messages.
Which it is is decided by all ranks together at the first call of the group on GPU arrays.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rdmakit.buffer import Buffer
from rdmakit.datatypes import ReduceOp
from rdmakit.drivers import cuda
from rdmakit.errors import InvalidArgument, RdmaKitError, SetupError, UnsupportedError
from rdmakit.intra.device_node import DeviceNode, Registration
from rdmakit.intra.device_words import check_memory
from rdmakit.layout import RankLayout
from rdmakit.plan.shape import Kind
from rdmakit.process.phase import current
from rdmakit.protocols import Bootstrap
from rdmakit.staging import HostCall, Staging
from rdmakit.waiting import Waiter

__all__ = ["DeviceGroup", "DeviceSide", "Gpu", "stream_of"]

_SEEN_KEPT = 4096


@dataclass(frozen=True)
class Gpu:
    """What stands between this and CUDA; a fake in tests."""

    door: Any = cuda
    """:mod:`rdmakit.drivers.cuda`."""
    create: Callable[..., Any] = DeviceNode.create
    """Makes a node's collectives."""
    check: Callable[[str, Any, int], None] = check_memory
    """Refuses memory that kernels on a device cannot use."""


@dataclass(frozen=True)
class _Held:
    """A stream of another library, kept alive."""

    ptr: int
    owner: object


def stream_of(stream: object, door: Any = cuda) -> Any:
    """Return an object with ``ptr`` that keeps the stream alive: CuPy's current one for None.

    A later call may be ordered after the last, so the stream of the last call must exist: of a
    bare number the caller sees to that.

    Raises:
        InvalidArgument: not a stream.
    """
    if stream is None:
        return door.current_stream()
    if isinstance(stream, int):
        return _Held(stream, None)
    if isinstance(getattr(stream, "ptr", None), int):  # CuPy
        return stream
    for name in ("cuda_stream", "handle"):  # PyTorch; Numba
        number = getattr(stream, name, None)
        if isinstance(number, int):
            return _Held(number, stream)
        if number is not None and hasattr(number, "value"):
            return _Held(int(number.value or 0), stream)
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return _Held(int(protocol()[1]), stream)
    raise InvalidArgument(f"stream: expected a CUDA stream, got {type(stream).__name__}")


class DeviceSide:
    """What the groups of one communicator share on this rank's GPU.

    Attributes:
        device: ordinal of the GPU; -1 before the first call on GPU arrays.
        node: the node's collectives, once made and where they can be.
        notes: what a person should know.
        crowd: most ranks of the job that may share one of this node's GPUs, other nodes' counted
            (virtual nodes); what the node goes by when it is asked alone; 0: its own only.
    """

    def __init__(
        self, job: Bootstrap, node: Bootstrap, waiter: Waiter, gpu: Gpu | None = None
    ) -> None:
        self.gpu = gpu or Gpu()
        self.device, self.crowd = -1, 0
        self.node: DeviceNode | None = None
        self.notes: list[str] = []
        self.waiter = waiter
        self._job, self._boot = job, node
        self._problem = ""
        self._tried = False
        self._seen: set[tuple[int, int, int]] = set()
        self._stagings: list[Staging] = []
        self._event: Any = None

    # -- one rank alone -----------------------------------------------------------------------

    def check(self, name: str, buffer: Buffer) -> None:
        """See that this rank's GPU can serve the array. Local.

        Raises:
            InvalidArgument: not GPU memory.
            UnsupportedError: no GPU can be used here, or the array is on another one.
        """
        key = (buffer.address, buffer.count, buffer.dtype.itemsize)
        if key in self._seen:
            return
        self._find(name)
        if buffer.device not in (-1, self.device) and buffer.count:
            raise UnsupportedError(
                f"{name} is on device {buffer.device}; this communicator's device is "
                f"{self.device}, the current one at its first call on GPU arrays"
            )
        self.gpu.check(name, buffer, self.device)
        if len(self._seen) >= _SEEN_KEPT:
            self._seen.clear()
        self._seen.add(key)

    def _find(self, name: str) -> None:
        if self.device >= 0:
            return
        reason = self.gpu.door.why_not()
        if reason:
            raise UnsupportedError(f"{name} is GPU memory, which cannot be used here: {reason}")
        device = self.gpu.door.current_device()
        self.gpu.door.activate(device)
        self.device = device

    def follow(self, stream: int, buffers: Sequence[Buffer]) -> None:
        """Order later work of ``stream`` after what makes the arrays ready. Local."""
        for buffer in buffers:
            if buffer.stream and buffer.stream != stream:
                if self._event is None:
                    self._event = self.gpu.door.Event()
                self._event.record(buffer.stream)
                self.gpu.door.wait_event(stream, self._event)

    # -- together -----------------------------------------------------------------------------

    def begin_node(self, crowd: int) -> str:
        """Make the node's collectives if it was not tried. Collective in the node, blocking.

        Returns:
            Why they cannot be made, on all ranks of the node, or nothing.
        """
        if not self._tried:
            self._tried = True
            try:
                self._find("an array")
                self.node = self.gpu.create(
                    self._boot, self.waiter, device=self.device, crowd=crowd
                )
                self.notes += self.node.notes
            except SetupError as exc:
                self._problem = str(exc)
                self.notes.append(f"GPU arrays go through pinned host memory: {exc}")
        return self._problem

    def begin_job(self) -> str:
        """The same for all nodes. Collective in the job, blocking; one answer on all ranks."""
        uuids = self._job.allgather(self.gpu.door.device_facts(self.device).uuid.encode())
        mine = self._boot.allgather(uuids[self._job.rank])
        self.begin_node(max(map(uuids.count, mine)))  # also ranks of other nodes on our GPUs
        problems = [text.decode() for text in self._job.allgather(self._problem.encode())]
        return next((f"rank {r}: {text}" for r, text in enumerate(problems) if text), "")

    def staging(self, **options: Any) -> Staging:
        """Return a way through host memory, closed with this."""
        self._stagings.append(Staging(self.gpu.door, self.waiter, **options))
        return self._stagings[-1]

    def abandon(self) -> None:
        """After an error: end waiting kernels. Local; memory stays until exit."""
        if self.node is not None:
            self.node.abort()

    def close(self) -> None:
        """Release everything. Collective in the node, blocking; after an error local."""
        if self.node is not None:
            self.node.close()
        for staging in self._stagings:
            staging.close()
        if self._event is not None:
            self._event.close()
        self.node, self._stagings, self._event = None, [], None


class DeviceGroup:
    """Collectives on GPU arrays of one group of ranks."""

    def __init__(self, side: DeviceSide, layout: RankLayout, *, spans: str) -> None:
        """Describe it. Local.

        Args:
            side: the communicator's.
            layout: where the group's ranks are.
            spans: ``node``, ``job`` or ``rail``.
        """
        self._side, self._layout, self._spans = side, layout, spans
        self._ready = False
        self._node: DeviceNode | None = None
        self._staging: Staging | None = None

    def check(self, send: Buffer, recv: Buffer) -> None:
        """See that this rank's GPU can serve the arrays. Local; raises as DeviceSide.check."""
        self._side.check("recvbuf", recv)
        if send.address != recv.address:
            self._side.check("sendbuf", send)

    def run(
        self,
        kind: Kind,
        send: Buffer,
        recv: Buffer,
        op: ReduceOp,
        root: int,
        stream: Any,
        whole: HostCall,
        rail: HostCall | None,
    ) -> None:
        """Do it on checked arrays. Collective.

        Args:
            kind: which collective.
            send: input.
            recv: output.
            op: the reduction.
            root: of a broadcast.
            stream: what the call is ordered on; None is CuPy's current stream.
            whole: does a collective of this group on host memory, blocking.
            rail: the same of this rank's rail, where the group spans nodes.
        """
        side = self._side
        stream = stream_of(stream, side.gpu.door)
        number: int = stream.ptr
        if not self._ready:
            self._begin(number)
        if send.stream or recv.stream:
            side.follow(number, (send, recv))
        if self._node is not None:
            self._node.run(kind, send, recv, op, root, stream)
        elif self._staging is not None:
            self._staging.run(kind, send, recv, op, root, stream, whole, rail)
        elif send.address != recv.address:  # alone
            side.gpu.door.copy_async(recv.address, send.address, recv.nbytes, number)

    def _begin(self, number: int) -> None:
        """Choose the way. Collective, blocking."""
        side, layout = self._side, self._layout
        if side.gpu.door.is_capturing(number):
            raise UnsupportedError(
                "the first call on GPU arrays makes windows and cannot be captured into a CUDA "
                "graph: make the same call once before"
            )
        with current.during("start of the GPU", timeout=side.waiter.timeout):
            if self._spans == "node" or len(layout.nodes) == 1:
                if layout.size > 1 or self._spans == "node":
                    problem = side.begin_node(side.crowd if self._spans == "node" else 0)
                    self._node = side.node
                    if problem:
                        self._staging = side.staging()
            elif self._spans == "rail":
                self._staging = side.staging()
            else:
                problem = side.begin_job()
                sizes = [len(ranks) for ranks in layout.nodes]
                if not problem and len(set(sizes)) > 1:
                    problem = f"nodes of {min(sizes)} to {max(sizes)} ranks have no equal shards"
                if problem:
                    side.notes.append(
                        f"all-reduces of GPU arrays between nodes go through host memory whole: "
                        f"{problem}"
                    )
                self._staging = side.staging(node=None if problem else side.node, ranks=layout.size)
        self._ready = True

    # -- memory -------------------------------------------------------------------------------

    def empty(self, shape: Any, dtype: Any) -> tuple[Any, Registration | None]:
        """Return a new zero-copy CuPy array and its registration. Collective, blocking."""
        self._side._find("a new array")
        dtype = np.dtype(dtype)
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        memory = self._side.gpu.door.DeviceMemory(int(np.prod(shape)) * dtype.itemsize)
        weakref.finalize(memory, _free, self._side.gpu.door, memory.address).atexit = False
        array = memory.array(shape, dtype)
        return array, self.register(memory.address, memory.nbytes, array)

    def register(self, address: int, nbytes: int, owner: object) -> Registration | None:
        """Make memory zero-copy in this rank's node. Collective, blocking.

        Returns:
            None where nothing can be mapped, and for an empty array.
        """
        if not self._ready:
            self._begin(0)
        node = self._side.node
        if node is None or not nbytes:
            return None
        return node.register(address, nbytes, owner)

    def unregister(self, entry: Registration | None) -> None:
        """Undo it. Collective, blocking: waits for this rank's kernels."""
        if entry is not None and self._side.node is not None:
            self._side.node.unregister(entry)

    def synchronize(self, stream: object) -> None:
        """Wait for ``stream``, moving messages. Local, blocking; raises as DeviceNode.wait."""
        side = self._side
        number: int = stream_of(stream, side.gpu.door).ptr
        if side.node is not None:
            side.node.wait(number, (side.waiter.progress,))
            return
        event = side.gpu.door.Event()
        event.record(number)
        polls = (side.waiter.progress,)
        side.waiter.until(event.done, polls, lambda: "waiting for the GPU")
        event.close()


def _free(door: Any, address: int) -> None:
    with contextlib.suppress(RdmaKitError):  # the context may be gone, and the memory with it
        door.free(address)
