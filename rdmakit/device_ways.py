"""Which way collectives on GPU arrays of one group go, and what is made for it.

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

from collections.abc import Callable
from typing import Any

from rdmakit.device_side import DeviceSide, stream_of
from rdmakit.errors import UnsupportedError
from rdmakit.executor import Places
from rdmakit.intra.device_node import DeviceNode
from rdmakit.layout import RankLayout
from rdmakit.plan.shape import Form, Kind
from rdmakit.process.phase import current
from rdmakit.protocols import Window
from rdmakit.staging import Staging
from rdmakit.stepped import CAPTURE, Stepped

__all__ = ["DeviceWays"]


class DeviceWays:
    """See the module. :class:`rdmakit.device.DeviceGroup` is one, with the calls."""

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
        rail: DeviceWays | None = None,
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

    def one_kernel(self, kind: Kind, form: Form | None, stream: Any) -> bool:
        """Return whether a call with this form is one kernel of the node's; equal on all ranks.

        An all-to-all of equal blocks, not in place, is. Collective, blocking at the group's first
        call, where it chooses the way. Raises as the call.
        """
        if kind is not Kind.ALLTOALL or form is None or form.counts or form.in_place:
            return False
        if not self.way:
            self._begin(stream_of(stream, self._side.gpu.door).ptr)
        return self._node is not None

    def _through_host(self) -> Staging:
        """Return the way of what the steps do not do: a frame around the whole. Local."""
        if self._host is None:
            self._host = self._side.staging(ranks=self.layout.size)
        return self._host

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
