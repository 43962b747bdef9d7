"""One message to or from each of a group: down from the first rank to all, or up, reduced.

A chain's time does not grow with the group once a vector is cut into many more chunks than
there are ranks; a binomial tree has ceil(log2(n)) rounds and is for small vectors. Every rank
of a group must be on a node of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rdmakit.plan.steps import Builder, Ref

__all__ = ["Branch", "binomial", "chain", "pass_down", "reduce_up"]


@dataclass(frozen=True)
class Branch:
    """Place of one rank: indices in its group, whose root is index 0."""

    parent: int | None
    children: tuple[int, ...]


def chain(n: int, me: int) -> Branch:
    """Return the place in a chain of ``n``."""
    return Branch(me - 1 if me else None, (me + 1,) if me + 1 < n else ())


def binomial(n: int, me: int) -> Branch:
    """Return the place in a binomial tree; the child with most below it comes first."""
    step = 1
    while step < n and not me & step:
        step <<= 1
    below = [1 << bit for bit in reversed(range(step.bit_length() - 1))]
    return Branch(me - step if me else None, tuple(me + s for s in below if me + s < n))


def pass_down(
    b: Builder, group: Sequence[int], at: Branch, buffer: Ref, tag: int, after: Iterable[int]
) -> tuple[list[int], list[int]]:
    """Receive ``buffer`` from the parent, if any, and send it to the children; one tag.

    Returns when it is there, and when it may be changed.
    """
    ready = list(after)
    if at.parent is not None:
        ready = b.recv(group[at.parent], buffer, tag, ready)
    sent = [step for child in at.children for step in b.send(group[child], buffer, tag, ready)]
    return ready, [*(ready if at.parent is not None else []), *sent]


def reduce_up(
    b: Builder,
    group: Sequence[int],
    at: Branch,
    part: Ref,
    into: Ref,
    tmp: Sequence[Ref],
    tag: int,
    after: Iterable[int],
    free: Iterable[int] = (),
) -> tuple[list[int], list[int]]:
    """Reduce ``part`` of this rank, then the children's sums, to ``into``; send it to the parent.

    ``into`` may be ``part``; a rank without children does not write it. ``tmp`` has a place for
    each child, free after ``free``. Returns when the sum is there, and when it may be changed.
    """
    ready = list(after)
    if at.children:
        places = [place.part(0, part.count) for place in tmp[: len(at.children)]]
        for child, place in zip(at.children, places, strict=True):
            ready += b.recv(group[child], place, tag, free)
        ready = b.reduce(into, [part, *places], ready)
    if at.parent is None:
        return ready, ready
    return ready, b.send(group[at.parent], into if at.children else part, tag, ready)
