"""Runs the cases one after the other and hands each row to whoever shows or keeps it."""

from __future__ import annotations

from collections.abc import Callable

from rdmakit.bench.cases import all_cases
from rdmakit.bench.measure import Budget, Group
from rdmakit.bench.options import Options
from rdmakit.bench.session import Case, Session
from rdmakit.communicator import Communicator
from rdmakit.process.phase import current
from rdmakit.report.schema import Row

__all__ = ["run"]


def run(
    comm: Communicator,
    options: Options,
    on_row: Callable[[Row], None],
    on_case: Callable[[str], None] = lambda _: None,
) -> None:
    """Run the benchmark. Collective, blocking; ``on_row`` is called on every rank.

    Raises:
        TransportError: a transfer failed; rows before it were handed over.
    """
    group = Group(comm.bootstrap)
    session = Session(comm, options, Budget(options.time_budget, 0), group)
    cases = list(all_cases(session))
    session.budget = Budget(options.time_budget, len(cases))
    for case in cases:
        label = " ".join(filter(None, (case.layer, case.name, case.algorithm, str(case.nbytes))))
        on_case(label)
        # The limit is of the blocking MPI calls between and inside the timed ones.
        before = current.enter(f"bench {label}", timeout=comm.config.timeout + _longest(case))
        try:
            reason = session.why_skip(case) if case.nbytes else ""
            row = session.row(case, skipped=reason) if reason else case.run(session, case)
        finally:
            current.restore(before)
        if row.skipped:
            session.budget.rows -= bool(reason)
        on_row(row)


def _longest(case: Case) -> float:
    return 60.0 if case.nbytes > 1 << 24 else 20.0
