"""What ranks do in tests/gpu/test_types.py: all types with all operations. types.py MODE..."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np
import pytest

from rdmakit import Communicator, Kind, UnsupportedError
from rdmakit.datatypes import TABLE, ReduceOp, dtype_of
from rdmakit.drivers.cuda import activate, current_device
from rdmakit.intra.device_local import combine
from tests.conformance import values as closed
from tests.gpu.programs.common import (
    RANK,
    SIZE,
    Array,
    main,
    make_node,
    reduced,
    same,
    say,
    values,
)
from tests.gpu.programs.node import one

CASES = ((7, (1, 1), True), (1003, (0, 1), False), (9001, (0, 0), False))


def node(which: str = "cover") -> None:
    """Every kernel of each pair; aligned and not, in place and not."""
    made = make_node(tile=4096)
    pairs = closed.ALL if which == "all" else closed.COVER
    for dtype, op in pairs:
        for kind in (Kind.ALLREDUCE, Kind.REDUCE_SCATTER):
            algorithms = ("oneshot", "direct", "staged")[kind is Kind.REDUCE_SCATTER :]
            for algorithm in algorithms:
                for count, offsets, in_place in CASES:
                    one(made, kind, algorithm, count, dtype, op, offsets, in_place=in_place)
    made.close()
    if RANK == 0:
        say(len(pairs), "pairs")


def local() -> None:
    """Combine on this rank alone."""
    device = current_device()
    activate(device)
    for (dtype, op), reason in TABLE.items():
        if reason:
            with pytest.raises(UnsupportedError, match=f"{op.name} of {dtype} is not served"):
                combine(device, 0, [0], 1, dtype, op)
            continue
        for n, count, offset in ((2, 1000, 0), (3, 777, 1), (16, 5000, 0)):
            inputs = [values(r, count, dtype, op) for r in range(n)]
            arrays = [Array(count, dtype, offset) for _ in range(n)]
            for array, data in zip(arrays, inputs, strict=True):
                array.put(data)
            combine(device, arrays[0].address, [a.address for a in arrays], count, dtype, op)(0)
            same(arrays[0].get(), reduced(inputs, op), (dtype, op, n, count))


def on_gpu(data: Any) -> Any:
    """Return it as a CuPy array; None where CuPy does not know the type."""
    try:
        return cupy.asarray(data)
    except (TypeError, ValueError, NotImplementedError) as exc:
        if data.dtype.name != "bfloat16":
            raise
        if RANK == 0:
            say("CuPy", cupy.__version__, "has no bfloat16:", exc)
        return None


def public() -> None:
    """The calls of a communicator on CuPy arrays, of one node or several."""
    with Communicator() as comm:
        for dtype, op in closed.ALL:
            for count in (5, 3001):
                x = on_gpu(closed.values(RANK, count, dtype, op))
                if x is None:
                    continue
                comm.Allreduce(x, y := cupy.zeros_like(x), op)
                check(comm, y, closed.reduced(SIZE, count, dtype, op), (dtype, op, count))
        for dtype in closed.DTYPES:
            x = on_gpu(closed.values(RANK, 1001, dtype, ReduceOp.SUM))
            if x is None:
                continue
            comm.Allgather(x, wide := cupy.zeros(1001 * SIZE, x.dtype))
            inputs = [closed.values(r, 1001, dtype, ReduceOp.SUM) for r in range(SIZE)]
            check(comm, wide, np.concatenate(inputs), dtype)
            comm.Bcast(x, SIZE - 1)
            check(comm, x, inputs[-1], dtype)
        halves(comm)


def halves(comm: Communicator) -> None:
    """Means do not overflow; exact sums are rounded once."""
    x = cupy.full(3001, 60000, "float16")
    comm.Allreduce(x, x, ReduceOp.AVG)
    check(comm, x, np.full(3001, 60000, "float16"), "mean")
    inputs = [np.random.default_rng(r).integers(-4096, 4096, 3001) for r in range(SIZE)]
    rounded = [i.astype("float16") for i in inputs]
    x = cupy.asarray(rounded[RANK])
    comm.Allreduce(x, x, ReduceOp.EXACT_SUM)
    want = np.sum([i.astype("float32") for i in rounded], axis=0)
    check(comm, x, want.astype("float16"), "exact")
    with pytest.raises(UnsupportedError, match="complex numbers have no order"):
        comm.Allreduce(y := cupy.zeros(3, "complex64"), y, ReduceOp.MIN)


def check(comm: Communicator, got: Any, want: Any, what: object) -> None:
    comm.synchronize()
    host = cupy.asnumpy(got).view(dtype_of(want.dtype))
    np.testing.assert_array_equal(closed.plain(host), closed.plain(want), err_msg=f"{what}")


if __name__ == "__main__":
    main({"node": node, "local": local, "public": public})
