"""Runs the program of one rank on real memory, a window and a channel.

``Bound`` ties a program to addresses once; it may then be run any number of times while the
arrays at those addresses are alive. Programs without messages run straight down their list;
others as a data flow, lowest index first, so that messages of one chunk travel while the next
is copied and reduced.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rdmakit.buffer import array_at
from rdmakit.plan.steps import Await, Copy, Planned, Post, Program, Recv, Reduce, Ref, Send, Space
from rdmakit.protocols import Channel, Request, Window
from rdmakit.reduction import Reducer
from rdmakit.waiting import Waiter, settle

__all__ = ["Bound", "BoundRun", "Guard", "Places"]

Array = npt.NDArray[Any]
_BURST = 8
"""Copies and reductions after which a run that is not waited for lets others have a turn."""
_COPY, _REDUCE, _POST, _AWAIT, _SEND, _RECV = range(6)
_Op = tuple[int, Any, Any, Any]


@dataclass(frozen=True)
class Places:
    """Where the ranks of a plan are: their index in this rank's window and on the channel."""

    window: dict[int, int]
    job: Sequence[int]
    named: Sequence[int]
    """What errors call them: their ranks in the communicator."""


def _nothing(*_: Any) -> Any:
    """Stand where a program has no messages."""


_NO_CHANNEL: tuple[Callable[..., Any], ...] = (_nothing, _nothing, _nothing)


class Guard(Protocol):
    """A lock."""

    def enter(self) -> None:
        """Take it."""
        ...

    def leave(self) -> None:
        """Give it back."""
        ...


