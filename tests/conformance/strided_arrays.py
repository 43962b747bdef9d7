"""Arrays that lie with gaps in larger ones, and ranks to call with them.

On host arrays, and on a GPU made of host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rdmakit.communicator import Communicator
from tests.conformance.fake_gpu import Array
from tests.conformance.gpu_ranks import with_gpus
from tests.conformance.ranks import with_comm
from tests.unit.test_buffer import of_cupy

SHAPE = (6, 5)
NUMBERS = np.arange(30).reshape(SHAPE)

# How an array of SHAPE can lie in a larger one: (shape of the larger one, the view of it).
LIES: dict[str, tuple[tuple[int, ...], Callable[[Any], Any]]] = {
    "contiguous": (SHAPE, lambda x: x),
    "step": ((12, 15), lambda x: x[::2, 1::3]),
    "transposed": ((5, 6), lambda x: x.T),
    "reversed": (SHAPE, lambda x: x[::-1, ::-1]),
    "columns": ((6, 9), lambda x: x[:, 2:7]),
    "one of three": ((6, 3, 5), lambda x: x[:, 1]),
    "inner": ((6, 5, 2), lambda x: x[..., 1]),
    "transposed step": ((10, 6), lambda x: x[::-2].T),
}


def lying(how: str, values: Any, dtype: str) -> tuple[Any, Any]:
    """Return an array that lies so, and the larger one, whose other elements are 77."""
    shape, view = LIES[how]
    whole = np.full(shape, 77, dtype)
    part = view(whole)
    assert part.shape == SHAPE
    part[...] = values
    return part, whole


def untouched(how: str, whole: Any) -> None:
    rest = np.ones(whole.shape, bool)
    LIES[how][1](rest)[...] = False
    assert (whole[rest] == 77).all(), "elements between were written"


def data(rank: int, dtype: str) -> Any:
    return ((NUMBERS * 7 + rank * 13) % 23).astype(dtype)


Wrap = Callable[[Any], Any]
WHERE = [
    ("host", [2]), ("host", [2, 1]),
    ("gpu", [1]), ("gpu", [2]), ("gpu", [2, 2]), ("gpu", [2, 1]), ("cupy", [2]),
]  # fmt: skip


def run(where: str, sizes: list[int], body: Callable[[Communicator, Wrap], None]) -> None:
    if where == "host":
        with_comm(sizes, lambda comm: body(comm, lambda x: x))
    else:
        wrap = of_cupy if where == "cupy" else Array
        with_gpus(sizes, lambda comm: body(comm, wrap))
