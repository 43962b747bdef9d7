"""How vectors are cut, and the window counters that planners use."""

from __future__ import annotations

from collections.abc import Sequence

from rdmakit.errors import UnsupportedError
from rdmakit.plan.steps import Ref

__all__ = [
    "FLAGS",
    "LANE_FREE",
    "LANE_FULL",
    "SLOTS",
    "cut",
    "free",
    "full",
    "joined",
    "piece",
    "reduced",
    "split",
    "turns_for",
]

SLOTS = 3
"""Chunks of one vector that a window holds at once: one being filled, one reduced, one read."""

_LEAST_PIECE = 4
"""Elements of a block's piece, if the window has room for them."""

LANE_FULL = 1
"""Ring link inside a node: the sender's count of filled places."""
LANE_FREE = 2
"""Ring link inside a node: the receiver's count of emptied places."""
FLAGS = 3 + 3 * SLOTS
"""Counters that a window must offer to each rank."""


def full(slot: int) -> int:
    """Return the counter that says this rank's contribution is in ``slot`` of its area."""
    return 3 + slot


def reduced(slot: int) -> int:
    """Return the counter that says this rank's shards in ``slot`` hold the result."""
    return 3 + SLOTS + slot


def free(slot: int) -> int:
    """Return the counter that says this rank no longer reads ``slot`` of its peers' areas."""
    return 3 + 2 * SLOTS + slot


def split(count: int, parts: int) -> list[tuple[int, int]]:
    """Divide ``count`` elements into ``parts`` (offset, count); sizes differ by at most one."""
    return [piece(count, parts, index) for index in range(parts)]


def piece(count: int, parts: int, index: int) -> tuple[int, int]:
    """Return (offset, count) of one of the ``parts`` that :func:`split` makes."""
    base, more = divmod(count, parts)
    return index * base + min(index, more), base + (index < more)


def cut(count: int, limit: int) -> list[tuple[int, int]]:
    """Divide ``count`` elements into the fewest equal (offset, count) of at most ``limit``."""
    if limit < 1:
        raise ValueError(f"limit {limit} leaves no room for an element")
    return split(count, -(-count // limit)) if count else []


def turns_for(blocks: int, total: int, longest: int, wish: int, slot: int) -> int:
    """Return into how many pieces to cut blocks so that a chunk has one piece of each.

    A chunk has ``wish`` elements, but more where pieces would be too short, up to ``slot``.

    Args:
        blocks: number of blocks that are not empty.
        total: elements of all of them.
        longest: elements of the longest, or more.
        wish: elements that a chunk should have.
        slot: elements that it can have.

    Raises:
        UnsupportedError: the slot has no room for one element of each block.
    """
    room = max(wish, min(slot, _LEAST_PIECE * blocks))
    if blocks > room:
        raise UnsupportedError(
            f"a window slot of {slot} elements has no room for one of each of {blocks} "
            "blocks: make the window larger"
        )
    # The sum of ceil(c/t) is at most blocks + (total - blocks)/t.
    spare = room - blocks
    return min(longest, max(1, -(-(total - blocks) // spare))) if spare else longest


def joined(refs: Sequence[Ref]) -> list[Ref]:
    """Return ``refs`` with neighbours that touch made one, and empty ones left out."""
    runs: list[Ref] = []
    for ref in refs:
        if not ref.count:
            continue
        last = runs[-1] if runs else None
        if (
            last is not None
            and (last.space, last.owner) == (ref.space, ref.owner)
            and last.offset + last.count == ref.offset
        ):
            runs[-1] = Ref(last.space, last.offset, last.count + ref.count, last.owner)
        else:
            runs.append(ref)
    return runs
