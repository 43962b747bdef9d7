"""Schedules of few rounds for small vectors: recursive doubling and halving.

n ranks, S elements, rounds: all-reduce log2(n) (+2 when n is no power of two) with S sent in
each; reduce-scatter by halving and all-gather by doubling log2(n) with (n-1)/n * S in all, n a
power of two. All are messages, so every rank must be on a node of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rdmakit.plan.steps import Builder, Ref

__all__ = [
    "doubling_allgather",
    "doubling_allreduce",
    "doubling_rounds",
    "halving_reduce_scatter",
]


def doubling_rounds(n: int) -> int:
    """Return the tags that :func:`doubling_allreduce` uses."""
    return n.bit_length() + 1


def doubling_allreduce(
    b: Builder,
    group: Sequence[int],
    work: Ref,
    tmp: Callable[[int], tuple[Ref, list[int]]],
    tag: int,
    after: Iterable[int],
) -> tuple[list[int], list[int]]:
    """All-reduce ``work`` in place among ``group``.

    Partial results are reduced lower rank first on both sides, so all ranks compute the same
    bits. ``tmp(round)`` gives memory for what arrives and the steps after which it is free.
    Returns (steps to wait for, steps that consumed ``tmp``).
    """
    me, n = group.index(b.rank), len(group)
    after = list(after)
    consumed: list[int] = []
    if n == 1 or not work.count:
        return after, consumed
    power = 1 << (n.bit_length() - 1)
    extra = n - power
    ready, last = after, tag + n.bit_length()
    if me < 2 * extra:
        if me % 2 == 0:  # gives its vector to the next rank and gets the result back
            sent = b.send(group[me + 1], work, tag, ready)
            return b.recv(group[me + 1], work, last, sent), consumed
        place, free = tmp(0)
        arrived = b.recv(group[me - 1], place, tag, free)
        ready = b.reduce(work, [place, work], [*arrived, *ready])
        consumed += ready
    virtual = me // 2 if me < 2 * extra else me - extra
    for turn in range(power.bit_length() - 1):
        other = virtual ^ (1 << turn)
        peer = group[2 * other + 1 if other < extra else other + extra]
        place, free = tmp(turn + 1)
        sent = b.send(peer, work, tag + 1 + turn, ready)
        arrived = b.recv(peer, place, tag + 1 + turn, free)
        pair = [work, place] if virtual < other else [place, work]
        ready = b.reduce(work, pair, [*sent, *arrived, *ready])
        consumed += ready
    if me < 2 * extra:
        ready = b.send(group[me - 1], work, last, ready)
    return ready, consumed


def halving_reduce_scatter(
    b: Builder, group: Sequence[int], work: Sequence[Ref], tmp: Ref, tag: int, after: Iterable[int]
) -> list[int]:
    """Reduce ``work`` (n contiguous blocks, overwritten); block ``me`` holds the result.

    ``len(group)`` must be a power of two, ``tmp`` half of the vector plus one element a block.
    """
    me = group.index(b.rank)
    low, high = 0, len(group)
    ready = list(after)
    turn = 0
    while high - low > 1:
        middle = (low + high) // 2
        upper = me >= middle
        peer = group[me - (middle - low) if upper else me + (middle - low)]
        keep, give = ((middle, high), (low, middle)) if upper else ((low, middle), (middle, high))
        mine, theirs = _span(work, *keep), _span(work, *give)
        place = tmp.part(0, mine.count)
        sent = b.send(peer, theirs, tag + turn, ready)
        arrived = b.recv(peer, place, tag + turn, ready)
        pair = [place, mine] if upper else [mine, place]
        # The half given away is not read again, but its memory is the caller's: wait for both.
        ready = [*b.reduce(mine, pair, [*arrived, *ready]), *sent]
        low, high = keep
        turn += 1
    return ready


def doubling_allgather(
    b: Builder, group: Sequence[int], work: Sequence[Ref], tag: int, after: Iterable[int]
) -> list[int]:
    """Gather n contiguous blocks, block ``me`` being in place; n must be a power of two."""
    me, n = group.index(b.rank), len(group)
    ready = list(after)
    turn = 0
    while 1 << turn < n:
        step = 1 << turn
        start = me & ~(step - 1)
        peer = me ^ step
        sent = b.send(group[peer], _span(work, start, start + step), tag + turn, ready)
        theirs = peer & ~(step - 1)
        got = b.recv(group[peer], _span(work, theirs, theirs + step), tag + turn, after)
        ready = [*ready, *sent, *got]
        turn += 1
    return ready


def _span(blocks: Sequence[Ref], low: int, high: int) -> Ref:
    first = blocks[low]
    return Ref(first.space, first.offset, sum(x.count for x in blocks[low:high]), first.owner)
