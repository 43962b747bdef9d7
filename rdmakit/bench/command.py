"""``rdmakit bench``: starts the communicator, runs the cases, shows and keeps the rows."""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

import msgspec

from rdmakit.bench.environment import environment, host_key
from rdmakit.bench.gpus import Doors, GpuSide, find_gpus, warm_up
from rdmakit.bench.options import Options
from rdmakit.bench.path import prove_run
from rdmakit.bench.runner import run
from rdmakit.bench.shown import Shown
from rdmakit.bootstrap import MpiBootstrap
from rdmakit.communicator import Communicator
from rdmakit.config import Config
from rdmakit.devices import Choice, choose_device
from rdmakit.errors import InvalidArgument, OutputError
from rdmakit.process.phase import current
from rdmakit.process.watchdog import abort_on_exception, end_job, install, speak_first
from rdmakit.startup import raise_together

__all__ = ["run_bench"]

_FIRST_SPEAKS = 3.0
"""Seconds that an interrupted rank leaves rank 0 to print and write what there is."""

_IMPORTS = 60.0
"""Seconds more than one wait that CuPy may take to be imported, from a cold network folder."""


def _placed(options: Options, config: Config, world: MpiBootstrap) -> tuple[Options, Choice]:
    """Return the options for the device that all ranks take. Collective, blocking.

    Before the communicator is made: its UCX must find the rank's GPU chosen.
    """
    with current.during("choice of the device", timeout=config.timeout + _IMPORTS):
        choice = choose_device(world, options.device, options.gpu_map, host_key(config))
    return options.placed(choice.device), choice


def run_bench(options: Options, config: Config) -> int:
    """Run and return the exit status. Collective over COMM_WORLD."""
    world = MpiBootstrap(duplicate=False)
    install(world.rank, world.size, world.host, world.abort, config)
    abort_on_exception(world.rank, world.host, world.abort)
    options, choice = _placed(options, config, world)
    comm = Communicator(config=config)
    _check_folder(comm, options)
    gpus = _gpus(comm, options)
    facts = environment(comm)  # after it: the GPUs' notes are known
    facts |= {"device": options.device, "device_reason": choice.reason}
    path = prove_run(comm, options, gpus.doors.cuda if gpus else None)
    facts["path"] = None if path.report is None else msgspec.to_builtins(path.report)
    facts["gpus"] = [msgspec.to_builtins(gpu) for gpu in gpus.ranks] if gpus else []
    shown = Shown(options, facts, first=comm.rank == 0, gpu=gpus is not None)
    with _ending_the_job(comm, shown):
        shown.lines([] if options.quiet else _heading(comm, facts, gpus))
        if path.problem:
            shown.refuse(path.problem, path.lines(always=True))
        else:
            shown.lines([] if options.quiet else path.lines(always=bool(options.require)))
            run(comm, options, shown.row, shown.working, gpus, path)
            shown.close()
    comm.close()
    return 1 if path.problem or any(row.wrong for row in shown.rows) else 0


def _check_folder(comm: Communicator, options: Options) -> None:
    """Raise on all ranks where rank 0 has no folder for the result file. Collective."""
    folder = options.output.absolute().parent if options.output else None
    missing = comm.rank == 0 and folder is not None and not folder.is_dir()
    raise_together(
        comm.bootstrap, f"--output: no folder {folder}" if missing else "", InvalidArgument
    )


def _gpus(comm: Communicator, options: Options) -> GpuSide | None:
    """Return the job's GPUs, warmed up, in a run with GPU arrays. Collective, blocking."""
    if options.device != "gpu":
        return None
    doors = Doors()
    warm_up(comm, options.dtype, options.op, doors)
    return find_gpus(comm, doors)


@contextlib.contextmanager
def _ending_the_job(comm: Communicator, shown: Shown) -> Iterator[None]:
    """End the job where this rank fails: the others are elsewhere in the run, and would wait."""
    try:
        yield
    except KeyboardInterrupt:
        _complain(shown.rescue())
        if comm.rank:
            time.sleep(_FIRST_SPEAKS)
        end_job(comm.bootstrap.abort, 130)
    except BaseException as exc:
        where = current.describe(comm.rank, comm.host)
        text = f"{where}: {type(exc).__name__}: {exc}"
        if isinstance(exc, OutputError):
            text = str(exc)  # no matter which rank, or in which call
        elif not isinstance(exc, RuntimeError | OSError) and not type(exc).__module__.startswith(
            "rdmakit"
        ):
            text += "\n" + traceback.format_exc()
        _complain(list(dict.fromkeys([*shown.rescue(), text])))
        speak_first(exc)
        end_job(comm.bootstrap.abort, 2 if isinstance(exc, OutputError) else 1)


def _complain(problems: list[str]) -> None:
    for problem in problems:
        print(f"rdmakit bench: {problem}", file=sys.stderr, flush=True)


def _heading(comm: Communicator, facts: dict[str, Any], gpus: GpuSide | None) -> list[str]:
    mpi, ucx, cpu = facts["mpi"], facts["ucx"], facts["cpu"]
    hosts = facts["hosts"]
    lines = [
        f"rdmakit {facts['rdmakit']} bench: {comm.size} ranks as {comm.layout.describe()} "
        f"({'virtual nodes' if comm.virtual else 'nodes x ranks'}) on " + ", ".join(hosts),
        f"MPI: {mpi['library']}; CPU: {cpu['model']}, {cpu['usable']} usable cores"
        + (f" for {max(hosts.values())} ranks" if max(hosts.values()) > cpu["usable"] else ""),
    ]
    if "version" in ucx:
        lines.append(f"UCX: {ucx['reason']}")
        lines += [f"UCX: {warning}" for warning in ucx["warnings"]]
    lines += [f"GPU: {line}" for line in (gpus.describe() if gpus else ())]
    if facts["device_reason"] and "no NVIDIA driver" not in facts["device_reason"]:
        lines.append(f"host arrays, since no GPU can be used: {facts['device_reason']}")
    lines += [f"note: {note}" for note in comm.notes]
    lines.append(
        "GB = 1e9 bytes; times are the slowest rank's; wire: sent to other nodes by the "
        "busiest rank"
    )
    return lines
