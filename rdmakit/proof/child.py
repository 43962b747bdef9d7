"""One end of a short-lived pair of processes whose UCX tells what it does with each message.

``python -m rdmakit.proof.child``, started by :mod:`rdmakit.proof.children`. The order comes as a
line on standard input; so does the peer's address, and then the word to end. UCX prints its
tables to standard output. An alarm ends it should the parent forget it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
from typing import Any

import msgspec
import numpy as np

from rdmakit.drivers import ucx_loading
from rdmakit.drivers.spawn import MARK
from rdmakit.inter.tags import COMMUNICATORS, TagKind, pack
from rdmakit.inter.ucx import UcxChannel
from rdmakit.proof.evidence import ChildResult, Hello, Order
from rdmakit.waiting import Waiter, settle, spins_for

__all__ = ["main"]

_WARM = 2
"""Messages before the timed ones: the first registers memory and completes the connection."""


def main() -> int:
    """Do as the order says and return the exit status."""
    order = msgspec.json.decode(sys.stdin.readline(), type=Order)
    signal.alarm(int(order.seconds) + 5)
    device: Any = None
    if order.memory == "gpu":
        from rdmakit.drivers import cuda

        cuda.activate(order.ordinal)  # before UCX's context, which looks for it
        device = cuda
    channel = UcxChannel.open(
        order.role, order.policy, virtual=order.virtual, devices=order.devices
    )
    library = ucx_loading.loaded()
    _say(Hello(channel.address.hex(), library.version, library.libraries.get("libucp", "")))
    peer = sys.stdin.readline().strip()
    if not peer:
        return 1
    mine, theirs = channel.address, bytes.fromhex(msgspec.json.decode(peer))
    channel.connect([theirs, mine] if order.role else [mine, theirs])
    memory: Any
    if device is None:
        memory = np.full(order.nbytes, order.role, np.uint8)
        handle = channel.wrap(memory)
    else:
        memory = device.DeviceMemory(order.nbytes, zero=True)
        handle = channel.wrap_device(memory.address, order.nbytes)
    waiter = Waiter(order.role, socket.gethostname(), order.seconds, spins_for(2))
    waiter.check_peers = channel.check_peers
    _move(channel, waiter, order, handle, _WARM)
    start = time.monotonic()
    _move(channel, waiter, order, handle, order.messages)
    seconds = time.monotonic() - start
    lanes = tuple(channel.transports(1 - order.role))
    dmabuf = channel.effective.get("CUDA_COPY_DMABUF", os.environ.get("UCX_CUDA_COPY_DMABUF", ""))
    _say(ChildResult(seconds, order.messages, lanes, dmabuf))
    sys.stdin.readline()  # neither end closes while the other still needs it
    channel.close()
    return 0


def _move(channel: UcxChannel, waiter: Waiter, order: Order, handle: Any, messages: int) -> None:
    """Send, or receive, one message after the other, and a word back."""
    word = np.zeros(8, np.uint8)
    peer, back = 1 - order.role, channel.wrap(word)
    tag = pack(COMMUNICATORS - 1, TagKind.BENCH, 0, 0)
    for _ in range(messages):
        request = channel.recv(peer, handle, tag) if order.role else channel.send(peer, handle, tag)
        waiter.until(request.done, (channel.progress,), lambda: "proof: message")
    tag = pack(COMMUNICATORS - 1, TagKind.BENCH, 0, 1)
    request = channel.send(peer, back, tag) if order.role else channel.recv(peer, back, tag)
    waiter.until(request.done, (channel.progress,), lambda: "proof: word back")
    settle(channel.flush, channel.progress)


def _say(message: msgspec.Struct) -> None:
    # UCX writes by C's own buffer: empty it first, or the lines run into each other.
    ctypes.CDLL(None).fflush(None)
    sys.stdout.write(MARK + msgspec.json.encode(message).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
