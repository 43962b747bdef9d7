"""Which algorithm serves and which is chosen; what the cost model says; calls that are refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from rdmakit.errors import InvalidArgument, UnsupportedError
from rdmakit.layout import RankLayout
from rdmakit.plan.cost import Costs, alltoall_seconds, predict
from rdmakit.plan.planner import ALGORITHMS, algorithms, program, why_not
from rdmakit.plan.select import CHUNK_BYTES, choose, limits_for
from rdmakit.plan.shape import Call, Kind, Limits
from tests.unit.plan_cases import BLOCKS

LIMITS = limits_for(4, 3 << 20)
SMALL = Limits(64, 16, 0)


USUAL = Costs()


def seconds(
    kind: Kind, algorithm: str, layout: RankLayout, nbytes: int, costs: Costs = USUAL
) -> float:
    call = Call(kind, layout, nbytes // 4, LIMITS)
    programs = [program(algorithm, call, rank) for rank in range(layout.size)]
    return predict(programs, layout, 4, costs)


def test_why_not_names_the_reason() -> None:
    layout = RankLayout.of_sizes([2, 2])
    assert "one node" in why_not("one-shot", Kind.ALLREDUCE, layout)
    assert "or reduce" in why_not("one-shot", Kind.SCAN, layout)
    assert "node of its own" in why_not("tree", Kind.ALLREDUCE, layout)
    assert "power of two" in why_not("tree", Kind.ALLGATHER, RankLayout.of_sizes([1] * 3))
    assert "tree serves" in why_not("tree", Kind.SCAN, RankLayout.of_sizes([1] * 4))
    assert "do not want it" in why_not("ring", Kind.ALLTOALL, layout)
    assert "reduces nothing" in why_not("flat", Kind.REDUCE, layout)
    call = Call(Kind.ALLREDUCE, layout, 4, SMALL)
    with pytest.raises(UnsupportedError, match="one node"):
        program("one-shot", call, 0)
    with pytest.raises(InvalidArgument, match="unknown algorithm"):
        program("fastest", call, 0)
    alone = RankLayout.of_sizes([1, 1])
    with pytest.raises(UnsupportedError, match="equal blocks"):
        program("tree", Call(Kind.ALLGATHER, alone, 0, SMALL, counts=(1, 2)), 0)
    with pytest.raises(UnsupportedError, match="one-shot reduce holds 21 elements, not 22"):
        program("one-shot", Call(Kind.REDUCE, RankLayout.of_sizes([2]), 22, SMALL), 0)
    for kind in Kind:
        assert set(algorithms(kind, layout)) <= set(ALGORITHMS)


def test_all_kinds_have_a_choice_that_serves() -> None:
    for sizes in ([1], [4], [1, 1, 1], [2, 2], [3, 1], [8, 7]):
        layout = RankLayout.of_sizes(sizes)
        for kind in Kind:
            for nbytes in (0, 8, 4 << 10, 1 << 16, 1 << 26):
                name = choose(kind, layout, nbytes, mpi=False)
                assert name in algorithms(kind, layout)
            assert choose(kind, layout, 64, mpi=True) == ("mpi" if layout.size > 1 else name)


def test_alltoall_collects_small_messages_and_sends_long_ones_straight() -> None:
    for nodes, ranks in ((2, 4), (4, 2), (2, 8)):
        layout = RankLayout.uniform(nodes, ranks)
        for block in (8, 1024, 16 << 10, 64 << 10, 256 << 10):
            chosen = choose(Kind.ALLTOALL, layout, block * layout.size, mpi=False)
            assert chosen == ("hierarchical" if block <= 1024 else "flat")
            other = "flat" if chosen == "hierarchical" else "hierarchical"
            times = {name: seconds(Kind.ALLTOALL, name, layout, block) for name in (chosen, other)}
            assert times[chosen] < times[other], (layout, block, times)
    lone = RankLayout.uniform(8, 1)  # one rank on each node: there is nothing to collect
    collected, straight = alltoall_seconds(lone, 1 << 20, CHUNK_BYTES, Costs())
    assert collected == straight


def test_a_chunked_ring_does_not_wait_for_more_ranks_but_one_sender_does() -> None:
    """64 MiB to 4 and to 16 nodes."""
    growth = {}
    for algorithm in ("ring", "hierarchical", "flat"):
        few, many = (
            seconds(Kind.BROADCAST, algorithm, RankLayout.uniform(nodes, 1), 64 << 20)
            for nodes in (4, 16)
        )
        growth[algorithm] = many / few
    assert growth["ring"] < 1.3
    assert growth["hierarchical"] < 1.3
    assert growth["flat"] > 3


def test_predicted_time_orders_algorithms() -> None:
    layout = RankLayout.uniform(2, 4)
    limits = Limits(1 << 19, 1 << 17, 1 << 12)
    slow = Costs(wire=1 / 125e6)
    call = Call(Kind.ALLREDUCE, layout, 1 << 20, limits)
    times = {
        name: predict([program(name, call, r) for r in range(8)], layout, 4, slow)
        for name in ("hierarchical", "ring")
    }
    wire = 4 * (1 << 20) / 4 / 125e6  # S/L of each rank over its own link, N = 2
    assert wire <= times["hierarchical"] < 1.6 * wire
    assert times["ring"] > 3 * times["hierarchical"]
    pair = RankLayout.of_sizes([2])
    programs = [program("one-shot", Call(Kind.ALLREDUCE, pair, 2, SMALL), r) for r in range(2)]
    assert predict(programs, pair, 4, Costs()) < 50e-6


@pytest.mark.parametrize("kind", [Kind.BROADCAST, Kind.REDUCE])
def test_rails_divide_the_time_on_the_wire(kind: Kind) -> None:
    layout, slow = RankLayout.uniform(4, 4), Costs(wire=1 / 125e6)
    nbytes = 16 << 20
    times = {name: seconds(kind, name, layout, nbytes, slow) for name in ("hierarchical", "ring")}
    assert nbytes / 4 / 125e6 <= times["hierarchical"] < 1.5 * nbytes / 4 / 125e6
    assert times["ring"] > nbytes / 125e6


@pytest.mark.parametrize("kind", Kind)
def test_node_phases_hide_behind_the_rails(kind: Kind) -> None:
    """Where the wire is slow, the time is that of the busiest rank's link and little more."""
    slow = Costs(wire=1 / 1e9)
    for layout in (RankLayout.uniform(4, 4), RankLayout.uniform(4, 1)):
        blocks = kind in BLOCKS
        call = Call(kind, layout, (16 << 18) // (layout.size if blocks else 1), LIMITS)
        programs = [program("hierarchical", call, rank) for rank in range(layout.size)]
        link: Counter[tuple[str, int]] = Counter()
        for rank, steps in enumerate(programs):
            for peer, count in steps.sent().items():
                link["out", rank] += count
                link["in", peer] += count
        wire = 4 * max(link.values()) * slow.wire
        assert wire < predict(programs, layout, 4, slow) < 1.5 * wire


TWO = RankLayout.of_sizes([1, 1])


@pytest.mark.parametrize(
    ("kind", "more", "why"),
    [
        (Kind.ALLREDUCE, {"counts": (1, 2)}, "one count"),
        (Kind.GATHER, {"counts": (1, 2, 3)}, "3 entries for 2 ranks"),
        (Kind.GATHER, {"counts": ((1, 2), (3, 4))}, "a row for each rank"),
        (Kind.ALLTOALL, {"counts": (1, 2)}, "a row for each rank"),
        (Kind.ALLTOALL, {"counts": ((1, 2), (3,))}, "has not 2 entries"),
        (Kind.ALLTOALL, {"counts": ((1, 2), (3, 4)), "in_place": True}, "equal counts"),
        (Kind.SCATTER, {"counts": (1, -1)}, "below 0"),
        (Kind.SCATTER, {"recv_at": (0, 1)}, "no displacements"),
        (Kind.ALLGATHER, {"send_at": (0, 1)}, "no displacements"),
        (Kind.ALLGATHER, {"recv_at": (0, -1)}, "below 0"),
        (Kind.ALLGATHER, {"in_place": True}, "by the addresses"),
        (Kind.BROADCAST, {"root": 2}, "root 2"),
    ],
)
def test_calls_that_make_no_sense_are_refused(kind: Kind, more: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        Call(kind, TWO, 4, SMALL, **more)


def test_the_longest_array_is_the_same_for_all() -> None:
    matrix = ((1, 7), (2, 3))
    assert Call(Kind.ALLTOALL, TWO, 0, SMALL, counts=matrix).longest == 10
    assert Call(Kind.ALLTOALL, TWO, 4, SMALL).longest == 8
    assert Call(Kind.GATHER, TWO, 0, SMALL, counts=(5, 6)).longest == 11
    assert Call(Kind.SCAN, TWO, 4, SMALL).longest == 4
    one, other = (Call(Kind.ALLTOALL, TWO, 0, SMALL, counts=matrix) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert program("flat", one, 0) is program("flat", other, 0)
