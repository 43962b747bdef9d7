"""All-reduces of half precision that round once: float32 goes out, rounded sums come back.

EXACT_SUM and AVG reduce-scatter in float32, each rank rounds its block, and the blocks are
gathered in the arrays' type. For S bytes in N nodes 3(N-1)/N S leave each, beside 4(N-1)/N S of an
all-reduce in float32 that is rounded at its end, which takes fewer rounds and so serves what is
small. Blocks are equal shares of the nodes, whatever the number of their ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from rdmakit.buffer import Buffer, array_at
from rdmakit.datatypes import ReduceOp
from rdmakit.family import Run
from rdmakit.layout import RankLayout
from rdmakit.packing import HostScratch
from rdmakit.plan.pieces import split
from rdmakit.plan.select import SMALL_BYTES
from rdmakit.plan.shape import Form, Kind
from rdmakit.reduction import average, on_the_way

__all__ = ["Rounded", "rounds_between"]

_ALGORITHMS = ("hierarchical", "ring")
"""All-reduces for long vectors."""
_Begin = Callable[[], Run | None]
_AREA = 2
"""Of the scratch; 0 and 1 are of arrays with gaps."""


def rounds_between(
    kind: Kind, algorithm: str, layout: RankLayout, recv: Buffer, op: ReduceOp
) -> bool:
    """Return whether the two halves are worth it; the same on all ranks."""
    return (
        kind is Kind.ALLREDUCE
        and len(layout.nodes) > 1
        and algorithm in _ALGORITHMS
        and recv.count * 4 > SMALL_BYTES * layout.size
        and on_the_way(recv.dtype, op)[0] != recv.dtype
    )


@dataclass(frozen=True)
class Rounded:
    """One all-reduce as two collectives, and what this rank does before and between them."""

    work: Buffer
    """float32 of the whole vector; the reduce-scatter's input."""
    total: Buffer
    """This rank's block of it; the output."""
    mine: Buffer
    """This rank's block of the result; the all-gather's input."""
    recv: Buffer
    form: Form
    prepare: Callable[[], None]
    round: Callable[[], None]
    keep: object
    """Memory of ``work``: must outlive the transfer."""

    @classmethod
    def of(
        cls,
        layout: RankLayout,
        rank: int,
        send: Buffer,
        recv: Buffer,
        op: ReduceOp,
        scratch: HostScratch,
    ) -> Rounded:
        """Return the halves of an all-reduce of contiguous host arrays. Local.

        Args:
            layout: the ranks.
            rank: this one.
            send: its input; may be the output.
            recv: its output.
            op: EXACT_SUM or AVG.
            scratch: gives the float32 vector, until this call is done.
        """
        counts = _shares(layout, recv.count)
        first, count = list(accumulate(counts, initial=0))[rank], counts[rank]
        wide = on_the_way(recv.dtype, op)[0]
        start = scratch.take(_AREA, recv.count * wide.itemsize)
        work = replace(recv, address=start, dtype=wide)
        total = replace(work, address=start + first * wide.itemsize, count=count)
        mine = replace(recv, address=recv.address + first * recv.dtype.itemsize, count=count)
        source = array_at(send.address, send.count, send.dtype)
        vector = array_at(work.address, work.count, wide)
        block, result = vector[first : first + count], array_at(mine.address, count, mine.dtype)
        keep = scratch.areas[_AREA]

        def prepare() -> None:
            np.copyto(vector, source)

        def rounded() -> None:
            with np.errstate(all="ignore"):
                if op is ReduceOp.AVG:
                    average(block, layout.size)
                np.copyto(result, block, casting="unsafe")

        form = Form(recv.count, counts)
        return cls(work, total, mine, recv, form, prepare, rounded, keep)

    @property
    def calls(self) -> tuple[tuple[Kind, Buffer, Buffer, Form], ...]:
        """The two collectives: kind, input, output, form."""
        return (
            (Kind.REDUCE_SCATTER, self.work, self.total, self.form),
            (Kind.ALLGATHER, self.mine, self.recv, self.form),
        )

    def begins(self, scatter: _Begin, gather: _Begin) -> list[_Begin]:
        """Return what is done one after the other, by what begins the halves."""

        def rounded(_held: object = self.keep) -> None:
            self.round()

        return [self.prepare, scatter, rounded, gather]

    def done(self, scatter: Callable[[], object], gather: Callable[[], object]) -> None:
        """Do the whole, by what does the halves."""
        self.prepare()
        scatter()
        self.round()
        gather()


def _shares(layout: RankLayout, count: int) -> tuple[int, ...]:
    """Return each rank's share: equal for the nodes, and among the ranks of a node."""
    shares = [0] * layout.size
    for ranks, (_, held) in zip(layout.nodes, split(count, len(layout.nodes)), strict=True):
        for rank, (_, own) in zip(ranks, split(held, len(ranks)), strict=True):
            shares[rank] = own
    return tuple(shares)
