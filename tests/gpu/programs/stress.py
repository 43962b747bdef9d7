"""Stale reads and order through the public calls; modes of calls.py."""

from __future__ import annotations

import cupy
import numpy as np

from rdmakit import MAX
from tests.gpu.programs.job import COMM, RANK, SIZE, get, same

_CHECK = cupy.ElementwiseKernel(
    "float32 y, float32 want", "raw int64 bad",
    "if (y != want) atomicAdd((unsigned long long*)&bad[0], 1ull)", "rdmakit_tests_stale",
)  # fmt: skip


def stale(rounds: str = "10000") -> None:
    """Poison, transfer, reduce at once: what is read is never what was there before.

    Registered and any arrays, large and small, and a view with gaps, mixed; the host never waits
    inside a node, so that calls of one rank run ahead of another's.
    """
    count = 70_001 if len(COMM.layout.nodes) == 1 else 600_001
    x, y = COMM.empty(count, "float32"), COMM.empty(count, "float32")
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        z = cupy.zeros(1001, "float32")
        wide = cupy.zeros((500, 3), "float32")
        gaps, out = wide[:, 1], cupy.zeros((500, 2), "float32")[:, 1]
        bad = cupy.zeros(1, cupy.int64)
        for turn in range(int(rounds)):
            base = turn % 997
            y.fill(-1.0)
            x.fill(base + RANK)
            COMM.Allreduce(x, y)
            x.fill(-7.0)
            _CHECK(y, SIZE * base + SIZE * (SIZE - 1) // 2, bad)
            z.fill(base - RANK)
            COMM.Allreduce(z, z)
            _CHECK(z, SIZE * base - SIZE * (SIZE - 1) // 2, bad)
            if turn % 8 == 0:
                out.fill(-1.0)
                gaps.fill(base + RANK)
                COMM.Allreduce(gaps, out, MAX)
                wide.fill(-7.0)
                _CHECK(out, base + SIZE - 1, bad)
    COMM.synchronize(stream)
    assert not int(get(bad)[0]), f"{int(get(bad)[0])} stale elements"


def scratch_on_two_streams() -> None:
    """Views with gaps on two streams in turn share the scratch: one waits for the other."""
    first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    count = 400_000
    pairs = []
    for stream in (first, second):
        with stream:
            pairs.append((cupy.zeros((count, 2), "float32")[:, 1], cupy.zeros(count, "float32")))
    wrong = []
    for turn in range(60):
        for shift, (stream, (x, y)) in enumerate(zip((first, second), pairs, strict=True)):
            with stream:
                x.fill(turn + RANK + 1000 * shift)
                COMM.Allreduce(x, y)
                want = SIZE * (turn + 1000 * shift) + SIZE * (SIZE - 1) // 2
                wrong.append((y != want).sum())
    for stream in (first, second):
        COMM.synchronize(stream)
    same([int(w) for w in wrong], np.zeros(120), "elements wrong in each call")
