"""Which pairs are looked at, and which at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rdmakit.proof.pairs import choose_pairs, rounds

SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=40)


def nodes_of(sizes: list[int]) -> list[list[int]]:
    nodes, start = [], 0
    for size in sizes:
        nodes.append(list(range(start, start + size)))
        start += size
    return nodes


def test_all_pairs_of_few_nodes() -> None:
    pairs, note = choose_pairs([[0, 1], [2, 3], [4]])
    assert pairs == ((0, 2), (1, 4), (3, 4))  # ranks take turns
    assert note == ""
    assert choose_pairs([[0, 1, 2]]) == ((), "")
    assert choose_pairs([[0, 1], [2]], inside=True)[0] == ((0, 2), (0, 1))


def test_a_sample_of_many() -> None:
    pairs, note = choose_pairs([[n] for n in range(64)], most=1)
    assert len(pairs) == 32
    assert pairs[0] == (0, 32)
    assert note == "a sample: 32 of 2016 pairs of nodes, every node in one"
    pairs, _ = choose_pairs([[n] for n in range(3)], most=1)
    assert pairs == ((0, 1), (0, 2))


@given(SIZES, st.integers(1, 60))
def test_every_node_is_in_a_pair(sizes: list[int], most: int) -> None:
    nodes = nodes_of(sizes)
    place = {rank: index for index, ranks in enumerate(nodes) for rank in ranks}
    pairs, note = choose_pairs(nodes, most=most)
    joined = [frozenset(place[rank] for rank in pair) for pair in pairs]
    assert all(len(both) == 2 for both in joined)
    assert len(set(joined)) == len(joined)
    if len(nodes) > 1:
        assert set().union(*joined) == set(range(len(nodes)))
    every = len(nodes) * (len(nodes) - 1) // 2
    assert len(pairs) <= max(most, (len(nodes) + 1) // 2)
    assert bool(note) == (len(pairs) < every)


@given(SIZES, st.integers(1, 60), st.integers(1, 4))
def test_no_host_is_twice_in_a_round(sizes: list[int], most: int, together: int) -> None:
    nodes = nodes_of(sizes)
    hosts = [str(index // together) for index, ranks in enumerate(nodes) for _ in ranks]
    pairs, _ = choose_pairs(nodes, most=most, inside=True)
    found = rounds(pairs, hosts)
    assert sorted(pair for these in found for pair in these) == sorted(pairs)
    for these in found:
        used = [host for pair in these for host in {hosts[rank] for rank in pair}]
        assert len(set(used)) == len(used)
