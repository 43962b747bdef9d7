"""What every Channel must do, as cases that run in threads and in processes.

A case is called on all ranks with their control plane and a function that makes the thing under
test; it raises AssertionError. tests/parallel/programs/conformance.py runs the same cases under
mpirun.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rdmakit.errors import TransportError
from rdmakit.protocols import Bootstrap, Bytes, Channel, Request
from tests.conformance.cases import LIMIT, SIZES, pattern

MakeChannel = Callable[[], Channel]


class Mail:
    """A channel whose memory is held as long as the case runs."""

    def __init__(self, boot: Bootstrap, channel: Channel) -> None:
        self.boot, self.channel = boot, channel
        self.others = [peer for peer in range(boot.size) if peer != boot.rank]
        self._held: list[Bytes] = []

    def send(self, peer: int, data: Bytes, tag: int) -> Request:
        self._held.append(data)
        return self.channel.send(peer, self.channel.wrap(data), tag)

    def recv(self, peer: int, data: Bytes, tag: int) -> Request:
        self._held.append(data)
        return self.channel.recv(peer, self.channel.wrap(data), tag)

    def finish(self, requests: Sequence[Request], limit: float = LIMIT) -> None:
        end = time.monotonic() + limit
        left = list(requests)
        while left:
            self.channel.progress()
            left = [request for request in left if not request.done()]
            if left:
                self.channel.check_peers()
                assert time.monotonic() < end, f"{len(left)} of {len(requests)} still open"
                time.sleep(0)
        assert all(request.done() for request in requests), "done stays done"

    def leave(self) -> None:
        """Flush, wait for all others with messages still moving, close."""
        self.sync()
        self.channel.close()
        self.channel.close()

    def sync(self) -> None:
        end = time.monotonic() + LIMIT
        while not self.channel.flush():
            self.channel.progress()
            assert time.monotonic() < end, "flush"
        arrived = self.boot.start_barrier()
        while not arrived():
            self.channel.progress()
            assert time.monotonic() < end, "barrier"
            time.sleep(0)


def channel_sizes(boot: Bootstrap, make: MakeChannel) -> None:
    mail = Mail(boot, make())
    for number, nbytes in enumerate(SIZES):
        got = {peer: np.zeros(nbytes, np.uint8) for peer in mail.others}
        requests = [mail.recv(peer, got[peer], number) for peer in mail.others]
        requests += [
            mail.send(peer, pattern(nbytes, boot.rank, peer, number), number)
            for peer in mail.others
        ]
        mail.finish(requests)
        for peer, data in got.items():
            np.testing.assert_array_equal(data, pattern(nbytes, peer, boot.rank, number))
    mail.leave()


def channel_many_outstanding(boot: Bootstrap, make: MakeChannel) -> None:
    mail, count = Mail(boot, make()), 300
    lengths = [
        (number * 37) % 2000 + (70_000 if number % 50 == 0 else 1) for number in range(count)
    ]
    got = {(p, i): np.zeros(lengths[i], np.uint8) for p in mail.others for i in range(count)}
    requests = []
    for number in range(count):
        for peer in mail.others:
            requests.append(mail.recv(peer, got[peer, number], number))
            data = pattern(lengths[number], boot.rank, peer, number)
            requests.append(mail.send(peer, data, number))
    mail.finish(requests)
    for (peer, number), data in got.items():
        np.testing.assert_array_equal(data, pattern(lengths[number], peer, boot.rank, number))
    mail.leave()


def channel_tags_out_of_order(boot: Bootstrap, make: MakeChannel) -> None:
    mail, count = Mail(boot, make()), 24
    got = {(p, i): np.zeros(5000, np.uint8) for p in mail.others for i in range(count)}
    requests = [
        mail.send(peer, pattern(5000, boot.rank, peer, number), number)
        for number in range(count)
        for peer in mail.others
    ]
    for number in reversed(range(count)):
        requests += [mail.recv(peer, got[peer, number], number) for peer in reversed(mail.others)]
    mail.finish(requests)
    for (peer, number), data in got.items():
        np.testing.assert_array_equal(data, pattern(5000, peer, boot.rank, number))
    mail.leave()


def channel_equal_tags_keep_their_order(boot: Bootstrap, make: MakeChannel) -> None:
    mail, count = Mail(boot, make()), 40
    lengths = [60_000 if number % 7 == 3 else 100 + number for number in range(count)]
    got = {(p, i): np.zeros(lengths[i], np.uint8) for p in mail.others for i in range(count)}
    requests = []
    for number in range(count):
        for peer in mail.others:
            data = pattern(lengths[number], boot.rank, peer, number)
            requests += [mail.send(peer, data, 5), mail.recv(peer, got[peer, number], 5)]
    mail.finish(requests)
    for (peer, number), data in got.items():
        np.testing.assert_array_equal(data, pattern(lengths[number], peer, boot.rank, number))
    mail.leave()


def channel_late_receive(boot: Bootstrap, make: MakeChannel) -> None:
    """Messages that come before their receive is posted, short and long."""
    mail = Mail(boot, make())
    lengths = (1, 3000, 300_000)
    requests = [
        mail.send(peer, pattern(nbytes, boot.rank, peer, tag), tag)
        for tag, nbytes in enumerate(lengths)
        for peer in mail.others
    ]
    mail.sync()
    for _ in range(50):
        mail.channel.progress()
    got = {(p, t): np.zeros(n, np.uint8) for p in mail.others for t, n in enumerate(lengths)}
    requests += [mail.recv(peer, data, tag) for (peer, tag), data in got.items()]
    mail.finish(requests)
    for (peer, tag), data in got.items():
        np.testing.assert_array_equal(data, pattern(lengths[tag], peer, boot.rank, tag))
    mail.leave()


def channel_shorter_than_its_room(boot: Bootstrap, make: MakeChannel) -> None:
    mail = Mail(boot, make())
    got = {peer: np.full(9000, 255, np.uint8) for peer in mail.others}
    requests = [mail.recv(peer, got[peer], 1) for peer in mail.others]
    requests += [mail.send(peer, pattern(4000, boot.rank, peer), 1) for peer in mail.others]
    mail.finish(requests)
    for peer, data in got.items():
        np.testing.assert_array_equal(data[:4000], pattern(4000, peer, boot.rank))
        assert (data[4000:] == 255).all()
    mail.leave()


def channel_longer_than_its_room(boot: Bootstrap, make: MakeChannel) -> None:
    """An error at the receiver, and nothing outside the room is written."""
    mail = Mail(boot, make())
    room = {peer: np.full(200, 255, np.uint8) for peer in mail.others}
    receives = [mail.recv(peer, room[peer][:100], 1) for peer in mail.others]
    sends = [mail.send(peer, pattern(150, boot.rank, peer), 1) for peer in mail.others]
    for request in receives:
        try:
            mail.finish([request])
        except TransportError:
            continue
        raise AssertionError("50 bytes were lost and nobody said so")
    mail.finish(sends)
    assert all((data[100:] == 255).all() for data in room.values())
    mail.leave()


def channel_handles_are_reused(boot: Bootstrap, make: MakeChannel) -> None:
    mail = Mail(boot, make())
    out = {peer: np.zeros(2000, np.uint8) for peer in mail.others}
    into = {peer: np.zeros(2000, np.uint8) for peer in mail.others}
    sends = {peer: mail.channel.wrap(out[peer]) for peer in mail.others}
    recvs = {peer: mail.channel.wrap(into[peer]) for peer in mail.others}
    for turn in range(60):
        for peer in mail.others:
            out[peer][:] = pattern(2000, boot.rank, peer, turn)
        mail.finish(
            [mail.channel.recv(peer, recvs[peer], turn) for peer in mail.others]
            + [mail.channel.send(peer, sends[peer], turn) for peer in mail.others]
        )
        for peer in mail.others:
            np.testing.assert_array_equal(into[peer], pattern(2000, peer, boot.rank, turn))
    mail.leave()


def channel_flushed_bytes_need_no_more_progress(boot: Bootstrap, make: MakeChannel) -> None:
    """Rank 0 sends, flushes and then waits in the control plane alone."""
    mail, count = Mail(boot, make()), 100
    if boot.rank == 0:
        requests = [
            mail.send(peer, pattern(4000, peer, number), number)
            for number in range(count)
            for peer in mail.others
        ]
        mail.finish(requests)
        end = time.monotonic() + LIMIT
        while not mail.channel.flush():
            mail.channel.progress()
            assert time.monotonic() < end, "flush"
    else:
        got = [np.zeros(4000, np.uint8) for _ in range(count)]
        mail.finish([mail.recv(0, data, number) for number, data in enumerate(got)], limit=10)
        for number, data in enumerate(got):
            np.testing.assert_array_equal(data, pattern(4000, boot.rank, number))
    boot.barrier()
    mail.leave()


def channel_tells_its_transports(boot: Bootstrap, make: MakeChannel) -> None:
    mail = Mail(boot, make())
    room = {peer: np.zeros(10, np.uint8) for peer in mail.others}
    requests = [mail.recv(peer, room[peer], 0) for peer in mail.others]
    requests += [mail.send(peer, pattern(10, peer), 0) for peer in mail.others]
    mail.finish(requests)
    for peer in mail.others:
        lanes = mail.channel.transports(peer)
        assert lanes
        assert all(isinstance(name, str) and name and isinstance(dev, str) for name, dev in lanes)
    mail.channel.check_peers()
    mail.leave()


def channel_two_are_apart(boot: Bootstrap, make: MakeChannel) -> None:
    """Equal tags of two channels do not meet."""
    first, second = Mail(boot, make()), Mail(boot, make())
    got = {peer: (np.zeros(700, np.uint8), np.zeros(700, np.uint8)) for peer in first.others}
    requests = [second.recv(peer, got[peer][1], 3) for peer in first.others]
    requests += [first.send(peer, pattern(700, boot.rank, 1), 3) for peer in first.others]
    requests += [second.send(peer, pattern(700, boot.rank, 2), 3) for peer in first.others]
    requests += [first.recv(peer, got[peer][0], 3) for peer in first.others]
    end = time.monotonic() + LIMIT
    while not all([request.done() for request in requests]):
        first.channel.progress()
        second.channel.progress()
        assert time.monotonic() < end
        time.sleep(0)
    for peer, (one, two) in got.items():
        np.testing.assert_array_equal(one, pattern(700, peer, 1))
        np.testing.assert_array_equal(two, pattern(700, peer, 2))
    first.leave()
    second.leave()


def channel_abandoned_memory_is_not_touched(boot: Bootstrap, make: MakeChannel) -> None:
    """A receive is given up and its memory let go; then the peer sends after all."""
    for nbytes in (1000, 1 << 20):
        channel = make()
        after = (boot.rank + 1) % boot.size
        before = (boot.rank - 1) % boot.size
        lost = np.full(nbytes, 1, np.uint8)
        request = channel.recv(before, channel.wrap(lost), 7)
        for _ in range(20):
            channel.progress()
            assert not request.done()
        channel.abandon([request], [lost])
        del lost, request
        gc.collect()
        # The allocator would give the same place again, had it been let go.
        fresh = [np.full(nbytes, 2, np.uint8) for _ in range(20)]
        boot.barrier()
        data = pattern(nbytes, boot.rank)
        late: list[Any] = [channel.send(after, channel.wrap(data), 7)] if boot.size > 1 else []
        for _ in range(100):
            channel.progress()
            time.sleep(1e-4)
        boot.barrier()
        for _ in range(100):
            channel.progress()
        assert all((array == 2).all() for array in fresh)
        channel.abandon(late, [data])
        boot.barrier()
        channel.close()
        channel.close()


def channel_close_without_use(boot: Bootstrap, make: MakeChannel) -> None:
    mail = Mail(boot, make())
    assert mail.channel.name in ("ucx", "mpi", "memory")
    mail.channel.check_peers()
    mail.leave()


CHANNEL_CASES = (
    channel_sizes,
    channel_many_outstanding,
    channel_tags_out_of_order,
    channel_equal_tags_keep_their_order,
    channel_late_receive,
    channel_shorter_than_its_room,
    channel_longer_than_its_room,
    channel_handles_are_reused,
    channel_flushed_bytes_need_no_more_progress,
    channel_tells_its_transports,
    channel_two_are_apart,
    channel_close_without_use,
    channel_abandoned_memory_is_not_touched,
)
