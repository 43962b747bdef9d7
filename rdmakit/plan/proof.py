"""Proves of the programs of all ranks that no order of their steps changes a result or hangs.

From the dependencies, posts and messages follows which steps are complete before another
begins, in every run. Two steps that touch the same elements, one writing, must be in that
relation (else it is a race), and the relation must have no cycle even if every send waits for
its receive (else ranks may hang). The simulator shows one order right; with this, all are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from rdmakit.layout import RankLayout
from rdmakit.plan.simulator import Deadlock
from rdmakit.plan.steps import (
    DONE,
    Await,
    Copy,
    Post,
    Program,
    Recv,
    Reduce,
    Ref,
    Send,
    Space,
    Step,
)

__all__ = ["Race", "prove"]

Array = npt.NDArray[Any]
Node = int
"""A step of any rank: numbered through, rank by rank."""
Key = tuple[int, int, int]
"""Source, target and tag of a message."""


class Race(Exception):
    """Two steps touch the same memory in no fixed order, or a step reads what nobody wrote."""


def prove(
    programs: Sequence[Program], layout: RankLayout, send: Sequence[Array], recv: Sequence[Array]
) -> None:
    """Check ``programs[r]`` of every rank; ``send`` and ``recv`` say which arrays share memory.

    Raises:
        Race: the result may depend on the order of steps.
        Deadlock: ranks may wait for each other for ever.
    """
    proof = _Proof(programs, layout)
    proof.order_steps()
    proof.check_queues()
    _Memory(proof, send, recv).check()
    proof.check_window_is_left()


class _Proof:
    def __init__(self, programs: Sequence[Program], layout: RankLayout) -> None:
        self.programs, self.layout = programs, layout
        self.first = [0]
        for program in programs:
            self.first.append(self.first[-1] + len(program.steps))
        self.steps: list[Step] = [step for program in programs for step in program.steps]
        self.rank = [r for r, program in enumerate(programs) for _ in program.steps]
        self.after = [
            tuple(self.first[r] + i for i in after)
            for r, program in enumerate(programs)
            for after in program.after
        ]
        self.queues: list[list[Node]] = []
        """Ends of messages that have source, target and tag in common, in list order."""
        self.partner = self._partners()
        self.begun: dict[Node, int] = {}
        """For each step the set (bits) of those that are complete before it begins."""
        self.order: list[Node] = []

    def _partners(self) -> dict[Node, Node]:
        """Return each message's other end, and for each await the post that ends it."""
        found = self._posts()
        sends: dict[Key, list[Node]] = defaultdict(list)
        recvs: dict[Key, list[Node]] = defaultdict(list)
        for node, step in enumerate(self.steps):
            if isinstance(step, Send):
                sends[self.rank[node], step.peer, step.tag].append(node)
            elif isinstance(step, Recv):
                recvs[step.peer, self.rank[node], step.tag].append(node)
        for key in sends.keys() | recvs.keys():
            if len(sends[key]) != len(recvs[key]):
                raise Deadlock(
                    f"{len(sends[key])} sends and {len(recvs[key])} receives from rank {key[0]} "
                    f"to rank {key[1]} with tag {key[2]}"
                )
            for send, recv in zip(sends[key], recvs[key], strict=True):
                found[send], found[recv] = recv, send
            self.queues += [sends[key], recvs[key]]
        return found

    def _posts(self) -> dict[Node, Node]:
        posts: dict[tuple[int, int], list[tuple[int, Node]]] = defaultdict(list)
        for node, step in enumerate(self.steps):
            if isinstance(step, Post):
                earlier = posts[self.rank[node], step.flag]
                if earlier and earlier[-1][1] not in self.after[node]:
                    raise Race(f"rank {self.rank[node]}: {step} may come before a smaller one")
                earlier.append((step.value, node))
        found: dict[Node, Node] = {}
        for node, step in enumerate(self.steps):
            if isinstance(step, Await) and step.value > 0:
                ends = posts[step.owner, step.flag]
                at = bisect_left(ends, (step.value, -1))
                if at == len(ends):
                    raise Deadlock(f"rank {self.rank[node]}: nobody posts what {step} waits for")
                found[node] = ends[at][1]
        return found

    def check_queues(self) -> None:
        """Raise unless messages of one tag begin one after the other, as they are matched."""
        for nodes in self.queues:
            for before, node in pairwise(nodes):
                if not self.begun[node] >> before & 1:
                    raise Race(f"rank {self.rank[node]}: two messages at once: {self.steps[node]}")

    def _needs(self, node: Node) -> tuple[Node, ...]:
        """Return what must be complete before the step can be, if sends wait for receives."""
        other = self.partner.get(node)
        if other is None:
            return self.after[node]
        if isinstance(self.steps[node], Await):
            return (*self.after[node], other)
        return (*self.after[node], *self.after[other])

    def order_steps(self) -> None:
        """Find one order of all steps, and for each what is complete before it in every order."""
        left = [len(self._needs(node)) for node in range(len(self.steps))]
        waiters: dict[Node, list[Node]] = defaultdict(list)
        for node in range(len(self.steps)):
            for before in self._needs(node):
                waiters[before].append(node)
        ready = [node for node, n in enumerate(left) if not n]
        while ready:
            node = ready.pop()
            self.order.append(node)
            self._begins(node)
            for waiter in waiters[node]:
                left[waiter] -= 1
                if not left[waiter]:
                    ready.append(waiter)
        if len(self.order) < len(self.steps):
            stuck = {self.rank[n]: str(self.steps[n]) for n, count in enumerate(left) if count}
            raise Deadlock(f"steps wait for each other: {stuck}")

    def _begins(self, node: Node) -> None:
        known = 0
        for before in self.after[node]:
            known |= 1 << before | self._known(before)
        self.begun[node] = known

    def _known(self, node: Node) -> int:
        """Return what is complete, for all to rely on, once ``node`` is."""
        other = self.partner.get(node)
        if other is None or isinstance(self.steps[node], Send):
            return self.begun[node]
        if other not in self.begun:  # a send with the same needs, later in the order
            self._begins(other)
        return self.begun[node] | 1 << other | self.begun[other]

    def check_window_is_left(self) -> None:
        """Raise unless a rank's last word comes behind all that it does in the window."""
        for rank, program in enumerate(self.programs):
            if len(self.layout.nodes[self.layout.node_of(rank)]) == 1 or not program.span:
                continue
            nodes = range(self.first[rank], self.first[rank + 1])
            word = [n for n in nodes if self.steps[n] == Post(DONE, program.span)]
            used = [n for n in nodes if _in_window(self.steps[n])]
            if not word or any(not self.begun[word[-1]] >> n & 1 for n in used):
                raise Race(f"rank {rank} says it has left the window before it has")


