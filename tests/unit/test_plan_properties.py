"""What plans promise beside results: bytes on each link, dependencies, huge counts, proofs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmakit.errors import UnsupportedError
from rdmakit.layout import RankLayout
from rdmakit.plan.formulas import bytes_out_of_node, elements_out
from rdmakit.plan.planner import algorithms, program
from rdmakit.plan.proof import Race, prove
from rdmakit.plan.routes import Area, Collect, Direct, Routes, Spread
from rdmakit.plan.shape import Call, Kind, Limits
from rdmakit.plan.simulator import Deadlock
from rdmakit.plan.steps import (
    DONE,
    Await,
    Copy,
    Post,
    Program,
    Recv,
    Reduce,
    Ref,
    Send,
    Space,
    Step,
)  # fmt: skip
from tests.unit.plan_cases import BLOCKS, MOVES, Case, make
from tests.unit.test_plans import layouts

MULTI = [
    ((0, 1), (2, 3)), ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 1, 2), (3,)), ((0,), (1,), (2,), (3,)),
    ((0, 1), (2, 3), (4, 5)), ((0,), (1,), (2, 3)), ((0, 2), (1, 3)), ((4,), (0, 2, 5), (1, 3)),
]  # fmt: skip


# -- bytes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [*MULTI, RankLayout.of_sizes([8, 7]).nodes], ids=str)
@pytest.mark.parametrize("kind", Kind)
def test_elements_out_of_every_node(kind: Kind, nodes: Any) -> None:
    layout = RankLayout(nodes)
    n, count = layout.size, 200
    counts: Any = ()
    if kind in BLOCKS:
        counts = tuple(q * 7 % 40 for q in range(n))
    if kind is Kind.ALLTOALL:
        counts = tuple(tuple((s * 5 + d * 11) % 23 for d in range(n)) for s in range(n))
    for algorithm in algorithms(kind, layout):
        if algorithm == "tree":
            continue
        for root in {0, n - 1, n // 2}:
            case = make(
                kind, algorithm, layout, 0 if counts else count, counts=counts, root=root,
                window=3000, chunk=900,
            )  # fmt: skip
            traffic = case.run(seed=root)
            want = elements_out(algorithm, case.call)
            assert want is not None
            got = [traffic.out_of(node) for node in range(len(nodes))]
            # The pieces of an all-reduced vector differ by one element.
            slack = layout.shards * len(nodes) + n if kind is Kind.ALLREDUCE else 0
            if kind is Kind.ALLREDUCE and algorithm == "ring":
                slack = 2 * n
            assert all(abs(a - b) <= slack for a, b in zip(got, want, strict=True)), (
                algorithm, root, got, want,
            )  # fmt: skip
            assert bytes_out_of_node(algorithm, case.call, 4) == 4 * max(want)


@pytest.mark.parametrize("kind", [Kind.BROADCAST, Kind.REDUCE, Kind.ALLREDUCE, Kind.SCAN])
def test_every_rail_carries_its_share(kind: Kind) -> None:
    """S over L rails: no rank sends more than a shard of the vector, between any two nodes."""
    layout, count = RankLayout.uniform(3, 4), 800
    traffic = make(kind, "hierarchical", layout, count, window=3000, chunk=100).run(seed=1)
    rounds = 4 / 3 if kind is Kind.ALLREDUCE else 1
    sent: Counter[int] = Counter()
    for (source, target), elements in traffic.ranks.items():
        assert layout.local_rank(source) == layout.local_rank(target)
        sent[source] += elements
    assert max(sent.values()) <= rounds * count / 4 + 3 * 8
    busy = [node for node in range(3) if traffic.out_of(node)]
    assert all(sent[rank] >= count / 4 - 8 for node in busy for rank in layout.nodes[node])


@pytest.mark.parametrize("sizes", [[4, 4], [2, 2, 2], [3, 3]], ids=str)
def test_nodes_exchange_once_on_each_rail(sizes: list[int]) -> None:
    layout, count = RankLayout.of_sizes(sizes), 5
    n, ranks, others = layout.size, sizes[0], len(sizes) - 1
    collected = make(Kind.ALLTOALL, "hierarchical", layout, count, window=3000, chunk=900).run()
    assert set(collected.messages.values()) == {1}
    assert len(collected.messages) == n * others
    assert all(layout.local_rank(a) == layout.local_rank(b) for a, b in collected.messages)
    straight = make(Kind.ALLTOALL, "flat", layout, count, window=3000, chunk=900).run()
    assert len(straight.messages) == n * (n - ranks)
    for kind in (Kind.ALLGATHER, Kind.GATHER):
        traffic = make(kind, "hierarchical", layout, count, window=3000, chunk=900).run()
        targets = n * others if kind is Kind.ALLGATHER else n - ranks
        assert len(traffic.messages) == targets  # each block once to each node that wants it
        assert set(traffic.ranks.values()) == {count}


def test_long_vectors_save_bytes_on_wide_nodes() -> None:
    """A shard of one chunk is small where a node has many ranks; the whole shard decides."""
    layout = RankLayout.uniform(8, 32)
    call = Call(Kind.ALLREDUCE, layout, 64000, Limits(1 << 20, 2000, 100))
    sent = sum(sum(program("hierarchical", call, r).sent().values()) for r in layout.nodes[0])
    assert sent == pytest.approx(2 * 7 / 8 * 64000, rel=0.15)
    assert bytes_out_of_node("hierarchical", call, 1) == 2 * 7 * 64000 // 8
    small = Call(Kind.ALLREDUCE, layout, 3000, Limits(1 << 20, 2000, 100))
    assert bytes_out_of_node("hierarchical", small, 1) is None


@pytest.mark.parametrize("kind", [Kind.ALLREDUCE, Kind.BROADCAST, Kind.REDUCE])
def test_small_vectors_take_few_rounds(kind: Kind) -> None:
    layout = RankLayout.of_sizes([1] * 8)
    few = make(kind, "hierarchical", layout, 8, small=8)
    few.run(seed=0)
    sends = [sum(isinstance(step, Send) for step in p.steps) for p in few.programs]
    assert max(sends) == (1 if kind is Kind.REDUCE else 3)
    receives = [sum(isinstance(step, Recv) for step in p.steps) for p in few.programs]
    assert max(receives) == (1 if kind is Kind.BROADCAST else 3)


@settings(max_examples=60, deadline=None)
@given(layout=layouts(), kind=st.sampled_from(MOVES), root=st.integers(0, 63))
def test_both_ends_of_a_route_agree(layout: RankLayout, kind: Kind, root: int) -> None:
    counts: Any = tuple(q % 3 for q in range(layout.size))
    if kind is Kind.ALLTOALL:
        counts = tuple(
            tuple((s + 2 * d) % 3 for d in range(layout.size)) for s in range(layout.size)
        )
    call = Call(kind, layout, 0, Limits(999, 99, 0), root % layout.size, counts)
    routes = [Direct(call), (Spread if kind in (Kind.GATHER, Kind.ALLGATHER) else Collect)(call)]
    for route in routes:
        left, landed = {}, {}
        for rank in range(layout.size):
            left |= {(rank, q): parcels for q, parcels in route.leaving(rank).items()}
            landed |= {(q, rank): parcels for q, parcels in route.landing(rank).items()}
        assert left == landed
        loads = [(0, 0), *route._loads()]
        for rank in range(layout.size):
            blocks, elements = _held(route, route.area(rank))
            assert any(blocks <= most and elements <= total for most, total in loads)
        assert all(layout.node_of(a) != layout.node_of(b) for a, b in left)


def _held(route: Routes, area: Area) -> tuple[int, int]:
    regions = [*area.kept.values(), *area.leaving.values(), *area.landing.values()]
    parcels = [parcel for region in regions for parcel in region.parcels]
    return len(parcels), sum(map(route.size, parcels))


# -- dependencies ------------------------------------------------------------------------------


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
            counts.append(
                max(sum(len(a) for a in program(algorithm, call, r).after) for r in range(4))
            )
        # The first messages wait for none before them.
        assert counts[1] < 5 * counts[0] + 200, (algorithm, counts)


@pytest.mark.parametrize("sizes", [[2, 2], [3, 1], [3]], ids=str)
@pytest.mark.parametrize("kind", Kind)
def test_a_missing_dependency_is_found(kind: Kind, sizes: list[int]) -> None:
    """A check that cannot fail proves nothing: take each dependency away and see it fail.

    Left out are those that hold messages and polls back, and those of the last word, which says
    that *all* is done.
    """
    layout = RankLayout.of_sizes(sizes)
    form = {Kind.ALLTOALL: "field", Kind.BROADCAST: ""}.get(kind, "memory")
    window = 90 if kind in BLOCKS else 54
    for algorithm in algorithms(kind, layout):
        case = make(kind, algorithm, layout, 20, window=window, chunk=8, root=1, in_place=form)
        case.prove()
        found, missed = 0, Counter[str]()
        for rank, good in enumerate(case.programs):
            for index, dependency in _needed(good):
                after = list(good.after)
                after[index] = tuple(step for step in after[index] if step != dependency)
                broken = list(case.programs)
                broken[rank] = replace(good, after=tuple(after))
                try:
                    prove(broken, layout, case.send, case.recv)
                except (Race, Deadlock):
                    found += 1
                else:
                    missed[f"{good.steps[index]} after {good.steps[dependency]}"] += 1
        assert found > 0 or not any(p.steps for p in case.programs)
        # The rest is implied through other ranks, or guards pieces that happen to be apart.
        assert sum(missed.values()) <= 0.45 * found, (algorithm, found, missed)


def _needed(program: Program) -> list[tuple[int, int]]:
    """Return (step, dependency) that no other dependency of the step implies."""
    behind: list[set[int]] = []
    pairs = []
    for index, after in enumerate(program.after):
        behind.append(set(after).union(*(behind[step] for step in after)))
        step = program.steps[index]
        if isinstance(step, Await) or step == Post(DONE, program.span):
            continue
        for dependency in after:
            held_back = type(step) is type(program.steps[dependency])
            if isinstance(step, Send | Recv) and held_back:
                continue
            if not any(dependency in behind[other] for other in after):
                pairs.append((index, dependency))
    return pairs


def test_a_send_without_receive_is_a_deadlock() -> None:
    case = make(Kind.GATHER, "hierarchical", RankLayout.of_sizes([2, 2]), 9, window=90)
    program = case.programs[2]
    at = next(i for i, step in enumerate(program.steps) if isinstance(step, Send))
    steps = list(program.steps)
    send = steps[at]
    assert isinstance(send, Send)
    steps[at] = replace(send, tag=send.tag + 1)
    case.programs[2] = replace(program, steps=tuple(steps))
    with pytest.raises(Deadlock):
        case.prove()


def test_ranks_that_wait_for_each_other_are_found() -> None:
    """Send before receive on both sides hangs where a send waits for its receive."""
    x = Ref(Space.SEND, 0, 1)
    y = Ref(Space.RECV, 0, 1)
    hangs = [
        Program((Send(peer, x, 0), Recv(peer, y, 0)), ((), (0,)), 0, 0, 0, 1) for peer in (1, 0)
    ]
    layout = RankLayout.of_sizes([1, 1])
    case = make(Kind.ALLREDUCE, "ring", layout, 1)
    with pytest.raises(Deadlock, match="wait for each other"):
        prove(hangs, layout, case.send, case.recv)
    runs = [replace(p, after=((), ())) for p in hangs]
    prove(runs, layout, case.send, case.recv)


# -- sizes -------------------------------------------------------------------------------------


def _written(program: Program) -> list[tuple[int, int]]:
    """Return (offset, count) of all that the program writes to RECV, in order."""
    found = []
    for step in program.steps:
        if isinstance(step, Copy | Reduce | Recv) and step.dst.space is Space.RECV:
            found.append((step.dst.offset, step.dst.count))
    return sorted(found)


@pytest.mark.parametrize("sizes", [[2, 2], [1, 1, 2], [4]], ids=str)
@pytest.mark.parametrize("kind", Kind)
def test_more_elements_than_fit_31_bits(kind: Kind, sizes: list[int]) -> None:
    """Nothing is allocated for a plan: offsets go beyond 2^31 and leave no gap."""
    layout = RankLayout.of_sizes(sizes)
    count, limits = (1 << 33) + 5, Limits(3 << 29, 1 << 29, 0)
    for algorithm in algorithms(kind, layout):
        if algorithm in ("one-shot", "tree"):
            continue
        call = Call(kind, layout, count, limits, root=1)
        for rank in range(layout.size):
            steps = program(algorithm, call, rank)
            assert steps.window <= limits.window
            blocks = kind in (Kind.GATHER, Kind.ALLGATHER, Kind.ALLTOALL)
            end = count * layout.size if blocks else count
            if kind in (Kind.REDUCE, Kind.GATHER) and rank != 1:
                end = 0
            if (kind is Kind.EXSCAN and not rank) or (kind is Kind.BROADCAST and rank == 1):
                end = 0
            assert _covered(_written(steps)) == end, (algorithm, rank)


def _covered(pieces: list[tuple[int, int]]) -> int:
    """Return where ``pieces`` end, which must begin at 0 and leave no gap."""
    end = 0
    for offset, count in pieces:
        assert offset <= end
        end = max(end, offset + count)
    return end


@pytest.mark.parametrize("kind", Kind)
def test_a_window_that_is_too_small_is_refused_by_all(kind: Kind) -> None:
    layout = RankLayout.of_sizes([4, 4])
    call = Call(kind, layout, 100, Limits(3, 16, 0))
    refusals = []
    for rank in range(layout.size):
        try:
            program("hierarchical", call, rank)
        except UnsupportedError as exc:
            refusals.append(str(exc))
    assert len(refusals) in (0, layout.size)
    assert len(set(refusals)) <= 1
    if kind in (Kind.ALLTOALL, Kind.ALLGATHER, Kind.REDUCE_SCATTER, Kind.SCAN):
        assert "window larger" in refusals[0]


def _steps(case: Case) -> list[Step]:
    return [step for program in case.programs for step in program.steps]


def test_blocks_of_no_elements_send_nothing() -> None:
    layout = RankLayout.of_sizes([2, 2])
    none = tuple((0,) * 4 for _ in range(4))
    assert not _steps(make(Kind.ALLTOALL, "hierarchical", layout, counts=none))
    one = make(Kind.GATHER, "hierarchical", layout, counts=(0, 0, 0, 3), root=0)
    assert sum(isinstance(step, Send) for step in _steps(one)) == 1
