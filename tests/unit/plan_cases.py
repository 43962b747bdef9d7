"""Calls with their inputs and closed-form results, run on the simulator and proven.

Inputs differ for every rank, block and element; results are int64 arithmetic.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from rdmakit.errors import UnsupportedError
from rdmakit.layout import RankLayout
from rdmakit.plan.planner import program
from rdmakit.plan.proof import prove
from rdmakit.plan.shape import Call, Kind, Limits
from rdmakit.plan.simulator import Traffic, simulate
from rdmakit.plan.steps import Program

Array = npt.NDArray[Any]
UNSET = -1
MOVES = (Kind.GATHER, Kind.SCATTER, Kind.ALLGATHER, Kind.ALLTOALL)
BLOCKS = (*MOVES, Kind.REDUCE_SCATTER)
ROOTED = (Kind.BROADCAST, Kind.REDUCE, Kind.GATHER, Kind.SCATTER)


def vector(rank: int, count: int) -> Array:
    """Element i of rank r is 1 + r + i * (r + 2): sums over ranks have a closed form."""
    i = np.arange(count, dtype=np.int64)
    return 1 + rank + i * (rank + 2)


def total(n: int, count: int) -> Array:
    """Sum of ``vector`` of ranks 0 to n - 1."""
    i = np.arange(count, dtype=np.int64)
    return n * (n + 1) // 2 + i * (n * (n - 1) // 2 + 2 * n)


def block(source: int, target: int, count: int) -> Array:
    """What ``source`` has for ``target``; no two elements of a job are equal."""
    return 1 + ((source * 101 + target) << 20) + np.arange(count, dtype=np.int64)


def add(dst: Array, srcs: Sequence[Array]) -> None:
    acc = srcs[0].copy()
    for src in srcs[1:]:
        acc = acc + src
    dst[:] = acc


@dataclass
class Case:
    """A call of all ranks: one Call each, for their displacements differ."""

    algorithm: str
    calls: list[Call]
    send: list[Array]
    recv: list[Array]
    want: list[Array]
    keep: bool = True
    """Whether SEND must be as it was."""
    programs: list[Program] = field(default_factory=list)

    @property
    def call(self) -> Call:
        return self.calls[0]

    def plan(self) -> Case:
        """Make the programs, in a larger window if it has to be; too small is so for all."""
        while True:
            refused = 0
            self.programs = []
            for rank, call in enumerate(self.calls):
                try:
                    self.programs.append(program(self.algorithm, call, rank))
                except UnsupportedError as exc:
                    if "window larger" not in str(exc) and "one-shot" not in str(exc):
                        raise
                    refused += 1
            if not refused:
                break
            assert refused == len(self.calls)
            limits = replace(self.call.limits, window=2 * self.call.limits.window)
            self.calls = [replace(call, limits=limits) for call in self.calls]
        assert max(p.window for p in self.programs) <= self.call.limits.window
        return self

    def prove(self) -> None:
        prove(self.programs, self.call.layout, self.send, self.recv)

    def run(self, seed: int | None = None, eager: float = 0.5, **more: Any) -> Traffic:
        """Run on the simulator and compare; the arrays are used up."""
        rng = random.Random(seed) if seed is not None else None
        before = [array.copy() for array in self.send]
        traffic = simulate(
            self.programs, self.call.layout, self.send, self.recv, add,
            rng=rng, eager=eager, base=17, **more,
        )  # fmt: skip
        for rank, (got, want) in enumerate(zip(self.recv, self.want, strict=True)):
            np.testing.assert_array_equal(got, want, err_msg=f"rank {rank}")
            if self.keep:
                np.testing.assert_array_equal(self.send[rank], before[rank], "SEND was changed")
        return traffic


def make(
    kind: Kind,
    algorithm: str,
    layout: RankLayout,
    count: int = 0,
    *,
    counts: Sequence[Any] = (),
    window: int = 64,
    chunk: int = 16,
    small: int = 0,
    root: int = 0,
    in_place: str = "",
    holes: int | None = None,
) -> Case:
    """Return the planned case.

    ``in_place``: "" or "memory" (told by the addresses alone) or "field". ``holes``: seed of
    displacements with gaps, different on each rank.
    """
    limits = Limits(window, chunk, small)
    call = Call(kind, layout, count, limits, root, tuple(counts), in_place=in_place == "field")
    n = layout.size
    calls = [call] * n
    if holes is not None:
        calls = [_with_holes(call, rank, random.Random(holes + rank)) for rank in range(n)]
    build = {
        Kind.REDUCE_SCATTER: _reduce_scatter, Kind.GATHER: _moves, Kind.SCATTER: _moves,
        Kind.ALLGATHER: _moves, Kind.ALLTOALL: _moves,
    }.get(kind, _vectors)  # fmt: skip
    send, recv, want = build(calls, in_place)
    return Case(
        algorithm, calls, send, recv, want, not in_place and kind is not Kind.BROADCAST
    ).plan()


def elements(call: Call, source: int, target: int) -> int:
    if call.kind is Kind.ALLTOALL:
        return call.elements(source, target)
    return call.blocks[target if call.kind is Kind.SCATTER else source]


def _with_holes(call: Call, rank: int, rng: random.Random) -> Call:
    def scattered(counts: list[int]) -> tuple[int, ...]:
        order, at = list(range(len(counts))), 0
        rng.shuffle(order)
        starts = [0] * len(counts)
        for q in order:
            at += rng.choice((0, 0, 1, 5))
            starts[q] = at
            at += counts[q]
        return tuple(starts)

    ranks = range(call.layout.size)
    more: dict[str, tuple[int, ...]] = {}
    if call.kind in (Kind.SCATTER, Kind.ALLTOALL) and not call.in_place:
        more["send_at"] = scattered([elements(call, rank, q) for q in ranks])
    if call.kind in (Kind.GATHER, Kind.ALLGATHER, Kind.ALLTOALL):
        more["recv_at"] = scattered([elements(call, q, rank) for q in ranks])
    return replace(call, **more)


def _vectors(calls: list[Call], in_place: str) -> tuple[list[Array], list[Array], list[Array]]:
    call, n, count = calls[0], calls[0].layout.size, calls[0].count
    send = [vector(rank, count) for rank in range(n)]
    recv = [np.full(count, UNSET) for _ in range(n)]
    if call.kind is Kind.BROADCAST:
        recv[call.root] = vector(call.root, count)
        return [np.zeros(0, np.int64)] * n, recv, [vector(call.root, count)] * n
    sums = {
        Kind.ALLREDUCE: [n] * n,
        Kind.REDUCE: [n if rank == call.root else 0 for rank in range(n)],
        Kind.SCAN: [rank + 1 for rank in range(n)],
        Kind.EXSCAN: list(range(n)),
    }[call.kind]
    if in_place:
        recv = list(send)
    want = [total(m, count) if m else recv[rank].copy() for rank, m in enumerate(sums)]
    if call.kind is Kind.REDUCE:
        for rank in range(n):
            if rank != call.root:  # has no array
                recv[rank] = want[rank] = np.zeros(0, np.int64)
    return send, recv, want


def _reduce_scatter(
    calls: list[Call], in_place: str
) -> tuple[list[Array], list[Array], list[Array]]:
    call, n = calls[0], calls[0].layout.size
    ends = list(accumulate(call.blocks))
    send = [vector(rank, ends[-1]) for rank in range(n)]
    own = [slice(end - count, end) for end, count in zip(ends, call.blocks, strict=True)]
    recv = [np.full(count, UNSET) for count in call.blocks]
    if in_place == "memory":
        recv = [send[rank][own[rank]] for rank in range(n)]
    elif in_place:
        recv = [send[rank][: call.blocks[rank]] for rank in range(n)]
    return send, recv, [total(n, ends[-1])[own[rank]] for rank in range(n)]


def _moves(calls: list[Call], in_place: str) -> tuple[list[Array], list[Array], list[Array]]:
    """Arrays of the kinds that move blocks; who has no array gets an empty one."""
    kind, root, n = calls[0].kind, calls[0].root, calls[0].layout.size
    ranks = range(n)
    sends_many, gets_many = kind in (Kind.SCATTER, Kind.ALLTOALL), kind is not Kind.SCATTER
    send, recv, want = [], [], []
    for rank, call in enumerate(calls):
        into = call.recv_offsets(rank) if gets_many else (0,) * n
        sources = list(ranks) if gets_many else [root]
        if kind is Kind.GATHER and rank != root:
            sources = []
        ends = [into[q] + elements(call, q, rank) for q in sources]
        result = np.full(max(ends, default=0) + 3 * gets_many, UNSET)
        wanted = result.copy()
        for q in sources:
            count = elements(call, q, rank)
            to = q if kind is Kind.ALLGATHER else rank
            wanted[into[q] : into[q] + count] = block(q, to, count)
        targets = list(ranks) if sends_many else [root]
        if kind is Kind.SCATTER and rank != root:
            targets = []
        at = call.send_offsets(rank) if sends_many else (0,) * n
        size = max((at[q] + elements(call, rank, q) for q in targets), default=0)
        given = np.full(size, -5)
        for q in targets:
            count = elements(call, rank, q)
            to = rank if kind is Kind.ALLGATHER else q
            given[at[q] : at[q] + count] = block(rank, to, count)
        if in_place == "field":
            result[: len(given)] = given
            wanted = np.where(wanted == UNSET, result, wanted)
            given = result
        elif in_place and kind is Kind.SCATTER and rank == root:
            result = given[at[rank] : at[rank] + len(result)]
        elif in_place and gets_many and (kind is Kind.ALLGATHER or rank == root):
            own = slice(into[rank], into[rank] + elements(call, rank, rank))
            result[own] = given
            given = result[own]
        send.append(given)
        recv.append(result)
        want.append(wanted)
    return send, recv, want


def symmetric(counts: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Return the matrix with its lower half made equal to the upper."""
    n = len(counts)
    return tuple(tuple(counts[min(s, d)][max(s, d)] for d in range(n)) for s in range(n))