class Bound:
    """A program tied to memory. Local to make; running it is collective."""

    def __init__(
        self,
        program: Program,
        dtype: np.dtype[Any],
        addresses: dict[Space, tuple[int, int]],
        places: Places,
        window: Window | None,
        channel: Channel | None,
        waiter: Waiter,
        guard: Guard,
        reduce: Reducer,
        label: str,
        prepare: Callable[[], None] | None = None,
        finish: Callable[[], None] | None = None,
    ) -> None:
        """Bind.

        Args:
            program: what to run.
            dtype: type of the elements.
            addresses: (address, count) of SEND and RECV.
            places: the plan's ranks.
            window: needed if the program has window steps.
            channel: needed if it has messages.
            waiter: deadline and yielding.
            guard: held while ``run`` uses the channel.
            reduce: what a Reduce step calls.
            label: names the operation in errors.
            prepare: local work on the caller's input, ahead of the first step of each run.
            finish: local work on the caller's output, behind the last step of each run.
        """
        self.dtype, self._prepare, self._finish = dtype, prepare, finish
        self.planned = Planned(program, dtype.itemsize)
        self.program, self._window, self._channel, self._waiter = program, window, channel, waiter
        self._places, self.label, self._guard = places, label, guard
        self._scratch = np.empty(program.scratch, dtype)
        spaces = {space: array_at(*where, dtype) for space, where in addresses.items()}
        spaces[Space.SCRATCH] = self._scratch
        areas: dict[int, Array] = {}
        if program.window:
            assert window is not None
            assert program.window * dtype.itemsize <= window.nbytes
            usable = window.nbytes // dtype.itemsize * dtype.itemsize
            areas = {
                rank: window.area(index)[:usable].view(dtype)
                for rank, index in places.window.items()
            }

        def view(ref: Ref) -> Array:
            array = areas[ref.owner] if ref.space is Space.WINDOW else spaces[ref.space]
            return array[ref.offset : ref.offset + ref.count]

        self._reduce = reduce
        self._ops = [self._compile(step, view) for step in program.steps]
        self._waiters: list[list[int]] = [[] for _ in program.steps]
        for index, after in enumerate(program.after):
            for before in after:
                self._waiters[before].append(index)
        self._left = [len(after) for after in program.after]
        self._messages = program.messages
        self._first = [i for i, n in enumerate(self._left) if not n]

    def run(self, tag: int, keep: Sequence[object] = ()) -> None:
        """Run once. Collective, blocking.

        Args:
            tag: equal on all ranks and not used by other operations under way.
            keep: owns the memory; outlives what is given up.
        """
        # Not bound once as an attribute: memory would then wait for the garbage collector.
        if self._prepare is not None:
            self._prepare()
        if self._messages:
            self._run_messages(tag, keep)
        else:
            self._run_straight(tag, keep)
        if self._finish is not None:
            self._finish()

    def start(self, tag: int, keep: Sequence[object] = ()) -> BoundRun:
        """Return a run that does a little at a time. Collective, does not block.

        The next run, or ``run``, may begin once it is complete. Arguments as of ``run``.
        """
        return BoundRun(self, tag, keep)

    def _compile(self, step: object, view: Callable[[Ref], Array]) -> _Op:
        match step:
            case Copy(dst, src):
                to, of = view(dst), view(src)
                same = to.__array_interface__["data"] == of.__array_interface__["data"]
                return (_COPY, to[:0], of[:0], None) if same else (_COPY, to, of, None)
            case Reduce(dst, srcs):
                return (_REDUCE, view(dst), [view(src) for src in srcs], None)
            case Post(flag, value):
                return (_POST, flag, value, None)
            case Await(owner, flag, value):
                return (_AWAIT, self._places.window[owner], flag, value)
            case Send(peer, ref, tag) | Recv(peer, ref, tag):
                assert self._channel is not None
                handle = self._channel.wrap(view(ref).view(np.uint8))
                kind = _SEND if isinstance(step, Send) else _RECV
                return (kind, self._places.job[peer], handle, tag)
        raise TypeError(step)

    def _waits_for(self, *indices: int) -> str:
        """Return whom this rank waits for, and the first of the steps in question."""
        if not indices:
            return f"{self.label}: waiting"
        peers: list[int] = []
        for index in indices:
            step = self.program.steps[index]
            peer = step.owner if isinstance(step, Await) else getattr(step, "peer", None)
            if peer is not None and self._places.named[peer] not in peers:
                peers.append(self._places.named[peer])
        match self.program.steps[indices[0]]:
            case Await(_, _, value):
                what = f"step {value}"
            case Send(_, ref, _):
                what = f"to send {ref.count} elements"
            case Recv(_, ref, _):
                what = f"for {ref.count} elements"
            case step:
                what = str(step)
        ranks = ", ".join(f"rank {peer}" for peer in peers)
        return f"{self.label}: waiting for {ranks} ({what})"

    def _run_straight(self, tag: int, keep: Sequence[object] = ()) -> None:
        window, reduce, copyto = self._window, self._reduce, np.copyto
        waiter = self._waiter
        waiter.start()
        if window is None:
            for code, a, b, _ in self._ops:
                if code == _COPY:
                    copyto(a, b)
            return
        base, post, reached = window.base, window.post, window.reached
        for index, (code, a, b, c) in enumerate(self._ops):
            if code == _COPY:
                copyto(a, b)
            elif code == _AWAIT:
                value = base + c
                if not reached(a, b, value):
                    waiter.moved()
                    while not reached(a, b, value):
                        waiter.idle(partial(self._waits_for, index))
                    waiter.start()
            elif code == _REDUCE:
                reduce(a, b)
            else:
                post(a, base + b)
        window.base = base + self.program.span

    def _run_messages(self, tag: int, keep: Sequence[object] = ()) -> None:
        channel, waiter, guard = self._channel, self._waiter, self._guard
        assert channel is not None
        requests: list[tuple[Request, int]] = []
        flags: list[int] = []
        waits_for = partial(self._blocked, requests, flags)
        guard.enter()
        try:
            flow = self._flow(tag, keep, requests, flags, sys.maxsize)
            waiter.start()
            try:
                for moved in flow:
                    if moved:
                        waiter.start()
                    waiter.idle(waits_for)
                settle(channel.flush, channel.progress)
            except BaseException:
                flow.close()
                raise
        finally:
            guard.leave()

    def _blocked(self, requests: Sequence[tuple[Request, int]], flags: Sequence[int]) -> str:
        return self._waits_for(*sorted([*(index for _, index in requests), *flags]))

    def _flow(
        self,
        tag: int,
        keep: Sequence[object],
        requests: list[tuple[Request, int]],
        flags: list[int],
        burst: int,
    ) -> Generator[bool, None, None]:
        """Run as a data flow; yield whether anything was done since, where all now waits.

        Also after ``burst`` copies and reductions. ``requests`` and ``flags`` are what it waits
        for. Closing it gives up its messages.
        """
        window, channel = self._window, self._channel
        base = window.base if window is not None else 0
        send, recv, progress = (
            (channel.send, channel.recv, channel.progress) if channel is not None else _NO_CHANNEL
        )
        ops, waiters = self._ops, self._waiters
        left, ready = self._left.copy(), self._first.copy()
        remaining, moved, calls = len(ops), False, burst
        try:
            while remaining:
                finished: list[int] = []
                if ready:
                    index = heapq.heappop(ready)
                    code, a, b, c = ops[index]
                    if code >= _SEND:
                        requests.append(((send if code == _SEND else recv)(a, b, tag + c), index))
                    elif code == _AWAIT:
                        flags.append(index)
                    else:
                        self._do(code, a, b, base)
                        finished.append(index)
                        calls -= 1
                    if ready and not finished:
                        continue  # start all that can start before looking at any
                progress()
                if requests:
                    finished += _take_done(requests)
                if flags:
                    finished += self._take_reached(flags, base)
                for index in finished:
                    remaining -= 1
                    for waiting in waiters[index]:
                        left[waiting] -= 1
                        if not left[waiting]:
                            heapq.heappush(ready, waiting)
                if finished:
                    moved = True
                    if calls <= 0 and remaining:
                        yield True
                        moved, calls = False, burst
                elif not ready:
                    yield moved
                    moved, calls = False, burst
        except BaseException:
            if channel is not None:
                channel.abandon([request for request, _ in requests], [self, keep])
            raise
        if window is not None:
            window.base = base + self.program.span

    def _do(self, code: int, to: Any, of: Any, base: int) -> None:
        """Do a step that needs no waiting."""
        if code == _COPY:
            np.copyto(to, of)
        elif code == _REDUCE:
            self._reduce(to, of)
        else:
            assert self._window is not None
            self._window.post(to, base + of)

    def _take_reached(self, flags: list[int], base: int) -> list[int]:
        """Take the steps out of ``flags`` whose flag has come, and return them."""
        window, ops = self._window, self._ops
        assert window is not None
        passed = [i for i in flags if window.reached(*ops[i][1:3], base + ops[i][3])]
        if passed:
            flags[:] = [i for i in flags if i not in passed]
        return passed


