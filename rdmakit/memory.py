"""In-memory bootstrap, window and channel: ranks are threads of one process.

They pass the same conformance tests as the real ones, and let plans, executors and
communicators be tested without MPI, shared memory or a network.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from rdmakit.errors import PeerLost, TransportError
from rdmakit.inter.tags import MESSAGES
from rdmakit.protocols import Arrived, Bytes, Request

__all__ = ["MemoryBootstrap", "MemoryChannel", "MemoryWindow", "Post", "run_threads"]

T = TypeVar("T")


class _Meeting:
    """An all-gather among threads; broken for all when one of them fails."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.lock = threading.Lock()
        self.slots: list[Any] = [None] * size
        self.arrived: dict[int, int] = defaultdict(int)
        self.gathered: dict[int, dict[int, bytes]] = defaultdict(dict)
        self.groups: dict[Any, _Meeting] = {}

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.slots[rank] = value
        self.barrier.wait()
        seen = list(self.slots)
        self.barrier.wait()
        return seen


class MemoryBootstrap:
    """Control plane of threads; make all ranks' with :meth:`world`."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self._meeting, self.rank, self.size = meeting, rank, meeting.size
        self._barriers = self._gathers = 0
        self._subsets: dict[tuple[int, ...], int] = defaultdict(int)
        self.host = "memory"

    @classmethod
    def world(cls, size: int) -> list[MemoryBootstrap]:
        """Return the control planes of ``size`` ranks."""
        meeting = _Meeting(size)
        return [cls(meeting, rank) for rank in range(size)]

    def allgather(self, data: bytes) -> list[bytes]:
        """Return every rank's ``data``."""
        return self._meeting.exchange(self.rank, data)

    def share(self, value: T) -> list[T]:
        """Return every rank's object itself, not a copy."""
        return self._meeting.exchange(self.rank, value)

    def barrier(self) -> None:
        """Return when all ranks have called."""
        self._meeting.barrier.wait()

    def start_barrier(self) -> Callable[[], bool]:
        """Start a barrier and return its test."""
        number, meeting = self._barriers, self._meeting
        self._barriers += 1
        with meeting.lock:
            meeting.arrived[number] += 1
        return lambda: meeting.arrived[number] >= meeting.size

    def start_gather(self, data: bytes) -> Callable[[], list[bytes] | None]:
        """Start an all-gather and return its test."""
        meeting = self._meeting
        with meeting.lock:
            told = meeting.gathered[self._gathers]
            told[self.rank] = data
        self._gathers += 1

        def test() -> list[bytes] | None:
            if len(told) < meeting.size:
                return None
            return [told[rank] for rank in range(meeting.size)]

        return test

    def subset(self, ranks: Sequence[int]) -> MemoryBootstrap:
        """Return the control plane of ``ranks``, made by whichever comes first."""
        members = tuple(ranks)
        key = (members, self._subsets[members])
        self._subsets[members] += 1
        with self._meeting.lock:
            meeting = self._meeting.groups.setdefault(key, _Meeting(len(members)))
        return MemoryBootstrap(meeting, members.index(self.rank))

    def split(self, color: int, key: int) -> MemoryBootstrap:
        """Return the control plane of the ranks with equal ``color``."""
        all_ = self.share((color, key, self.rank))
        members = sorted((k, r) for c, k, r in all_ if c == color)
        fresh = _Meeting(len(members)) if members[0][1] == self.rank else None
        made = self.share(fresh)
        meeting = made[members[0][1]]
        assert meeting is not None
        return MemoryBootstrap(meeting, members.index((key, self.rank)))

    def abort(self, code: int) -> None:
        """Break the barriers of all ranks."""
        self._meeting.barrier.abort()

    def free(self) -> None:
        """Nothing to release."""


class MemoryWindow:
    """Areas in ordinary memory."""

    kind = "memory"

    def __init__(self, rank: int, areas: Sequence[Bytes], counters: Sequence[list[int]]) -> None:
        self.rank, self.size, self.nbytes = rank, len(areas), areas[0].nbytes
        self.flags, self.base = len(counters[0]), 0
        self._areas, self._counters = areas, counters

    @classmethod
    def create(cls, bootstrap: MemoryBootstrap, nbytes: int, flags: int) -> MemoryWindow:
        """Make the window of the ranks of ``bootstrap``. Collective."""
        made = bootstrap.share((np.zeros(nbytes, np.uint8), [0] * flags))
        return cls(bootstrap.rank, [a for a, _ in made], [c for _, c in made])

    def area(self, owner: int) -> Bytes:
        """Return the area of rank ``owner``."""
        return self._areas[owner]

    def post(self, flag: int, value: int) -> None:
        """Set this rank's counter."""
        self._counters[self.rank][flag] = value

    def reached(self, owner: int, flag: int, value: int) -> bool:
        """Return whether a peer's counter is at ``value`` or above."""
        return self._counters[owner][flag] >= value

    def close(self) -> None:
        """Nothing to release."""


