"""The cost model: predicted time of all ranks' programs, without running them."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rdmakit.layout import RankLayout
from rdmakit.plan.simulator import graph
from rdmakit.plan.steps import Await, Copy, Post, Program, Recv, Reduce, Send

__all__ = ["Costs", "predict"]


@dataclass(frozen=True)
class Costs:
    """Seconds of the cost model: a step costs a start plus bytes over a rate."""

    step: float = 1.5e-6
    """Start of any step."""
    copy: float = 1 / 12e9
    """Per byte copied or reduced by one rank."""
    message: float = 8e-6
    """Latency of a message between nodes."""
    wire: float = 1 / 2.5e9
    """Per byte on a rank's link, each direction its own."""


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
    states = [graph(program) for program in programs]
    cpu = [0.0] * len(programs)
    out, into = [0.0] * len(programs), [0.0] * len(programs)
    posted: dict[tuple[int, int], list[tuple[int, float]]] = {}
    blocked: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
    sends: dict[tuple[int, int, int], tuple[float, int, int]] = {}
    recvs: dict[tuple[int, int, int], tuple[float, int]] = {}
    queue: list[tuple[float, int, int]] = []  # (time ready, index, rank)
    for rank, (_, _, ready) in enumerate(states):
        for index in ready:
            heapq.heappush(queue, (0.0, index, rank))
    last = 0.0

    def finish(rank: int, index: int, time: float) -> None:
        nonlocal last
        last = max(last, time)
        left, waiters, _ = states[rank]
        for waiter in waiters[index]:
            left[waiter] -= 1
            if not left[waiter]:
                heapq.heappush(queue, (time, waiter, rank))

    def meet(key: tuple[int, int, int]) -> None:
        if key not in sends or key not in recvs:
            return
        begun, index, count = sends.pop(key)
        wanted, sink = recvs.pop(key)
        source, target, _ = key
        start = max(begun, wanted, out[source], into[target])
        end = start + count * itemsize * c.wire
        out[source] = into[target] = end
        finish(source, index, end)
        finish(target, sink, end + c.message)

    while queue:
        time, index, rank = heapq.heappop(queue)
        step = programs[rank].steps[index]
        if isinstance(step, Await):
            key = (step.owner, step.flag)
            seen = [t for value, t in posted.get(key, []) if value >= step.value]
            if seen or step.value == 0:
                finish(rank, index, max([time, *seen[:1]]) + c.step)
            else:
                blocked[key].append((step.value, rank, index))
            continue
        time = max(time, cpu[rank])
        match step:
            case Copy(dst, _):
                time += c.step + dst.count * itemsize * c.copy
            case Reduce(dst, srcs):
                time += c.step + dst.count * itemsize * c.copy * (len(srcs) - 1)
            case _:
                time += c.step
        cpu[rank] = time
        match step:
            case Post(flag, value):
                posted.setdefault((rank, flag), []).append((value, time))
                waiting = blocked.pop((rank, flag), [])
                for wanted, other, sink in waiting:
                    if value >= wanted:
                        finish(other, sink, time + c.step)
                    else:
                        blocked[rank, flag].append((wanted, other, sink))
                finish(rank, index, time)
            case Send(peer, src, tag):
                sends[rank, peer, tag] = (time, index, src.count)
                meet((rank, peer, tag))
            case Recv(peer, _, tag):
                recvs[peer, rank, tag] = (time, index)
                meet((peer, rank, tag))
            case _:
                finish(rank, index, time)
    return last
