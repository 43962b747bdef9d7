"""The heat equation in two dimensions; neighbours exchange the edges of their blocks.

    mpirun -n 4 python benchmarks/examples/heat.py [--gpu]

The plate is cut into blocks, as square as the number of ranks allows. Before each step a rank sends
its outermost rows and columns to its neighbours with Isend and receives theirs into the border
around its block; a column is an array with gaps. The result is compared, bit by bit, with that of
the whole plate on one rank: each element is computed from the same numbers in the same order.
"""

from __future__ import annotations

from math import isqrt
from typing import Any

from common import run, shares

from rdmakit import PROC_NULL, Communicator, Request

ROWS, COLUMNS = 61, 83
STEPS = 50
KAPPA = 0.2


def start(xp: Any) -> Any:
    """Return the plate with its border, which stays as it is."""
    i = xp.arange(ROWS + 2, dtype=xp.float64)[:, None]
    j = xp.arange(COLUMNS + 2, dtype=xp.float64)[None, :]
    return (i * 7 + j * 13) % 31


def step(u: Any) -> None:
    """Compute all elements but the outermost."""
    middle = u[1:-1, 1:-1]
    around = (u[:-2, 1:-1] + u[2:, 1:-1]) + (u[1:-1, :-2] + u[1:-1, 2:])
    middle += KAPPA * (around - 4 * middle)


def exchange(comm: Communicator, u: Any, neighbours: list[Any]) -> None:
    """Fill the border of a block with the edges of the blocks around it."""
    up, down, left, right = neighbours
    Request.Waitall(
        [
            comm.Irecv(u[0, 1:-1], up, 1),
            comm.Irecv(u[-1, 1:-1], down, 2),
            comm.Irecv(u[1:-1, 0], left, 3),
            comm.Irecv(u[1:-1, -1], right, 4),
            comm.Isend(u[-2, 1:-1], down, 1),
            comm.Isend(u[1, 1:-1], up, 2),
            comm.Isend(u[1:-1, -2], right, 3),
            comm.Isend(u[1:-1, 1], left, 4),
        ]
    )


def main(comm: Communicator, xp: Any) -> tuple[bool, str]:
    """Compute this rank's block, and the whole plate, and compare."""
    high = next(h for h in range(isqrt(comm.size), 0, -1) if comm.size % h == 0)
    wide = comm.size // high
    row, column = divmod(comm.rank, wide)
    top, bottom = shares(ROWS, high)[row : row + 2]
    west, east = shares(COLUMNS, wide)[column : column + 2]
    neighbours: list[Any] = [
        comm.rank - wide if row else PROC_NULL,
        comm.rank + wide if row < high - 1 else PROC_NULL,
        comm.rank - 1 if column else PROC_NULL,
        comm.rank + 1 if column < wide - 1 else PROC_NULL,
    ]
    plate = start(xp)
    block = plate[top : bottom + 2, west : east + 2].copy()
    for _ in range(STEPS):
        exchange(comm, block, neighbours)
        step(block)
        step(plate)
    mine, wanted = block[1:-1, 1:-1], plate[top + 1 : bottom + 1, west + 1 : east + 1]
    heat = xp.array([mine.sum()])
    comm.Allreduce(heat, heat)
    text = (
        f"heat equation, {ROWS}x{COLUMNS} points in {high}x{wide} blocks, {STEPS} steps, mean "
        f"{float(heat[0]) / (ROWS * COLUMNS):.6f}"
    )
    return bool((mine == wanted).all()) and bool(xp.ptp(mine) > 0), text


if __name__ == "__main__":
    run(str(__doc__), main)
