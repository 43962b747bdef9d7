"""Every plan on the simulator and proven: right results in any order, no deadlock."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmakit.layout import RankLayout
from rdmakit.plan.planner import algorithms, program
from rdmakit.plan.shape import Call, Kind, Limits
from rdmakit.plan.simulator import simulate
from tests.unit.plan_cases import BLOCKS, Case, make, symmetric

SHAPES: list[tuple[tuple[int, ...], ...]] = [
    *(RankLayout.of_sizes(sizes).nodes for sizes in (
        [1], [2], [3], [8], [1, 1], [1] * 4, [1] * 7, [2, 2], [4, 4], [3, 1], [1, 3],
        [1, 1, 2], [2, 3, 1], [1, 6], [2] * 5,
    )),
    ((0, 2), (1, 3)),
    ((3, 1), (2, 0)),
    ((4,), (0, 2, 5), (1, 3)),
    ((1, 2, 3), (0, 5), (4, 6, 7)),
]  # fmt: skip
LARGE = [[8, 7], [8, 8], [5, 5, 4], [1, 8, 1]]
FEW_ROUNDS = (Kind.ALLREDUCE, Kind.BROADCAST, Kind.REDUCE)
SELF_TOLD = (Kind.BROADCAST, Kind.ALLTOALL)
"""Kinds that have no in-place form told by the addresses alone."""


@st.composite
def layouts(draw: Any, most: int = 16) -> RankLayout:
    """Nodes of any sizes; ranks next to each other, or scattered over the nodes."""
    sizes = draw(
        st.lists(st.integers(1, 9), min_size=1, max_size=6).filter(lambda x: sum(x) <= most)
    )
    nodes = RankLayout.of_sizes(sizes).nodes
    if draw(st.booleans()):
        order = draw(st.permutations(range(sum(sizes))))
        nodes = tuple(tuple(order[rank] for rank in node) for node in nodes)
    return RankLayout(nodes)


def checked(case: Case, **more: Any) -> Case:
    case.prove()
    case.run(**more)
    return case


def forms(kind: Kind) -> list[str]:
    """Return the in-place forms of ``kind``."""
    told = [] if kind in SELF_TOLD else ["memory"]
    return ["", *told, *(["field"] if kind in (Kind.ALLTOALL, Kind.REDUCE_SCATTER) else [])]


@pytest.mark.parametrize("nodes", SHAPES, ids=str)
@pytest.mark.parametrize("kind", Kind)
def test_every_algorithm_on_every_shape(kind: Kind, nodes: tuple[tuple[int, ...], ...]) -> None:
    layout, n = RankLayout(nodes), sum(map(len, nodes))
    served = algorithms(kind, layout)
    assert "hierarchical" in served
    # Room for six elements of each block: seven chunks of the longest.
    window, chunk = (18 * n, 6 * n) if kind in BLOCKS else (48, 16)
    for algorithm in served:
        for count in (0, 1, 7, 41 if kind in BLOCKS else 100):
            for small in (0, 1 << 20) if kind in FEW_ROUNDS else (0,):
                for form in forms(kind):
                    case = make(
                        kind, algorithm, layout, count, window=window, chunk=chunk, small=small,
                        root=count % n, in_place=form,
                    )  # fmt: skip
                    checked(case, seed=count)


@pytest.mark.parametrize("sizes", LARGE, ids=str)
@pytest.mark.parametrize("kind", Kind)
def test_many_ranks(kind: Kind, sizes: list[int]) -> None:
    layout = RankLayout.of_sizes(sizes)
    for algorithm in algorithms(kind, layout):
        checked(make(kind, algorithm, layout, 40, window=600, chunk=200, root=9), seed=1)


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(list(Kind)),
    layout=layouts(),
    count=st.integers(0, 90),
    seed=st.integers(0, 1 << 30),
    window=st.integers(4, 300),
    chunk=st.integers(1, 60),
    small=st.sampled_from([0, 20, 1 << 20]),
    root=st.integers(0, 63),
    eager=st.sampled_from([0.0, 0.5, 1.0]),
    data=st.data(),
)
def test_random_order_gives_the_closed_form(
    kind: Kind,
    layout: RankLayout,
    count: int,
    seed: int,
    window: int,
    chunk: int,
    small: int,
    root: int,
    eager: float,
    data: Any,
) -> None:
    algorithm = data.draw(st.sampled_from(algorithms(kind, layout)))
    form = data.draw(st.sampled_from(forms(kind)))
    if kind in BLOCKS:
        count = min(count, 250 // layout.size)
    case = make(
        kind, algorithm, layout, count, window=window, chunk=max(chunk, count // 12),
        small=small, root=root % layout.size, in_place=form,
    )  # fmt: skip
    checked(case, seed=seed, eager=eager)


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(BLOCKS),
    layout=layouts(12),
    limit=st.sampled_from([1, 3, 40]),
    seed=st.integers(0, 1 << 30),
    window=st.integers(4, 300),
    chunk=st.integers(4, 60),
    root=st.integers(0, 63),
    eager=st.sampled_from([0.0, 0.5, 1.0]),
    holes=st.booleans(),
    data=st.data(),
)
def test_counts_per_rank_and_holes(
    kind: Kind,
    layout: RankLayout,
    limit: int,
    seed: int,
    window: int,
    chunk: int,
    root: int,
    eager: float,
    holes: bool,
    data: Any,
) -> None:
    """MPI's v-calls: any counts, zero among them; displacements of each rank's own."""
    n, rng = layout.size, random.Random(seed)
    algorithm = data.draw(
        st.sampled_from([name for name in algorithms(kind, layout) if name != "tree"])
    )
    form = data.draw(st.sampled_from(forms(kind)))

    def some() -> int:
        return rng.choice((0, 1, rng.randrange(limit + 1), rng.randrange(limit + 1)))

    counts: Any = tuple(some() for _ in range(n))
    if kind is Kind.ALLTOALL:
        counts = tuple(tuple(some() for _ in range(n)) for _ in range(n))
        counts = symmetric(counts) if form else counts
    case = make(
        kind, algorithm, layout, counts=counts, window=window, chunk=chunk, root=root % n,
        in_place=form, holes=seed if holes and kind is not Kind.REDUCE_SCATTER else None,
    )  # fmt: skip
    checked(case, seed=seed, eager=eager)


@settings(max_examples=12, deadline=None)
@given(
    kind=st.sampled_from(list(Kind)),
    sizes=st.lists(st.integers(1, 16), min_size=1, max_size=8).filter(lambda x: 25 <= sum(x) <= 64),
    count=st.integers(0, 40),
    seed=st.integers(0, 1 << 30),
)
def test_up_to_64_ranks(kind: Kind, sizes: list[int], count: int, seed: int) -> None:
    layout = RankLayout.of_sizes(sizes)
    case = make(kind, "hierarchical", layout, count, window=3000, chunk=1000, root=seed % 25)
    case.run(seed=seed)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("kind", Kind)
def test_programs_without_messages_run_in_list_order(kind: Kind, n: int) -> None:
    layout = RankLayout.of_sizes([n])
    for algorithm in algorithms(kind, layout):
        if algorithm == "tree":
            continue
        for count in (0, 1, 5, 90):
            for seed in (None, 1, 2):
                case = make(kind, algorithm, layout, count, window=24 * n, root=count % n)
                case.run(seed=seed, in_order=True)
                assert not any(p.messages for p in case.programs)


@pytest.mark.parametrize(
    "nodes",
    [
        ((0, 1, 2),),
        ((0, 1), (2, 3)),
        ((0, 2), (1, 3)),
        ((0,), (1,), (2,), (3,)),
        ((0, 1, 2), (3,)),
    ],
    ids=str,
)
def test_sums_have_one_order(nodes: tuple[tuple[int, ...], ...]) -> None:
    """Bits: equal on all ranks and in all runs; a scan is the sum from rank 0 on, one by one."""
    layout = RankLayout(nodes)
    n, count = layout.size, 57
    values = [np.random.default_rng(rank).normal(size=count) for rank in range(n)]
    folds = [values[0]]
    for value in values[1:]:
        folds.append(folds[-1] + value)

    def results(kind: Kind, algorithm: str, seed: int) -> list[bytes]:
        call = Call(kind, layout, count, Limits(96, 16, 0))
        if algorithm == "one-shot":
            call = Call(kind, layout, count, Limits(300, 16, 0))
        programs = [program(algorithm, call, rank) for rank in range(n)]
        recv = [np.full(count, np.nan) for _ in range(n)]

        def reduce(dst: Any, srcs: Any) -> None:
            total = srcs[0].copy()
            for src in srcs[1:]:
                total += src
            dst[:] = total

        simulate(programs, layout, values, recv, reduce, rng=random.Random(seed))
        return [array.tobytes() for array in recv]

    for algorithm in algorithms(Kind.ALLREDUCE, layout):
        runs = [results(Kind.ALLREDUCE, algorithm, seed) for seed in range(3)]
        assert len({bits for run in runs for bits in run}) == 1
    for algorithm in algorithms(Kind.REDUCE, layout):
        assert len({results(Kind.REDUCE, algorithm, seed)[0] for seed in range(3)}) == 1
    for algorithm in algorithms(Kind.SCAN, layout):
        assert results(Kind.SCAN, algorithm, 1) == [fold.tobytes() for fold in folds]
        assert results(Kind.EXSCAN, algorithm, 1)[1:] == [fold.tobytes() for fold in folds[:-1]]
