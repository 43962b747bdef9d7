"""allreduce_many and GradientBucketer on CuPy arrays: many.py MODE..."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from rdmakit import GradientBucketer
from rdmakit.datatypes import op_of
from tests.conformance.many_cases import SMALL, check, given_to, mine, total
from tests.gpu.programs.job import COMM, RANK, SIZE, get, main


def on_gpu(items: Any, turn: int = 0) -> list[Any]:
    """Return CuPy arrays with a rank's values, lying as the items say."""
    made = []
    for i, (shape, dtype, how) in enumerate(items):
        values = mine(i, shape, dtype, RANK, turn)
        array = cupy.asarray(np.array(values))
        if how == "F":
            array = cupy.asfortranarray(array)
        elif how == "gaps" and array.ndim:
            wide = cupy.full((*array.shape[:-1], array.shape[-1] * 2), 99, array.dtype)
            wide[..., ::2] = array
            array = wide[..., ::2]
        elif how == "back" and array.ndim:
            array = cupy.ascontiguousarray(array[::-1])[::-1]
        made.append(array)
    return made


def fused() -> None:
    """Every way to lie, buckets of every kind, on the default stream and on another."""
    for stream in (cupy.cuda.get_current_stream(), cupy.cuda.Stream(non_blocking=True)):
        for most in (1, 700, 25 << 20):
            for turn in range(3):
                with stream:
                    arrays = on_gpu(SMALL, turn)
                    COMM.allreduce_many(arrays, bucket_bytes=most)
                    check([get(array) for array in arrays], SMALL, SIZE, turn=turn)
                    many = [cupy.full((3, 5), RANK + i, "float32") for i in range(300)]
                    COMM.allreduce_many(many, bucket_bytes=most * 10, stream=stream)
                    for i, array in enumerate(many):
                        assert (get(array) == SIZE * i + SIZE * (SIZE - 1) // 2).all(), i


def later() -> None:
    """The same without blocking: several under way at once, waited for from the last."""
    begun = [(COMM.iallreduce_many(a, bucket_bytes=700), a, turn)
             for turn in range(4) for a in [on_gpu(SMALL, turn)]]  # fmt: skip
    for request, arrays, turn in reversed(begun):
        request.Wait()
        check([get(array) for array in arrays], SMALL, SIZE, turn=turn)


def gradients() -> None:
    """Means and sums, in another order on each rank, beside work on the GPU."""
    items = [item for item in SMALL if item[1] is np.float32]
    for op in ("sum", "avg"):
        arrays = on_gpu(items)
        bucketer = GradientBucketer(COMM, arrays, bucket_bytes=700, op=op)
        order = np.random.default_rng(RANK).permutation(len(items))
        for turn in range(20):
            for i in order:
                shape, dtype, _ = items[i]
                arrays[i][...] = cupy.asarray(np.array(mine(i, shape, dtype, RANK, turn)))
                bucketer.ready(int(i))
            bucketer.wait()
            for i, (shape, dtype, _) in enumerate(items):
                want = total(i, shape, dtype, SIZE, op_of(op), turn)
                np.testing.assert_array_equal(get(arrays[i]), want)


def on_the_host() -> None:
    """Host arrays in the same communicator."""
    arrays = given_to(COMM, SMALL)
    COMM.allreduce_many(arrays)
    check(arrays, SMALL, SIZE)


if __name__ == "__main__":
    main(fused, later, gradients, on_the_host)
