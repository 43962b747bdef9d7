"""Which pairs of ranks are looked at, and which at the same time; pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

__all__ = ["MOST_PAIRS", "choose_pairs", "rounds"]

Pair = tuple[int, int]
MOST_PAIRS = 28
"""All pairs of eight nodes; the pairs of one node cannot be measured at once."""


def choose_pairs(
    nodes: Sequence[Sequence[int]], *, most: int = MOST_PAIRS, inside: bool = False
) -> tuple[tuple[Pair, ...], str]:
    """Return pairs of ranks, and what was left out, or nothing. Equal for equal arguments.

    Between nodes: all pairs of nodes where these are at most ``most``; else so many that every
    node is in one, far ones first. Ranks take turns, so that several ports of a node are seen.

    Args:
        nodes: ranks of each node.
        most: pairs of nodes, where fewer would do.
        inside: with a pair of each node that has two ranks.
    """
    count = len(nodes)
    every = [(a, b) for a in range(count) for b in range(a + 1, count)]
    chosen = every
    if len(every) > most:
        half = count // 2
        far = [(a, a + half) for a in range(half)]
        if count % 2:
            far.append((0, count - 1))
        near = [(a, a + 1) for a in range(count - 1)]
        rest = [*far, *(pair for pair in near if pair not in far)]
        chosen = rest[: max(most, len(far))]
    turns = [0] * count
    pairs: list[Pair] = []
    for a, b in chosen:
        pairs.append((nodes[a][turns[a] % len(nodes[a])], nodes[b][turns[b] % len(nodes[b])]))
        turns[a] += 1
        turns[b] += 1
    if inside:
        pairs += [(ranks[0], ranks[1]) for ranks in nodes if len(ranks) > 1]
    left = len(every) - len(chosen)
    note = f"a sample: {len(chosen)} of {len(every)} pairs of nodes, every node in one"
    return tuple(pairs), note if left else ""


def rounds(pairs: Sequence[Pair], hosts: Sequence[Hashable]) -> tuple[tuple[Pair, ...], ...]:
    """Return the pairs in rounds; in one round no host is twice, since its ports count for all.

    Args:
        pairs: to be divided, each in one round.
        hosts: of each rank.
    """
    found: list[list[Pair]] = []
    taken: list[set[Hashable]] = []
    for pair in pairs:
        here = {hosts[rank] for rank in pair}
        for index, busy in enumerate(taken):
            if not busy & here:
                found[index].append(pair)
                busy |= here
                break
        else:
            found.append([pair])
            taken.append(set(here))
    return tuple(map(tuple, found))
