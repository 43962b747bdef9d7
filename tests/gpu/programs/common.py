"""What the rank programs share: a node of MPI's ranks, arrays of any dtype at any offset."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import cupy
import numpy as np

from rdmakit.bootstrap import MpiBootstrap
from rdmakit.datatypes import ReduceOp
from rdmakit.drivers import cuda
from rdmakit.intra import device_calls
from rdmakit.intra.device_node import DeviceNode
from rdmakit.intra.device_plan import zero_copy
from rdmakit.plan.shape import Kind
from rdmakit.waiting import Waiter, spins_for
from tests import arithmetic
from tests.arithmetic import bits, wanted

BOOT = MpiBootstrap()
RANK, SIZE = BOOT.rank, BOOT.size
# A GPU for each rank where there are several, before anything is allocated.
cupy.cuda.Device(RANK % cupy.cuda.runtime.getDeviceCount()).use()


def say(*words: object) -> None:
    os.write(1, f"[{RANK}] {' '.join(map(str, words))}\n".encode())


def dtype_of(name: str) -> np.dtype[Any]:
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def make_node(timeout: float = 20.0, **options: Any) -> DeviceNode:
    waiter = Waiter(RANK, BOOT.host, timeout, spins_for(SIZE))
    return DeviceNode.create(BOOT, waiter, **options)


class Array:
    """``count`` elements, ``offset`` elements after the start of a plain allocation."""

    def __init__(self, count: int, dtype: str, offset: int = 0) -> None:
        self.dtype, self.count = dtype_of(dtype), count
        self.offset = offset * self.dtype.itemsize
        self.nbytes = count * self.dtype.itemsize
        # Guards on both sides: a store outside is seen.
        self.memory = cuda.DeviceMemory(self.nbytes + self.offset + 512)
        self.address = self.memory.address + 256 + self.offset
        self._guard = np.full(self.nbytes + self.offset + 512, 0xA5, np.uint8)
        cuda.copy_now(self.memory.address, self._guard.ctypes.data, self._guard.nbytes)

    def put(self, values: np.ndarray[Any, Any]) -> None:
        values = np.ascontiguousarray(values.astype(self.dtype))
        assert values.nbytes == self.nbytes
        cuda.copy_now(self.address, values.ctypes.data, self.nbytes)

    def get(self) -> np.ndarray[Any, Any]:
        """Return the elements; fails when a guard was overwritten."""
        whole = np.empty_like(self._guard)
        cuda.copy_now(whole.ctypes.data, self.memory.address, whole.nbytes)
        first = 256 + self.offset
        assert (whole[:first] == 0xA5).all(), "bytes before the array were overwritten"
        assert (whole[first + self.nbytes :] == 0xA5).all(), "bytes after it were overwritten"
        return whole[first : first + self.nbytes].copy().view(self.dtype)

    def part(self, first: int, count: int) -> Array:
        """Return a view of some elements, without guards of its own."""
        view = object.__new__(Array)
        view.dtype, view.count, view.memory = self.dtype, count, self.memory
        view.address = self.address + first * self.dtype.itemsize
        view.nbytes = count * self.dtype.itemsize
        return view


def values(rank: int, count: int, dtype: str, op: ReduceOp, *, seed: int = 0) -> Any:
    """Return a rank's input: random, with NaN among the floats of MIN and MAX."""
    generator = np.random.default_rng((seed, rank, count))
    kind = dtype_of(dtype)
    if kind.kind in "biu":
        return bits(kind, count, generator)
    if kind.kind == "c":
        return (generator.standard_normal(2 * count) / 2).view(complex).astype(kind)
    data = generator.standard_normal(count)
    if op is ReduceOp.PROD:
        data = np.exp2(data / 4)
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        data[generator.random(count) < 0.05] = np.nan
    return data.astype(kind)


def reduced(inputs: list[Any], op: ReduceOp) -> Any:
    """Return the reduction in rank order, halves in float32 and rounded once."""
    return wanted(inputs, op, len(inputs) if op is ReduceOp.AVG else 0)


def same(got: Any, want: Any, what: object) -> None:
    """Compare bit by bit, but for the payload of NaN."""
    try:
        arithmetic.same(got, want)
    except AssertionError as exc:
        raise AssertionError(f"{what}: {exc}") from exc


@contextmanager
def forced(algorithm: str) -> Any:
    """Let one algorithm serve every size; ``direct`` is the one for registered arrays."""

    def choose(
        kind: Kind, ranks: int, nbytes: int, *, registered: bool, push: bool, **_: object
    ) -> str:
        if algorithm == "oneshot" and kind is not Kind.ALLREDUCE:
            return "staged"
        if algorithm != "direct":
            return algorithm
        assert registered, "not registered"
        return zero_copy(kind, push=push)[0]

    usual = device_calls.algorithm_for
    device_calls.algorithm_for = choose
    try:
        yield
    finally:
        device_calls.algorithm_for = usual


def main(modes: dict[str, Callable[..., None]]) -> None:
    """Run the modes named on the command line; a failure on one rank ends the job."""
    try:
        for mode in sys.argv[1:]:
            name, _, argument = mode.partition("=")
            BOOT.barrier()
            modes[name](*filter(None, [argument]))
            BOOT.barrier()
            if RANK == 0:
                say("ok", mode)
    except BaseException:
        say(traceback.format_exc())
        BOOT.abort(3)
