"""How much of an all-reduce hides behind a computation that calls nothing.

    mpirun -n 2 python benchmarks/overlap.py [--bytes 16M] [--json FILE]

Run it between real or emulated hosts (scripts/cluster up 2 --rate 1gbit), or with
RDMAKIT_RANKS_PER_NODE=1 on one. A computation is made as long as the all-reduce alone (NumPy's, in
the core or in memory, or a loop of pure Python); then both are done at once: Iallreduce,
computation, Wait. "overlap" is the time of both over the longer of the two: 1.0 hides all, 2.0
nothing. Over a fast link the messages themselves keep a core busy, so where the ranks' computations
have all cores little can be hidden. Times are medians of the slowest rank, rounds of the three
alternate. MPI's own Iallreduce is beside it, on the same arrays.
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


class Work:
    """Steps of about a millisecond: NumPy's free the interpreter, Python's own never do."""

    def __init__(self, kind: str) -> None:
        """Make the arrays; ``kind`` is matmul (in the core), stream (in memory) or python."""
        self.kind, self.steps = kind, 1
        n = 384 if kind == "matmul" else 1 << 20
        self.a, self.b, self.c = (np.full((n, n) if kind == "matmul" else n, 0.5) for _ in range(3))

    def __call__(self) -> None:
        """Compute."""
        for _ in range(self.steps):
            if self.kind == "matmul":
                np.matmul(self.a, self.b, out=self.c)
            elif self.kind == "python":
                count = 0
                for number in range(20_000):
                    count += number
            else:
                np.multiply(self.a, 1.0001, out=self.c)


def main() -> None:
    """Measure and print, on all ranks of the job."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=parse_size, default=16 << 20)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--beside", nargs="+", default=["matmul", "stream", "python"])
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    world = MPI.COMM_WORLD
    rows: list[dict[str, Any]] = []
    with Communicator() as comm:
        x = np.full(args.bytes // 4, 1.0, np.float32)
        y = np.empty_like(x)

        def once(call: Callable[[], object]) -> float:
            comm.Barrier()
            began = time.perf_counter()
            call()
            return float(world.allreduce(time.perf_counter() - began, MPI.MAX))

        def of_mpi() -> Any:
            return world.Iallreduce(x, y)

        ways: dict[str, Callable[[], Any]] = {
            "rdmakit": lambda: comm.Iallreduce(x, y),
            f"{MPI.get_vendor()[0]} Iallreduce": of_mpi,
        }
        for kind in args.beside:
            for name, start in ways.items():
                work = Work(kind)
                alone = statistics.median(
                    once(lambda start=start: start().Wait()) for _ in range(5)
                )
                work.steps = 10
                for _ in range(3):  # what a short one takes says little on a busy machine
                    step = statistics.median(once(work) for _ in range(5)) / work.steps
                    work.steps = max(1, round(alone / step))

                def both(start: Callable[[], Any] = start, work: Work = work) -> None:
                    request = start()
                    work()
                    request.Wait()

                times: dict[str, list[float]] = {"alone": [], "computation": [], "both": []}
                for _ in range(args.rounds):
                    times["alone"].append(once(lambda start=start: start().Wait()))
                    times["computation"].append(once(work))
                    times["both"].append(once(both))
                    assert (y == comm.size).all()
                row = {key: statistics.median(value) * 1e3 for key, value in times.items()}
                row["overlap"] = row["both"] / max(row["alone"], row["computation"])
                rows.append({"way": name, "beside": kind, "bytes": args.bytes, **row})
                if comm.rank == 0:
                    print(
                        f"{comm.layout.describe()} {args.bytes >> 10} KiB beside {kind:7s} "
                        f"{name:22s} alone {row['alone']:7.1f} ms, "
                        f"computation {row['computation']:7.1f} ms, both {row['both']:7.1f} ms: "
                        f"overlap {row['overlap']:.2f}",
                        flush=True,
                    )
        if comm.rank == 0 and args.json:
            Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
