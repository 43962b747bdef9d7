"""Every ``rdmakit bench`` that a machine with GPUs can do: one GPU shared, one each, virtual nodes.

    python benchmarks/gpu_bench.py [--output FOLDER] [--budget SECONDS] [--most SIZE] [--list]

Run it with the Python whose environment has rdmakit, CuPy and an MPI. Ranks that share a GPU need
MPS to mean anything: start it before (nvidia-cuda-mps-control -d). Each run is ended at a limit,
and its table goes to the screen; the results lie in FOLDER. The exit status counts the runs that
failed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rdmakit.drivers import cuda_tools, host

START = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
_REST = 90.0
"""Seconds for start, set-up and kernels, beside the time budget."""


def runs(gpus: int) -> Iterator[tuple[str, int, list[str]]]:
    """Yield name, ranks and options of each run that ``gpus`` GPUs allow."""
    if gpus == 1:
        yield "1gpu_1x2", 2, []
        yield "1gpu_1x4", 4, []
        yield "1gpu_2x2_virtual", 4, ["--ranks-per-node", "2"]
        yield "1gpu_2x1_virtual", 2, ["--ranks-per-node", "1"]
        return
    yield f"{gpus}gpu_1x{gpus}", gpus, []
    yield "2gpu_2x1_virtual", 2, ["--ranks-per-node", "1", "--gpu-map", "0,1"]
    if gpus >= 4:
        half = gpus // 2
        yield f"{gpus}gpu_2x{half}_virtual", 2 * half, ["--ranks-per-node", str(half)]


def main() -> int:
    """Run them one after the other; return how many failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("gpu_bench"))
    parser.add_argument("--budget", type=float, default=60.0)
    parser.add_argument("--least", default="1K", help="smallest message")
    parser.add_argument("--most", default="256M", help="largest message")
    parser.add_argument("--factor", default="16", help="from one size to the next")
    parser.add_argument("--list", action="store_true", help="print the commands only")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    mpirun = Path(sys.executable).with_name("mpirun")
    failed = 0
    for name, ranks, options in runs(len(cuda_tools.device_uuids())):
        command = [
            str(mpirun) if mpirun.exists() else "mpirun", "-n", str(ranks), sys.executable, "-m",
            "rdmakit", "bench", "--device", "gpu", "-b", args.least, "-e", args.most,
            "-f", args.factor,
            "--time-budget", f"{args.budget:g}", "--output", str(args.output / f"{name}.json"),
            *options,
        ]  # fmt: skip
        print(f"\n== {name}: {shlex.join(command)}", flush=True)
        if args.list:
            continue
        root = str(Path(__file__).resolve().parent.parent)
        env = {**os.environ, **START, "PYTHONPATH": root}
        done = host.run(command, args.budget + _REST, env)
        print(done.stdout, done.stderr, sep="\n", flush=True)
        if not done.ok:
            failed += 1
            print(f"== {name} failed: {done.error or f'status {done.rc}'}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
