"""Runs the program of one rank on GPU memory: messages, window areas and counters of the host.

The same plans as for host memory. Copies and reductions go onto one stream in the order in which
their inputs are ready; what the host does (messages, posts to peers) waits for the event behind
the work it needs, by polling. So no kernel ever waits for a peer: this serves where kernels of
different ranks cannot be resident at once, and between nodes.

Visibility. A post comes after its event, and the peer looks at the window only after the post. A
message has arrived when the host saw its completion, and the kernels that use it are launched
later. A NIC's write that *peers* will read from the window is flushed before its post
(:func:`rdmakit.plan.flush.flush_points`); what only this GPU reads needs none.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from rdmakit.executor import Guard, Places
from rdmakit.plan.flush import flush_points
from rdmakit.plan.steps import Await, Copy, Post, Program, Recv, Reduce, Ref, Send, Space
from rdmakit.protocols import DeviceChannel, Request, Window
from rdmakit.waiting import Waiter, settle

__all__ = ["DeviceProgram", "DeviceRun", "DeviceWork"]


def _nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True)
class DeviceWork:
    """What a program does on this rank's GPU; a fake in tests."""

    door: Any
    """:mod:`rdmakit.drivers.cuda`."""
    combine: Callable[[int, Sequence[int], int, str], Callable[[int], object]]
    """(dst, srcs, count, dtype name) -> launch on a stream of ``dst = srcs[0] op srcs[1] ...``."""
    flush: Callable[[], None] | None = None
    """Makes a NIC's writes visible to all GPUs; None where they are so by themselves."""
    enter: Callable[[], None] = _nothing
    """Makes the GPU current in the calling thread; called at each step, cheap when it is."""


class DeviceProgram:
    """A program tied to GPU memory. Local to make; running it is collective.

    Owns its scratch memory, freed by :meth:`close`.
    """

    def __init__(
        self,
        program: Program,
        dtype: np.dtype[Any],
        addresses: Mapping[Space, int],
        places: Places,
        *,
        areas: Mapping[int, int],
        counters: Window | None,
        channel: DeviceChannel | None,
        waiter: Waiter,
        guard: Guard,
        work: DeviceWork,
        label: str,
    ) -> None:
        """Bind.

        Args:
            program: what to run.
            dtype: type of the elements.
            addresses: of SEND and RECV.
            places: the plan's ranks.
            areas: address here of each rank's window area, where the program uses a window.
            counters: window whose counters say what is in the areas.
            channel: carries messages of GPU memory, where the program has any.
            waiter: deadline and yielding.
            guard: held while counters and channel are used.
            work: copies and reductions.
            label: names the operation in errors.
        """
        self.program, self.label = program, label
        self._places, self._counters, self._channel = places, counters, channel
        self._waiter, self._guard, self._door = waiter, guard, work.door
        self._enter = work.enter
        self._itemsize = dtype.itemsize
        self._scratch = work.door.DeviceMemory(program.scratch * dtype.itemsize)
        self._bases = {**addresses, Space.SCRATCH: self._scratch.address}
        self._areas = areas
        self._flush = flush_points(program) if work.flush is not None else frozenset()
        self._flush_writes = work.flush
        self._actions = [self._compile(step, work, dtype.name) for step in program.steps]
        self._events = [self._door.Event() if marked else None for marked in self._marked()]
        self._left = [len(after) for after in program.after]
        self._next: list[list[int]] = [[] for _ in program.steps]
        for index, after in enumerate(program.after):
            for before in after:
                self._next[before].append(index)

    def _on_device(self, index: int) -> bool:
        return isinstance(self.program.steps[index], Copy | Reduce)

    def _marked(self) -> list[bool]:
        """Return for each step whether the host must learn when the GPU has done it."""
        marked = [False] * len(self.program.steps)
        for index, after in enumerate(self.program.after):
            if not self._on_device(index):
                for before in after:
                    marked[before] = marked[before] or self._on_device(before)
        return marked

    def _address(self, ref: Ref) -> int:
        base = self._areas[ref.owner] if ref.space is Space.WINDOW else self._bases[ref.space]
        return base + ref.offset * self._itemsize

    def _compile(self, step: object, work: DeviceWork, dtype: str) -> Any:
        match step:
            case Copy(dst, src):
                to, of = self._address(dst), self._address(src)
                nbytes = 0 if to == of else dst.count * self._itemsize
                return partial(work.door.copy_async, to, of, nbytes)
            case Reduce(dst, srcs):
                return work.combine(
                    self._address(dst), [self._address(src) for src in srcs], dst.count, dtype
                )
            case Send(_, ref, _) | Recv(_, ref, _):
                assert self._channel is not None
                return self._channel.wrap_device(self._address(ref), ref.count * self._itemsize)
        return None

    def start(self, tag: int, stream: int, keep: object = None) -> DeviceRun:
        """Begin one run, of which only one may be under way. Collective, does not block.

        Args:
            tag: equal on all ranks and not used by other operations under way.
            stream: a CUstream number; inputs are ready there, the result is ready there when
                :meth:`DeviceRun.advance` has returned True.
            keep: owns the memory; outlives what is given up.
        """
        return DeviceRun(self, tag, stream, keep)

    def run(self, tag: int, stream: int, keep: object = None) -> None:
        """Run once. Collective; blocks until all messages are done and all work is enqueued.

        Raises:
            TransferTimeout: a wait passed its deadline.
            TransportError: a message failed.
        """
        channel, waiter = self._channel, self._waiter
        self._guard.enter()
        try:
            run = self.start(tag, stream, keep)
            waiter.start()
            try:
                while not run.advance():
                    if run.moved:
                        waiter.start()
                    waiter.idle(run.waits_for)
            except BaseException:
                run.abandon()
                raise
            if channel is not None:
                settle(channel.flush, channel.progress)
        finally:
            self._guard.leave()

    def close(self) -> None:
        """Free scratch memory and events. Local; waits for the device."""
        for event in self._events:
            if event is not None:
                event.close()
        self._scratch.close()


