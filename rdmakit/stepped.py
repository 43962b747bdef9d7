"""Collectives of one group on GPU memory as programs: the host decides each step, no kernel waits.

Serves between nodes, where messages are part of the schedule, and inside a node where kernels of
all ranks cannot be resident at once (ranks that share a GPU without MPS).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rdmakit.buffer import Buffer
from rdmakit.config import format_size
from rdmakit.datatypes import ReduceOp
from rdmakit.device_program import DeviceProgram, DeviceRun, DeviceWork
from rdmakit.errors import UnsupportedError
from rdmakit.executor import Guard, Places
from rdmakit.layout import RankLayout
from rdmakit.plan.planner import program
from rdmakit.plan.select import choose
from rdmakit.plan.shape import Form, Kind, Limits
from rdmakit.plan.steps import Space
from rdmakit.protocols import DeviceChannel, Window
from rdmakit.waiting import Waiter

__all__ = ["AREA", "CAPTURE", "Stepped", "SteppedRun"]

AREA = 24 << 20
"""Bytes of each rank's window on its GPU: three chunks of 8 MiB, whose copies take some times as
long as the host needs to see that they are done (tens of microseconds)."""
_CHUNK = 4 << 20
"""Bytes of a vector that go through node and rail together."""
_SMALL = 256 << 10
"""Bytes of a shard up to which the rail takes the schedule of fewest rounds: each round costs a
launch and a look at an event beside its message."""
_KEPT = 32
CAPTURE = (
    "the host takes part in this collective, which a CUDA graph cannot hold: call it outside the "
    "capture"
)


class Stepped:
    """See the module.

    Args:
        layout: where the group's ranks are.
        rank: this rank in the group.
        places: the group's ranks in this node's window and in the job.
        areas: address here of each rank's window area, by rank of the group.
        counters: window whose counters say what is in the areas.
        channel: carries messages of GPU memory; None in one node.
        waiter: deadline of waits.
        guard: held while counters and channel are used.
        door: :mod:`rdmakit.drivers.cuda`.
        combine: as :func:`rdmakit.intra.device_local.combine`, without the device.
        flush: makes a NIC's writes visible to all GPUs, where that is needed.
        enter: makes the GPU current in the calling thread.
        next_tag: gives the first tag of the group's next operation.
        label: names the group in errors.
    """

    def __init__(
        self,
        layout: RankLayout,
        rank: int,
        places: Places,
        *,
        areas: Mapping[int, int],
        counters: Window | None,
        channel: DeviceChannel | None,
        waiter: Waiter,
        guard: Guard,
        door: Any,
        combine: Callable[..., Callable[[int], object]],
        flush: Callable[[], None] | None,
        enter: Callable[[], None],
        next_tag: Callable[[], int],
        label: str,
    ) -> None:
        self._layout, self._rank, self._places = layout, rank, places
        self._areas, self._counters, self._channel = areas, counters, channel
        self._waiter, self._guard, self._door = waiter, guard, door
        self._combine, self._flush, self._enter = combine, flush, enter
        self._next_tag, self._label = next_tag, label
        self._own: Any = None
        self._bound: OrderedDict[tuple[Any, ...], DeviceProgram] = OrderedDict()

    def run(
        self,
        kind: Kind,
        send: Buffer,
        recv: Buffer,
        op: ReduceOp,
        root: int,
        stream: int,
        form: Form | None = None,
    ) -> None:
        """Do it. Collective; blocks until messages are done, the result is ready on ``stream``.

        Raises:
            UnsupportedError: ``stream`` is captured, or the array needs too many messages.
            TransferTimeout: a wait passed its deadline.
            TransportError: a message failed.
        """
        if self._door.is_capturing(stream):
            raise UnsupportedError(CAPTURE)
        if self._anything(kind, send, recv, form):
            self._bind(kind, send, recv, op, root, form).run(self._next_tag(), stream)

    def _anything(self, kind: Kind, send: Buffer, recv: Buffer, form: Form | None) -> bool:
        """Return whether any rank has any element; equal on all ranks."""
        if form is None:
            return max(send.count, recv.count) > 0
        return form.longest(kind, self._layout.size) > 0

    def start(
        self,
        kind: Kind,
        send: Buffer,
        recv: Buffer,
        op: ReduceOp,
        root: int,
        stream: int,
        form: Callable[[], Form] | None = None,
    ) -> Callable[[], SteppedRun]:
        """Return what begins it at its turn, after the present work of ``stream``. Local.

        The copies and reductions go onto a stream of their own; the run is complete when the
        result is there, for all streams. ``form`` is asked then. Raises as :meth:`run`.
        """
        if self._door.is_capturing(stream):
            raise UnsupportedError(CAPTURE)
        if self._own is None:
            self._own = self._door.Stream()
        own: int = self._own.ptr
        ready = self._door.Event()
        ready.record(stream)

        def begin() -> SteppedRun:
            self._enter()
            self._door.wait_event(own, ready)
            run, known = None, form() if form is not None else None
            if self._anything(kind, send, recv, known):
                run = self._bind(kind, send, recv, op, root, known).start(self._next_tag(), own)
            return SteppedRun(run, own, ready)

        return begin

    def _bind(
        self,
        kind: Kind,
        send: Buffer,
        recv: Buffer,
        op: ReduceOp,
        root: int,
        form: Form | None,
    ) -> DeviceProgram:
        if form is None:
            form = Form(recv.count if kind is Kind.REDUCE_SCATTER else send.count)
        key = (kind, send.address, recv.address, send.count, recv.dtype, op, root, form)
        bound = self._bound.get(key)
        if bound is not None:
            self._bound.move_to_end(key)
            return bound
        itemsize = recv.dtype.itemsize
        limits = Limits(AREA // itemsize, _CHUNK // itemsize, _SMALL // itemsize)
        call = form.call(kind, self._layout, limits, root)
        name = choose(kind, self._layout, call.longest * itemsize, mpi=False)
        steps = program(name, call, self._rank)
        if self._channel is not None and steps.tags > self._channel.messages:
            raise UnsupportedError(
                f"{call.longest} elements need {steps.tags} message tags, "
                f"{self._channel.messages} are there: cut the array"
            )
        size = format_size(recv.nbytes or send.nbytes)
        bound = DeviceProgram(
            steps,
            recv.dtype,
            {Space.SEND: send.address, Space.RECV: recv.address},
            self._places,
            areas=self._areas,
            counters=self._counters,
            channel=self._channel,
            waiter=self._waiter,
            guard=self._guard,
            work=DeviceWork(self._door, partial(self._launch, op), self._flush, self._enter),
            label=f"{self._label}{kind.value}/{name} {size} on GPUs",
        )
        self._bound[key] = bound
        if len(self._bound) > _KEPT:
            self._bound.popitem(last=False)[1].close()
        return bound

    def _launch(
        self, op: ReduceOp, dst: int, srcs: Any, count: int, dtype: str
    ) -> Callable[[int], object]:
        return self._combine(dst, srcs, count, dtype, op)

    def close(self) -> None:
        """Free what programs hold. Local; waits for the device."""
        for bound in self._bound.values():
            bound.close()
        self._bound.clear()
        if self._own is not None:
            self._own.close()
            self._own = None


class SteppedRun:
    """A collective under way until its result is there; a :class:`rdmakit.family.Run`."""

    def __init__(self, run: DeviceRun | None, stream: int, event: Any) -> None:
        """Describe it.

        Args:
            run: what is done; None is nothing.
            stream: where its work goes.
            event: to mark the end with, closed then.
        """
        self._run, self._stream, self._event = run, stream, event
        self._marked = self.moved = False

    def advance(self) -> bool:
        """Do what can be done without waiting; return whether it is complete."""
        if not self._marked:
            complete = self._run is None or self._run.advance()
            self.moved = complete or (self._run is not None and self._run.moved)
            if not complete:
                return False
            self._event.record(self._stream)
            self._marked = True
        if not self._event.done():
            self.moved = False
            return False
        self._event.close()
        return True

    def waits_for(self) -> str:
        """Return whom it waits for."""
        if self._run is None or self._marked:
            return "waiting for the GPU"
        return self._run.waits_for()

    def abandon(self) -> None:
        """Give up its messages."""
        if self._run is not None:
            self._run.abandon()
