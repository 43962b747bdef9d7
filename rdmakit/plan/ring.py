"""Ring schedules over a :class:`~rdmakit.plan.links.Link`.

n ranks, S elements: reduce-scatter and all-gather each pass (n-1)/n * S over every link in
n - 1 rounds, the all-reduce is one after the other, 2(n-1)/n * S in 2(n-1) rounds; a chain
broadcast passes S over n - 1 links, and its time does not grow with n once it is cut into many
more chunks than there are ranks. Sums run along the ring from the rank after the block's owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rdmakit.plan.links import Link
from rdmakit.plan.steps import Ref

__all__ = ["ring_allgather", "ring_allreduce", "ring_broadcast", "ring_reduce_scatter"]


def ring_reduce_scatter(
    link: Link,
    src: Sequence[Ref],
    dst: Sequence[Ref],
    first: int,
    tag: int,
    after: Iterable[int] = (),
) -> tuple[list[int], dict[int, list[int]]]:
    """Reduce block by block around the ring; block ``first + 1`` (mod n) ends here, in ``dst``.

    ``first`` is the block this rank sends first. Blocks of ``dst`` on the way hold partial
    results. Returns what to wait for, and for each block sent the steps after which it may be
    overwritten.
    """
    b, n, after = link.b, len(src), list(after)
    ready, sent = after, {}
    for turn in range(n - 1):
        out, into = (first - turn) % n, (first - turn - 1) % n
        sent[out] = link.push(src[out] if turn == 0 else dst[out], tag + turn, ready)
        got, arrived, release = link.pull(dst[into].count, tag + turn)
        ready = b.reduce(dst[into], [got, src[into]], [*arrived, *after])
        release(ready)
    return ready, sent


def ring_allgather(
    link: Link,
    blocks: Sequence[Ref],
    own: int,
    tag: int,
    ready: Iterable[int] = (),
    busy: dict[int, list[int]] | None = None,
) -> list[int]:
    """Pass blocks around the ring, starting with ``own``, until every rank has all of them.

    ``busy`` names steps that must be complete before a block may be overwritten.
    """
    n, busy = len(blocks), busy or {}
    ready, ends = list(ready), []
    for turn in range(n - 1):
        out, into = (own - turn) % n, (own - turn - 1) % n
        ends += link.push(blocks[out], tag + turn, ready)
        ready = link.pull_into(blocks[into], tag + turn, busy.get(into, []))
        ends += ready
    return ends


def ring_allreduce(
    link: Link, src: Sequence[Ref], dst: Sequence[Ref], me: int, tag: int, after: Iterable[int]
) -> list[int]:
    """All-reduce of n blocks, ``src`` to ``dst`` (may be the same); uses 2(n-1) tags."""
    after = list(after)
    n = len(src)
    if n == 1:
        return link.b.copy(dst[0], src[0], after)
    ready, sent = ring_reduce_scatter(link, src, dst, me, tag, after)
    # A block that stays empty here still orders what follows behind ``after``.
    busy = {block: [*steps, *after] for block, steps in sent.items()}
    return [*ring_allgather(link, dst, (me + 1) % n, tag + n - 1, [*ready, *after], busy), *ready]


def ring_broadcast(link: Link, buffer: Ref, root: int, tag: int, after: Iterable[int]) -> list[int]:
    """Pass ``buffer`` from ``root`` along the ring to the rank before it; one tag."""
    ready = list(after)
    ends: list[int] = []
    if link.b.rank != root:
        ready = link.pull_into(buffer, tag, ready)
        ends += ready
    if link.right != root:
        ends += link.push(buffer, tag, ready)
    return ends or ready
