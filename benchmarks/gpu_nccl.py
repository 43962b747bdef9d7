"""Node collectives beside NCCL, one GPU for each rank of one node.

    mpirun -n 2 python benchmarks/gpu_nccl.py [--json FILE] [--most BYTES] [--kinds allreduce,...]

Both do the same call on the same registered float32 arrays and stream, issued back to back; ten
rounds of each in turn. Times are device times of one call on the slowest rank, median of the rounds
(the host issues faster than that, or its time is the time). "graph": 20 calls captured and
replayed, where both can be. For an all-gather, reduce-scatter and all-to-all "bytes" is the larger
array, as in nccl-tests. "p2p" are plain device copies between the first two GPUs, and messages.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from mpi4py import MPI

from rdmakit import Communicator, Kind
from rdmakit.datatypes import SUM
from rdmakit.drivers import cuda, cuda_tools, nccl
from rdmakit.errors import UnsupportedError

KINDS = (Kind.ALLREDUCE, Kind.REDUCE_SCATTER, Kind.ALLGATHER, Kind.BROADCAST, Kind.ALLTOALL)
SIZES = tuple(8 << shift for shift in (0, 7, 11, 14, 17, 18, 20, 21, 23, 25, 27))
ROUNDS, CHAIN = 10, 20
FLOAT = np.dtype(np.float32)


class Bench:
    """One rank's side."""

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.world = comm, MPI.COMM_WORLD
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.stream.use()
        ids = self.world.allgather(nccl.unique_id() if comm.rank == 0 else b"")
        self.nccl = nccl.NcclGroup(comm.size, ids[0], comm.rank)
        self.rows: list[dict[str, Any]] = []

    def slowest(self, value: float) -> float:
        """Return the largest of the ranks' values. Collective."""
        return self.world.allreduce(value, MPI.MAX)

    def once(self, call: Callable[[], object], repeats: int) -> float:
        """Return us of one call, of ``repeats`` back to back. Collective."""
        first, last = cupy.cuda.Event(), cupy.cuda.Event()
        self.comm.synchronize(self.stream)
        self.world.Barrier()
        call()  # the ranks meet
        first.record(self.stream)
        for _ in range(repeats):
            call()
        last.record(self.stream)
        self.comm.synchronize(self.stream)
        return self.slowest(cupy.cuda.get_elapsed_time(first, last) * 1e3 / repeats)

    def both(self, ours: Callable[[], object], theirs: Callable[[], object], nbytes: int,
             scale: int = 1) -> tuple[float, float]:  # fmt: skip
        """Return the medians of both, measured in turn. Collective."""
        repeats = 50 if nbytes <= 1 << 20 else 20 if nbytes <= 16 << 20 else 5
        repeats = max(2, repeats // scale)
        times: tuple[list[float], list[float]] = ([], [])
        for turn in range(ROUNDS + 1):
            for kept, call in zip(times, (ours, theirs), strict=True):
                us = self.once(call, repeats) / scale
                if turn:
                    kept.append(us)
        return statistics.median(times[0]), statistics.median(times[1])

    def captured(self, call: Callable[[], object]) -> Callable[[], object] | None:
        """Return ``CHAIN`` calls as one graph, or None where it cannot be. Collective."""
        self.comm.synchronize(self.stream)
        try:
            self.stream.begin_capture()
            for _ in range(CHAIN):
                call()
            graph = self.stream.end_capture()
        except UnsupportedError:
            self.stream.end_capture()
            return None
        return partial(graph.launch, self.stream)

    def collective(self, kind: Kind, nbytes: int) -> None:
        """Measure one collective at one size, and compare every element. Collective."""
        comm, n = self.comm, self.comm.size
        whole = max(n, nbytes // 4 // n * n)
        part = whole // n
        sends, recvs = {
            Kind.REDUCE_SCATTER: (whole, part), Kind.ALLGATHER: (part, whole),
        }.get(kind, (whole, whole))  # fmt: skip
        a, b, c = comm.empty(sends, FLOAT), comm.empty(recvs, FLOAT), cupy.zeros(recvs, FLOAT)
        a[:] = cupy.arange(sends, dtype=FLOAT) % 1021 + 1000 * comm.rank
        count = {Kind.REDUCE_SCATTER: recvs, Kind.ALLTOALL: part}.get(kind, sends)
        if kind is Kind.BROADCAST:
            ours = comm.bind(kind, a, a, root=0).call
            mine = theirs_in = a
        else:
            ours = comm.bind(kind, a, b).call
            mine, theirs_in = b, a
        run = self.nccl.run
        theirs = partial(
            run, kind, theirs_in.data.ptr, c.data.ptr, count, FLOAT, SUM, self.stream.ptr
        )
        ours()
        theirs()
        comm.synchronize(self.stream)
        wrong = int(self.slowest(int((mine != c).sum())))
        us, peer = self.both(ours, theirs, nbytes)
        row = {"case": kind.value, "bytes": whole * 4, "us": us, "nccl_us": peer, "wrong": wrong}
        if nbytes <= 1 << 20 and (graph := self.captured(ours)) is not None:
            other = self.captured(theirs)
            assert other is not None
            row["graph_us"], row["nccl_graph_us"] = self.both(graph, other, nbytes, CHAIN)
        self.show(row)

    def show(self, row: dict[str, Any]) -> None:
        """Keep and print a row."""
        self.rows.append(row)
        if self.comm.rank == 0:
            ratio = f"{row['nccl_us'] / row['us']:6.2f}" if "nccl_us" in row else ""
            if "nccl_graph_us" in row:
                ratio += f" graph {row['nccl_graph_us'] / row['graph_us']:.2f}"
            words = (f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
            print(ratio, *words, flush=True)

    def copies(self, nbytes: int) -> None:
        """Measure plain copies from the next rank's GPU, one way and both, and messages."""
        comm = self.comm
        a = comm.empty(nbytes // 4, FLOAT)
        b = cupy.zeros(nbytes // 4, FLOAT)
        peer = comm.rank ^ 1
        if comm.rank > 1 or comm.size < 2:
            peer = comm.rank
        entry = comm._gpu().side.node.registration(a.data.ptr, nbytes)
        source = entry.peers(a.data.ptr)[peer]
        repeats = 50 if nbytes <= 1 << 20 else 10
        copy = partial(cuda.copy_async, b.data.ptr, source, nbytes, self.stream.ptr)
        for case, active in (("p2p copy one way", comm.rank == 0), ("p2p copy both ways", True)):
            best = [self.once(copy if active else _nothing, repeats) for _ in range(5)]
            self.show({"case": case, "bytes": nbytes, "us": statistics.median(best)})
        if comm.size == 2:
            other = cupy.zeros(nbytes // 4, FLOAT)
            for case, out in (
                ("message one way", a), ("message both ways", a),
                ("message one way, not registered", other),
                ("message both ways, not registered", other),
            ):  # fmt: skip

                def call(case: str = case, out: Any = out) -> None:
                    if "both" in case:
                        comm.Sendrecv(out, peer, recvbuf=b, source=peer)
                    elif comm.rank == 0:
                        comm.Send(out, 1)
                    else:
                        comm.Recv(b, 0)

                best = [self.once(call, repeats) for _ in range(5)]
                self.show({"case": case, "bytes": nbytes, "us": statistics.median(best)})


def _nothing() -> None:
    """Do nothing."""


def main() -> None:
    """Measure and print, on all ranks of the job."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", default="")
    parser.add_argument("--least", type=int, default=0)
    parser.add_argument("--most", type=int, default=1 << 30)
    parser.add_argument("--kinds", default=",".join(kind.value for kind in KINDS))
    args = parser.parse_args()
    comm = Communicator()
    if reason := nccl.why_not():
        raise SystemExit(reason)
    cupy.cuda.Device(comm.local_rank % cupy.cuda.runtime.getDeviceCount()).use()
    bench = Bench(comm)
    for nbytes in (1 << 20, 16 << 20, 256 << 20):
        bench.copies(nbytes)
    for kind in KINDS:
        if kind.value in args.kinds.split(","):
            for nbytes in SIZES:
                if args.least <= nbytes <= args.most:
                    bench.collective(kind, nbytes)
                    cuda_tools.trim()
    if comm.rank == 0 and args.json:
        facts = cuda.device_facts(cupy.cuda.Device().id)
        told = {
            "gpu": facts.name, "ranks": comm.size, "nccl": nccl.version(),
            "nvls": os.environ.get("NCCL_NVLS_ENABLE", "default"), "cupy": cupy.__version__,
            "driver": cupy.cuda.runtime.driverGetVersion(), "sms": facts.sms,
            "cpus": os.cpu_count(), "notes": comm.notes, "rows": bench.rows,
        }  # fmt: skip
        Path(args.json).write_text(json.dumps(told, indent=1) + "\n")
    bench.nccl.close()
    comm.close()


if __name__ == "__main__":
    main()
