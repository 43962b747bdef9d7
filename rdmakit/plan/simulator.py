"""Runs the programs of all ranks in one process: results, deadlock, bytes.

Steps of all ranks are taken in a random order that respects only their dependencies, which
finds a missing dependency as a wrong sum. Messages are either eager (the source is read when
the send is posted) or rendezvous (it is read, and the send completes, only after the receive
was posted); mixing both finds sources overwritten too early and schedules that need buffering.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rdmakit.layout import RankLayout
from rdmakit.plan.pieces import FLAGS
from rdmakit.plan.steps import Await, Copy, Post, Program, Recv, Reduce, Ref, Send, Space

__all__ = ["Deadlock", "Traffic", "graph", "simulate"]

Array = npt.NDArray[np.generic]


class Deadlock(Exception):
    """No step can run and some are left; the text lists what each rank waits for."""


@dataclass
class Traffic:
    """Elements that passed between nodes: [from node][to node]."""

    between: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))

    def out_of(self, node: int) -> int:
        """Return the elements that ``node`` sent to others."""
        return sum(n for (a, b), n in self.between.items() if a == node != b)


@dataclass
class _Rank:
    program: Program
    memory: dict[Space, Array]
    left: list[int]
    waiters: list[list[int]]
    ready: list[int]
    cursor: int = 0


def simulate(
    programs: Sequence[Program],
    layout: RankLayout,
    send: Sequence[Array],
    recv: Sequence[Array],
    reduce: Callable[[Array, Sequence[Array]], None],
    *,
    rng: random.Random | None = None,
    in_order: bool = False,
    eager: float = 0.5,
    poison: float = float("nan"),
    base: int = 0,
) -> Traffic:
    """Run ``programs[r]`` of every rank on ``send[r]`` and ``recv[r]`` (which may be one array).

    Args:
        programs: one for each rank of ``layout``.
        layout: who shares a window with whom.
        send: input arrays, one-dimensional, all of one dtype.
        recv: output arrays, likewise.
        reduce: ``reduce(dst, srcs)`` as an executor's.
        rng: source of the random order; without one, list order by turns.
        in_order: each rank runs its steps strictly in list order.
        eager: share of messages that are eager.
        poison: what window and scratch memory hold at the start.
        base: counter values of earlier plans.

    Raises:
        Deadlock: no step can run.
    """
    dtype = recv[0].dtype
    filler = poison if dtype.kind == "f" else int(-7e6 + 1)
    areas = [np.full(max((p.window for p in programs), default=0), filler, dtype) for _ in programs]
    flags = [[base] * FLAGS for _ in programs]
    ranks = [
        _Rank(
            program,
            {
                Space.SEND: send[r],
                Space.RECV: recv[r],
                Space.SCRATCH: np.full(program.scratch, filler, dtype),
            },
            *graph(program),
        )
        for r, program in enumerate(programs)
    ]
    traffic = Traffic()
    posted_sends: dict[tuple[int, int, int], tuple[int, Array | None]] = {}
    posted_recvs: dict[tuple[int, int, int], int] = {}
    parked: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)

    def view(rank: int, ref: Ref) -> Array:
        if ref.space is Space.WINDOW:
            if layout.node_of(ref.owner) != layout.node_of(rank):
                raise ValueError(f"rank {rank} cannot address the window of rank {ref.owner}")
            array = areas[ref.owner]
        else:
            array = ranks[rank].memory[ref.space]
        if not 0 <= ref.offset <= ref.offset + ref.count <= len(array):
            raise IndexError(f"rank {rank}: {ref} is outside {len(array)} elements")
        return array[ref.offset : ref.offset + ref.count]

    def complete(rank: int, index: int) -> None:
        state = ranks[rank]
        for waiter in state.waiters[index]:
            state.left[waiter] -= 1
            if not state.left[waiter]:
                state.ready.append(waiter)

    def deliver(key: tuple[int, int, int]) -> None:
        source, target, _ = key
        index, data = posted_sends.pop(key)
        into = posted_recvs.pop(key)
        step = ranks[source].program.steps[index]
        assert isinstance(step, Send)
        sink = ranks[target].program.steps[into]
        assert isinstance(sink, Recv)
        values = view(source, step.src) if data is None else data
        view(target, sink.dst)[:] = values
        if data is None:
            complete(source, index)
        complete(target, into)

    def attempt(rank: int, index: int) -> list[int]:
        """Run a ready step or park it; return the ranks that may have become runnable."""
        step = ranks[rank].program.steps[index]
        match step:
            case Copy(dst, src):
                view(rank, dst)[:] = view(rank, src)
            case Reduce(dst, srcs):
                reduce(view(rank, dst), [view(rank, src) for src in srcs])
            case Post(flag, value):
                if flags[rank][flag] > base + value:
                    raise ValueError(f"rank {rank}: counter {flag} would fall to {value}")
                flags[rank][flag] = base + value
                woken = parked.pop((rank, flag), [])
                for other, waiting in woken:
                    ranks[other].ready.append(waiting)
                complete(rank, index)
                return [rank, *(other for other, _ in woken)]
            case Await(owner, flag, value):
                if flags[owner][flag] < base + value:
                    parked[owner, flag].append((rank, index))
                    return []
            case Send(peer, src, tag):
                traffic.between[layout.node_of(rank), layout.node_of(peer)] += src.count
                key = (rank, peer, tag)
                if not 0 <= tag < ranks[rank].program.tags:
                    raise ValueError(f"tag {tag} is not below {ranks[rank].program.tags}")
                if key in posted_sends:
                    raise ValueError(f"two sends {key} at once")
                now = (rng.random() if rng else 0.0) < eager
                posted_sends[key] = (index, view(rank, src).copy() if now else None)
                if now:
                    complete(rank, index)
                if key in posted_recvs:
                    deliver(key)
                return [rank, peer]
            case Recv(peer, dst, tag):
                key = (peer, rank, tag)
                if key in posted_recvs:
                    raise ValueError(f"two receives {key} at once")
                posted_recvs[key] = index
                if key in posted_sends:
                    deliver(key)
                return [rank, peer]
        complete(rank, index)
        return [rank]

    runnable = [rank for rank, state in enumerate(ranks) if state.ready]
    listed = [bool(state.ready) for state in ranks]
    while runnable:
        at = rng.randrange(len(runnable)) if rng else 0
        rank = runnable[at]
        state = ranks[rank]
        if in_order:
            pick = state.ready.index(state.cursor) if state.cursor in state.ready else -1
        elif rng:
            pick = rng.randrange(len(state.ready)) if state.ready else -1
        else:
            pick = state.ready.index(min(state.ready)) if state.ready else -1
        if pick < 0:
            runnable[at] = runnable[-1]
            runnable.pop()
            listed[rank] = False
            continue
        state.ready[pick], state.ready[-1] = state.ready[-1], state.ready[pick]
        index = state.ready.pop()
        woken = attempt(rank, index)
        state.cursor += bool(woken)  # a parked step is tried again
        for other in woken:
            if not listed[other]:
                listed[other] = True
                runnable.append(other)
    stuck = {
        rank: [state.program.steps[i] for i in sorted(state.ready)]
        for rank, state in enumerate(ranks)
        if state.ready or any(state.left) or any(r == rank for v in parked.values() for r, _ in v)
    }
    if stuck or posted_sends or posted_recvs:
        raise Deadlock(f"waiting {stuck}; sends {posted_sends.keys()}, receives {posted_recvs}")
    for rank, state in enumerate(ranks):
        span = max((p.span for p in (programs[q] for q in _node(layout, rank))), default=0)
        if state.program.tags != programs[0].tags:
            raise ValueError(f"rank {rank}: {state.program.tags} tags, rank 0 {programs[0].tags}")
        if state.program.span != span:
            raise ValueError(f"rank {rank}: span {state.program.span} is not its node's {span}")
    return traffic


def _node(layout: RankLayout, rank: int) -> tuple[int, ...]:
    return layout.nodes[layout.node_of(rank)]


def graph(program: Program) -> tuple[list[int], list[list[int]], list[int]]:
    """Return for each step what it still waits for and who waits for it; and the first steps."""
    left = [len(after) for after in program.after]
    waiters: list[list[int]] = [[] for _ in program.steps]
    for index, after in enumerate(program.after):
        for before in after:
            if before >= index:
                raise ValueError(f"step {index} waits for step {before}, which is not before it")
            waiters[before].append(index)
    return left, waiters, [i for i, n in enumerate(left) if not n]
