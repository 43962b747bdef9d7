"""Collectives on GPU arrays of one group: which way they go, and memory that is zero-copy.

There are four ways. Which it is, all ranks decide together at the group's first call on GPU arrays:

- ``kernels``: a node whose ranks' kernels run at once, by one kernel a call
  (:class:`~rdmakit.intra.device_node.DeviceNode`); the host never waits.
- ``steps``: copies, reductions and messages that the host issues one by one
  (:mod:`rdmakit.stepped`): a node whose kernels cannot run at once, unequal nodes, a rail with
  GPUDirect.
- ``shards``: equal nodes: kernels reduce and gather inside them, the shards go over the rails
  (:mod:`rdmakit.staging`).
- ``host``: all of it through pinned host memory (the same module), where memory of peers cannot be
  mapped.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from rdmakit.buffer import Buffer
from rdmakit.datatypes import ReduceOp
from rdmakit.device_side import DeviceSide, stream_of
from rdmakit.errors import RdmaKitError, UnsupportedError
from rdmakit.executor import Places
from rdmakit.family import Poll, Run
from rdmakit.intra.device_node import DeviceNode, Registration
from rdmakit.layout import RankLayout
from rdmakit.packing import moved
from rdmakit.plan.shape import Form, Kind, Limits
from rdmakit.process.phase import current
from rdmakit.protocols import Window
from rdmakit.reduction import REDUCES
from rdmakit.staging import HostCall, Staging
from rdmakit.stepped import CAPTURE, Stepped

__all__ = ["DeviceGroup"]


_FRAMED = (ReduceOp.AVG, ReduceOp.EXACT_SUM)
"""What is more than its reductions: see :func:`rdmakit.reduction.frame`."""


class DeviceGroup:
    """Collectives on GPU arrays of one group of ranks."""

    def __init__(
        self,
        side: DeviceSide,
        layout: RankLayout,
        rank: int,
        places: Places,
        *,
        spans: str,
        counters: Window | None,
        next_tag: Callable[[], int],
        label: str = "",
        rail: DeviceGroup | None = None,
    ) -> None:
        """Describe it. Local.

        Args:
            side: the communicator's.
            layout: where the group's ranks are.
            rank: this rank in the group.
            places: the group's ranks in this node's window and in the job.
            spans: ``node``, ``job`` or ``rail``.
            counters: this node's window of the host, for its counters.
            next_tag: gives the first tag of the group's next operation.
            label: names the group in errors.
            rail: of a job: its rail.
        """
        self.layout, self.rank, self.places = layout, rank, places
        self.counters, self.next_tag, self.label = counters, next_tag, label
        self.way = ""
        """How calls are done (see the module); empty before the first."""
        self._side, self._spans, self._rail = side, spans, rail
        self._node: DeviceNode | None = None
        self._staging: Staging | None = None
        self._stepped: Stepped | None = None
        self._programs: Stepped | None = None
        self._host: Staging | None = None

    @property
    def transport(self) -> str:
        """What carries this group's all-reduces, as far as this layer knows it; joined by ``+``.

        ``device`` is memory of the node's GPUs, ``gpu-direct`` and ``host-staged`` are messages.
        Empty before the first call, and for one rank alone. Equal on all ranks of a node.
        """
        messages = "gpu-direct" if self._side.direct else "host-staged"
        if self.way in ("", "alone"):
            return ""
        if self.way == "host" or len(self.layout.nodes) == 1:
            return "host-staged" if self.way == "host" else "device"
        return f"device+{messages}" if max(self.layout.ranks_per_node) > 1 else messages

    @property
    def side(self) -> DeviceSide:
        """What it shares with the other groups of its communicator."""
        return self._side

    @property
    def begun(self) -> bool:
        """Whether later calls that do not block need no words between the ranks."""
        return bool(self.way) and (self.way != "shards" or self._stepped is not None)

    def check(self, send: Buffer, recv: Buffer) -> None:
        """See that this rank's GPU can serve the arrays. Local; raises as DeviceSide.check."""
        if recv.address:
            self._side.check("recvbuf", recv)
        if send.address and send.address != recv.address:
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
        if not self.way:
            self._begin(number)
        if send.stream or recv.stream:
            side.follow(number, (send, recv))

        if send.strided is None and recv.strided is None:
            if self._node is not None:
                self._node.run(kind, send, recv, op, root, stream)
            else:
                self._contiguous(kind, send, recv, op, root, stream, whole, rail)
            return

        def call(send: Buffer, recv: Buffer) -> None:
            self._contiguous(kind, send, recv, op, root, stream, whole, rail)

        side.packing.run(send, recv, number, call, **moved(kind, self.rank, root))

    def _contiguous(
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
        """Do it on arrays without gaps."""
        number: int = stream.ptr
        if self._node is not None:
            self._node.run(kind, send, recv, op, root, stream)
        elif self._staging is not None:
            self._staging.run(kind, send, recv, op, root, stream, whole, rail)
        elif self._stepped is not None:
            if op in _FRAMED and kind in REDUCES:
                self._through_host().run(kind, send, recv, op, root, stream, whole, rail)
            else:
                self._stepped.run(kind, send, recv, op, root, number)
        elif send.address != recv.address:  # alone
            self._side.gpu.door.copy_async(recv.address, send.address, recv.nbytes, number)

    def _through_host(self) -> Staging:
        """Return the way of what the steps do not do: a frame around the whole. Local."""
        if self._host is None:
            self._host = self._side.staging(ranks=self.layout.size)
        return self._host

    def start(
        self, kind: Kind, send: Buffer, recv: Buffer, op: ReduceOp, root: int, stream: Any
    ) -> Callable[[], Run]:
        """Begin it without waiting on the host, once ``begun``. Collective.

        Kernels are enqueued now; steps begin at the call's turn. What is returned gives the run
        that is complete when the result is there.

        Raises:
            UnsupportedError: all of it goes through host memory, where the host has to wait.
        """
        side = self._side
        stream = stream_of(stream, side.gpu.door)
        number: int = stream.ptr
        if not self.way:
            self._begin(number)
        if self.way == "host":
            raise UnsupportedError(
                "GPU arrays go through host memory in this group, where the host has to wait for "
                "the messages: call the blocking form (see notes)"
            )
        if self.way == "shards" and self._stepped is None:
            self._stepped = side.stepped(self, window=True)
        if self._stepped is not None:
            if op in _FRAMED and kind in REDUCES:
                raise UnsupportedError(
                    f"{op.name} in a call that does not block, where the host steps through it: "
                    "call the blocking form"
                )
            if send.strided is not None or recv.strided is not None:
                raise UnsupportedError(
                    "arrays with gaps in a call that does not block, where the host steps through "
                    "it: call the blocking form, or pass cupy.ascontiguousarray of it"
                )
            side.follow(number, (send, recv))
            return self._stepped.start(kind, send, recv, op, root, number)
        self.run(kind, send, recv, op, root, stream, _no_host, None)
        event, node = side.gpu.door.Event(), self._node
        event.record(number)

        def passed() -> bool:
            if not event.done():
                return False
            event.close()
            if node is not None:
                node.check()
            return True

        return lambda: Poll(passed, f"{self.label}{kind.value} on GPUs")

    # -- calls that have a form -----------------------------------------------------------------

    @property
    def has_programs(self) -> bool:
        """Whether :meth:`start_form` needs no words between the ranks."""
        return self._programs is not None or self.way == "host"

    def _runs_programs(self) -> Stepped | None:
        """Return what runs programs; None where all goes through host memory.

        Collective in the node and blocking at its first call: it makes windows.
        """
        if self._programs is None and self.way != "host":
            if self.way == "shards" and self._stepped is None:
                self._stepped = self._side.stepped(self, window=True)
            window = self.way not in ("alone", "steps")
            self._programs = self._stepped or self._side.stepped(self, window=window)
        return self._programs

    def _ready(self, stream: Any) -> tuple[Any, int, Stepped | None]:
        """Return the stream, its number and what runs programs. Collective."""
        stream = stream_of(stream, self._side.gpu.door)
        number: int = stream.ptr
        if not self.way:
            self._begin(number)
        if self._side.gpu.door.is_capturing(number):
            raise UnsupportedError(CAPTURE)
        return stream, number, self._runs_programs()

    def _framed(self, kind: Kind, op: ReduceOp) -> bool:
        return op in _FRAMED and kind in REDUCES and self.layout.size > 1

    def run_form(
        self,
        kind: Kind,
        send: Buffer,
        recv: Buffer,
        op: ReduceOp,
        root: int,
        stream: Any,
        whole: HostCall,
        form: Form,
    ) -> None:
        """Do what has a form, by steps or through host memory. Collective; as :meth:`run`."""
        side = self._side
        _, number, programs = self._ready(stream)
        side.follow(number, (send, recv))

        def contiguous(send: Buffer, recv: Buffer) -> None:
            if programs is not None and not self._framed(kind, op):
                programs.run(kind, send, recv, op, root, number, form)
                return
            limits = Limits(1, 1, 1)  # of no account: only where the blocks are is asked
            call = form.call(kind, self.layout, limits, root)
            staging = self._staging if self.way == "host" else None
            (staging or self._through_host()).run_form(
                call,
                self.rank,
                send,
                recv,
                number,
                lambda kind, send, recv: whole(kind, send, recv, op, root),
            )

        if send.strided is None and recv.strided is None:
            contiguous(send, recv)
            return
        side.packing.run(send, recv, number, contiguous, **moved(kind, self.rank, root))

    def start_form(
        self,
        kind: Kind,
        send: Buffer,
        recv: Buffer,
        op: ReduceOp,
        root: int,
        stream: Any,
        form: Callable[[], Form],
    ) -> Callable[[], Run]:
        """Begin what has a form, which is asked at the call's turn. Collective; as :meth:`start`.

        Blocking at the group's first call, see :attr:`has_programs`.
        """
        if self._framed(kind, op):
            raise UnsupportedError(
                f"{op.name} of GPU arrays in a call that does not block goes through host memory, "
                "where the host has to wait: call the blocking form"
            )
        if send.strided is not None or recv.strided is not None:
            raise UnsupportedError(
                "arrays with gaps in a call that does not block, where the host steps through "
                "it: call the blocking form, or pass cupy.ascontiguousarray of it"
            )
        _, number, programs = self._ready(stream)
        if programs is None:
            raise UnsupportedError(
                "GPU arrays go through host memory in this group, where the host has to wait for "
                "the messages: call the blocking form (see notes)"
            )
        self._side.follow(number, (send, recv))
        return programs.start(kind, send, recv, op, root, number, form)

    def _begin(self, number: int) -> None:
        """Choose the way. Collective, blocking."""
        side, layout = self._side, self.layout
        if side.gpu.door.is_capturing(number):
            raise UnsupportedError(
                "the first call on GPU arrays makes windows and cannot be captured into a CUDA "
                "graph: make the same call once before"
            )
        with current.during("start of the GPU", timeout=side.waiter.timeout):
            lone = self._spans == "node" or len(layout.nodes) == 1
            if lone and layout.size == 1 and self._spans != "node":
                self.way = "alone"
            elif lone:
                self.way = self._begin_node()
            elif self._spans == "rail":
                if side.direct:
                    self._stepped, self.way = side.stepped(self, window=False), "steps"
                else:
                    self._staging, self.way = side.staging(), "host"
                side.messages()
            else:
                self.way = self._begin_job()

    def _begin_node(self) -> str:
        """Choose the way of a node. Collective in it."""
        side = self._side
        if side.begin_node(side.crowd if self._spans == "node" else 0):
            self._staging = side.staging()
            return "host"
        if side.resident:
            self._node = side.node
            return "kernels"
        self._stepped = side.stepped(self, window=True)
        return "steps"

    def _begin_job(self) -> str:
        """Choose the way of several nodes. Collective in the job."""
        side = self._side
        problem, resident = side.begin_job()
        side.messages()
        if problem:
            side.notes.append(
                f"collectives of GPU arrays between nodes go through host memory whole: {problem}"
            )
            self._staging = side.staging(ranks=self.layout.size)
            return "host"
        if not resident or len(set(self.layout.ranks_per_node)) > 1:
            self._stepped = side.stepped(self, window=True)
            return "steps"
        direct = None
        if side.direct and self._rail is not None:
            direct = side.stepped(self._rail, window=False)
        self._staging = side.staging(node=side.node, direct=direct, ranks=self.layout.size)
        return "shards"

    # -- memory -------------------------------------------------------------------------------

    def empty(self, shape: Any, dtype: Any) -> tuple[Any, Registration | None]:
        """Return a new zero-copy CuPy array and its registration. Collective, blocking."""
        self._side._find("a new array")
        self._side.refuse_capture(None, "empty")
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
        self._side.refuse_capture(None, "register")
        if not self.way:
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
        side.refuse_capture(stream, "synchronize")
        number: int = stream_of(stream, side.gpu.door).ptr
        if side.node is not None:
            side.node.wait(number, (side.waiter.progress,))
            return
        event = side.gpu.door.Event()
        event.record(number)
        polls = (side.waiter.progress,)
        side.waiter.until(event.done, polls, lambda: "waiting for the GPU")
        event.close()


def _no_host(*_: object) -> None:
    raise RdmaKitError("a collective of one node's GPUs has no part on the host")


def _free(door: Any, address: int) -> None:
    with contextlib.suppress(RdmaKitError):  # the context may be gone, and the memory with it
        door.free(address)
