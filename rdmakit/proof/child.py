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

from rdmakit.drivers import ucx_loading
from rdmakit.drivers.spawn import MARK
from rdmakit.inter.ucx import UcxChannel
from rdmakit.proof.evidence import ChildResult, Hello, Order
from rdmakit.proof.measure import PairEnd
from rdmakit.waiting import Waiter, spins_for

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
    waiter = Waiter(order.role, socket.gethostname(), order.seconds, spins_for(2))
    waiter.check_peers = channel.check_peers
    end = PairEnd(
        channel, channel, waiter, order.role, 1 - order.role, order.memory, order.nbytes, device
    )
    # Both ways, so that both ends print a table for this memory.
    end.move(_WARM)
    end.move(1, back=True)
    start = time.monotonic()
    end.move(order.messages)
    seconds = time.monotonic() - start
    dmabuf = channel.effective.get("CUDA_COPY_DMABUF", os.environ.get("UCX_CUDA_COPY_DMABUF", ""))
    _say(ChildResult(seconds, order.messages, end.lanes(), dmabuf))
    sys.stdin.readline()  # neither end closes while the other still needs it
    end.close()
    channel.close()
    return 0


def _say(message: msgspec.Struct) -> None:
    # UCX writes by C's own buffer: empty it first, or the lines run into each other.
    ctypes.CDLL(None).fflush(None)
    sys.stdout.write(MARK + msgspec.json.encode(message).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
