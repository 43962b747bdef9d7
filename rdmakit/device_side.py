"""The GPU of a communicator's rank: found at the first call on GPU arrays, shared by its groups."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import msgspec

from rdmakit.buffer import Buffer
from rdmakit.device_mail import DeviceMail
from rdmakit.drivers import cuda
from rdmakit.errors import CudaError, InvalidArgument, SetupError, UnsupportedError
from rdmakit.executor import Guard, Places
from rdmakit.inter.staged import StagedChannel
from rdmakit.intra import device_local
from rdmakit.intra.cuda_ipc import share_window
from rdmakit.intra.device_node import DeviceNode
from rdmakit.intra.device_words import check_memory
from rdmakit.layout import RankLayout
from rdmakit.lending import SLOT, SLOTS, Borrower, Lender
from rdmakit.packing import DevicePacking
from rdmakit.protocols import Bootstrap, Channel, DeviceChannel, Window
from rdmakit.staging import Staging
from rdmakit.stepped import AREA, Stepped
from rdmakit.waiting import Waiter

__all__ = ["DeviceSide", "Gpu", "stream_of"]

_SEEN_KEPT = 4096
_QUARANTINE: list[object] = []
"""Sides of communicators that failed, with the memory that peers have mapped."""


@dataclass(frozen=True)
class Gpu:
    """What stands between this and CUDA; a fake in tests."""

    door: Any = cuda
    """:mod:`rdmakit.drivers.cuda`."""
    create: Callable[..., Any] = DeviceNode.create
    """Makes a node's collectives."""
    check: Callable[[str, Any, int], None] = check_memory
    """Refuses memory that kernels on a device cannot use."""
    pack: Callable[..., Any] = device_local.pack
    """Gathers an array with gaps."""
    unpack: Callable[..., Any] = device_local.unpack
    """Scatters into one."""
    window: Callable[..., Any] = share_window
    """Makes memory that a node's ranks address."""
    combine: Callable[..., Callable[[int], object]] = device_local.combine
    """Reduces arrays into one: (device, dst, srcs, count, dtype, op)."""


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


class Member(Protocol):
    """What a group tells of itself."""

    layout: RankLayout
    rank: int
    places: Places
    counters: Window | None
    next_tag: Callable[[], int]
    label: str


