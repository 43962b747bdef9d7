"""Every plan on the simulator: right results, no deadlock, bytes as the formulas say.

Inputs differ for every rank and element, expected values are closed formulas in int64.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmakit.errors import InvalidArgument, UnsupportedError
from rdmakit.layout import RankLayout
from rdmakit.plan.cost import Costs, predict
from rdmakit.plan.planner import ALGORITHMS, algorithms, bytes_out_of_node, program, why_not
from rdmakit.plan.shape import Call, Kind, Limits
from rdmakit.plan.simulator import simulate
from rdmakit.plan.steps import Await, Send

SHAPES = [
    [1],
    [2],
    [3],
    [4],
    [8],
    [1, 1],
    [1] * 3,
    [1] * 4,
    [1] * 7,
    [1] * 8,
    [2, 2],
    [4, 4],
    [8, 7],
    [3, 1],
    [1, 3],
    [1, 1, 2],
    [3, 2],
    [2, 3, 1],
    [8, 1],
    [1, 8],
    [2] * 5,
    [5, 5, 4],
]

layouts = st.one_of(
    st.sampled_from(SHAPES),
    st.lists(st.integers(1, 9), min_size=1, max_size=6).filter(lambda x: sum(x) <= 24),
)


BLOCKS = (Kind.REDUCE_SCATTER, Kind.ALLGATHER)


def inputs(n: int, count: int) -> list[np.ndarray]:
    """Element i of rank r is 1 + r + i * (r + 2): distinct, and sums have a closed form."""
    i = np.arange(count, dtype=np.int64)
    return [1 + r + i * (r + 2) for r in range(n)]


def total(n: int, count: int) -> np.ndarray:
    i = np.arange(count, dtype=np.int64)
    return n * (n + 1) // 2 + i * (n * (n - 1) // 2 + 2 * n)


def add(dst: np.ndarray, srcs: list[np.ndarray]) -> None:
    acc = srcs[0].copy()
    for src in srcs[1:]:
        acc = acc + src
    dst[:] = acc


def run(
    kind: Kind,
    algorithm: str,
    sizes: list[int],
    count: int,
    *,
    seed: int | None = None,
    window: int = 64,
    chunk: int = 16,
    small: int = 0,
    in_place: bool = False,
    root: int = 0,
    in_order: bool = False,
    eager: float = 0.5,
):
    layout = RankLayout.of_sizes(sizes)
    n = layout.size
    window = max(window, 3 * n * max(1, count // 12 if kind in BLOCKS else 1), count // 6)
    if algorithm == "one-shot":
        window = max(window, 3 * count)  # it holds the whole vector; refused where it does not fit
    chunk = max(chunk, count // 12)
    call = Call(kind, layout, count, Limits(window, chunk, small), root % n)
    programs = [program(algorithm, call, r) for r in range(n)]
    if kind is Kind.ALLREDUCE:
        send, want = inputs(n, count), [total(n, count)] * n
        recv = send if in_place else [np.full(count, -1, np.int64) for _ in range(n)]
    elif kind is Kind.REDUCE_SCATTER:
        send = inputs(n, n * count)
        want = [total(n, n * count)[r * count : (r + 1) * count] for r in range(n)]
        recv = [
            s[r * count : (r + 1) * count] if in_place else np.full(count, -1, np.int64)
            for r, s in enumerate(send)
        ]
    elif kind is Kind.ALLGATHER:
        blocks = inputs(n, count)
        want = [np.concatenate(blocks)] * n
        recv = [np.full(n * count, -1, np.int64) for _ in range(n)]
        if in_place:
            for r in range(n):
                recv[r][r * count : (r + 1) * count] = blocks[r]
        send = [recv[r][r * count : (r + 1) * count] if in_place else blocks[r] for r in range(n)]
    else:
        values = inputs(n, count)
        want = [values[call.root].copy()] * n
        recv = [values[r] if r == call.root else np.full(count, -1, np.int64) for r in range(n)]
        send = recv
    rng = random.Random(seed) if seed is not None else None
    traffic = simulate(
        programs, layout, send, recv, add, rng=rng, in_order=in_order, eager=eager, base=17
    )
    for r in range(n):
        np.testing.assert_array_equal(recv[r], want[r], err_msg=f"rank {r}")
    return call, programs, traffic


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@pytest.mark.parametrize("kind", Kind)
def test_every_algorithm_on_every_shape(kind: Kind, sizes: list[int]) -> None:
    served = algorithms(kind, RankLayout.of_sizes(sizes))
    assert "hierarchical" in served
    assert "ring" in served
    for algorithm in served:
        for count in (0, 1, 7, 100):
            for small in (0, 1 << 20):
                run(kind, algorithm, sizes, count, small=small, seed=count, root=count)


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(list(Kind)),
    sizes=layouts,
    count=st.integers(0, 130),
    seed=st.integers(0, 1 << 30),
    window=st.integers(4, 200),
    chunk=st.integers(1, 60),
    small=st.sampled_from([0, 20, 1 << 20]),
    in_place=st.booleans(),
    root=st.integers(0, 63),
    eager=st.sampled_from([0.0, 0.5, 1.0]),
    data=st.data(),
)
def test_random_order_gives_the_closed_form(
    kind, sizes, count, seed, window, chunk, small, in_place, root, eager, data
) -> None:
    served = algorithms(kind, RankLayout.of_sizes(sizes))
    algorithm = data.draw(st.sampled_from(served))
    run(
        kind,
        algorithm,
        sizes,
        count,
        seed=seed,
        window=window,
        chunk=chunk,
        small=small,
        in_place=in_place,
        root=root,
        eager=eager,
    )


@settings(max_examples=8, deadline=None)
@given(
    kind=st.sampled_from(list(Kind)),
    sizes=st.lists(st.integers(1, 16), min_size=1, max_size=8).filter(lambda x: 25 <= sum(x) <= 64),
    count=st.integers(0, 90),
    seed=st.integers(0, 1 << 30),
)
def test_up_to_64_ranks(kind, sizes, count, seed) -> None:
    run(kind, "hierarchical", sizes, count, seed=seed, window=400, chunk=80)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("kind", Kind)
def test_programs_without_messages_run_in_list_order(kind: Kind, n: int) -> None:
    for algorithm in algorithms(kind, RankLayout.of_sizes([n])):
        if algorithm == "tree":
            continue
        for count in (0, 1, 5, 600):
            for seed in (None, 1, 2):
                _, programs, _ = run(kind, algorithm, [n], count, in_order=True, seed=seed)
                assert not any(p.messages for p in programs)


@pytest.mark.parametrize(
    "sizes", [[2, 2], [4, 4], [8, 7], [3, 1], [1] * 4, [2, 2, 2], [1, 1, 2]], ids=str
)
@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("algorithm", ["hierarchical", "ring"])
def test_bytes_out_of_a_node(kind: Kind, sizes: list[int], algorithm: str) -> None:
    count = 1000
    call, _, traffic = run(kind, algorithm, sizes, count, window=6000, chunk=6000)
    want = bytes_out_of_node(algorithm, call, 1)
    assert want is not None
    most = max(traffic.out_of(node) for node in range(len(sizes)))
    slack = call.layout.shards * len(sizes) + 2 * call.layout.size  # one element a block
    assert abs(most - want) <= slack, (most, want)
    if kind is Kind.ALLREDUCE and algorithm == "hierarchical":
        n = len(sizes)
        for node in range(n):
            assert abs(traffic.out_of(node) - 2 * (n - 1) * count / n) <= slack


def test_small_vectors_take_few_rounds() -> None:
    _, programs, _ = run(Kind.ALLREDUCE, "hierarchical", [1] * 8, 8, small=8)
    assert max(sum(isinstance(s, Send) for s in p.steps) for p in programs) == 3
    _, programs, _ = run(Kind.ALLREDUCE, "hierarchical", [1] * 8, 9, small=8)
    assert max(sum(isinstance(s, Send) for s in p.steps) for p in programs) > 8


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("sizes", [[4], [2, 2], [1] * 4, [3, 1]], ids=str)
def test_dependencies_grow_with_the_chunks_and_not_faster(kind: Kind, sizes: list[int]) -> None:
    layout = RankLayout.of_sizes(sizes)
    for algorithm in algorithms(kind, layout):
        if algorithm in ("one-shot", "tree"):
            continue
        counts = []
        for chunks in (40, 160):
            call = Call(kind, layout, 100 * chunks, Limits(1200, 100, 0))
            counts.append(sum(len(a) for a in program(algorithm, call, 0).after))
        assert counts[1] < 5 * counts[0], (algorithm, counts)


def test_long_vectors_save_bytes_on_wide_nodes() -> None:
    """A shard of one chunk is small where a node has many ranks; the whole shard decides."""
    layout = RankLayout.uniform(8, 32)
    call = Call(Kind.ALLREDUCE, layout, 64000, Limits(1 << 20, 2000, 100))
    sent = sum(sum(program("hierarchical", call, r).sent().values()) for r in layout.nodes[0])
    assert sent == pytest.approx(2 * 7 / 8 * 64000, rel=0.15)
    assert bytes_out_of_node("hierarchical", call, 1) == 2 * 7 * 64000 // 8
    small = Call(Kind.ALLREDUCE, layout, 3000, Limits(1 << 20, 2000, 100))
    assert bytes_out_of_node("hierarchical", small, 1) is None


def test_why_not_names_the_reason() -> None:
    layout = RankLayout.of_sizes([2, 2])
    assert "one node" in why_not("one-shot", Kind.ALLREDUCE, layout)
    assert "node of its own" in why_not("tree", Kind.ALLREDUCE, layout)
    assert "power of two" in why_not("tree", Kind.ALLGATHER, RankLayout.of_sizes([1] * 3))
    call = Call(Kind.ALLREDUCE, layout, 4, Limits(64, 16, 0))
    with pytest.raises(UnsupportedError, match="one node"):
        program("one-shot", call, 0)
    with pytest.raises(InvalidArgument, match="unknown algorithm"):
        program("fastest", call, 0)
    assert set(ALGORITHMS) >= set(algorithms(Kind.ALLREDUCE, layout))


def test_the_simulator_finds_a_missing_dependency() -> None:
    """A check that cannot fail proves nothing: take one dependency away and see it fail."""
    from dataclasses import replace

    layout = RankLayout.of_sizes([2, 2])
    call = Call(Kind.ALLREDUCE, layout, 200, Limits(96, 32, 0))
    good = [program("hierarchical", call, r) for r in range(4)]
    found = 0
    needed = [i for i, step in enumerate(good[0].steps) if not isinstance(step, Await)]
    victims = [i for i in needed if good[0].after[i]][::5]
    for victim in victims:
        after = list(good[0].after)
        after[victim] = ()
        broken = [replace(good[0], after=tuple(after)), *good[1:]]
        for seed in range(6):
            send = inputs(4, 200)
            recv = [np.full(200, -1, np.int64) for _ in range(4)]
            try:
                simulate(broken, layout, send, recv, add, rng=random.Random(seed))
            except Exception:
                found += 1
                break
            if any((x != total(4, 200)).any() for x in recv):
                found += 1
                break
    assert found >= 0.6 * len(victims), (found, len(victims))


def test_predicted_time_orders_algorithms() -> None:
    layout = RankLayout.uniform(2, 4)
    call = Call(Kind.ALLREDUCE, layout, 1 << 20, Limits(1 << 19, 1 << 17, 1 << 12))
    slow = Costs(wire=1 / 125e6)
    times = {
        name: predict([program(name, call, r) for r in range(8)], layout, 4, slow)
        for name in ("hierarchical", "ring")
    }
    wire = 4 * (1 << 20) / 4 / 125e6  # S/L of each rank over its own link, N = 2
    assert wire <= times["hierarchical"] < 1.6 * wire
    assert times["ring"] > 3 * times["hierarchical"]
    assert (
        predict(
            [
                program(
                    "one-shot",
                    Call(Kind.ALLREDUCE, RankLayout.of_sizes([2]), 2, Limits(64, 16, 0)),
                    r,
                )
                for r in range(2)
            ],
            RankLayout.of_sizes([2]),
            4,
            Costs(),
        )
        < 50e-6
    )
