"""What programs with a Communicator on GPU arrays share: one communicator, arrays of any type."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import cupy
import numpy as np

from rdmakit import MAX, MIN, PROD, Communicator, ReduceOp

COMM = Communicator()
DEVICES: int = cupy.cuda.runtime.getDeviceCount()
# Ranks of a host, whatever their virtual node, take its GPUs in turn; before any allocation.
cupy.cuda.Device(COMM.hosts[: COMM.rank].count(COMM.host) % DEVICES).use()
RANK, SIZE = COMM.rank, COMM.size

DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64")


def say(*words: object) -> None:
    os.write(1, f"[{RANK}] {' '.join(map(str, words))}\n".encode())


def dtype_of(name: str) -> np.dtype[Any]:
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


class Shown:
    """GPU memory of a type that CuPy may not have, shown by the interface alone."""

    def __init__(self, raw: Any, dtype: np.dtype[Any]) -> None:
        self.raw, self.dtype = raw, dtype
        self.__cuda_array_interface__ = raw.__cuda_array_interface__ | {
            "shape": (raw.size // dtype.itemsize,), "typestr": f"<V{dtype.itemsize}",
            "strides": None,
        }  # fmt: skip


def put(values: np.ndarray[Any, Any]) -> Any:
    """Return a GPU array of these values."""
    if values.dtype.name != "bfloat16":
        return cupy.asarray(values)
    raw = cupy.asarray(np.ascontiguousarray(values).view(np.uint8))
    return Shown(raw, values.dtype)


def get(array: Any) -> np.ndarray[Any, Any]:
    """Return the values of a GPU array, after its stream."""
    if isinstance(array, Shown):
        return cupy.asnumpy(array.raw).view(array.dtype)
    return cupy.asnumpy(array)


def values(rank: int, count: int, dtype: str, op: ReduceOp) -> np.ndarray[Any, Any]:
    """Return a rank's input as integers, distinct for each rank and element.

    Results of up to 16 ranks are exact in every type; what leaves int8 wraps as NumPy's does.
    """
    i = np.arange(count, dtype=np.int64)
    if op is PROD:
        return 1 + (i * (rank + 1) + rank) % 2
    if op in (MAX, MIN):
        return (i * 7 + rank * 97 + i * rank) % 251 - (0 if dtype == "uint8" else 125)
    return (i * 7 + rank * 5 + i * rank) % 13


_COMBINE = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}


def reduced(n: int, count: int, dtype: str, op: ReduceOp) -> np.ndarray[Any, Any]:
    """Return the reduction of ``n`` ranks' inputs in the type itself."""
    total = values(0, count, dtype, op)
    for rank in range(1, n):
        total = _COMBINE[op.value](total, values(rank, count, dtype, op))
    return total.astype(dtype_of(dtype))


def same(got: Any, want: Any, what: object) -> None:
    got, want = (np.asarray(x).astype(np.float64) for x in (got, want))
    assert got.shape == want.shape, (what, got.shape, want.shape)
    bad = np.argwhere(got != want)
    assert not bad.size, (
        f"{what}: {len(bad)} of {got.size} wrong, first at {bad[0]}: {got[tuple(bad[0])]} in "
        f"place of {want[tuple(bad[0])]}"
    )


@contextmanager
def capturing(stream: Any) -> Iterator[list[Any]]:
    """Capture what is called inside; the graph is in the list afterwards."""
    graph: list[Any] = []
    with stream:
        stream.begin_capture()
        try:
            yield graph
        finally:
            graph.append(stream.end_capture())


def main(*modes: Callable[..., None]) -> None:
    """Run the modes named on the command line; a failure on one rank ends the job."""
    named = {mode.__name__: mode for mode in modes}
    try:
        for argument in sys.argv[1:]:
            name, _, value = argument.partition("=")
            COMM.bootstrap.barrier()
            named[name](*filter(None, [value]))
            COMM.bootstrap.barrier()
            if RANK == 0:
                say("ok", argument)
        if RANK == 0:
            say("notes", *COMM.notes, "nodes", COMM.layout.nodes)
        COMM.close()
    except BaseException:
        say(traceback.format_exc())
        COMM.bootstrap.abort(3)
