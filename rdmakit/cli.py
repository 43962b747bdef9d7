"""The command line: parses, calls, prints on rank 0, returns the exit status.

Exit status: 0; 1 where a value was wrong, a proof is missing, a check or the run failed; 2 for bad
usage or set-up, or where the output cannot be written; 3 where ``doctor --strict`` warns.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import click

import rdmakit
from rdmakit.bench.options import DEFAULT_BUDGET, DEVICES, LAYERS, ON_GPU, ON_HOST, Options
from rdmakit.config import Config
from rdmakit.datatypes import ITEMSIZES, ReduceOp
from rdmakit.errors import (
    InvalidArgument,
    OutputError,
    RdmaKitError,
    SetupError,
    UnsupportedError,
)
from rdmakit.process.launcher import launcher_of, report_once
from rdmakit.report.output import guarded_stdout

__all__ = ["main"]

_BENCH_TIMEOUT = 30.0


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(rdmakit.__version__, prog_name="rdmakit")
def cli() -> None:
    """Multi-node RDMA communication for Python: measure and check each layer."""


@cli.command()
@click.option("-b", "begin", default="8", show_default=True, help="Smallest size (8, 64K, 1M).")
@click.option("-e", "end", help="Largest size. [default: 64M; 1G with GPU arrays]")
@click.option("-f", "factor", default=2, show_default=True, help="Factor between sizes.")
@click.option(
    "-n",
    "iterations",
    default=20,
    show_default=True,
    help="Timed samples; calls under 60 us are timed several in a sample.",
)
@click.option("-w", "warmup", default=5, show_default=True, help="Calls before the timed ones.")
@click.option("-c", "check", default=1, show_default=True, help="Check values; 0: do not.")
@click.option(
    "-o",
    "op",
    default="sum",
    show_default=True,
    help=f"Operation: {', '.join(o.value for o in ReduceOp)}.",
)
@click.option(
    "-d", "dtype", default="float32", show_default=True, help=f"Type: {', '.join(ITEMSIZES)}."
)
@click.option(
    "--layer",
    "layers",
    multiple=True,
    metavar="NAME",
    help=f"Only this layer (may be repeated): {', '.join(LAYERS)}.",
)
@click.option(
    "--algorithm",
    "algorithms",
    multiple=True,
    metavar="NAME",
    help=(
        f"Only this way (may be repeated). Host arrays: {', '.join(ON_HOST)}; GPU arrays: "
        f"{', '.join(ON_GPU)}. Default: all that apply."
    ),
)
@click.option(
    "--device",
    default="auto",
    show_default=True,
    metavar="KIND",
    help=f"Where the arrays are: {', '.join(DEVICES)}; auto: on the GPU if all ranks can use one.",
)
@click.option(
    "--gpu-map",
    metavar="LIST",
    help=(
        "GPU of each rank of a host, by number or UUID: 0,1,2,3; begins anew at its end. "
        "Default: the visible GPUs in turn."
    ),
)
@click.option(
    "--gpu-direct",
    metavar="WAY",
    help="Messages of GPU memory by UCX on device pointers: on, off (through pinned host memory), "
    "auto. On asks for a proof as --require gdr. [default: auto, or RDMAKIT_GPU_DIRECT]",
)
@click.option(
    "--require",
    metavar="WHAT",
    help="Fail with status 1 unless it is proven that bytes go between nodes by rdma, or by gdr: "
    "RDMA that reads and writes GPU memory.",
)
@click.option(
    "--ranks-per-node",
    type=int,
    metavar="K",
    help="Cut each host into virtual nodes of K ranks, isolated from each other.",
)
@click.option(
    "--time-budget",
    default=DEFAULT_BUDGET,
    show_default=True,
    metavar="SECONDS",
    help="Time for all rows together.",
)
@click.option(
    "--timeout",
    type=float,
    metavar="SECONDS",
    help=f"Time one wait may take. [default: {_BENCH_TIMEOUT:g}, or RDMAKIT_TIMEOUT]",
)
@click.option("--output", metavar="FILE", help="Also write FILE: .json, .jsonl or .csv by name.")
@click.option("--quiet", is_flag=True, help="Print the summary only.")
def bench(
    ranks_per_node: int | None, timeout: float | None, gpu_direct: str | None, **given: Any
) -> int:
    """Measure memory, intra-node, inter-node and the whole all-reduce, each alone.

    Start it with mpirun: mpirun -n 16 rdmakit bench
    """
    options = Options.of(**given)
    config = Config.from_env(timeout=_BENCH_TIMEOUT, check=True)
    if ranks_per_node is not None:
        config = config.chosen(ranks_per_node=ranks_per_node)
    if timeout is not None:
        config = config.chosen(timeout=timeout)
    if gpu_direct is not None:
        config = config.chosen(gpu_direct=gpu_direct.lower())
    from rdmakit.bench.command import run_bench

    return run_bench(options, config)


@cli.command()
@click.option(
    "--from",
    "source",
    metavar="PATH",
    help="Not this machine: a directory of --collect, "
    "or of outputs of nvidia-smi topo, ibstat and others; or one such file.",
)
@click.option("--collect", metavar="DIR", help="Write what there is to know into DIR for --from.")
@click.option("--graph", metavar="FILE.svg", help="Write a picture of the nodes.")
@click.option(
    "--explain",
    nargs=2,
    metavar="A B",
    help="Tell which way bytes take between two devices: GPU0 GPU5, GPU0 mlx5_0.",
)
@click.option("--json", is_flag=True, help="Print JSON (schema rdmakit.topo/1).")
@click.option(
    "--nics",
    default="",
    metavar="LIST",
    help="Compute ports, where the choice made is wrong: mlx5_0,mlx5_1:1,mlx5_[2-5].",
)
@click.option(
    "--ranks-per-node",
    type=int,
    metavar="N",
    help="Propose a placement for N ranks on each node. [default: one for each GPU]",
)
def topo(
    nics: str,
    explain: tuple[str, str] | None,
    ranks_per_node: int | None,
    json: bool,
    **paths: str | None,
) -> int:
    """Show GPUs, NICs, CPUs and the ways between them; propose a place for each rank.

    Alone for this machine, under mpirun for all nodes of the job, with what differs between
    them.
    """
    from pathlib import Path

    from rdmakit.survey.topo import TopoOptions, run_topo

    places = {name: Path(path) for name, path in paths.items() if path}
    options = TopoOptions(
        **places,
        explain=explain or None,
        json=json,
        nics=tuple(name for name in nics.split(",") if name),
        ranks_per_node=ranks_per_node,
    )
    return run_topo(options, Config.from_env(timeout=_BENCH_TIMEOUT))


@cli.command()
@click.argument("file", required=False)
@click.option("-n", "ranks", type=int, metavar="N", help="Show what mpirun -n N would do.")
@click.option(
    "--dialect",
    metavar="NAME",
    help="Read it as openmpi, hydra, intelmpi, mvapich, deepspeed, slurm or plain. "
    "[default: by its lines]",
)
@click.option("--launcher", metavar="NAME", help="For -n: openmpi, hydra or slurm.")
@click.option(
    "--map-by",
    default="slot",
    show_default=True,
    metavar="HOW",
    help="For -n with Open MPI: slot, node or ppr:N:node.",
)
@click.option("--cores", type=int, metavar="N", help="Cores of each host, for hosts without slots.")
@click.option(
    "--to", metavar="NAME", help="Print it for openmpi, hydra, intelmpi, deepspeed or slurm."
)
@click.option("--slots", type=int, metavar="N", help="For --to: slots of hosts without.")
@click.option("--json", is_flag=True, help="Print JSON (schema rdmakit.hostfile/1).")
def hostfile(**given: Any) -> int:
    """Read, check or convert a hostfile (- for standard input; none: the Slurm job's nodes).

    Exit status 1 where it has errors, or where mpirun would refuse it.
    """
    from rdmakit.survey.hostfile import HostfileOptions, run_hostfile

    return run_hostfile(HostfileOptions(**given))


@cli.command()
@click.option("--only", multiple=True, metavar="ID", help="Only this check (host.memlock, host).")
@click.option("--skip", multiple=True, metavar="ID", help="Not this check; both may be repeated.")
@click.option("--list", is_flag=True, help="Show the checks and why they matter; run none.")
@click.option("--json", is_flag=True, help="Print JSON (schema rdmakit.doctor/1).")
@click.option("--junit", default="", metavar="FILE", help="Also write JUnit XML.")
@click.option(
    "--prometheus",
    default="",
    metavar="FILE",
    help="Also write metrics for node_exporter's textfile collector (FILE.prom).",
)
@click.option("--strict", is_flag=True, help="Exit status 3 where there are warnings only.")
@click.option("--profile", default="", metavar="FILE", help="Values this site expects (TOML).")
@click.option(
    "--from",
    "source",
    default="",
    metavar="DIR",
    help="Judge collected files (rdmakit topo --collect) in place of this machine.",
)
@click.option("--path", is_flag=True, help="Prove which way bytes take between nodes (mpirun).")
@click.option("-v", "--verbose", is_flag=True, help="Show the good ones too.")
def doctor(only: tuple[str, ...], skip: tuple[str, ...], **given: Any) -> int:
    """Check machine, drivers, network and settings; say what is wrong and the cure.

    Alone for this machine, under mpirun for all nodes of the job; --list names every check.

    Exit status: 0; 1 where a check failed, a node did not report or nothing could be checked on
    it; 2 for bad usage, where the output cannot be written or MPI does not come up; 3 with
    --strict where one warns.
    """
    from rdmakit.survey.doctor import DoctorOptions, run_doctor

    options = DoctorOptions(only=only, skip=skip, **given)
    return run_doctor(options, Config.from_env(timeout=_BENCH_TIMEOUT))


def main(args: list[str] | None = None) -> None:
    """Entry point of ``rdmakit`` and ``python -m rdmakit``. Does not return."""
    launcher = launcher_of(os.environ)
    if sys.stdout is None:  # closed by who started us (>&-): the exit status still counts
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - until the end
    # An interrupt becomes an exception also where the shell started us with it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        # Only the first rank may print what click prints.
        if launcher.rank and _only_prints(sys.argv[1:] if args is None else args):
            sys.exit(0)
        with guarded_stdout():
            status = cli.main(args, prog_name="rdmakit", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as exc:
        report_once(launcher, exc.format_message(), 2)
    except click.UsageError as exc:
        usage = f"{exc.ctx.get_usage()}\n" if exc.ctx else ""
        report_once(launcher, f"{usage}Error: {exc.format_message()}", 2)
    except (InvalidArgument, UnsupportedError) as exc:
        report_once(launcher, str(exc), 2)
    except SetupError as exc:
        # With MPI up, set-up errors are raised on every rank: rank 0 speaks for all.
        lone = launcher.kind == "openmpi" and "mpi4py.MPI" not in sys.modules
        report_once(launcher, str(exc), 2, alone=lone)
    except OutputError as exc:
        if exc.reader_left:  # rdmakit ... | head: no one is there to be told
            sys.exit(2)
        report_once(launcher, str(exc), 2, alone=True)
    except RdmaKitError as exc:
        report_once(launcher, str(exc), 1, alone=True)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    sys.exit(status or 0)


def _only_prints(args: list[str]) -> bool:
    return bool({"-h", "--help", "--version"} & set(args))
