"""Runs the programs of all ranks in one process: results, deadlock, bytes.

Steps of all ranks are taken in a random order that respects only their dependencies, which
finds a missing dependency as a wrong sum. Messages are either eager (the source is read when
the send is posted) or rendezvous (it is read, and the send completes, only after the receive
was posted); mixing both finds sources overwritten too early and schedules that need buffering.
What random orders may miss, :mod:`rdmakit.plan.proof` finds for all orders at once.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rdmakit.layout import RankLayout
from rdmakit.plan.pieces import FLAGS
from rdmakit.plan.steps import DONE, Await, Copy, Post, Program, Recv, Reduce, Ref, Send, Space

__all__ = ["Deadlock", "Traffic", "graph", "simulate"]

Array = npt.NDArray[Any]
Key = tuple[int, int, int]
"""Source, target and tag of a message."""


class Deadlock(Exception):
    """No step can run and some are left; the text lists what each rank waits for."""


@dataclass
class Traffic:
    """Elements that passed between nodes: [from node][to node], and so for ranks."""

    between: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))
    ranks: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))
    messages: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))
    """Number of messages from rank to rank."""

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
        ValueError: a step that no machine could run, or programs that do not fit each other.
    """
    machine = _Machine(programs, layout, reduce, rng, eager, base)
    machine.load(send, recv, poison)
    machine.run(in_order)
    machine.check_end()
    return machine.traffic


