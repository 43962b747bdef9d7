"""``rdmakit bench``: starts the communicator, runs the cases, shows and keeps the rows."""

from __future__ import annotations

import sys
import time
import traceback
from dataclasses import replace

from rdmakit.bench.device_cases import choose_device, device_facts, warm_up
from rdmakit.bench.environment import environment
from rdmakit.bench.options import Options
from rdmakit.bench.runner import run
from rdmakit.bench.summary import summarize
from rdmakit.communicator import Communicator
from rdmakit.config import Config
from rdmakit.errors import InvalidArgument
from rdmakit.process.phase import current
from rdmakit.process.watchdog import abort_on_exception, end_job, speak_first
from rdmakit.report.files import ResultFile
from rdmakit.report.schema import Result, Row
from rdmakit.report.table import LiveTable
from rdmakit.startup import raise_together

__all__ = ["run_bench"]

_FIRST_SPEAKS = 3.0
"""Seconds that an interrupted rank leaves rank 0 to print and write what there is."""


def run_bench(options: Options, config: Config) -> int:
    """Run and return the exit status. Collective over COMM_WORLD."""
    comm = Communicator(config=config)
    abort_on_exception(comm.rank, comm.host, comm.bootstrap.abort)
    first = comm.rank == 0
    folder = options.output.absolute().parent if options.output else None
    missing = first and folder is not None and not folder.is_dir()
    raise_together(
        comm.bootstrap, f"--output: no folder {folder}" if missing else "", InvalidArgument
    )
    options = replace(options, device=choose_device(comm, options.device))
    rows: list[Row] = []
    facts = environment(comm)
    if options.device == "gpu":
        warm_up(comm, options)
        facts["gpu"] = device_facts(comm)
    table = LiveTable(quiet=options.quiet) if first else None
    file = ResultFile(options.output) if first and options.output else None
    if table is not None and not options.quiet:
        for line in _heading(comm, facts):
            table.text(line)

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
        run(comm, options, on_row, table.working if table is not None else lambda _: None)
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


def _heading(comm: Communicator, facts: dict[str, object]) -> list[str]:
    mpi, ucx, cpu = facts["mpi"], facts["ucx"], facts["cpu"]
    assert isinstance(mpi, dict)
    assert isinstance(ucx, dict)
    assert isinstance(cpu, dict)
    hosts = facts["hosts"]
    assert isinstance(hosts, dict)
    lines = [
        f"rdmakit {facts['rdmakit']} bench: {comm.size} ranks as {comm.layout.describe()} "
        f"({'virtual nodes' if comm.virtual else 'nodes x ranks'}) on " + ", ".join(hosts),
        f"MPI: {mpi['library']}; CPU: {cpu['model']}, {cpu['usable']} usable cores"
        + (f" for {max(hosts.values())} ranks" if max(hosts.values()) > cpu["usable"] else ""),
    ]
    if "version" in ucx:
        lines.append(f"UCX: {ucx['reason']}")
        lines += [f"UCX: {warning}" for warning in ucx["warnings"]]
    gpu = facts.get("gpu")
    if isinstance(gpu, dict):
        lines.append(f"GPU: {gpu['name']} at {gpu['pci']}, MPS {'on' if gpu['mps'] else 'off'}")
    lines += [f"note: {note}" for note in comm.notes]
    lines.append(
        "GB = 1e9 bytes; times are the slowest rank's; wire: sent to other nodes by the "
        "busiest rank"
    )
    return lines
