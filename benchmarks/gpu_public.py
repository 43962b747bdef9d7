"""The public all-reduce on GPU arrays, beside what a user would do without it.

    mpirun -n 4 python benchmarks/gpu_public.py [--json FILE]
    RDMAKIT_RANKS_PER_NODE=2 mpirun -n 4 python benchmarks/gpu_public.py

Times are medians of the slowest rank, every call waited for. "host-staged MPI" copies to pinned
memory, calls MPI_Allreduce and copies back; "pipelined" does it in pieces of 4 MiB, the copy of one
beside MPI on another. "back to back" is issued without waiting: time of the host for one call.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from mpi4py import MPI

from rdmakit import Communicator, Kind
from rdmakit.drivers.cuda import PinnedMemory

SIZES = (1 << 10, 16 << 10, 256 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20)
PIECE = 4 << 20


def main() -> None:
    """Measure and print, on all ranks of the job."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", default="")
    parser.add_argument("--most", type=int, default=256 << 20)
    args = parser.parse_args()
    comm = Communicator()
    cupy.cuda.Device(comm.local_rank % cupy.cuda.runtime.getDeviceCount()).use()
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.use()
    world = MPI.COMM_WORLD
    rows: list[dict[str, Any]] = []

    def timed(call: Callable[[], object], rounds: int) -> float:
        times = []
        for _ in range(rounds + 1):
            world.Barrier()
            began = time.perf_counter()
            call()
            comm.synchronize(stream)
            times.append(world.allreduce(time.perf_counter() - began, MPI.MAX))
        return statistics.median(times[1:]) * 1e6

    for nbytes in (size for size in SIZES if size <= args.most):
        count, rounds = nbytes // 4, 9 if nbytes < 64 << 20 else 4
        a, b = (comm.empty(count, "float32") for _ in range(2))
        x, y = (cupy.zeros(count, "float32") for _ in range(2))
        a.fill(1)
        x.fill(1)
        memory = PinnedMemory(2 * nbytes)
        host = memory.bytes.view(np.float32)
        send, recv = host[:count], host[count:]
        row: dict[str, Any] = {"bytes": nbytes}
        row["registered"] = timed(comm.bind(Kind.ALLREDUCE, a, b).call, rounds)
        row["any array"] = timed(comm.bind(Kind.ALLREDUCE, x, y).call, rounds)

        def naive(send: Any = send, recv: Any = recv, x: Any = x, y: Any = y) -> None:
            x.get(stream=stream, out=send)
            world.Allreduce(send, recv)
            y.set(recv, stream=stream)

        def pipelined(send: Any = send, recv: Any = recv, x: Any = x, y: Any = y) -> None:
            events = []
            for at in range(0, len(send), PIECE // 4):
                part = slice(at, at + PIECE // 4)
                x[part].get(stream=stream, out=send[part], blocking=False)
                events.append((part, stream.record()))
            for part, event in events:
                event.synchronize()
                world.Allreduce(send[part], recv[part])
                y[part].set(recv[part], stream=stream)

        row["host-staged MPI"] = timed(naive, rounds)
        row["pipelined"] = timed(pipelined, rounds)
        row["host arrays"] = timed(comm.bind(Kind.ALLREDUCE, send.copy(), recv.copy()).call, rounds)
        assert float(b[-1]) == float(y[-1]) == comm.size, "wrong result"
        if len(comm.layout.nodes) == 1 and nbytes <= 16 << 10:
            for name, call in (
                ("public call, back to back", lambda a=a, b=b: comm.Allreduce(a, b)),
                ("bound call, back to back", comm.bind(Kind.ALLREDUCE, a, b).call),
            ):
                best = []
                for _ in range(5):
                    comm.synchronize(stream)
                    world.Barrier()
                    began = time.perf_counter()
                    for _ in range(500):
                        call()
                    comm.synchronize(stream)
                    best.append(world.allreduce(time.perf_counter() - began, MPI.MAX) / 500)
                row[name] = statistics.median(best) * 1e6
        rows.append(row)
        memory.close()
    if comm.rank == 0:
        channel = comm.channel.name if comm.channel is not None else ""
        print(f"{comm.size} ranks, nodes {comm.layout.nodes}, channel {channel}; us; {comm.notes}")
        for row in rows:
            print("  ", "  ".join(f"{k} {v:.1f}" if k != "bytes" else f"{v:>10} B"
                                  for k, v in row.items()))  # fmt: skip
        if args.json:
            facts = {"ranks": comm.size, "nodes": comm.layout.nodes, "channel": channel,
                     "notes": comm.notes, "rows": rows}  # fmt: skip
            Path(args.json).write_text(json.dumps(facts, indent=1) + "\n")
    comm.close()


if __name__ == "__main__":
    main()
