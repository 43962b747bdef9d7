"""Schedules as data: what one rank does in one collective, step by step.

A :class:`Program` is a list of steps with explicit dependencies. A step may run once the steps
it depends on are complete; nothing else orders it. List order is the priority. A program
without messages may also be run strictly in list order, which is faster: its planners put no
step before one that it needs through other ranks. The simulator tests both.

Memory is named by :class:`Ref`, in elements. Four spaces exist: ``SEND`` and ``RECV`` are the
caller's arrays (which may be the same memory), ``WINDOW`` is the area of ``owner`` in this
node's shared window, ``SCRATCH`` is private.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

__all__ = [
    "DONE",
    "Await",
    "Builder",
    "Copy",
    "Post",
    "Program",
    "Recv",
    "Reduce",
    "Ref",
    "Send",
    "Space",
    "Step",
]

DONE = 0
"""Window counter by which a rank says that it no longer reads its peers' areas for this plan."""


class Space(enum.Enum):
    """What a reference points into."""

    SEND = "send"
    RECV = "recv"
    WINDOW = "window"
    SCRATCH = "scratch"


@dataclass(frozen=True, slots=True)
class Ref:
    """``count`` elements from ``offset`` of one space; ``owner`` is a rank, for windows only."""

    space: Space
    offset: int
    count: int
    owner: int = -1

    def part(self, offset: int, count: int) -> Ref:
        """Return ``count`` elements of this from ``offset``."""
        if offset < 0 or count < 0 or offset + count > self.count:
            raise ValueError(f"part {offset}+{count} is outside {self}")
        return Ref(self.space, self.offset + offset, count, self.owner)


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy ``src`` to ``dst``; nothing where the two are the same memory."""

    dst: Ref
    src: Ref


@dataclass(frozen=True, slots=True)
class Reduce:
    """Reduce ``srcs``, in that order, to ``dst``, which may be one of them."""

    dst: Ref
    srcs: tuple[Ref, ...]


@dataclass(frozen=True, slots=True)
class Post:
    """Set this rank's window counter."""

    flag: int
    value: int


@dataclass(frozen=True, slots=True)
class Await:
    """Wait until the window counter of ``owner`` has reached ``value``."""

    owner: int
    flag: int
    value: int


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``src`` to ``peer``; complete when ``src`` may be overwritten."""

    peer: int
    src: Ref
    tag: int


@dataclass(frozen=True, slots=True)
class Recv:
    """Receive from ``peer`` into ``dst``; complete when the bytes are there."""

    peer: int
    dst: Ref
    tag: int


Step = Copy | Reduce | Post | Await | Send | Recv


@dataclass(frozen=True)
class Program:
    """The steps of one rank in one collective."""

    steps: tuple[Step, ...]
    after: tuple[tuple[int, ...], ...]
    """For each step the indices, all smaller than its own, of the steps it waits for."""
    scratch: int
    """Elements of private memory needed."""
    window: int
    """Elements of each rank's window area needed."""
    span: int
    """Largest value posted; equal on all ranks of a node."""
    tags: int = 0
    """Tags of messages are below this; equal on all ranks."""

    @property
    def messages(self) -> bool:
        """Whether any step is a message; without, list order is the fastest way to run it."""
        return any(isinstance(step, Send | Recv) for step in self.steps)

    def sent(self) -> dict[int, int]:
        """Return elements sent to each peer by messages."""
        total: dict[int, int] = {}
        for step in self.steps:
            if isinstance(step, Send):
                total[step.peer] = total.get(step.peer, 0) + step.src.count
        return total


@dataclass(frozen=True)
class Planned:
    """A program, and what its elements are."""

    program: Program
    itemsize: int
    """Bytes of an element between the ranks."""

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends by messages."""
        return self.itemsize * sum(self.program.sent().values())


@dataclass
class Builder:
    """Collects the steps of one rank; planners call its methods in list order."""

    rank: int
    steps: list[Step] = field(default_factory=list)
    after: list[tuple[int, ...]] = field(default_factory=list)
    scratch: int = 0
    window: int = 0
    span: int = 0
    _posts: dict[int, int] = field(default_factory=dict)

    def add(self, step: Step, after: Iterable[int] = ()) -> int:
        """Append ``step``, to run once the steps ``after`` are complete; return its index."""
        self.steps.append(step)
        self.after.append(tuple(sorted(set(after))))
        return len(self.steps) - 1

    def copy(self, dst: Ref, src: Ref, after: Iterable[int] = ()) -> list[int]:
        """Append a copy; empty ones are left out. Return what later steps should wait for."""
        return [self.add(Copy(dst, src), after)] if dst.count else sorted(set(after))

    def reduce(self, dst: Ref, srcs: Sequence[Ref], after: Iterable[int] = ()) -> list[int]:
        """Append a reduction; empty ones are left out, of one source a copy is made."""
        if len(srcs) == 1 or not dst.count:
            return self.copy(dst, srcs[0], after)
        return [self.add(Reduce(dst, tuple(srcs)), after)]

    def post(self, flag: int, value: int, after: Iterable[int] = ()) -> list[int]:
        """Append a post. Posts of one counter keep their order: values must not decrease."""
        waits = [*after, self._posts[flag]] if flag in self._posts else list(after)
        self._posts[flag] = self.add(Post(flag, value), waits)
        self.span = max(self.span, value)
        return [self._posts[flag]]

    def wait(
        self, owners: Iterable[int], flag: int, value: int, after: Iterable[int] = ()
    ) -> list[int]:
        """Append one wait for each of ``owners`` other than this rank.

        ``after`` is what the steps behind the wait need as well: a wait that is begun early is
        polled in vain.
        """
        after = list(after)
        others = [owner for owner in owners if owner != self.rank]
        return [self.add(Await(owner, flag, value), after) for owner in others]

    def send(self, peer: int, src: Ref, tag: int, after: Iterable[int] = ()) -> list[int]:
        """Append a message to ``peer``; empty ones are left out on both sides."""
        return [self.add(Send(peer, src, tag), after)] if src.count else sorted(set(after))

    def recv(self, peer: int, dst: Ref, tag: int, after: Iterable[int] = ()) -> list[int]:
        """Append a message from ``peer``; empty ones are left out on both sides."""
        return [self.add(Recv(peer, dst, tag), after)] if dst.count else sorted(set(after))

    def private(self, count: int) -> Ref:
        """Return ``count`` new elements of scratch."""
        self.scratch += count
        return Ref(Space.SCRATCH, self.scratch - count, count)

    def build(self, span: int = 0, tags: int = 0) -> Program:
        """Return the finished program; ``span`` and ``tags`` are the whole plan's."""
        return Program(
            tuple(self.steps),
            tuple(self.after),
            self.scratch,
            self.window,
            max(span, self.span),
            tags,
        )
