"""Runs the cases one after the other and hands each row to whoever shows or keeps it."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import groupby

from rdmakit.bench.budget import Budget, planned
from rdmakit.bench.cases import all_cases
from rdmakit.bench.gpus import GpuSide
from rdmakit.bench.measure import Group
from rdmakit.bench.options import Options
from rdmakit.bench.path import RunPath
from rdmakit.bench.session import Case, Session
from rdmakit.communicator import Communicator
from rdmakit.process.phase import current
from rdmakit.report.schema import Row

__all__ = ["run"]

_SETTLE = 0.3
"""Seconds before the first row: what was started beside the ranks takes their cores at first."""
_SHARES = {"memory": 0.07, "intra": 0.25, "inter": 0.28, "allreduce": 0.32, "broadcast": 0.08}
"""Of the time budget; what a layer leaves goes to those after it."""


def run(
    comm: Communicator,
    options: Options,
    on_row: Callable[[Row], None],
    on_case: Callable[[str], None] = lambda _: None,
    gpus: GpuSide | None = None,
    path: RunPath | None = None,
) -> None:
    """Run the benchmark. Collective, blocking; ``on_row`` is called on every rank.

    Args:
        comm: the communicator.
        options: placed on a device.
        on_row: takes each row.
        on_case: is told what comes next.
        gpus: the job's GPUs, where the device is the GPU.
        path: what was proven of the path between nodes.

    Raises:
        TransportError: a transfer failed; rows before it were handed over.
    """
    group = Group(comm.bootstrap)
    session = Session(comm, options, Budget(0.0, ()), group, gpus, path)
    by_layer = {name: list(cases) for name, cases in groupby(all_cases(session), _layer)}
    time.sleep(_SETTLE)
    start, seconds = time.monotonic(), options.time_budget
    for done, (layer, cases) in enumerate(by_layer.items()):
        coming = sum(_SHARES[name] for name in list(by_layer)[done:])
        left = max(0.0, seconds - (time.monotonic() - start))
        rows = [
            row
            for _, same in groupby(cases, lambda case: case.key)
            for row in planned([case.nbytes for case in same])
        ]
        session.budget = Budget(left * _SHARES[layer] / coming, rows)
        for case in cases:
            session.budget.begin()
            row = _one(session, case, on_case)
            session.budget.end(made=not row.skipped)
            on_row(row)
        session.release()


def _one(session: Session, case: Case, on_case: Callable[[str], None]) -> Row:
    label = " ".join(filter(None, (case.layer, case.name, case.algorithm, str(case.nbytes))))
    on_case(label)
    # The limit is of the blocking MPI calls between and inside the timed ones.
    limit = session.comm.config.timeout + session.options.time_budget
    before = current.enter(f"bench {label}", timeout=limit)
    try:
        reason = session.why_skip(case) if case.nbytes else ""
        return session.row(case, skipped=reason) if reason else case.run(session, case)
    finally:
        current.restore(before)


def _layer(case: Case) -> str:
    return case.layer