def _reads(step: Step) -> tuple[Ref, ...]:
    match step:
        case Copy(_, src) | Send(_, src, _):
            return (src,)
        case Reduce(_, srcs):
            return srcs
    return ()


def _writes(step: Step) -> tuple[Ref, ...]:
    match step:
        case Copy(dst, _) | Reduce(dst, _) | Recv(_, dst, _):
            return (dst,)
    return ()


def _in_window(step: Step) -> bool:
    return any(ref.space is Space.WINDOW for ref in (*_reads(step), *_writes(step)))


class _Memory:
    """All memory, cut where any reference begins or ends; who wrote and read each piece last."""

    def __init__(self, proof: _Proof, send: Sequence[Array], recv: Sequence[Array]) -> None:
        self.proof = proof
        self.start = {Space.SEND: list(map(_address, send)), Space.RECV: list(map(_address, recv))}
        bounds: dict[object, set[int]] = defaultdict(set)
        for node, step in enumerate(proof.steps):
            for ref in (*_reads(step), *_writes(step)):
                where, low = self._place(node, ref)
                bounds[where] |= {low, low + ref.count}
        self.bounds = {where: sorted(found) for where, found in bounds.items()}
        self.writer: dict[tuple[object, int], Node] = {}
        self.readers: dict[tuple[object, int], list[Node]] = defaultdict(list)

    def _place(self, node: Node, ref: Ref) -> tuple[object, int]:
        if ref.space is Space.WINDOW:
            return ("window", ref.owner), ref.offset
        rank = self.proof.rank[node]
        if ref.space is Space.SCRATCH:
            return ("scratch", rank), ref.offset
        return "arrays", self.start[ref.space][rank] + ref.offset

    def _pieces(self, node: Node, ref: Ref) -> Iterator[tuple[object, int]]:
        where, low = self._place(node, ref)
        bounds = self.bounds[where]
        for at in range(bisect_left(bounds, low), bisect_left(bounds, low + ref.count)):
            yield where, at

    def check(self) -> None:
        """Raise if two steps that need an order have none."""
        for node in self.proof.order:
            step = self.proof.steps[node]
            if isinstance(step, Copy) and self._place(node, step.dst) == self._place(
                node, step.src
            ):
                continue  # of memory to itself: no executor does it
            for ref in _reads(step):
                for piece in self._pieces(node, ref):
                    self._read(node, piece)
            for ref in _writes(step):
                for piece in self._pieces(node, ref):
                    self._write(node, piece, ref)

    def _read(self, node: Node, piece: tuple[object, int]) -> None:
        writer = self.writer.get(piece)
        if writer is not None:
            self._ordered(writer, node)
        elif piece[0] != "arrays":
            raise Race(f"{self._name(node)} reads memory that nobody wrote")
        self.readers[piece].append(node)

    def _write(self, node: Node, piece: tuple[object, int], ref: Ref) -> None:
        writer = self.writer.get(piece)
        for before in (*self.readers.pop(piece, ()), *(() if writer is None else (writer,))):
            if before != node:
                self._ordered(before, node)
        if writer is None and ref.space is Space.WINDOW:
            self._check_entry(node)
        self.writer[piece] = node

    def _check_entry(self, node: Node) -> None:
        """Raise unless all peers are known to have left the window that an earlier plan used."""
        proof, rank = self.proof, self.proof.rank[node]
        left = {rank}
        for other in range(proof.first[rank], proof.first[rank + 1]):
            step = proof.steps[other]
            if isinstance(step, Await) and step.flag == DONE and proof.begun[node] >> other & 1:
                left.add(step.owner)
        if left < set(proof.layout.nodes[proof.layout.node_of(rank)]):
            raise Race(f"{self._name(node)} writes where an earlier plan may still read")

    def _ordered(self, before: Node, node: Node) -> None:
        if not self.proof.begun[node] >> before & 1:
            raise Race(f"{self._name(before)} and {self._name(node)} touch the same, in any order")

    def _name(self, node: Node) -> str:
        rank = self.proof.rank[node]
        return f"rank {rank}, step {node - self.proof.first[rank]}: {self.proof.steps[node]}"


def _address(array: Array) -> int:
    return int(np.asarray(array).__array_interface__["data"][0]) // array.itemsize
