"""``rdmakit doctor``: checks this machine, all nodes of a job, or collected directories."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rdmakit.config import Config
from rdmakit.discovery.collect import read_machines
from rdmakit.doctor.catalog import CHECKS, select
from rdmakit.doctor.messages import NodeReport, Order
from rdmakit.doctor.path_findings import PATH
from rdmakit.doctor.profile import load_profile
from rdmakit.doctor.supervise import NODE_CHECK, supervise
from rdmakit.doctor.worker import FACTS
from rdmakit.errors import InvalidArgument
from rdmakit.pretty import pretty_json
from rdmakit.process.launcher import Launcher, launcher_of
from rdmakit.proof import PathReport
from rdmakit.report.doctor_text import Listed, print_checks
from rdmakit.survey.doctor_options import DoctorOptions, show
from rdmakit.survey.doctor_steps import JOB_STEPS, path_step
from rdmakit.survey.run import Run

__all__ = ["DoctorOptions", "run_doctor"]


@dataclass(frozen=True)
class _Listed:
    id: str
    title: str
    why: str
    needs: tuple[str, ...] = ()


_ALWAYS = (
    _Listed(
        NODE_CHECK,
        "Nodes that report (always on)",
        "Where a node cannot be checked, or a rank of it hangs or dies, a job would too.",
    ),
    _Listed(
        FACTS,
        "What a node tells of itself (always on)",
        "Nodes are compared by it; it speaks only where that cannot be found out.",
    ),
)
"""Not to be chosen, but their identifiers stand in outputs."""


def run_doctor(options: DoctorOptions, config: Config) -> int:
    """Run and return the exit status. Blocking; under a launcher every rank calls it.

    Raises:
        InvalidArgument: an identifier fits no check, or a file cannot be read or written.
        SetupError: MPI does not come up.
    """
    launcher = launcher_of(os.environ)
    paths: list[PathReport] = []
    with_path = (*JOB_STEPS, path_step(config, paths))
    between = [one for step in with_path for one in step.checks]
    known: list[Listed] = [*CHECKS, *between]
    if options.list:
        known += _ALWAYS
    only = (*options.only, PATH.id) if options.path and options.only else options.only
    ids = select(only, options.skip, [one.id for one in known])
    wanted = with_path if options.path else JOB_STEPS
    run = Run(
        options,
        CHECKS,
        [check.id for check in CHECKS if check.id in ids],
        [step for step in wanted if any(one.id in ids for one in step.checks)],
        between=frozenset(one.id for one in between if one.id in ids),
        paths=paths,
    )
    if not (run.selected or run.steps or options.list):
        raise InvalidArgument("of the checks that --only names none runs without --path")
    if options.profile:
        load_profile(Path(options.profile))  # a wrong one is told before anything is started
    alone = launcher.size == 1 or options.list or options.source
    if alone and launcher.rank:
        return 0
    if options.list:
        _list([one for one in known if one.id in ids], as_json=options.json)
        return 0
    if options.source:
        return _files(run, Path(options.source))
    if launcher.size > 1:
        from rdmakit.survey.doctor_job import run_job  # MPI, which one machine does not need

        return run_job(run, config, launcher)
    return _alone(run, launcher)


def _list(shown: Sequence[Listed], *, as_json: bool) -> None:
    if not as_json:
        print_checks(shown)
        return
    listed = [
        {"id": one.id, "title": one.title, "why": one.why, "needs": list(one.needs)}
        for one in shown
    ]
    sys.stdout.write(pretty_json(listed))


def _alone(run: Run, launcher: Launcher) -> int:
    if run.options.path:
        raise InvalidArgument("--path needs two ranks at least: mpirun -n 2 rdmakit doctor --path")
    if not run.selected:
        raise InvalidArgument("the checks that --only names compare nodes: start it with mpirun")
    report = NodeReport(host=os.uname().nodename, ranks=[launcher.rank])
    _supervise(run, run.order, report)
    return show(run.options, [report], [], run.whys, f"this machine, {report.host}")


def _files(run: Run, source: Path) -> int:
    nodes = []
    for found in read_machines(source):
        report = NodeReport(host=found.machine.host)
        order = msgspec.structs.replace(run.order, source=found.path)
        _supervise(run, order, report)
        nodes.append(report)
    job = run.compared(nodes) if len(nodes) > 1 else []
    return show(run.options, nodes, job, run.whys, f"files of {len(nodes)} machine(s), {source}")


def _supervise(run: Run, order: Order, report: NodeReport) -> None:
    supervise(order, run.seconds, report, limits=run.limits, command=run.command)
