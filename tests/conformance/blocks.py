"""What calls in blocks, reduces to one rank and scans must do, in threads and in processes.

Values differ for each rank and element; every element of every array is compared, also those
between blocks. A case is called on all ranks with a :class:`Where`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from rdmakit import IN_PLACE
from rdmakit.collectives import Collectives
from rdmakit.datatypes import MAX, SUM

Array = Any
HOLE = 77
DTYPES = ("int32", "uint8", "float64", "complex64")


def _same(array: Array) -> Array:
    return array


def _nothing() -> None:
    pass


@dataclass
class Where:
    """The ranks, the memory and the form of the calls."""

    comm: Collectives
    wrap: Callable[[Array], Any] = _same
    """Makes an array of the kind that is tested, in the same memory."""
    done: Callable[[], object] = _nothing
    later: bool = False
    """Whether to take the calls that do not block."""
    held: list[Any] = field(default_factory=list)
    """Arrays that a stream may still use."""

    def do(self, name: str, *args: Any, **more: Any) -> None:
        args = tuple(self._of(arg) for arg in args)
        self.held.append(args)
        if self.later:
            getattr(self.comm, f"I{name.lower()}")(*args, **more).Wait()
        else:
            getattr(self.comm, name)(*args, **more)
        self.done()
        self.held.clear()

    def _of(self, arg: Any) -> Any:
        if isinstance(arg, np.ndarray):
            return self.wrap(arg)
        if isinstance(arg, list) and isinstance(arg[0], np.ndarray):
            return [self.wrap(arg[0]), *arg[1:]]
        return arg


def values(count: int, *seed: int, dtype: str = "float64") -> Array:
    """Return small whole numbers that differ for each seed and element."""
    start = 5
    for number in seed:
        start = (start * 17 + number * 31 + 1) % 101
    return ((np.arange(count) * 3 + start) % 113).astype(dtype)


def same(got: Array, want: Array, what: object) -> None:
    np.testing.assert_array_equal(got, want, err_msg=str(what))


Placed = tuple[list[int], list[int]]


def layouts(n: int) -> list[Placed]:
    """Return counts and displacements: none, odd, one has all, gaps, any order."""
    out: list[Placed] = []
    for counts in (
        [0] * n,
        [2 * r + 1 for r in range(n)],
        [(900 if r == n - 1 else 0) for r in range(n)],
        [r * 7 % 5 for r in range(n)],
        [5] * n,
    ):
        dense = list(accumulate(counts, initial=0))[:-1]
        total, back = sum(counts), list[int]()
        for count in counts:  # the first block last, with a gap of 3 behind each
            total -= count
            back.append(total + 3 * (n - len(back)))
        out += [(counts, dense), (counts, back)]
    return out


def room(placed: Placed) -> int:
    counts, at = placed
    return max(a + c for a, c in zip(at, counts, strict=True)) + 4


def filled(placed: Placed, blocks: Sequence[Array], dtype: str) -> Array:
    """Return an array of the blocks; what is between them is HOLE."""
    whole = np.full(room(placed), HOLE, dtype)
    for count, at, block in zip(*placed, blocks, strict=True):
        whole[at : at + count] = block
    return whole


def gathers(where: Where) -> None:
    comm = where.comm
    n, rank = comm.size, comm.rank
    for number, placed in enumerate(layouts(n)):
        counts, at = placed
        dtype, root = DTYPES[number % len(DTYPES)], number % n
        blocks = [values(c, r, number, dtype=dtype) for r, c in enumerate(counts)]
        want, empty = filled(placed, blocks, dtype), np.full(room(placed), HOLE, dtype)
        for in_place in (False, True):
            what = ("gather", number, dtype, root, in_place)
            got, own = empty.copy(), blocks[rank].copy()
            if in_place:
                got[at[rank] : at[rank] + counts[rank]] = own
            mine = IN_PLACE if in_place else own
            before = got.copy()
            spec: Any = [got, counts, at] if number % 2 else [got, (counts, at)]
            if rank == root:
                where.do("Gatherv", mine, spec, root=root)
                same(got, want, what)
            else:
                where.do("Gatherv", own, None, root=root)
            got = before
            where.do("Allgatherv", mine, [got, counts, at])
            same(got, want, what)
            same(own, blocks[rank], what)
    got = np.zeros(n * 3 + 1)  # dealt out: the first rank has one more
    where.do("Allgatherv", values(3 + (rank == 0), rank), got)
    same(got, np.concatenate([values(3 + (r == 0), r) for r in range(n)]), "dealt out")


def scatters(where: Where) -> None:
    comm = where.comm
    n, rank = comm.size, comm.rank
    for number, placed in enumerate(layouts(n)):
        counts, at = placed
        dtype, root = DTYPES[number % len(DTYPES)], (number + 1) % n
        blocks = [values(c, r, number, dtype=dtype) for r, c in enumerate(counts)]
        for in_place in (False, True):
            what = ("scatter", number, dtype, root, in_place)
            whole = filled(placed, blocks, dtype)
            before, own = whole.copy(), np.full(counts[rank], HOLE, dtype)
            if rank != root:
                where.do("Scatterv", None, own, root=root)
            else:
                mine = IN_PLACE if in_place else own
                where.do("Scatterv", [whole, counts, at], mine, root=root)
                same(whole, before, what)
            if rank != root or not in_place:
                same(own, blocks[rank], what)


def exchanges(where: Where) -> None:
    comm = where.comm
    n, rank = comm.size, comm.rank
    for number, dtype in enumerate(DTYPES):
        rows = [
            [(3 * s + 5 * d + number) % 7 * (40 if number == 2 else 1) for d in range(n)]
            for s in range(n)
        ]
        mine, theirs = rows[rank], [row[rank] for row in rows]
        for back in (False, True):
            send, recv = (_apart(counts, back=back) for counts in (mine, theirs))
            out = [values(mine[d], rank, d, dtype=dtype) for d in range(n)]
            into = [values(theirs[s], s, rank, dtype=dtype) for s in range(n)]
            given, got = filled(send, out, dtype), np.full(room(recv), HOLE, dtype)
            before = given.copy()
            where.do("Alltoallv", [given, *send], [got, *recv])
            same(got, filled(recv, into, dtype), ("alltoallv", dtype, back))
            same(given, before, "sendbuf")
        both = [(s + rank + number) % 5 for s in range(n)]  # equal for each pair
        placed = _apart(both, back=bool(number % 2))
        got = filled(placed, [values(c, rank, d, dtype=dtype) for d, c in enumerate(both)], dtype)
        where.do("Alltoallv", IN_PLACE, [got, *placed])
        want = [values(c, s, rank, dtype=dtype) for s, c in enumerate(both)]
        same(got, filled(placed, want, dtype), ("alltoallv in place", dtype))
    nothing = np.zeros(0)
    where.do("Alltoallv", [nothing, 0], [nothing, 0])


def _apart(counts: list[int], *, back: bool) -> Placed:
    order = range(len(counts))
    at, next_ = [0] * len(counts), 0
    for r in reversed(order) if back else order:
        at[r] = next_
        next_ += counts[r] + 2 * back
    return counts, at


def reduce_scatters(where: Where) -> None:
    comm = where.comm
    n, rank = comm.size, comm.rank
    for number, (counts, at) in enumerate(layouts(n)[::2]):
        for dtype, op in (("int32", SUM), ("float64", MAX), ("float16", SUM)):
            total = sum(counts)
            inputs = [values(total, r, number, dtype=dtype) for r in range(n)]
            sums = [x.astype("float64") for x in inputs]
            whole = (np.sum if op is SUM else np.max)(sums, axis=0).astype(dtype)
            want = whole[at[rank] : at[rank] + counts[rank]]
            for given in (counts, None):
                got = np.full(counts[rank], HOLE, dtype)
                where.do("Reduce_scatter", inputs[rank].copy(), got, given, op)
                same(got, want, ("reduce_scatter", counts, dtype, op, given))
            got = inputs[rank].copy()
            where.do("Reduce_scatter", IN_PLACE, got, counts, op)
            same(got[: counts[rank]], want, ("reduce_scatter in place", counts, dtype))
            got = inputs[rank].copy()
            block = got[at[rank] : at[rank] + counts[rank]]
            where.do("Reduce_scatter", got, block, counts, op)
            same(block, want, ("reduce_scatter own block", counts, dtype))
    for count in (1, 700):
        got = values(n * count, rank)
        want = np.sum([values(n * count, r) for r in range(n)], axis=0)[rank * count :][:count]
        where.do("Reduce_scatter_block", IN_PLACE, got)
        same(got[:count], want, "reduce_scatter_block in place")


def equal_blocks(where: Where) -> None:
    """Also shapes: one row for each rank, and numbers without dimensions."""
    comm = where.comm
    n, rank = comm.size, comm.rank
    for shape in ((), (3,), (2, 5), (40, 30)):
        count = int(np.prod(shape))
        own, rows = values(count, rank).reshape(shape), [values(count, r) for r in range(n)]
        for root in {0, n - 1}:
            got = np.full((n, *shape), float(HOLE))
            where.do("Gather", own, got if rank == root else None, root=root)
            want = np.concatenate(rows).reshape((n, *shape))
            same(got, want if rank == root else np.full_like(got, HOLE), ("gather", shape))
            got = np.full(shape, float(HOLE))
            where.do("Scatter", want if rank == root else None, got, root=root)
            same(got, own, ("scatter", shape))
            if rank == root:
                got = np.full((n, *shape), float(HOLE))
                got[rank] = own
                where.do("Gather", IN_PLACE, got, root=root)
                same(got, want, "gather in place")
                where.do("Scatter", got, IN_PLACE, root=root)
                same(got, want, "scatter in place")
            else:
                where.do("Gather", own, None, root=root)
                got = np.full(shape, float(HOLE))
                where.do("Scatter", None, got, root=root)
                same(got, own, "scatter in place")
        every = np.stack([values(count, rank, d).reshape(shape) for d in range(n)])
        want = np.stack([values(count, s, rank).reshape(shape) for s in range(n)])
        got = np.full_like(every, HOLE)
        where.do("Alltoall", every, got)
        same(got, want, ("alltoall", shape))
        where.do("Alltoall", IN_PLACE, every)
        same(every, want, ("alltoall in place", shape))


def reductions(where: Where) -> None:
    comm = where.comm
    n, rank = comm.size, comm.rank
    for count in (0, 1, 7, 3001):
        for dtype, op in (("int64", SUM), ("float32", MAX), ("float16", SUM), ("uint8", MAX)):
            small = [values(count, r, dtype=dtype) for r in range(n)]
            run = {SUM: np.add, MAX: np.maximum}[op].accumulate(small, axis=0, dtype=dtype)
            empty = np.full(count, HOLE, dtype)
            for in_place in (False, True):
                what = (count, dtype, op, in_place)
                for root in {0, n - 1}:
                    got = small[rank].copy() if in_place else empty.copy()
                    if rank == root:
                        where.do("Reduce", IN_PLACE if in_place else small[rank], got, op, root)
                        same(got, run[-1], what)
                    else:
                        where.do("Reduce", small[rank], None, op, root)
                got = small[rank].copy() if in_place else empty.copy()
                mine = IN_PLACE if in_place else small[rank].copy()
                before = got.copy()
                where.do("Scan", mine, got, op)
                same(got, run[rank], what)
                got = before.copy()
                where.do("Exscan", mine, got, op)
                same(got, run[rank - 1] if rank else before, what)


def halves(where: Where) -> None:
    """Means are divided at the root, exact sums are rounded once, and a mean does not overflow."""
    comm = where.comm
    n, rank = comm.size, comm.rank
    big = np.full(300, 60_000, np.float16)
    got = np.zeros_like(big)
    where.do("Reduce", big, got if rank == n - 1 else None, "avg", n - 1)
    same(got, big if rank == n - 1 else np.zeros_like(big), "mean")
    inputs = [(np.arange(500) * (r + 3) % 4096 - 2048).astype(np.float16) for r in range(n)]
    sums = np.cumsum([x.astype(np.float32) for x in inputs], axis=0).astype(np.float16)
    got = np.full(500, HOLE, np.float16)
    where.do("Scan", inputs[rank], got, "exact_sum")
    same(got, sums[rank], "exact scan")
    got[:] = HOLE
    where.do("Exscan", inputs[rank], got, "exact_sum")
    same(got, sums[rank - 1] if rank else np.full(500, HOLE, np.float16), "exact exscan")
    got[:] = HOLE
    where.do("Reduce", inputs[rank], got, "exact_sum", 0)
    same(got, np.full(500, HOLE, np.float16) if rank else sums[-1], "exact reduce")


def strides(where: Where) -> None:
    """Views with gaps, and arrays in Fortran order, in equal blocks and reductions."""
    comm = where.comm
    n, rank = comm.size, comm.rank
    wide, narrow = np.full((n, 4, 6), float(HOLE)), values(12, rank).reshape(4, 3)
    view = wide[:, :, ::2]
    where.do("Gather", np.asfortranarray(narrow), view if rank == 0 else None)
    if rank == 0:
        same(view, np.stack([values(12, r).reshape(4, 3) for r in range(n)]), "gather")
        where.do("Scatter", view, IN_PLACE)
    else:
        got = np.full((4, 6), float(HOLE))
        where.do("Scatter", None, got[:, 1::2])
        same(got[:, 1::2], narrow, "scatter")
        same(got[:, ::2], np.full((4, 3), HOLE), "between")
    view[...] = np.stack([values(12, rank, d).reshape(4, 3) for d in range(n)])
    where.do("Alltoall", IN_PLACE, view)
    same(view, np.stack([values(12, s, rank).reshape(4, 3) for s in range(n)]), "alltoall")
    view[...] = values(n * 12, rank).reshape(n, 4, 3)
    where.do("Reduce_scatter_block", IN_PLACE, view)
    want = np.sum([values(n * 12, r) for r in range(n)], axis=0)
    same(view[0].ravel(), want[rank * 12 : (rank + 1) * 12], "reduce_scatter_block")
    view[0] = narrow
    run = np.cumsum([values(12, r).reshape(4, 3) for r in range(n)], axis=0)
    where.do("Scan", IN_PLACE, view[0])
    same(view[0], run[rank], "scan")
    where.do("Exscan", np.asfortranarray(narrow), view[0])
    same(view[0], run[rank - 1] if rank else run[0], "exscan")
    where.do("Reduce", narrow[::-1], view[0] if rank == n - 1 else None, SUM, n - 1)
    if rank == n - 1:
        same(view[0], run[-1][::-1], "reduce")
    same(wide[:, :, 1::2], np.full((n, 4, 3), HOLE), "between")


CASES = (
    gathers,
    scatters,
    exchanges,
    reduce_scatters,
    equal_blocks,
    reductions,
)
"""On every memory, blocking or not."""
BLOCKING = (halves, strides)
"""Where calls that do not block refuse some on GPU arrays."""