class DeviceSide:
    """What the groups of one communicator share on this rank's GPU.

    Attributes:
        device: ordinal of the GPU; -1 before the first call on GPU arrays.
        node: the node's collectives, once made and where they can be.
        notes: what a person should know.
        channel: carries messages between nodes; None where there is one node.
        why_staged: why its messages take no GPU memory; empty, on all ranks, where they do.
        neighbours: the rank in the node of each other rank of the communicator that is there.
        lender: lends GPU memory to them for messages, once the node is made.
        borrower: takes what they lend.
        crowd: most ranks of the job that may share one of this node's GPUs, other nodes' counted
            (virtual nodes); what the node goes by when it is asked alone; 0: its own only.
    """

    def __init__(
        self,
        job: Bootstrap,
        node: Bootstrap,
        waiter: Waiter,
        guard: Guard,
        gpu: Gpu | None = None,
    ) -> None:
        self.gpu = gpu or Gpu()
        self.device, self.crowd = -1, 0
        self.node: DeviceNode | None = None
        self.notes: list[str] = []
        self.waiter, self.guard = waiter, guard
        self._threads = {threading.get_ident()}
        self.channel: Channel | None = None
        self.why_staged = ""
        self.neighbours: Mapping[int, int] = {}
        self.lender: Lender | None = None
        self.borrower = Borrower(self)
        self._job, self._boot = job, node
        self._problem = ""
        self._tried = False
        self._seen: set[tuple[int, int, int]] = set()
        self._ways: list[Staging | Stepped] = []
        self._packing: DevicePacking | None = None
        self._mail: DeviceMail | None = None
        self._messages: DeviceChannel | None = None
        self._instead: StagedChannel | None = None
        self._unflushed = False
        self._shared: Any = None
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

    def enter(self) -> None:
        """Make the device current in this thread, if it is not the program's own. Local."""
        me = threading.get_ident()
        if me not in self._threads:
            self.gpu.door.activate(self.device)
            self._threads.add(me)

    def refuse_capture(self, stream: object, what: str) -> None:
        """Raise UnsupportedError where ``stream`` goes into a CUDA graph. Local."""
        if self.gpu.door.is_capturing(stream_of(stream, self.gpu.door).ptr):
            raise UnsupportedError(
                f"{what} cannot be captured into a CUDA graph: call it before the capture begins "
                "or after it has ended"
            )

    def follow(self, stream: int, buffers: Sequence[Buffer]) -> None:
        """Order later work of ``stream`` after what makes the arrays ready. Local.

        Raises:
            UnsupportedError: ``stream`` is captured, and an array names another one.
        """
        for buffer in buffers:
            if buffer.stream and buffer.stream != stream:
                if self.gpu.door.is_capturing(stream):
                    raise UnsupportedError(
                        f"an array is ready on stream {buffer.stream:#x}, outside of the CUDA "
                        "graph under capture: give the stream of the capture as the array's, or "
                        "pass a CuPy array"
                    )
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
            else:
                self._begin_lending()
        return self._problem

    def _begin_lending(self) -> None:
        """Register the slots that messages go through. Collective in the node, blocking."""
        if self._boot.size == 1 or self.node is None:
            return
        memory, problem = None, ""
        try:
            memory = self.gpu.door.DeviceMemory(SLOT * SLOTS)
        except (CudaError, MemoryError) as exc:
            problem = f"no room for {SLOT * SLOTS} bytes: {exc}"
        told = [text.decode() for text in self._boot.allgather(problem.encode())]
        problem = next((f"local rank {r}: {text}" for r, text in enumerate(told) if text), "")
        if not problem and memory is not None:
            try:
                slots = self.node.register(memory.address, memory.nbytes, memory)
                self.lender = Lender(self.node, slots, self.neighbours)
                return
            except SetupError as exc:  # on every rank of the node
                problem = str(exc)
        if memory is not None:
            memory.close()
        self.notes.append(
            f"messages of GPU memory in the node go through pinned host memory: {problem}"
        )

    @property
    def resident(self) -> bool:
        """Whether all kernels of this node's ranks run at once."""
        return self.node is None or self.node.grid.resident

    def begin_job(self) -> tuple[str, bool]:
        """The same for all nodes. Collective in the job, blocking.

        Returns:
            Why some node has no collectives, or nothing; and whether all nodes' kernels can run
            at once. Equal on all ranks.
        """
        uuids = self._job.allgather(self.gpu.door.device_facts(self.device).uuid.encode())
        mine = self._boot.allgather(uuids[self._job.rank])
        self.begin_node(max(map(uuids.count, mine)))  # also ranks of other nodes on our GPUs
        mine_ = (self._problem, self.resident, self._flushing == "impossible")
        told = self._job.allgather(msgspec.json.encode(mine_))
        answers = [msgspec.json.decode(text, type=tuple[str, bool, bool]) for text in told]
        problem = next((f"rank {r}: {text}" for r, (text, *_) in enumerate(answers) if text), "")
        self._unflushed = any(impossible for *_, impossible in answers)
        return problem, all(resident for _, resident, _ in answers)

    @property
    def direct(self) -> bool:
        """Whether messages take GPU memory as it is; equal on all ranks."""
        return self.channel is not None and not self.why_staged

    def messages(self) -> DeviceChannel | None:
        """Return what carries messages of GPU memory. Local; None in a job of one node."""
        if self._messages is None and self.channel is not None:
            if self.direct:
                self._messages = self.channel  # type: ignore[assignment]
                self.notes.append(
                    "messages of GPU memory: UCX on device pointers; not proven that a NIC reads "
                    "the GPU's memory"
                )
            else:
                self._messages = StagedChannel(self.gpu.door, self.channel)
                self.notes.append(
                    f"messages of GPU memory go through pinned host memory: {self.why_staged}"
                )
        return self._messages

    def areas(self) -> Sequence[int]:
        """Return where this node's windows for steps are. Collective in the node, blocking."""
        if self._shared is None:
            assert self.node is not None
            self._shared = self.gpu.window(self._boot, self.node.facts, AREA)
        addresses: Sequence[int] = self._shared.addresses
        return addresses

    def stepped(self, group: Member, *, window: bool) -> Stepped:
        """Return a group's collectives as programs, closed with this.

        Collective in the node, blocking, with ``window``; else local.
        """
        areas = self.areas() if window else ()
        channel = self.messages() if len(group.layout.nodes) > 1 else None
        if channel is not None and window and self.direct and self._unflushed:
            # Peers would read what a NIC wrote into the window, and could see old bytes.
            assert self.channel is not None
            channel = self._instead = StagedChannel(self.gpu.door, self.channel)
        flush = None
        if channel is self.channel and self._flushing == "needed":
            flush = partial(self.gpu.door.flush_nic_writes, all_devices=True)
        made = Stepped(
            group.layout,
            group.rank,
            group.places,
            areas={rank: areas[i] for rank, i in group.places.window.items()} if window else {},
            counters=group.counters,
            channel=channel,
            waiter=self.waiter,
            guard=self.guard,
            door=self.gpu.door,
            combine=partial(self.gpu.combine, self.device),
            flush=flush,
            enter=self.enter,
            next_tag=group.next_tag,
            label=group.label,
        )
        self._ways.append(made)
        return made

    @property
    def _flushing(self) -> str:
        """What this node's other GPUs need to see what a NIC wrote into this rank's."""
        if self.node is None or len({facts.uuid for facts in self.node.facts}) == 1:
            return "none"
        facts = self.gpu.door.device_facts(self.device)
        if facts.gpudirect_ordering >= 200:  # all devices
            return "none"
        return "needed" if facts.gpudirect_flush & 1 else "impossible"

    @property
    def packing(self) -> DevicePacking:
        """What gathers arrays with gaps, closed with this."""
        if self._packing is None:
            self._packing = DevicePacking(self.gpu, self.device, self.waiter)
        return self._packing

    @property
    def mail(self) -> DeviceMail:
        """What messages between two ranks take, closed with this. Local."""
        if self._mail is None:
            self._mail = DeviceMail(
                self.gpu, self.device, self.enter, direct=self.direct, lender=lambda: self.lender
            )
        return self._mail

    def staging(self, **options: Any) -> Staging:
        """Return a way through host memory, closed with this."""
        made = Staging(self.gpu.door, self.waiter, **options)
        self._ways.append(made)
        return made

    def abandon(self) -> None:
        """After an error: end waiting kernels. Local; memory stays until exit."""
        if self.node is not None:
            self.node.abort()
            _QUARANTINE.append(self)  # peers' kernels may still write to what is registered

    def close(self) -> None:
        """Release everything. Collective in the node, blocking; after an error local.

        Programs and stagings wait for the device; then the windows they used are unmapped by all,
        then the node's own.
        """
        for part in (*self._ways, self._packing, self._mail):
            if part is not None:
                part.close()
        for channel in (self._messages, self._instead):
            if isinstance(channel, StagedChannel):
                channel.close()
        if self._shared is not None:
            self._shared.close(self._boot)
        if self.node is not None:
            self.node.close()
        if self._event is not None:
            self._event.close()
        self.node, self._shared, self._messages, self._event = None, None, None, None
        self._instead, self._packing, self._mail, self.lender = None, None, None, None
        self._ways = []
