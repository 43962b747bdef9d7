"""One rank's end of a pair: sends or receives over the communicator's own channel, and looks on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from rdmakit.drivers.host import HostTree
from rdmakit.inter.tags import COMMUNICATORS, TagKind, pack
from rdmakit.proof.counters import LEAST, PortReading, difference
from rdmakit.proof.readings import read_ports
from rdmakit.protocols import Channel, Request
from rdmakit.waiting import Waiter, settle

__all__ = ["Looks", "Memory", "PairEnd", "memory_of", "messages_for", "pattern", "pause", "watch"]

TOTAL = 16 << 20
"""Bytes that counters are held against: far above what a quiet port counts by itself."""
SECONDS = 0.5
"""Longest time that the messages may take, by the time of one."""
_LATE = 0.6
"""Seconds in which counters that a driver fetches now and then may still rise."""
_LOOK_EVERY = 0.05
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
_DATA, _WORD = 0, 1

Looks = tuple[dict[str, PortReading], ...]


def messages_for(nbytes: int, seconds: float) -> int:
    """Return how many messages to send when one takes ``seconds``. Pure."""
    wanted = -(-TOTAL // nbytes)
    return max(1, min(wanted, int(SECONDS / max(seconds, 1e-6))))


def pattern(nbytes: int, seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return bytes that tell senders apart; no two near offsets are equal. Pure."""
    return ((np.arange(nbytes, dtype=np.int64) * 7 + 31 * seed + 1) % 251).astype(np.uint8)


class Memory(Protocol):
    """Where the messages lie."""

    address: int
    nbytes: int
    handle: Any

    def put(self, seed: int) -> None:
        """Fill it."""
        ...

    def wrong(self, seed: int) -> int:
        """Return the bytes that are not those of ``seed``."""
        ...

    def close(self) -> None:
        """Release it; nothing is under way."""
        ...


class _Host:
    def __init__(self, channel: Channel, nbytes: int) -> None:
        self._data, self.nbytes = np.zeros(nbytes, np.uint8), nbytes
        self.address = int(self._data.ctypes.data)
        self.handle = channel.wrap(self._data)

    def put(self, seed: int) -> None:
        self._data[:] = pattern(self.nbytes, seed)

    def wrong(self, seed: int) -> int:
        return int(np.count_nonzero(self._data != pattern(self.nbytes, seed)))

    def close(self) -> None:
        self.handle = None


class _Gpu:
    def __init__(self, channel: Any, nbytes: int, door: Any) -> None:
        self._door, self._memory, self.nbytes = door, door.DeviceMemory(nbytes, zero=True), nbytes
        self.address = int(self._memory.address)
        self.handle = channel.wrap_device(self.address, nbytes)

    def put(self, seed: int) -> None:
        data = pattern(self.nbytes, seed)
        self._door.copy_now(self.address, int(data.ctypes.data), self.nbytes)

    def wrong(self, seed: int) -> int:
        data = np.zeros(self.nbytes, np.uint8)
        self._door.copy_now(int(data.ctypes.data), self.address, self.nbytes)
        return int(np.count_nonzero(data != pattern(self.nbytes, seed)))

    def close(self) -> None:
        self.handle = None
        self._memory.close()


def memory_of(kind: str, channel: Any, nbytes: int, door: Any) -> Memory:
    """Return memory for messages. Local.

    Raises:
        CudaError: the GPU has no room.
    """
    return _Host(channel, nbytes) if kind == "host" else _Gpu(channel, nbytes, door)


class PairEnd:
    """This rank's end: role 0 sends, role 1 receives; both call the same methods alike."""

    def __init__(
        self,
        host: Channel,
        channel: Any,
        waiter: Waiter,
        role: int,
        peer: int,
        kind: str,
        nbytes: int,
        door: Any,
    ) -> None:
        """Make it. Local.

        Args:
            host: the communicator's channel.
            channel: the same, or what stages GPU memory over it.
            waiter: its waits.
            role: 0 sends, 1 receives.
            peer: the other's number on the channel.
            kind: ``host`` or ``gpu``.
            nbytes: of a message.
            door: to CUDA.
        """
        self.channel, self.role, self.peer = channel, role, peer
        self.memory = memory_of(kind, channel, nbytes, door)
        self._waiter = waiter
        self._word = np.zeros(8, np.uint8)
        self._host = host
        self._back = host.wrap(self._word)

    def move(self, messages: int, *, back: bool = False) -> None:
        """Send so many messages, one after the other, and a word back. Blocking.

        Args:
            messages: how many.
            back: from the receiver to the sender.
        """
        receives = self.role != back
        tag = pack(COMMUNICATORS - 1, TagKind.BENCH, 0, _DATA)
        for _ in range(messages):
            if receives:
                self._wait(self.channel.recv(self.peer, self.memory.handle, tag))
            else:
                self._wait(self.channel.send(self.peer, self.memory.handle, tag))
        tag = pack(COMMUNICATORS - 1, TagKind.BENCH, 0, _WORD)
        if receives:
            self._wait(self._host.send(self.peer, self._back, tag))
        else:
            self._wait(self._host.recv(self.peer, self._back, tag))
        settle(self._host.flush, self.channel.progress)

    def _wait(self, request: Request) -> None:
        try:
            self._waiter.until(
                request.done,
                (self.channel.progress,),
                lambda: f"proof of path: messages with rank {self.peer}",
            )
        except BaseException:
            # A late peer may still write the memory.
            self.channel.abandon([request], (self.memory, self._word))
            raise

    def lanes(self) -> tuple[tuple[str, str], ...]:
        """Return the lanes to the peer; after a first message."""
        return tuple(self._host.transports(self.peer))

    def close(self) -> None:
        """Release the memory; nothing is under way."""
        self.memory.close()


def watch(
    tree: HostTree,
    before: dict[str, PortReading],
    move: Callable[[], None],
    ports: set[str],
    sent: int,
    role: int,
) -> tuple[Looks, float]:
    """Look at the ports after ``move``; return both looks and the seconds between.

    ``before`` was seen before the peer could begin. Waits a moment for counters that come late,
    if the ports that should have carried the bytes have not counted them yet. Blocking.
    """
    start = time.monotonic()
    move()
    after, done = read_ports(tree), time.monotonic()
    while _behind(before, after, ports, sent, role) and time.monotonic() - done < _LATE:
        time.sleep(_LOOK_EVERY)
        after = read_ports(tree)
    return (before, after), time.monotonic() - start


def _behind(
    before: dict[str, PortReading],
    after: dict[str, PortReading],
    ports: set[str],
    sent: int,
    role: int,
) -> bool:
    seen = 0
    for port in ports & set(before) & set(after):
        first, last = before[port], after[port]
        pair = (first.received, last.received) if role else (first.sent, last.sent)
        seen += (difference(*pair) or 0) * (last.mtu if last.unit == "packets" else 1)
    return seen < LEAST * sent


def pause(tree: HostTree, seconds: float, sleep: Callable[[float], None]) -> tuple[Looks, float]:
    """Look at the ports before and after doing nothing for as long. Blocking, two seconds at most.

    Returns:
        The looks, and the seconds between them.
    """
    before, start = read_ports(tree), time.monotonic()
    sleep(min(max(seconds, _SHORTEST_PAUSE), _LONGEST_PAUSE))
    return (before, read_ports(tree)), time.monotonic() - start
