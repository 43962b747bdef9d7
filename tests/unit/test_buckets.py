"""Which arrays are reduced together."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmakit.plan.buckets import buckets


@pytest.mark.parametrize(
    ("items", "most", "want"),
    [
        ([], 10, ()),
        ([("f", 4), ("f", 4)], 10, ((0, 1),)),
        ([("f", 4), ("f", 6)], 10, ((0, 1),)),
        ([("f", 4), ("f", 7)], 10, ((0,), (1,))),
        ([("f", 4), ("f", 10), ("f", 4)], 10, ((1,), (0, 2))),
        ([("f", 4), ("i", 4), ("f", 4), ("i", 4)], 10, ((0, 2), (1, 3))),
        ([("f", 0), ("f", 1), ("i", 0)], 10, ((1,),)),
        ([("f", 1), ("f", 1)], 1, ((0,), (1,))),
        ([("f", 9), ("f", 9), ("f", 1)], 10, ((0,), (1, 2))),
    ],
)
def test_cases(items: list[Any], most: int, want: object) -> None:
    assert buckets(items, most) == want


@given(
    items=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 40)), max_size=40),
    most=st.integers(1, 60),
)
def test_any(items: list[tuple[str, int]], most: int) -> None:
    found = buckets(items, most)
    everything = sorted(index for bucket in found for index in bucket)
    assert everything == [i for i, (_, nbytes) in enumerate(items) if nbytes], "each once"
    assert [bucket[-1] for bucket in found] == sorted(bucket[-1] for bucket in found)
    for bucket in found:
        assert list(bucket) == sorted(bucket)
        assert len({items[i][0] for i in bucket}) == 1
        assert len(bucket) == 1 or sum(items[i][1] for i in bucket) <= most
        assert len(bucket) == 1 or all(items[i][1] < most for i in bucket)
    for kind in "abc":  # none could have taken the first array of the next
        mine = [b for b in found if items[b[0]][0] == kind and items[b[0]][1] < most]
        for first, second in pairwise(mine):
            assert sum(items[i][1] for i in first) + items[second[0]][1] > most
