"""A program in the middle of GPU collectives: busy.py FOLDER.

Every rank writes its pid into FOLDER once large all-reduces are under way. Calls are issued ahead
of the GPU and waited for now and then, so that kernels of the others spin when a rank stops.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import cupy

from rdmakit import Communicator, RdmaKitError

folder = Path(sys.argv[1])
with Communicator() as comm:
    devices = cupy.cuda.runtime.getDeviceCount()
    cupy.cuda.Device(comm.hosts[: comm.rank].count(comm.host) % devices).use()
    x, y = cupy.full(1 << 20, 1.0 + comm.rank, "float32"), cupy.zeros(1 << 20, "float32")
    total = comm.size * (comm.size + 1) / 2
    start = time.monotonic()
    turn = 0
    try:
        while time.monotonic() - start < 60:
            comm.Allreduce(x, y)
            turn += 1
            if turn % 16 == 0:
                comm.synchronize()
                assert bool((y == total).all())
            if turn == 48:
                (folder / f"new{comm.rank}").write_text(str(os.getpid()))
                (folder / f"new{comm.rank}").rename(folder / f"pid{comm.rank}")
    except RdmaKitError as exc:
        told = f"[{comm.rank}] {type(exc).__name__} at {time.time():.2f}: {exc}\n"
        os.write(1, told.encode())
        raise
