"""Where a NIC's write into GPU memory becomes something that other GPUs read.

A NIC that writes to a GPU's memory orders its writes for that GPU before the host sees the
completion (GPUDirect write ordering OWNER); other GPUs may still see the old bytes until the
owner's writes are flushed. In a program such an edge goes from a message into a *window* area to
the post by which peers learn of it. An area that the owner's own kernel reads, or a result that
the owner pushes to its peers, needs no flush.
"""

from __future__ import annotations

from functools import lru_cache

from rdmakit.plan.steps import Post, Program, Recv, Space

__all__ = ["exposed_receives", "flush_points"]


def exposed_receives(program: Program) -> frozenset[int]:
    """Return the messages that land where peers read. Pure."""
    return frozenset(
        index
        for index, step in enumerate(program.steps)
        if isinstance(step, Recv) and step.dst.space is Space.WINDOW
    )


@lru_cache(maxsize=256)
def flush_points(program: Program) -> frozenset[int]:
    """Return the posts before which a NIC's writes must be flushed. Pure.

    A post is one when a message into a window completes before it and no earlier flush lies
    between the two on every path: those behind a flushed post need none for the same message.
    """
    exposed = exposed_receives(program)
    points: set[int] = set()
    # For each step: the messages into the window that it follows and that are not flushed yet.
    open_: list[frozenset[int]] = []
    flushed: list[frozenset[int]] = []
    for index, step in enumerate(program.steps):
        before = program.after[index]
        done = frozenset().union(*(flushed[b] for b in before))
        mine = frozenset().union(*(open_[b] for b in before)) - done
        if index in exposed:
            mine |= {index}
        elif isinstance(step, Post) and mine:
            points.add(index)
            done, mine = done | mine, frozenset()
        open_.append(mine)
        flushed.append(done)
    return frozenset(points)
