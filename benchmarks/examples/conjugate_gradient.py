"""Conjugate gradients with the matrix cut into rows; dot products by Allreduce.

    mpirun -n 4 python benchmarks/examples/conjugate_gradient.py [--gpu]

Each rank has some rows of a dense symmetric positive definite matrix, and those elements of all
vectors. A step takes one product with the whole search direction, put together by an all-reduce of
a vector with this rank's part in its place, and two dot products. The solution is compared with
that of one rank alone, and with the residual itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from common import run, shares

from rdmakit import Communicator

N = 301
STEPS = 80
SMALL = 1e-12


def problem(xp: Any) -> tuple[Any, Any]:
    """Return the matrix and the right side, the same on every rank."""
    i = xp.arange(N, dtype=xp.float64)
    matrix = xp.exp(-abs(i[:, None] - i[None, :])) + xp.diag(1 + i / N)
    return matrix, xp.sin(i + 1)


def solve(comm: Communicator | None, xp: Any) -> tuple[Any, int]:
    """Return the solution, and the steps it took; None: this rank alone has all rows."""
    ranks, rank = (comm.size, comm.rank) if comm is not None else (1, 0)
    first, last = shares(N, ranks)[rank : rank + 2]
    matrix, right = problem(xp)
    rows = matrix[first:last]
    scalar, whole = xp.empty(1), xp.empty(N)

    def dot(a: Any, b: Any) -> float:
        scalar[0] = a @ b
        if comm is not None:
            comm.Allreduce(scalar, scalar)
        return float(scalar[0])

    def everywhere(part: Any) -> Any:
        whole[:] = 0
        whole[first:last] = part
        if comm is not None:
            comm.Allreduce(whole, whole)
        return whole

    x = xp.zeros(last - first)
    r = right[first:last].copy()
    p = r.copy()
    square = start = dot(r, r)
    steps = 0
    while square > SMALL**2 * start and steps < STEPS:
        product = rows @ everywhere(p)
        alpha = square / dot(p, product)
        x += alpha * p
        r -= alpha * product
        square, before = dot(r, r), square
        p = r + square / before * p
        steps += 1
    return everywhere(x).copy(), steps


def main(comm: Communicator, xp: Any) -> tuple[bool, str]:
    """Solve it together and alone, and compare."""
    together, steps = solve(comm, xp)
    alone, _ = solve(None, xp)
    matrix, right = problem(xp)
    error = float(abs(together - alone).max())
    residual = float(abs(right - matrix @ together).max())
    text = (
        f"conjugate gradients, {N} unknowns, {steps} steps, residual {residual:.1e}, difference "
        f"from one rank's solution {error:.1e}"
    )
    return bool(error < 1e-10 and residual < 1e-10 and np.isfinite(residual)), text


if __name__ == "__main__":
    run(str(__doc__), main)