class DeviceRun:
    """One run of a program; a :class:`rdmakit.family.Run`. With the guard held."""

    def __init__(self, bound: DeviceProgram, tag: int, stream: int, keep: object) -> None:
        self._bound, self._tag, self._stream, self._keep = bound, tag, stream, keep
        self._left = bound._left.copy()
        self._ready = [index for index, n in enumerate(self._left) if not n]
        self._remaining = len(self._left)
        self._base = bound._counters.base if bound._counters is not None else 0
        self._requests: list[tuple[Request, int]] = []
        self._awaits: list[int] = []
        self._marks: deque[int] = deque()
        self._begun = bound._door.Event()
        """Inputs are ready on the stream: messages and posts that need no step wait for it."""
        self._begun.record(stream)
        self._may_send = False
        self.moved = False

    def advance(self) -> bool:
        """Do all that can be done now; return whether the run is complete. Does not block."""
        bound = self._bound
        self.moved = False
        bound._enter()
        if not self._may_send:
            if not self._begun.done():
                return False
            self._may_send = self.moved = True
            self._begun.close()
        while self._ready:
            self._issue(heapq.heappop(self._ready))
        if bound._channel is not None:
            bound._channel.progress()
        for index in self._finished():
            self._complete(index, device=False)
            self.moved = True
        if self._remaining or self._marks:
            return False
        if bound._counters is not None:
            bound._counters.base = self._base + bound.program.span
        return True

    def _issue(self, index: int) -> None:
        bound = self._bound
        step, action = bound.program.steps[index], bound._actions[index]
        match step:
            case Copy() | Reduce():
                action(self._stream)
                event = bound._events[index]
                if event is not None:
                    event.record(self._stream)
                    self._marks.append(index)
                self._complete(index, device=True)
            case Post(flag, value):
                assert bound._counters is not None
                if index in bound._flush and bound._flush_writes is not None:
                    bound._flush_writes()
                bound._counters.post(flag, self._base + value)
                self._complete(index, device=False)
            case Await():
                self._awaits.append(index)
            case Send(peer, _, tag) | Recv(peer, _, tag):
                assert bound._channel is not None
                move = bound._channel.send if isinstance(step, Send) else bound._channel.recv
                request = move(bound._places.job[peer], action, self._tag + tag)
                self._requests.append((request, index))

    def _complete(self, index: int, *, device: bool) -> None:
        """Note that a step is done; of a device step only for its device followers, in order."""
        if device or not self._bound._on_device(index):
            self._remaining -= 1
        for later in self._bound._next[index]:
            if self._bound._on_device(index) and self._bound._on_device(later) != device:
                continue
            self._left[later] -= 1
            if not self._left[later]:
                heapq.heappush(self._ready, later)

    def _finished(self) -> list[int]:
        """Return the steps that are done since the last look."""
        bound, done = self._bound, []
        while self._marks and bound._events[self._marks[0]].done():  # type: ignore[union-attr]
            done.append(self._marks.popleft())
        if self._requests:
            still = []
            for entry in self._requests:
                if entry[0].done():
                    done.append(entry[1])
                else:
                    still.append(entry)
            self._requests = still
        if self._awaits:
            passed = [index for index in self._awaits if self._reached(index)]
            done += passed
            self._awaits = [index for index in self._awaits if index not in passed]
        return done

    def _reached(self, index: int) -> bool:
        bound, step = self._bound, self._bound.program.steps[index]
        assert isinstance(step, Await)
        assert bound._counters is not None
        owner = bound._places.window[step.owner]
        return bound._counters.reached(owner, step.flag, self._base + step.value)

    def waits_for(self) -> str:
        """Return whom this rank waits for."""
        bound, peers = self._bound, list[int]()
        for index in sorted([*(index for _, index in self._requests), *self._awaits]):
            step = bound.program.steps[index]
            peer = step.owner if isinstance(step, Await) else getattr(step, "peer", -1)
            if bound._places.named[peer] not in peers:
                peers.append(bound._places.named[peer])
        whom = ", ".join(f"rank {peer}" for peer in peers) if peers else "the GPU"
        return f"{bound.label}: waiting for {whom}"

    def abandon(self) -> None:
        """Give up what is under way, keeping its memory alive."""
        channel = self._bound._channel
        if channel is not None:
            requests = [request for request, _ in self._requests]
            channel.abandon(requests, [self._bound, self._keep])