def _take_done(requests: list[tuple[Request, int]]) -> list[int]:
    """Take the requests that are done out of ``requests``, and return their steps."""
    finished, still = [], []
    for entry in requests:
        if entry[0].done():
            finished.append(entry[1])
        else:
            still.append(entry)
    requests[:] = still
    return finished


class BoundRun:
    """A program under way; see :class:`rdmakit.family.Run`."""

    __slots__ = ("_begun", "_bound", "_flags", "_flow", "_requests", "moved")

    def __init__(self, bound: Bound, tag: int, keep: Sequence[object]) -> None:
        self._bound, self._begun = bound, bound._prepare is None
        self._requests: list[tuple[Request, int]] = []
        self._flags: list[int] = []
        self._flow = bound._flow(tag, keep, self._requests, self._flags, _BURST)
        self.moved = False

    def advance(self) -> bool:
        """Do a little of what can be done without waiting; return whether it is complete."""
        if not self._begun and self._bound._prepare is not None:
            self._bound._prepare()
            self._begun = True
        moved = next(self._flow, None)
        self.moved = moved is None or moved
        if moved is None and self._bound._finish is not None:
            self._bound._finish()
        return moved is None

    def waits_for(self) -> str:
        """Return whom it waits for."""
        return self._bound._blocked(self._requests, self._flags)

    def abandon(self) -> None:
        """Give up its messages."""
        self._flow.close()
