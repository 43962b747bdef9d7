"""Messages of GPU arrays between two ranks: on device pointers, through pinned memory, host arrays.

    RDMAKIT_RANKS_PER_NODE=1 RDMAKIT_GPU_DIRECT=on mpirun -n 2 python benchmarks/gpu_messages.py

Both ranks send and receive WINDOW messages at once; the rate is each way's. "direct" over tcp is
UCX's own staging. Then, over a second UCX context with CUDA IPC, one way, beside ucx_perftest with
as many sends outstanding, when it is found (--perftest FILE).
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from mpi4py import MPI

from rdmakit import Communicator
from rdmakit.drivers import cuda
from rdmakit.inter.staged import StagedChannel
from rdmakit.inter.tags import TagKind, pack
from rdmakit.inter.ucx import UcxChannel

WINDOW = 4
SIZES = (8, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
TAG = pack(9, TagKind.BENCH, 0)


def main() -> None:
    """Measure and print, on both ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", default="")
    parser.add_argument("--perftest", default="")
    args = parser.parse_args()
    comm = Communicator()
    world = MPI.COMM_WORLD
    cupy.cuda.Device(comm.rank % cupy.cuda.runtime.getDeviceCount()).use()
    cupy.zeros(1)
    rows: list[dict[str, Any]] = []

    def show(**row: Any) -> None:
        rows.append(row)
        if comm.rank == 0:
            print(*(f"{name}={value}" for name, value in row.items()), flush=True)

    def timed(call: Callable[[], object], rounds: int) -> float:
        times = []
        for _ in range(rounds + 1):
            world.Barrier()
            began = time.perf_counter()
            call()
            times.append(world.allreduce(time.perf_counter() - began, MPI.MAX))
        return statistics.median(times[1:])

    def exchange(channel: Any, sends: list[Any], recvs: list[Any]) -> Callable[[], None]:
        def run() -> None:
            requests = [channel.recv(1 - comm.rank, handle, TAG) for handle in recvs]
            requests += [channel.send(1 - comm.rank, handle, TAG) for handle in sends]
            comm.waiter.until(
                lambda: all([r.done() for r in requests]), (channel.progress,), lambda: "exchange"
            )

        return run

    host = comm.channel
    staged = StagedChannel(cuda, host)
    for nbytes in SIZES:
        rounds = 9 if nbytes < 16 << 20 else 4
        seconds = {}

        def of(library: Any, nbytes: int = nbytes) -> list[Any]:
            shape = (WINDOW, nbytes)
            return [library.full(shape, comm.rank, np.uint8), library.zeros(shape, np.uint8)]

        for name in ("host", "staged", "direct"):
            if name == "direct" and (host.name != "ucx" or host.why_no_device):
                continue
            if name == "host":
                arrays = of(np)
                handles = [[host.wrap(row) for row in array] for array in arrays]
                channel = host
            else:
                channel = staged if name == "staged" else host
                arrays = of(cupy)
                cupy.cuda.Device().synchronize()
                handles = [
                    [channel.wrap_device(row.data.ptr, nbytes) for row in array] for array in arrays
                ]
            seconds[name] = timed(exchange(channel, *handles), rounds)
            cupy.cuda.Device().synchronize()
            assert (arrays[1] == 1 - comm.rank).all(), name
        show(
            case="both ways",
            bytes=nbytes,
            **{f"{name}_us": round(s * 1e6, 1) for name, s in seconds.items()},
            **{f"{name}_GBps": round(WINDOW * nbytes / s / 1e9, 3) for name, s in seconds.items()},
            staged_of_host=round(seconds["host"] / seconds["staged"], 3),
            staged_to_direct=round(seconds.get("direct", 0) / seconds["staged"], 2),
        )
    if host.name == "ucx" and not host.why_no_device:
        over_ipc(comm, world, timed, show, args.perftest)
    if args.json and comm.rank == 0:
        name = cuda.device_facts(cupy.cuda.Device().id).name
        result = {"gpu": name, "window": WINDOW, "lanes": host.transports(1), "rows": rows}
        Path(args.json).write_text(json.dumps(result, indent=1))
    comm.close()


def over_ipc(comm: Any, world: Any, timed: Any, show: Any, perftest: str) -> None:
    """One way over CUDA IPC, beside ucx_perftest."""
    channel = UcxChannel.open(comm.rank, comm.config.ucx, virtual=False, local=True)
    channel.connect(comm.bootstrap.allgather(channel.address))
    word = channel.wrap(np.zeros(1, np.uint8))
    peer = 1 - comm.rank

    def stream(handles: list[Any], count: int) -> None:
        """Keep WINDOW messages open until ``count`` are through, then hear of it."""
        move, progress = (channel.send if comm.rank == 0 else channel.recv), channel.progress
        open_ = deque(move(peer, handle, TAG) for handle in handles)
        for started in range(WINDOW, count + WINDOW):
            while not open_[0].done():
                progress()
            open_.popleft()
            if started < count:
                open_.append(move(peer, handles[started % WINDOW], TAG))
        last = channel.recv if comm.rank == 0 else channel.send
        request = last(peer, word, TAG + 1)
        comm.waiter.until(request.done, (channel.progress,), lambda: "the last word")

    for nbytes in (16 << 20, 256 << 20):
        array = cupy.full((WINDOW, nbytes), comm.rank, np.uint8)
        cupy.cuda.Device().synchronize()
        handles = [channel.wrap_device(row.data.ptr, nbytes) for row in array]
        count = 200 if nbytes < 64 << 20 else 50
        seconds = timed(partial(stream, handles, count), 5)
        assert (array == 0).all() or comm.rank == 0
        rate = count * nbytes / seconds / 1e9
        other = against(world, perftest, nbytes) if perftest else None
        show(
            case="one way over cuda_ipc",
            bytes=nbytes,
            lanes=channel.transports(peer),
            ours_GBps=round(rate, 1),
            perftest_GBps=other,
            share=round(rate / other, 3) if other else None,
        )
    channel.close()


def against(world: Any, perftest: str, nbytes: int) -> float | None:
    """Return ucx_perftest's rate in GB/s."""
    flags = ["-t", "tag_bw", "-m", "cuda", "-s", str(nbytes), "-n", "200", "-O", str(WINDOW)]
    port = 13400 + nbytes % 97
    if world.rank == 1:
        server = subprocess.Popen([perftest, "-p", str(port), *flags], stdout=subprocess.DEVNULL)
        world.Barrier()
        server.wait(60)
        return world.bcast(None)
    world.Barrier()
    time.sleep(1)
    done = subprocess.run(
        [perftest, "localhost", "-p", str(port), *flags], capture_output=True, text=True, timeout=60
    )
    found = re.findall(r"^\s*(?:Final:)?\s*\d+.*$", done.stdout, re.MULTILINE)
    if not found:
        print(done.stdout[-300:], done.stderr[-300:], flush=True)
    rate = float(found[-1].split()[-3]) * 1.048576e-3 if found else None  # overall MB/s of 2**20
    return world.bcast(rate)


if __name__ == "__main__":
    main()
