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
from rdmakit.device_program import DeviceProgram, DeviceWork
from rdmakit.errors import UnsupportedError
from rdmakit.executor import Places
from rdmakit.layout import RankLayout
from rdmakit.plan.planner import program
from rdmakit.plan.select import choose
from rdmakit.plan.shape import Call, Kind, Limits
from rdmakit.plan.steps import Space
from rdmakit.protocols import DeviceChannel, Window
from rdmakit.waiting import Waiter

__all__ = ["AREA", "Stepped"]

AREA = 24 << 20
"""Bytes of each rank's window on its GPU: three chunks of 8 MiB, whose copies take some times as
long as the host needs to see that they are done (tens of microseconds)."""
_CHUNK = 4 << 20
"""Bytes of a vector that go through node and rail together."""
_SMALL = 256 << 10
"""Bytes of a shard up to which the rail takes the schedule of fewest rounds: each round costs a
launch and a look at an event beside its message."""
_KEPT = 32


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
        door: :mod:`rdmakit.drivers.cuda`.
        combine: as :func:`rdmakit.intra.device_local.combine`, without the device.
        flush: makes a NIC's writes visible to all GPUs, where that is needed.
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
        door: Any,
        combine: Callable[..., Callable[[int], object]],
        flush: Callable[[], None] | None,
        next_tag: Callable[[], int],
        label: str,
    ) -> None:
        self._layout, self._rank, self._places = layout, rank, places
        self._areas, self._counters, self._channel = areas, counters, channel
        self._waiter, self._door, self._combine, self._flush = waiter, door, combine, flush
        self._next_tag, self._label = next_tag, label
        self._bound: OrderedDict[tuple[Any, ...], DeviceProgram] = OrderedDict()

    def run(
        self, kind: Kind, send: Buffer, recv: Buffer, op: ReduceOp, root: int, stream: int
    ) -> None:
        """Do it. Collective; blocks until messages are done, the result is ready on ``stream``.

        Raises:
            UnsupportedError: ``stream`` is captured, or the array needs too many messages.
            TransferTimeout: a wait passed its deadline.
            TransportError: a message failed.
        """
        if self._door.is_capturing(stream):
            raise UnsupportedError(
                "the host takes part in this collective, which a CUDA graph cannot hold: call it "
                "outside the capture"
            )
        if max(send.count, recv.count):
            self._bind(kind, send, recv, op, root).run(self._next_tag(), stream)

    def _bind(
        self, kind: Kind, send: Buffer, recv: Buffer, op: ReduceOp, root: int
    ) -> DeviceProgram:
        key = (kind, send.address, recv.address, send.count, recv.dtype, op, root)
        bound = self._bound.get(key)
        if bound is not None:
            self._bound.move_to_end(key)
            return bound
        itemsize = recv.dtype.itemsize
        limits = Limits(AREA // itemsize, _CHUNK // itemsize, _SMALL // itemsize)
        count = recv.count if kind is Kind.REDUCE_SCATTER else send.count
        name = choose(kind, self._layout, max(send.nbytes, recv.nbytes), mpi=False)
        steps = program(name, Call(kind, self._layout, count, limits, root), self._rank)
        if self._channel is not None and steps.tags > self._channel.messages:
            raise UnsupportedError(
                f"{count} elements need {steps.tags} message tags, {self._channel.messages} are "
                "there: cut the array"
            )
        bound = DeviceProgram(
            steps,
            recv.dtype,
            {Space.SEND: send.address, Space.RECV: recv.address},
            self._places,
            areas=self._areas,
            counters=self._counters,
            channel=self._channel,
            waiter=self._waiter,
            work=DeviceWork(self._door, partial(self._launch, op), self._flush),
            label=f"{self._label}{kind.value}/{name} {format_size(recv.nbytes)} on GPUs",
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