class _Message:
    def __init__(self, data: Bytes) -> None:
        self.data, self.complete, self.problem, self.number = data, False, "", 0

    def done(self) -> bool:
        if self.problem:
            raise TransportError(self.problem)
        return self.complete


def _deliver(src: _Message, dst: _Message) -> None:
    if src.data.nbytes > dst.data.nbytes:
        dst.problem = f"{src.data.nbytes} bytes sent, room for {dst.data.nbytes}"
    else:
        dst.data[: src.data.nbytes] = src.data
    src.complete = dst.complete = True


class Post:
    """What the channels of one job share: messages that wait for their other half."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.sent = 0
        self.sends: dict[tuple[int, int, int], deque[_Message]] = defaultdict(deque)
        self.recvs: dict[tuple[int, int, int], deque[_Message]] = defaultdict(deque)
        self.lost: set[int] = set()


class MemoryChannel:
    """Messages by rendezvous: a send completes when its receive was posted."""

    name = "memory"
    holds = False
    messages = MESSAGES

    def __init__(self, rank: int, post: Post) -> None:
        self.rank, self._post = rank, post

    @classmethod
    def create(cls, bootstrap: MemoryBootstrap) -> MemoryChannel:
        """Make the channel of all ranks. Collective."""
        post = bootstrap.share(Post())[0]
        return cls(bootstrap.rank, post)

    def wrap(self, data: Bytes) -> Bytes:
        """Return ``data``."""
        return data

    def send(self, peer: int, handle: Any, tag: int) -> Request:
        """Start sending."""
        return self._meet((self.rank, peer, tag), handle, sending=True)

    def recv(self, peer: int, handle: Any, tag: int) -> Request:
        """Start receiving."""
        return self._meet((peer, self.rank, tag), handle, sending=False)

    def _meet(self, key: tuple[int, int, int], data: Bytes, *, sending: bool) -> Request:
        message, post = _Message(data), self._post
        with post.lock:
            others = (post.recvs if sending else post.sends)[key]
            if not others:
                post.sent += 1
                message.number = post.sent
                (post.sends if sending else post.recvs)[key].append(message)
                return message
            other = others.popleft()
            _deliver(*(message, other) if sending else (other, message))
        return message

    def arrived(self, tag: int, mask: int) -> Arrived | None:
        """Take a message out of the matching."""
        post = self._post
        with post.lock:
            there = [
                (queue[0].number, key)
                for key, queue in post.sends.items()
                if queue and key[1] == self.rank and key[2] & mask == tag & mask
            ]
            if not there:
                return None
            source, _, whole = key = min(there)[1]
            message = post.sends[key].popleft()

        def receive(data: Bytes) -> Request:
            into = _Message(data)
            with post.lock:
                _deliver(message, into)
            return into

        return Arrived(source, whole, message.data.nbytes, receive)

    def progress(self) -> None:
        """Nothing to do."""

    def flush(self) -> bool:
        """Nothing is ever held back."""
        return True

    def lose(self, rank: int) -> None:
        """Make ``rank`` count as dead, for tests."""
        self._post.lost.add(rank)

    def check_peers(self) -> None:
        """Raise PeerLost for a rank given to :meth:`lose`."""
        for rank in self._post.lost:
            raise PeerLost(f"rank {rank} is gone")

    def transports(self, peer: int) -> Sequence[tuple[str, str]]:
        """Return the one lane."""
        return (("memory", "memory"),)

    def abandon(self, requests: Sequence[Request], keep: Sequence[object]) -> None:
        """Take back posted halves so that a late peer does not touch the memory."""
        gone = set(map(id, requests))
        with self._post.lock:
            for table in (self._post.sends, self._post.recvs):
                for key, queue in table.items():
                    table[key] = deque(m for m in queue if id(m) not in gone)

    def close(self) -> None:
        """Nothing to release."""


def run_threads(size: int, main: Callable[[MemoryBootstrap], T], timeout: float = 60.0) -> list[T]:
    """Run ``main`` on ``size`` ranks, each a thread; return their results.

    Raises:
        BaseException: the first rank's error that is not a consequence of another's.
        TimeoutError: a rank did not end.
    """
    worlds = MemoryBootstrap.world(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def body(bootstrap: MemoryBootstrap) -> None:
        try:
            results[bootstrap.rank] = main(bootstrap)
        except BaseException as exc:
            if not isinstance(exc, threading.BrokenBarrierError):
                errors.append(exc)
            bootstrap.abort(1)

    threads = [threading.Thread(target=body, args=(b,), daemon=True) for b in worlds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    if errors:
        raise errors[0]
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError(f"not all of {size} ranks ended within {timeout} s")
    return results
