"""Collectives of GPU arrays between nodes and in steps, for tests/gpu/test_messages.py."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

import cupy
import numpy as np

import rdmakit
from rdmakit import MAX, Communicator

COMM = Communicator()
if "late" not in sys.argv:
    cupy.cuda.Device(COMM.local_rank % cupy.cuda.runtime.getDeviceCount()).use()
RANK = COMM.rank


def data(rank: int, count: int, dtype: str, seed: int) -> Any:
    return ((np.arange(count) * 7 + rank * 5 + seed) % 13).astype(dtype)


def check(comm: Any, count: int, dtype: str, seed: int) -> None:
    n, rank = comm.size, comm.rank
    ins = [data(r, count, dtype, seed) for r in range(n)]
    total = sum(x.astype("int64") for x in ins).astype(dtype)
    what = (comm.label, count, dtype, seed)
    x, y = cupy.asarray(ins[rank]), cupy.full(count, 99, dtype)
    comm.Allreduce(x, y)
    assert (cupy.asnumpy(y) == total).all(), what
    y = x.copy()
    comm.Allreduce(rdmakit.IN_PLACE, y, MAX)
    assert (cupy.asnumpy(y) == np.max(ins, axis=0)).all(), what
    y = x.copy()
    comm.Bcast(y, n - 1)
    assert (cupy.asnumpy(y) == ins[n - 1]).all(), what
    z = cupy.full(count * n, 99, dtype)
    comm.Allgather(x, z)
    assert (cupy.asnumpy(z) == np.concatenate(ins)).all(), what
    wide = [data(r, count * n, dtype, seed) for r in range(n)]
    part = cupy.full(count, 99, dtype)
    comm.Reduce_scatter_block(cupy.asarray(wide[rank]), part)
    summed = sum(x.astype("int64") for x in wide).astype(dtype)
    assert (cupy.asnumpy(part) == summed[rank * count : (rank + 1) * count]).all(), what


def main() -> None:
    counts = (1, 5, 1023, 65_537, 3_000_001)
    if "few" in sys.argv:
        counts = (1, 1023, 65_537)
    for turn, count in enumerate(counts):
        for dtype in ("float32", "float16", "int64"):
            for comm in (COMM, COMM.rail, COMM.node):
                check(comm, count, dtype, turn)
    ways = [group._on_device.way for group in (COMM, COMM.rail, COMM.node)]
    if RANK == 0:
        print("ways", *ways, flush=True)
        for note in COMM.notes:
            print("note:", note, flush=True)
    COMM.close()


try:
    main()
    os.write(1, f"[{RANK}] ok\n".encode())
except BaseException:
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)
