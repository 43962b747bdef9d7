"""Which arrays are reduced together. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

__all__ = ["buckets"]


def buckets(items: Sequence[tuple[Hashable, int]], most: int) -> tuple[tuple[int, ...], ...]:
    """Return the indices of the arrays in each bucket, ascending in each.

    Each kind fills a bucket of its own, in the order given, whatever lies between; so types that
    alternate are fused as well. Buckets are ordered by their last array: where arrays become ready
    in the order given, so do the buckets. Empty arrays are in none.

    Args:
        items: kind (what must be equal in a bucket) and bytes of each array.
        most: bytes of a bucket; an array of as many or more is alone in its own.
    """
    done: list[list[int]] = []
    open_: dict[Hashable, tuple[list[int], int]] = {}
    for index, (kind, nbytes) in enumerate(items):
        if not nbytes:
            continue
        if nbytes >= most:
            done.append([index])
            continue
        members, filled = open_.get(kind, ([], 0))
        if members and filled + nbytes > most:
            done.append(members)
            members, filled = [], 0
        members.append(index)
        open_[kind] = members, filled + nbytes
    done += [members for members, _ in open_.values()]
    return tuple(sorted((tuple(members) for members in done), key=lambda m: m[-1]))