class _Machine:
    def __init__(
        self,
        programs: Sequence[Program],
        layout: RankLayout,
        reduce: Callable[[Array, Sequence[Array]], None],
        rng: random.Random | None,
        eager: float,
        base: int,
    ) -> None:
        self.programs, self.layout, self.reduce = programs, layout, reduce
        self.rng, self.eager, self.base = rng, eager, base
        self.traffic = Traffic()
        self.flags = [[base] * FLAGS for _ in programs]
        self.areas: list[Array] = []
        self.ranks: list[_Rank] = []
        self.sends: dict[Key, tuple[int, Array | None]] = {}
        self.recvs: dict[Key, int] = {}
        self.parked: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)

    def load(self, send: Sequence[Array], recv: Sequence[Array], poison: float) -> None:
        """Give the ranks their memory."""
        dtype = recv[0].dtype
        filler = poison if dtype.kind == "f" else int(-7e6 + 1)
        window = max((p.window for p in self.programs), default=0)
        for r, program in enumerate(self.programs):
            self.areas.append(np.full(window, filler, dtype))
            memory = {
                Space.SEND: send[r],
                Space.RECV: recv[r],
                Space.SCRATCH: np.full(program.scratch, filler, dtype),
            }
            self.ranks.append(_Rank(program, memory, *graph(program)))

    def run(self, in_order: bool) -> None:
        """Take steps until none can run."""
        rng = self.rng
        runnable = [rank for rank, state in enumerate(self.ranks) if state.ready]
        listed = [bool(state.ready) for state in self.ranks]
        while runnable:
            at = rng.randrange(len(runnable)) if rng else 0
            rank = runnable[at]
            state = self.ranks[rank]
            pick = self._pick(state, in_order)
            if pick < 0:
                runnable[at] = runnable[-1]
                runnable.pop()
                listed[rank] = False
                continue
            state.ready[pick], state.ready[-1] = state.ready[-1], state.ready[pick]
            woken = self._attempt(rank, state.ready.pop())
            state.cursor += bool(woken)  # a parked step is tried again
            for other in woken:
                if not listed[other]:
                    listed[other] = True
                    runnable.append(other)

    def _pick(self, state: _Rank, in_order: bool) -> int:
        """Return which of the ready steps is next; -1: none."""
        if not state.ready:
            return -1
        if in_order:
            return state.ready.index(state.cursor) if state.cursor in state.ready else -1
        if self.rng:
            return self.rng.randrange(len(state.ready))
        return state.ready.index(min(state.ready))

    def _attempt(self, rank: int, index: int) -> list[int]:
        """Run a ready step or park it; return the ranks that may have become runnable."""
        match self.ranks[rank].program.steps[index]:
            case Copy(dst, src):
                self._view(rank, dst)[:] = self._view(rank, src)
            case Reduce(dst, srcs):
                self.reduce(self._view(rank, dst), [self._view(rank, src) for src in srcs])
            case Post(flag, value):
                return self._post(rank, index, flag, value)
            case Await(owner, flag, value):
                self._node_of(rank, owner)
                if self.flags[owner][flag] < self.base + value:
                    self.parked[owner, flag].append((rank, index))
                    return []
            case Send() as step:
                return self._send(rank, index, step)
            case Recv() as step:
                return self._recv(rank, index, step)
        self._complete(rank, index)
        return [rank]

    def _node_of(self, rank: int, owner: int) -> None:
        if self.layout.node_of(owner) != self.layout.node_of(rank):
            raise ValueError(f"rank {rank} cannot address the window of rank {owner}")

    def _view(self, rank: int, ref: Ref) -> Array:
        if ref.space is Space.WINDOW:
            self._node_of(rank, ref.owner)
            array = self.areas[ref.owner]
        else:
            array = self.ranks[rank].memory[ref.space]
        if not 0 <= ref.offset <= ref.offset + ref.count <= len(array):
            raise IndexError(f"rank {rank}: {ref} is outside {len(array)} elements")
        return array[ref.offset : ref.offset + ref.count]

    def _complete(self, rank: int, index: int) -> None:
        state = self.ranks[rank]
        for waiter in state.waiters[index]:
            state.left[waiter] -= 1
            if not state.left[waiter]:
                state.ready.append(waiter)

    def _post(self, rank: int, index: int, flag: int, value: int) -> list[int]:
        if self.flags[rank][flag] > self.base + value:
            raise ValueError(f"rank {rank}: counter {flag} would fall to {value}")
        self.flags[rank][flag] = self.base + value
        woken = self.parked.pop((rank, flag), [])
        for other, waiting in woken:
            self.ranks[other].ready.append(waiting)
        self._complete(rank, index)
        return [rank, *(other for other, _ in woken)]

    def _send(self, rank: int, index: int, step: Send) -> list[int]:
        peer, layout, key = step.peer, self.layout, (rank, step.peer, step.tag)
        self.traffic.between[layout.node_of(rank), layout.node_of(peer)] += step.src.count
        self.traffic.ranks[rank, peer] += step.src.count
        self.traffic.messages[rank, peer] += 1
        if not 0 <= step.tag < self.programs[rank].tags:
            raise ValueError(f"tag {step.tag} is not below {self.programs[rank].tags}")
        if key in self.sends:
            raise ValueError(f"two sends {key} at once")
        now = (self.rng.random() if self.rng else 0.0) < self.eager
        self.sends[key] = (index, self._view(rank, step.src).copy() if now else None)
        if now:
            self._complete(rank, index)
        if key in self.recvs:
            self._deliver(key)
        return [rank, peer]

    def _recv(self, rank: int, index: int, step: Recv) -> list[int]:
        key = (step.peer, rank, step.tag)
        if key in self.recvs:
            raise ValueError(f"two receives {key} at once")
        self.recvs[key] = index
        if key in self.sends:
            self._deliver(key)
        return [rank, step.peer]

    def _deliver(self, key: Key) -> None:
        source, target, _ = key
        index, data = self.sends.pop(key)
        into = self.recvs.pop(key)
        step, sink = self.programs[source].steps[index], self.programs[target].steps[into]
        assert isinstance(step, Send)
        assert isinstance(sink, Recv)
        if step.src.count != sink.dst.count:
            raise ValueError(f"{step} of rank {source} meets {sink} of rank {target}")
        self._view(target, sink.dst)[:] = self._view(source, step.src) if data is None else data
        if data is None:
            self._complete(source, index)
        self._complete(target, into)

    def check_end(self) -> None:
        """Raise if steps are left, or what ranks must have in common differs."""
        waiting = {rank for parked in self.parked.values() for rank, _ in parked}
        stuck = {
            rank: [state.program.steps[i] for i in sorted(state.ready)]
            for rank, state in enumerate(self.ranks)
            if state.ready or any(state.left) or rank in waiting
        }
        if stuck or self.sends or self.recvs:
            raise Deadlock(f"waiting {stuck}; sends {self.sends.keys()}, receives {self.recvs}")
        for rank, program in enumerate(self.programs):
            peers = self.layout.nodes[self.layout.node_of(rank)]
            span = max(self.programs[q].span for q in peers)
            if program.tags != self.programs[0].tags:
                raise ValueError(f"rank {rank}: {program.tags} tags, not {self.programs[0].tags}")
            if program.span != span:
                raise ValueError(f"rank {rank}: span {program.span} is not its node's {span}")
            if len(peers) > 1 and self.flags[rank][DONE] != self.base + span:
                raise ValueError(f"rank {rank} does not say that it has left the window")


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
