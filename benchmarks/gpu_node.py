"""Node collectives on one GPU shared through MPS, against the device's own copy rate.

    python benchmarks/gpu_node.py [--ranks 2,4,8] [--json FILE] [--tile BYTES] [--unroll N]

Starts one MPI job for each number of ranks and prints a table. Times are of the slowest rank.
"traffic" is 2 * ranks * bytes / t, the least that crosses the memory bus, as a share of what a
device-to-device copy moves (read and write) in the same run. MPS must run already for figures that
mean something; what was found is in the table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

KIB, MIB = 1 << 10, 1 << 20
SMALL = (8, KIB, 4 * KIB, 16 * KIB, 64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB, MIB, 2 * MIB)
LARGE = (MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)


class Ranks:
    """One rank's side of the measurement."""

    def __init__(self, args: argparse.Namespace) -> None:
        import cupy

        from rdmakit.bootstrap import MpiBootstrap
        from rdmakit.drivers import cuda
        from rdmakit.intra.device_node import DeviceNode
        from rdmakit.waiting import Waiter, spins_for

        self.cupy, self.cuda = cupy, cuda
        self.boot = MpiBootstrap()
        waiter = Waiter(self.boot.rank, self.boot.host, 30.0, spins_for(self.boot.size))
        began = time.perf_counter()
        self.node = DeviceNode.create(self.boot, waiter, tile=args.tile, unroll=args.unroll)
        self.setup = time.perf_counter() - began
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.rows: list[dict[str, Any]] = []

    def slowest(self, value: float) -> float:
        """Return the largest of the ranks' values. Collective."""
        return max(float(text) for text in self.boot.allgather(repr(value).encode()))

    def row(self, case: str, nbytes: int, us: float, **more: Any) -> None:
        """Keep a result; the slowest rank's time counts. Collective."""
        self.rows.append({"case": case, "ranks": self.boot.size, "bytes": nbytes, "us": us, **more})

    def timed(
        self, call: Callable[[], object], repeats: int, rounds: int = 7
    ) -> tuple[float, float]:
        """Return (device us, host us) of one call, back to back; median of rounds."""
        event = self.cupy.cuda.Event
        device, host = [], []
        for _ in range(8):
            first, last = event(), event()
            self.boot.barrier()
            self.node.barrier(self.stream)
            first.record(self.stream)
            began = time.perf_counter()
            for _ in range(repeats):
                call()
            issued = time.perf_counter() - began
            last.record(self.stream)
            self.node.wait(self.stream)
            total = self.cupy.cuda.get_elapsed_time(first, last) * 1e3
            device.append(self.slowest(total / repeats))
            host.append(self.slowest(issued * 1e6 / repeats))
        return statistics.median(device[1:]), statistics.median(host[1:])

    def array(self, nbytes: int, *, register: bool) -> Any:
        """Return float32 device memory; registered memory is new, other comes from CuPy's pool."""
        x = self.cuda.DeviceMemory(nbytes).array(nbytes // 4, "float32")
        x.fill(1)
        span = Span(x)
        if register:
            self.node.register(span.address, nbytes, x)
        return span

    def copy_rate(self) -> float:
        """Return bytes per second, read and write, of a device copy by rank 0 alone."""
        rate = 0.0
        if self.boot.rank == 0:
            nbytes = 512 * MIB
            a, b = self.cuda.DeviceMemory(nbytes), self.cuda.DeviceMemory(nbytes, zero=True)
            times = []
            for _ in range(9):
                first, last = self.cupy.cuda.Event(), self.cupy.cuda.Event()
                first.record(self.stream)
                for _ in range(8):
                    self.cuda.copy_async(a.address, b.address, nbytes, self.stream.ptr)
                last.record(self.stream)
                self.node.wait(self.stream)
                times.append(self.cupy.cuda.get_elapsed_time(first, last) / 8e3)
            rate = 2 * nbytes / statistics.median(times[1:])
            a.close()
            b.close()
        return self.slowest(rate)

    def run(self, args: argparse.Namespace) -> dict[str, Any]:
        """Measure everything. Collective."""
        from rdmakit.intra import device_calls

        node, stream, n = self.node, self.stream, self.boot.size
        rate = self.copy_rate()
        self.row("device copy", 512 * MIB, 2 * 512 * MIB / rate * 1e6)
        us, host = self.timed(lambda: node.barrier(stream), 200)
        self.row("flag barrier", 0, us, host_us=host)
        usual = device_calls.algorithm_for
        biggest = max(LARGE)
        plain = [self.array(biggest, register=False) for _ in range(2)]
        shared = [self.array(biggest, register=True) for _ in range(2)]

        def measure(
            case: str, algorithm: str, arrays: list[Any], nbytes: int, repeats: int
        ) -> None:
            parts = [array.first(nbytes // 4) for array in arrays]
            device_calls.algorithm_for = lambda *_, **__: algorithm
            try:
                call = lambda: node.allreduce(*parts, stream=stream)  # noqa: E731
                us, host = self.timed(call, repeats)
            finally:
                device_calls.algorithm_for = usual
            share = 2 * n * nbytes / (us * 1e-6) / rate
            self.row(case, nbytes, us, host_us=host, traffic=share)

        for nbytes in SMALL:
            if nbytes <= node.layout.teams * node.layout.tile:
                measure("one-shot", "oneshot", plain, nbytes, 200)
        for nbytes in SMALL[5:]:
            measure("two-shot small", "direct", shared, nbytes, 100)
        for case, arrays, sizes, chain in (
            ("one-shot, from a graph", plain, SMALL[:4], 20),
            ("two-shot, from a graph", shared, LARGE[-2:], 4),
        ):
            for nbytes in sizes:
                parts = [array.first(max(2, nbytes // 4)) for array in arrays]
                node._ready.clear()
                with stream:
                    node.allreduce(*parts, stream=stream)
                    stream.begin_capture()
                    for _ in range(chain):
                        node.allreduce(*parts, stream=stream)
                    captured = stream.end_capture()
                us, _ = self.timed(lambda captured=captured: captured.launch(stream), 100 // chain)
                share = 2 * n * nbytes / (us / chain * 1e-6) / rate
                self.row(case, nbytes, us / chain, traffic=share)
        for nbytes in LARGE:
            repeats = 20 if nbytes >= 64 * MIB else 50
            measure("two-shot registered", "direct", shared, nbytes, repeats)
            measure("two-shot in place", "direct", shared[:1] * 2, nbytes, repeats)
            measure("staged", "staged", plain, nbytes, repeats)
        node.close()
        facts = node.facts[0]
        return {
            "ranks": n, "gpu": facts.name, "sms": facts.sms, "mps": facts.mps,
            "copy_tb_per_s": rate / 1e12, "blocks": node.grid.blocks, "tile": node.layout.tile,
            "unroll": args.unroll, "notes": node.notes, "setup_s": self.setup, "rows": self.rows,
        }  # fmt: skip


class Span:
    """Device memory as the node takes it."""

    def __init__(self, array: Any, count: int | None = None) -> None:
        self.owner, self.address, self.dtype = array, array.data.ptr, array.dtype
        self.count = array.size if count is None else count

    def first(self, count: int) -> Span:
        """Return the first elements."""
        return Span(self.owner, count)


def table(results: list[dict[str, Any]]) -> str:
    """Return the rows as text."""
    lines = []
    for result in results:
        lines.append(
            f"{result['ranks']} ranks on {result['gpu']}, MPS {'on' if result['mps'] else 'off'}, "
            f"copy {result['copy_tb_per_s']:.2f} TB/s, {result['blocks']} blocks, tile "
            f"{result['tile']}, unroll {result['unroll'] or 'default'}, "
            f"start {result['setup_s']:.1f} s"
        )
        for row in result["rows"]:
            host = f"{row['host_us']:8.1f}" if "host_us" in row else " " * 8
            share = f"{row['traffic'] * 100:6.1f} %" if "traffic" in row else ""
            lines.append(
                f"  {row['case']:24}{row['bytes']:>11} B{row['us']:>10.1f} us{host}  {share}"
            )
    return "\n".join(lines)


def main() -> None:
    """Start the jobs, or be a rank of one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--json", default="")
    parser.add_argument("--tile", type=int, default=0)
    parser.add_argument("--unroll", type=int, default=0)
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        ranks = Ranks(args)
        result = ranks.run(args)
        if ranks.boot.rank == 0:
            Path(args.worker).write_text(json.dumps(result))
        return
    results = []
    mpirun = Path(sys.executable).parent / "mpirun"
    for n in map(int, args.ranks.split(",")):
        with tempfile.TemporaryDirectory() as place:
            out = Path(place) / "result.json"
            options = [f"--tile={args.tile}", f"--unroll={args.unroll}", f"--worker={out}"]
            command = [str(mpirun), "-n", str(n), sys.executable, __file__, *options]
            done = subprocess.run(command, check=False, timeout=240)
            if done.returncode:
                print(f"{n} ranks: mpirun ended with {done.returncode}", file=sys.stderr)
                continue
            results.append(json.loads(out.read_text()))
            print(table(results[-1:]), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
