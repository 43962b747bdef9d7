"""A NIC's writes that peers read: each has its flush before the post that tells of them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rdmakit.layout import RankLayout
from rdmakit.plan.flush import exposed_receives, flush_points
from rdmakit.plan.planner import algorithms, program
from rdmakit.plan.shape import Call, Kind, Limits
from rdmakit.plan.steps import Builder, Post, Program, Ref, Space

LIMITS = Limits(96, 16, 4)
AREA = Ref(Space.WINDOW, 0, 8, 0)


def unflushed(steps: Program, points: frozenset[int]) -> list[tuple[int, int]]:
    """Return (message, post) where a peer may learn of bytes that only the owner sees.

    By walking every path backwards: slow, and written without a look at the function under test.
    """
    found = []
    for post, step in enumerate(steps.steps):
        if not isinstance(step, Post) or post in points:
            continue
        # A flush covers what was complete before it: all that it follows.
        covered: set[int] = set()
        behind, todo = set(), [post]
        while todo:
            for before in steps.after[todo.pop()]:
                if before not in behind:
                    behind.add(before)
                    todo.append(before)
        for flush in behind & points:
            todo = [flush]
            while todo:
                for before in steps.after[todo.pop()]:
                    if before not in covered:
                        covered.add(before)
                        todo.append(before)
        found += [(m, post) for m in exposed_receives(steps) & behind - covered]
    return found


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    kind=st.sampled_from(list(Kind)),
    count=st.integers(1, 120),
    data=st.data(),
)
def test_every_plan_is_covered(
    sizes: list[int], kind: Kind, count: int, data: st.DataObject
) -> None:
    layout = RankLayout.of_sizes(sizes)
    name = data.draw(st.sampled_from(algorithms(kind, layout)))
    for rank in range(layout.size):
        steps = program(name, Call(kind, layout, count, LIMITS, 0), rank)
        points = flush_points(steps)
        assert not unflushed(steps, points)
        for point in points:
            assert unflushed(steps, points - {point}), "each flush is needed"


def test_some_plans_need_it() -> None:
    layout = RankLayout.of_sizes([2, 2])
    call = Call(Kind.ALLGATHER, layout, 40, LIMITS, 0)
    assert any(flush_points(program("hierarchical", call, rank)) for rank in range(4))


def test_what_the_owner_reads_needs_none() -> None:
    b = Builder(0)
    into = b.private(8)
    got = b.recv(1, into, 0)
    moved = b.copy(AREA, into, got)
    b.post(3, 1, moved)
    assert not flush_points(b.build())


def test_a_second_post_needs_no_second_flush() -> None:
    b = Builder(0)
    got = b.recv(1, AREA, 0)
    first = b.post(3, 1, got)
    b.post(4, 1, first)
    late = b.recv(1, AREA, 1, first)
    last = b.post(5, 1, late)
    assert flush_points(b.build()) == {first[0], last[0]}
