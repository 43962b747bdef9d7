"""What every algorithm sends between nodes, by formula: the simulator is held to it."""

from __future__ import annotations

from collections.abc import Callable

from rdmakit.plan.shape import Call, Kind

__all__ = ["bytes_out_of_node", "elements_out"]

_FLAT_COPIES = (Kind.ALLGATHER, Kind.BROADCAST)


def elements_out(algorithm: str, call: Call) -> list[int] | None:
    """Return the elements that each node sends to others, for long vectors.

    Exact where blocks are moved and in chains; up to one element for each shard and chunk in
    reductions. None for schedules of few rounds, which send more to save time (recursive
    doubling: log2(N) * S).
    """
    nodes = range(len(call.layout.nodes))
    if len(nodes) == 1:
        return [0]
    if algorithm == "tree" or (call.few_rounds and algorithm in ("hierarchical", "one-shot")):
        return None
    out = _ring(call) if algorithm == "ring" else _by_node(algorithm, call)
    return [out(node) for node in nodes]


def bytes_out_of_node(algorithm: str, call: Call, itemsize: int) -> int | None:
    """Return the bytes that the busiest node sends to others; see :func:`elements_out`."""
    out = elements_out(algorithm, call)
    return None if out is None else max(out) * itemsize


def _by_node(algorithm: str, call: Call) -> Callable[[int], int]:
    layout, kind = call.layout, call.kind
    nodes, home = layout.nodes, layout.node_of(call.root)
    blocks = call.blocks if kind is not Kind.ALLTOALL else ()

    def held(node: int) -> int:
        return sum(blocks[q] for q in nodes[node])

    def abroad(node: int) -> int:
        return sum(blocks) - held(node)

    def copies(node: int) -> int:
        """Return how often a block leaves its node that all want."""
        return layout.size - len(nodes[node]) if algorithm == "flat" else len(nodes) - 1

    last = (home - 1) % len(nodes)  # of the chain from the root's node on
    return {
        Kind.ALLREDUCE: lambda node: 2 * call.count * (len(nodes) - 1) // len(nodes),
        Kind.REDUCE_SCATTER: abroad,
        Kind.ALLGATHER: lambda node: held(node) * copies(node),
        Kind.REDUCE: lambda node: call.count * (node != home),
        Kind.BROADCAST: lambda node: (
            call.count * copies(node) * (node == home)
            if algorithm == "flat"
            else call.count * (node != last)
        ),
        Kind.GATHER: lambda node: held(node) * (node != home),
        Kind.SCATTER: lambda node: abroad(node) * (node == home),
        Kind.ALLTOALL: lambda node: sum(
            call.elements(s, d) for s in nodes[node] for d in range(layout.size)
            if layout.node_of(d) != node
        ),
        Kind.SCAN: lambda node: _crossings(call, node),
        Kind.EXSCAN: lambda node: _crossings(call, node),
    }[kind]  # fmt: skip


def _crossings(call: Call, node: int) -> int:
    """Return S for each rank of ``node`` whose next rank is on another node."""
    layout = call.layout
    ends = (q for q in layout.nodes[node] if q + 1 < layout.size)
    return call.count * sum(layout.node_of(q + 1) != node for q in ends)


def _ring(call: Call) -> Callable[[int], int]:
    """One link of the ring leaves each node."""
    layout, n = call.layout, call.layout.size
    order = layout.rank_order()
    last = {node: ranks[-1] for node, ranks in enumerate(layout.nodes)}

    def behind(node: int) -> int:
        return order[(order.index(last[node]) + 1) % n]

    def block(rank: int) -> int:
        return call.blocks[rank]

    total = call.longest
    return {
        Kind.ALLREDUCE: lambda node: 2 * total * (n - 1) // n,
        # Each block passes every link but one: that into its own rank, or out of it.
        Kind.ALLGATHER: lambda node: total - block(behind(node)),
        Kind.REDUCE_SCATTER: lambda node: total - block(last[node]),
        Kind.BROADCAST: lambda node: total * (behind(node) != call.root),
        Kind.REDUCE: lambda node: total * (last[node] != call.root),
        Kind.SCAN: lambda node: _crossings(call, node),
        Kind.EXSCAN: lambda node: _crossings(call, node),
    }[call.kind]
