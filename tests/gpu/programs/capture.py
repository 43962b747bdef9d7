"""CUDA graphs through the public calls; modes of calls.py."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np
import pytest

from rdmakit import MAX, PROD, InvalidArgument, UnsupportedError
from rdmakit.drivers import cuda_compile
from tests.gpu.programs.job import COMM, RANK, SIZE, capturing, get, same


def first() -> None:
    """The first call makes windows: refused in a capture, and right afterwards."""
    stream = cupy.cuda.Stream(non_blocking=True)
    x = cupy.full(1000, RANK + 1, "float32")
    cupy.cuda.Device().synchronize()
    for group in (COMM, COMM.node):
        with capturing(stream), pytest.raises(UnsupportedError, match=r"first call .* cannot be"):
            group.Allreduce(x, x)
    for name, call in (("empty", lambda: COMM.empty(10)), ("register", lambda: COMM.register(x))):
        with capturing(stream), pytest.raises(UnsupportedError, match=f"{name} cannot be captured"):
            call()
    with stream:
        COMM.Allreduce(x, x)
    COMM.synchronize(stream)
    same(get(x), np.full(1000, SIZE * (SIZE + 1) / 2), "after refused captures")


def replays(count: str = "1000") -> None:
    """Captured once; replayed with changed inputs, mixed with eager calls of the same kinds.

    Registered arrays in place (direct), small ones (one-shot), any array (staged), and the other
    collectives, all in one graph: all-to-all from any array into a registered one, and back.
    """
    stream = cupy.cuda.Stream(non_blocking=True)
    large, small = 700_001, 1001
    x, y = COMM.empty(large, "float32"), COMM.empty(large, "float32")
    block = large // SIZE - 3
    there = COMM.empty(SIZE * block, "float32")
    with stream:
        given, back = (cupy.zeros(SIZE * block, "float32") for _ in range(2))
        z, top = cupy.zeros(large, "float32"), cupy.zeros(small, "float32")
        wide, part = cupy.zeros(SIZE * small, "float32"), cupy.zeros(small, "float32")

        def calls() -> None:
            COMM.Allreduce(x, y)  # registered
            COMM.Allreduce(y, z)  # into any array
            COMM.Allreduce(z[:small], top, MAX)
            COMM.Bcast(top, SIZE - 1)
            COMM.Allgather(x[:small], wide)
            COMM.Reduce_scatter_block(wide, part)
            COMM.Alltoall(given, there)
            COMM.Alltoall(there, back)

        calls()  # compiles
        COMM.synchronize(stream)
        with capturing(stream) as graph:
            calls()
        bad = cupy.zeros(1, cupy.int64)
        ranks = cupy.repeat(cupy.arange(SIZE, dtype="float32"), small)
        other, at = (cupy.arange(SIZE * block) // block, cupy.arange(SIZE * block) % block % 997)
        sent = ((RANK * SIZE + other) * 1000 + at).astype("float32")
        came = ((other * SIZE + RANK) * 1000 + at).astype("float32")
        for turn in range(int(count)):
            eager = turn % 10 == 0
            x.fill(turn + RANK)
            y.fill(-1)
            z.fill(-2)
            cupy.add(sent, turn, out=given)
            there.fill(-1)
            back.fill(-1)
            if eager:
                calls()
            else:
                graph[0].launch(stream)
            total = SIZE * turn + SIZE * (SIZE - 1) // 2
            bad += (y != total).sum() + (z != SIZE * total).sum() + (top != SIZE * total).sum()
            bad += (wide != turn + ranks).sum() + (part != SIZE * (turn + RANK)).sum()
            bad += (there != came + turn).sum() + (back != given).sum()
        COMM.synchronize(stream)
        assert not int(bad[0]), int(bad[0])


def refused() -> None:
    """What a graph cannot hold is named; the capture and the communicator stay usable."""
    stream = cupy.cuda.Stream(non_blocking=True)
    several = len(COMM.layout.nodes) > 1
    with stream:
        x, y = cupy.full(1000, RANK + 1.0, "float32"), cupy.zeros(1000, "float32")
        gaps, fresh = cupy.zeros((10, 10), "float32")[:, ::2], cupy.zeros(17, "int64")
        y *= 2  # compiles
        COMM.Allreduce(x, y)
        COMM.Allreduce(gaps, cupy.zeros((10, 5), "float32"))
    COMM.synchronize(stream)

    class Elsewhere:
        """Ready on a stream that the capture knows nothing of."""

        other = cupy.cuda.Stream(non_blocking=True)
        __cuda_array_interface__ = x.__cuda_array_interface__ | {"stream": other.ptr}

    wrong: list[tuple[Any, str]] = [
        (lambda: COMM.Allreduce(gaps, y[:50]), "arrays with gaps"),
        (lambda: COMM.synchronize(stream), "synchronize cannot be captured"),
        (lambda: COMM.empty(100), "empty cannot be captured"),
        (lambda: COMM.register(x), "register cannot be captured"),
        (lambda: COMM.Allreduce(Elsewhere(), y), "outside of the CUDA graph"),
    ]
    if several:
        wrong += [
            (
                lambda: COMM.Allreduce(x, y),
                "GPU arrays go through host memory here|the host takes part",
            )
        ]
    elif SIZE > 1:
        wrong += [(lambda: COMM.Allreduce(fresh, fresh, PROD), "not compiled yet")]
    for key in [key for key in cuda_compile._functions if "-DRDK_OP=Prod" in key[2]]:
        del cuda_compile._functions[key]  # another mode may have compiled it
    with capturing(stream) as graph:
        for call, text in wrong:
            with pytest.raises(UnsupportedError, match=text):
                call()
        with pytest.raises(InvalidArgument):
            COMM.Allreduce(x, y[:10])
        y *= 2
        if not several:
            COMM.Allreduce(x, y)
    with stream:
        graph[0].launch(stream)
        COMM.Allreduce(y, x)
    COMM.synchronize(stream)
    total = SIZE * (SIZE + 1) / 2
    same(get(x), np.full(1000, SIZE * total * (2 if several else 1)), "after refused calls")
