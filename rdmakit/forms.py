"""Calls in blocks, reduces and scans: the table of them, and what is agreed on.

Each of these calls is a row of :data:`CALLS`. :mod:`rdmakit.prepare` makes of its arguments the
buffers and the :class:`~rdmakit.plan.shape.Form` that plans are made of. Where MPI gives the counts
to the root or to each rank alone, the form is known after the ranks have told them each other.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rdmakit.arguments import fortran
from rdmakit.buffer import Buffer
from rdmakit.datatypes import ReduceOp
from rdmakit.plan.shape import Form, Kind
from rdmakit.reduction import REDUCES

__all__ = ["CALLS", "ROOTED", "Calling", "Prepared", "Told", "described"]

ROOTED = (Kind.REDUCE, Kind.GATHER, Kind.SCATTER)
_TEXT_COUNTS = 8
"""Counts that are written out in a comparison; more are told by a checksum."""


@dataclass(frozen=True)
class Calling:
    """One of MPI's calls."""

    name: str
    kind: Kind
    vector: bool = False
    """Whether blocks have counts of their own."""


CALLS = {
    row.name: row
    for row in (
        Calling("Reduce", Kind.REDUCE),
        Calling("Gather", Kind.GATHER),
        Calling("Gatherv", Kind.GATHER, vector=True),
        Calling("Scatter", Kind.SCATTER),
        Calling("Scatterv", Kind.SCATTER, vector=True),
        Calling("Allgatherv", Kind.ALLGATHER, vector=True),
        Calling("Reduce_scatter_block", Kind.REDUCE_SCATTER),
        Calling("Reduce_scatter", Kind.REDUCE_SCATTER, vector=True),
        Calling("Alltoall", Kind.ALLTOALL),
        Calling("Alltoallv", Kind.ALLTOALL, vector=True),
        Calling("Scan", Kind.SCAN),
        Calling("Exscan", Kind.EXSCAN),
    )
}

Told = Sequence[tuple[int, ...]]
"""What each rank has told."""


@dataclass(frozen=True)
class Prepared:
    """A call, checked by this rank alone."""

    calling: Calling
    send: Buffer
    recv: Buffer
    form: Form | None
    """None: it follows from what all ranks tell."""
    tells: tuple[int, ...] = ()
    """What this rank tells the others."""
    settle: Callable[[Told], Form] | None = None
    """Makes the form of what all have told; raises ValueError, on all ranks, if it does not fit."""

    @property
    def facts(self) -> bytes:
        """What this rank tells, as bytes."""
        return np.array(self.tells, np.int64).tobytes()

    def settled(self, facts: Sequence[bytes]) -> Form:
        """Return the form; raises ValueError on all ranks where counts do not fit each other."""
        assert self.settle is not None
        return self.settle([tuple(np.frombuffer(fact, np.int64).tolist()) for fact in facts])


def described(ready: Prepared, op: ReduceOp, algorithm: str, root: int) -> str:
    """Return what must be equal on all ranks."""
    kind, form = ready.calling.kind, ready.form
    words = [kind.value]
    if form is not None:
        words.append(_counts(form) if form.counts else f"count={form.count}")
        words += ["in place"] if form.in_place else []
    words.append(f"dtype={ready.recv.dtype}")
    words += [f"op={op.value}"] if kind in REDUCES else []
    words.append(f"algorithm={algorithm}")
    words += [f"root={root}"] if kind in ROOTED else []
    words += ["order=F"] if fortran(ready.send, ready.recv) else []
    return " ".join(words)


def _counts(form: Form) -> str:
    text = ",".join(map(str, form.counts))
    if len(form.counts) > _TEXT_COUNTS:
        text = f"{len(form.counts)} of checksum {zlib.crc32(text.encode()):08x}"
    return f"counts={text}"
