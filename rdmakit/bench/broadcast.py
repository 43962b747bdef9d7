"""A broadcast over the number of ranks: a chain of many pieces beside one sender for all.

The chain's (``ring``) time hardly grows with the ranks, since all hand on pieces at once; that of
one sender (``flat``) grows with each, since all bytes leave through the root.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from rdmakit.bench import values
from rdmakit.bench.collective import lanes
from rdmakit.bench.session import Case, Session, nothing
from rdmakit.communicator import Communicator
from rdmakit.errors import UnsupportedError
from rdmakit.operation import Operation
from rdmakit.plan.shape import Kind
from rdmakit.report.schema import Row

__all__ = ["DEFAULT", "broadcast_cases", "rank_counts"]

LAYER = "broadcast"
_CURVES = ("ring", "flat")
DEFAULT = 16 << 20
"""Bytes where no largest size was asked for: 16 pieces, so a chain of some ranks is filled."""
_EACH_UP_TO = 4
"""Ranks up to which each number has its rows; then powers of two, and all."""


def rank_counts(size: int) -> list[int]:
    """Return how many of ``size`` ranks the rows are made on, in ascending order. Pure."""
    counts = set(range(2, min(size, _EACH_UP_TO) + 1))
    power = 2 * _EACH_UP_TO
    while power < size:
        counts.add(power)
        power *= 2
    return sorted(counts | {size}) if size > 1 else []


def broadcast_cases(session: Session) -> Iterator[Case]:
    """Yield the ways one beside the other, for more and more of the job's first ranks."""
    if session.gpus is not None:
        yield nothing(LAYER, LAYER, "GPU arrays have one way; the two are of host arrays")
        return
    comm, chosen = session.comm, session.options.algorithms
    counts = rank_counts(comm.size)
    if not counts:
        yield nothing(LAYER, LAYER, "the job has one rank")
        return
    beside = ("auto", "mpi") if "mpi" in comm.algorithms(Kind.BROADCAST) else ("auto",)
    size = session.options.one_size(DEFAULT)
    # The curves first: what is left out where time is short is beside them.
    for names in (chosen,) if chosen else (_CURVES, beside):
        for count in counts:
            for name in names:
                run = partial(_run, ranks=count)
                yield Case(LAYER, f"to {count} ranks", name, size, run, 1.0)


class _First:
    """The job's first ranks; ``comm`` is None on the others."""

    def __init__(self, session: Session, ranks: int) -> None:
        """Make their communicator. Collective in the job, blocking."""
        self._whole = ranks == session.comm.size
        self.comm: Communicator | None = session.comm
        if not self._whole:
            self.comm = session.comm.Split(0 if session.comm.rank < ranks else None)

    def close(self) -> None:
        """Close it. Collective in these ranks, blocking."""
        if self.comm is not None and not self._whole:
            self.comm.close()


def _run(session: Session, case: Case, ranks: int) -> Row:
    """Measure one way over the first ``ranks`` ranks and check each. Collective in the job."""
    part: Communicator | None = session.once(case.name, lambda: _First(session, ranks)).comm
    array, operation, problem = _bound(session, case, part)
    problem = session.agreed(problem)
    if problem:
        return session.row(case, skipped=problem, ranks=ranks)
    call: Callable[[], object] = operation.call if operation is not None else _idle
    samples = session.timed(call, apart=True)
    wrong: int | None = None
    if session.options.check:
        if array is not None and session.comm.rank:
            array.view(np.uint8).fill(values.SPOILED)
        session.group.barrier()
        call()
        mine = 0
        if array is not None:
            mine = values.count_wrong(array, values.block(0, session.dtype, session.op))
        wrong = session.wrong(mine)
    own = 0.0
    transport = note = ""
    if part is not None and operation is not None:
        own = -1.0 if operation.sent_bytes is None else float(operation.sent_bytes)
        transport, note = _told(session, part, operation, case)
    told = session.group.share([own, transport, note])  # rank 0 takes part in each
    least, most = min(told)[0], max(told)[0]
    return session.row(
        case,
        samples=samples,
        ranks=ranks,
        sent=int(most) if least >= 0 and most > 0 else None,
        wrong=wrong,
        transport=told[0][1],
        note=told[0][2],
    )


def _bound(
    session: Session, case: Case, part: Communicator | None
) -> tuple[npt.NDArray[Any] | None, Operation | None, str]:
    """Return this rank's array and its operation, or why there is none. Local."""
    if part is None:
        return None, None, ""
    try:
        array = session.array(case.nbytes // session.dtype.itemsize)
        if part.rank == 0:
            values.fill(array, 0, session.op)
        return array, part.bind(Kind.BROADCAST, array, array, algorithm=case.algorithm), ""
    except MemoryError as exc:
        return None, None, f"no room: {exc}"
    except UnsupportedError as exc:
        return None, None, str(exc)


def _told(
    session: Session, part: Communicator, operation: Operation, case: Case
) -> tuple[str, str]:
    """Return what carries the bytes, and what the reader should know. Local."""
    several = len(part.layout.nodes) > 1
    if operation.algorithm == "mpi":
        beside = "not confined to the virtual nodes" if session.comm.virtual and several else ""
        return "mpi", beside
    inside = part.window.kind if part.window else ""
    transport = "+".join(filter(None, (inside, lanes(session) if several else "")))
    return transport, operation.algorithm if case.algorithm == "auto" else ""


def _idle() -> None:
    """What ranks do that take no part."""
