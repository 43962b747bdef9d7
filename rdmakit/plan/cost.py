"""The cost model: predicted time of all ranks' programs, without running them."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rdmakit.layout import RankLayout
from rdmakit.plan.simulator import graph
from rdmakit.plan.steps import Await, Copy, Post, Program, Recv, Reduce, Send

__all__ = ["Costs", "alltoall_seconds", "predict"]


@dataclass(frozen=True)
class Costs:
    """Seconds of the cost model: a step costs a start plus bytes over a rate."""

    step: float = 1.5e-6
    """Start of any step."""
    post: float = 2e-6
    """What the start of a message costs more, on either side: UCX's call from Python."""
    copy: float = 1 / 12e9
    """Per byte copied or reduced by one rank."""
    message: float = 8e-6
    """Latency of a message between nodes."""
    wire: float = 1 / 2.5e9
    """Per byte on a rank's link, each direction its own."""


def alltoall_seconds(
    layout: RankLayout, nbytes: int, chunk: int, costs: Costs
) -> tuple[float, float]:
    """Return the time of an all-to-all whose messages are collected in nodes, and sent straight.

    By formula, for equal blocks and the fullest node. ``nbytes`` are those of one rank's array,
    ``chunk`` those that go through a node together. Bytes inside nodes cost both the same and
    are left out.
    """
    n, most = layout.size, max(layout.ranks_per_node)
    abroad = n - min(layout.ranks_per_node)
    block, nodes = nbytes / n, len(layout.nodes)
    side = costs.step + costs.post
    wire = abroad * block * costs.wire
    # Straight, the next messages are started while the first are on the wire.
    straight = max(2 * abroad * side, wire) + 2 * side + costs.message
    if most == 1:
        return straight, straight
    messages = max(nodes - 1, -(-abroad // most))
    # Into the window before; and, where there are several chunks, each message has pieces that
    # do not touch in the receiver's array: through private memory behind.
    copies = abroad * (costs.step + block * costs.copy) * (1 if nbytes <= chunk else 2)
    inside = copies + 2 * (most - 1) * costs.step
    return 2 * messages * side + inside + wire + costs.message, straight


def predict(
    programs: Sequence[Program],
    layout: RankLayout,
    itemsize: int,
    costs: Mapping[str, float] | Costs,
) -> float:
    """Return the modelled seconds until the last rank has finished.

    Each rank runs one local step at a time, in list order among those that are ready; each
    rank's link carries one message at a time and direction.
    """
    c = costs if isinstance(costs, Costs) else Costs(**costs)
    return _Model(programs, itemsize, c).run()


class _Model:
    def __init__(self, programs: Sequence[Program], itemsize: int, costs: Costs) -> None:
        self.programs, self.itemsize, self.costs = programs, itemsize, costs
        self.states = [graph(program) for program in programs]
        self.cpu = [0.0] * len(programs)
        self.out, self.into = [0.0] * len(programs), [0.0] * len(programs)
        self.posted: dict[tuple[int, int], list[tuple[int, float]]] = defaultdict(list)
        self.blocked: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
        self.sends: dict[tuple[int, int, int], tuple[float, int, int]] = {}
        self.recvs: dict[tuple[int, int, int], tuple[float, int]] = {}
        self.queue: list[tuple[float, int, int]] = []  # (time ready, index, rank)
        self.last = 0.0

    def run(self) -> float:
        for rank, (_, _, ready) in enumerate(self.states):
            for index in ready:
                heapq.heappush(self.queue, (0.0, index, rank))
        while self.queue:
            time, index, rank = heapq.heappop(self.queue)
            step = self.programs[rank].steps[index]
            if isinstance(step, Await):
                self._await(rank, index, step, time)
            else:
                time = max(time, self.cpu[rank]) + self._busy(step)
                self.cpu[rank] = time
                self._done(rank, index, step, time)
        return self.last

    def _busy(self, step: object) -> float:
        """Return how long the step keeps its rank from others."""
        c = self.costs
        match step:
            case Copy(dst, _):
                return c.step + dst.count * self.itemsize * c.copy
            case Reduce(dst, srcs):
                return c.step + dst.count * self.itemsize * c.copy * (len(srcs) - 1)
            case Send() | Recv():
                return c.step + c.post
        return c.step

    def _done(self, rank: int, index: int, step: object, time: float) -> None:
        match step:
            case Post(flag, value):
                self.posted[rank, flag].append((value, time))
                for wanted, other, sink in self.blocked.pop((rank, flag), []):
                    if value >= wanted:
                        self._finish(other, sink, time + self.costs.step)
                    else:
                        self.blocked[rank, flag].append((wanted, other, sink))
                self._finish(rank, index, time)
            case Send(peer, src, tag):
                self.sends[rank, peer, tag] = (time, index, src.count)
                self._meet((rank, peer, tag))
            case Recv(peer, _, tag):
                self.recvs[peer, rank, tag] = (time, index)
                self._meet((peer, rank, tag))
            case _:
                self._finish(rank, index, time)

    def _await(self, rank: int, index: int, step: Await, time: float) -> None:
        key = (step.owner, step.flag)
        seen = [t for value, t in self.posted[key] if value >= step.value]
        if seen or step.value == 0:
            self._finish(rank, index, max([time, *seen[:1]]) + self.costs.step)
        else:
            self.blocked[key].append((step.value, rank, index))

    def _finish(self, rank: int, index: int, time: float) -> None:
        self.last = max(self.last, time)
        left, waiters, _ = self.states[rank]
        for waiter in waiters[index]:
            left[waiter] -= 1
            if not left[waiter]:
                heapq.heappush(self.queue, (time, waiter, rank))

    def _meet(self, key: tuple[int, int, int]) -> None:
        if key not in self.sends or key not in self.recvs:
            return
        begun, index, count = self.sends.pop(key)
        wanted, sink = self.recvs.pop(key)
        source, target, _ = key
        start = max(begun, wanted, self.out[source], self.into[target])
        end = start + count * self.itemsize * self.costs.wire
        self.out[source] = self.into[target] = end
        self._finish(source, index, end)
        self._finish(target, sink, end + self.costs.message)
