"""A matrix cut into rows, transposed: each rank sends a block to each other by Alltoall.

    mpirun -n 4 python benchmarks/examples/transpose.py [--gpu]

Rank r has rows of A, and afterwards the same rows of A's transpose. Blocks are transposed while
they are packed, so what arrives lies as it is wanted, one block beside the other.
"""

from __future__ import annotations

from typing import Any

from common import run

from rdmakit import Communicator

BLOCK = 37


def main(comm: Communicator, xp: Any) -> tuple[bool, str]:
    """Transpose, compare with the formula, transpose back and compare with the input."""
    n = BLOCK * comm.size
    mine = xp.arange(comm.rank * BLOCK, (comm.rank + 1) * BLOCK, dtype=xp.float64)[:, None]
    all_ = xp.arange(n, dtype=xp.float64)[None, :]
    rows = mine * n + all_  # element (i, j) is i * n + j

    def transposed(rows: Any) -> Any:
        blocks = rows.reshape(BLOCK, comm.size, BLOCK)
        send = xp.ascontiguousarray(blocks.transpose(1, 2, 0))  # [to whom][column][row]
        recv = xp.empty_like(send)
        comm.Alltoall(send, recv)
        return xp.ascontiguousarray(recv.transpose(1, 0, 2)).reshape(BLOCK, n)

    there = transposed(rows)
    back = transposed(there)
    right = bool((there == all_ * n + mine).all()) and bool((back == rows).all())
    return right, f"transpose of a {n}x{n} matrix, there and back"


if __name__ == "__main__":
    run(str(__doc__), main)
