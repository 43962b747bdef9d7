"""Time of a broadcast over the number of ranks: a chain of many pieces, and one sender for all.

    mpirun -n 4 python benchmarks/broadcast.py [--bytes 16M] [--json FILE]

Run it between emulated hosts with limited links (scripts/cluster up 4 --rate 1gbit), one rank on
each, or between real ones. For 2, 3, ... ranks: the time of ``ring`` (pieces handed on in a chain,
which hardly grows), ``flat`` (the root sends to each, which grows with the ranks), what ``auto``
takes, and the MPI library's own. Times are medians of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from rdmakit import Communicator
from rdmakit.config import parse_size


def main() -> None:
    """Measure and print, on all ranks of the job."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=parse_size, default=16 << 20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with Communicator() as world:
        for size in range(2, world.size + 1):
            part = world.Split(0 if world.rank < size else None)
            if part is not None:
                with part:
                    rows.append(measure(part, args.bytes, args.rounds))
                if world.rank == 0:
                    print(*(f"{k} {v}" for k, v in rows[-1].items()), sep=", ", flush=True)
            world.Barrier()
        if world.rank == 0 and args.json:
            Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")


def measure(comm: Communicator, nbytes: int, rounds: int) -> dict[str, Any]:
    """Return the milliseconds of each way. Collective."""
    data = np.zeros(nbytes, np.uint8)

    def once(call: Callable[[], object]) -> float:
        comm.Barrier()
        began = time.perf_counter()
        call()
        return float(comm.mpi.allreduce(time.perf_counter() - began, MPI.MAX))

    ways: dict[str, Callable[[], object]] = {
        name: lambda name=name: comm.Bcast(data, 0, algorithm=name)
        for name in ("ring", "flat", "auto")
    }
    ways["mpi"] = lambda: comm.mpi.Bcast(data, 0)
    row: dict[str, Any] = {"ranks": comm.size, "layout": comm.layout.describe(), "bytes": nbytes}
    for name, call in ways.items():
        times = []
        for turn in range(rounds + 1):
            data[:] = turn + 1 if comm.rank == 0 else 0
            times.append(once(call))
            assert (data == turn + 1).all(), name
        row[f"{name}_ms"] = round(statistics.median(times[1:]) * 1e3, 1)
    return row


if __name__ == "__main__":
    main()
