"""``rdmakit bench``: starts the communicator, runs the cases, shows and keeps the rows."""

from __future__ import annotations

import sys
import time
import traceback
from typing import Any

import msgspec

from rdmakit.bench.environment import environment, host_key
from rdmakit.bench.gpus import Doors, GpuSide, find_gpus, warm_up
from rdmakit.bench.options import Options
from rdmakit.bench.path import prove_run
from rdmakit.bench.runner import run
from rdmakit.bench.summary import summarize
from rdmakit.bootstrap import MpiBootstrap
from rdmakit.communicator import Communicator
from rdmakit.config import Config
from rdmakit.devices import Choice, choose_device
from rdmakit.errors import InvalidArgument
from rdmakit.process.phase import current
from rdmakit.process.watchdog import abort_on_exception, end_job, install, speak_first
from rdmakit.report.files import ResultFile
from rdmakit.report.schema import Result, Row
from rdmakit.report.table import LiveTable
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
    first = comm.rank == 0
    folder = options.output.absolute().parent if options.output else None
    missing = first and folder is not None and not folder.is_dir()
    raise_together(
        comm.bootstrap, f"--output: no folder {folder}" if missing else "", InvalidArgument
    )
    rows: list[Row] = []
    gpus: GpuSide | None = None
    if options.device == "gpu":
        doors = Doors()
        warm_up(comm, options.dtype, options.op, doors)
        gpus = find_gpus(comm, doors)
    facts = environment(comm)  # after it: the GPUs' notes are known
    facts |= {"device": options.device, "device_reason": choice.reason}
    path = prove_run(comm, options, gpus.doors.cuda if gpus else None)
    facts["path"] = None if path.report is None else msgspec.to_builtins(path.report)
    facts["gpus"] = [msgspec.to_builtins(gpu) for gpu in gpus.ranks] if gpus else []
    table = LiveTable(quiet=options.quiet, gpu=gpus is not None) if first else None
    file = ResultFile(options.output) if first and options.output else None
    if table is not None and not options.quiet:
        for line in _heading(comm, facts, gpus):
            table.text(line)
        for line in [] if path.problem else path.lines(always=bool(options.require)):
            table.text(line)
    if path.problem:
        if table is not None:
            for line in path.lines(always=True):
                table.text(line)
        if file is not None:
            file.update(Result(environment=facts, rows=[], summary=[path.problem]), final=True)
        comm.close()
        return 1

    def on_row(row: Row) -> None:
        rows.append(row)
        if table is not None:
            table.row(row)
        if file is not None:
            file.update(Result(environment=facts, rows=rows))

    def close(*, interrupted: bool) -> None:
        if table is None:
            return
        table.stop()
        summary = summarize(rows)
        table.text("")
        table.text("summary" + (" of what was measured until the interrupt" if interrupted else ""))
        for line in summary:
            table.text(f"  {line}")
        if file is not None:
            result = Result(environment=facts, rows=rows, summary=summary, interrupted=interrupted)
            file.update(result, final=True)
            table.text(f"  written: {options.output}")

    try:
        on_case = table.working if table is not None else lambda _: None
        run(comm, options, on_row, on_case, gpus, path)
    except KeyboardInterrupt:
        close(interrupted=True)
        if not first:
            time.sleep(_FIRST_SPEAKS)
        end_job(comm.bootstrap.abort, 130)
    except BaseException as exc:
        # The others are elsewhere in the run: this rank ends the job, and says why.
        close(interrupted=True)
        where = current.describe(comm.rank, comm.host)
        text = f"rdmakit bench: {where}: {type(exc).__name__}: {exc}"
        if not isinstance(exc, RuntimeError | OSError) and not type(exc).__module__.startswith(
            "rdmakit"
        ):
            text += "\n" + traceback.format_exc()
        print(text, file=sys.stderr, flush=True)
        speak_first(exc)
        end_job(comm.bootstrap.abort, 1)
    close(interrupted=False)
    comm.close()
    return 1 if any(row.wrong for row in rows) else 0


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
