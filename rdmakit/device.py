"""Collectives on GPU arrays of one group, and memory that is zero-copy.

Which way they go is in :mod:`rdmakit.device_ways`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from rdmakit.buffer import Buffer
from rdmakit.datatypes import ReduceOp
from rdmakit.device_side import stream_of
from rdmakit.device_ways import DeviceWays
from rdmakit.errors import RdmaKitError, UnsupportedError
from rdmakit.family import Poll, Run
from rdmakit.intra.device_registry import Registration
from rdmakit.packing import moved
from rdmakit.plan.shape import Form, Kind, Limits
from rdmakit.reduction import REDUCES
from rdmakit.staging import HostCall

__all__ = ["DeviceGroup"]


_FRAMED = (ReduceOp.AVG, ReduceOp.EXACT_SUM)
"""What is more than its reductions: see :func:`rdmakit.reduction.frame`."""


class DeviceGroup(DeviceWays):
    """Collectives on GPU arrays of one group of ranks."""

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

    def refuse_gaps(self, send: Buffer, recv: Buffer) -> None:
        """See that a call that does not block can take the arrays. Local; knows it once begun.

        Raises:
            UnsupportedError: the host steps through it, and they have gaps.
        """
        if self._stepped is not None:
            _refuse_gaps(send, recv)

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
            self.refuse_gaps(send, recv)
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
        """Do what has a form, as its way is: one kernel, steps, host memory. As :meth:`run`."""
        if self.one_kernel(kind, form, stream):
            self.run(kind, send, recv, op, root, stream, whole, None)
            return
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

        By steps; what is :meth:`one_kernel` takes :meth:`start`. Blocking at the group's first
        call, see :attr:`has_programs`.
        """
        if self._framed(kind, op):
            raise UnsupportedError(
                f"{op.name} of GPU arrays in a call that does not block goes through host memory, "
                "where the host has to wait: call the blocking form"
            )
        _refuse_gaps(send, recv)
        _, number, programs = self._ready(stream)
        if programs is None:
            raise UnsupportedError(
                "GPU arrays go through host memory in this group, where the host has to wait for "
                "the messages: call the blocking form (see notes)"
            )
        self._side.follow(number, (send, recv))
        return programs.start(kind, send, recv, op, root, number, form)

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


def _refuse_gaps(send: Buffer, recv: Buffer) -> None:
    if send.strided is not None or recv.strided is not None:
        raise UnsupportedError(
            "arrays with gaps in a call that does not block, where the host steps through it: call "
            "the blocking form, or pass cupy.ascontiguousarray of it"
        )


def _no_host(*_: object) -> None:
    raise RdmaKitError("a collective of one node's GPUs has no part on the host")


def _free(door: Any, address: int) -> None:
    with contextlib.suppress(RdmaKitError):  # the context may be gone, and the memory with it
        door.free(address)
