"""Calls of mpi4py's communicators that are not served: each says why, and what to take instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from rdmakit.errors import UnsupportedError

__all__ = ["REFUSED", "Refused"]

_EACH_ITS_TYPE = "it is for a derived type for each rank: take Alltoallv on arrays of one type"
_NEIGHBORS = "there are no topologies of neighbors here: take Alltoallv with counts of 0, or Isend"
_PERSISTENT = "take comm.bind(Kind....), whose operation has Start, Test and Wait"
_MODES = "sends have one mode here: take Send or Isend, which may return before the receive"
_MATCHED = "take Probe, then Recv with its source and tag"
_TOPOLOGY = "there are no topologies here: take Split, or that call of comm.mpi"
_OBJECTS = "Python objects are not moved here: take an array, or the same call of comm.mpi"

_PERSISTENT_CALLS = (
    "Allgather", "Allgatherv", "Allreduce", "Alltoall", "Alltoallv", "Alltoallw", "Barrier",
    "Bcast", "Exscan", "Gather", "Gatherv", "Reduce", "Reduce_scatter", "Reduce_scatter_block",
    "Scan", "Scatter", "Scatterv",
)  # fmt: skip
_NEIGHBOR_CALLS = ("allgather", "allgatherv", "alltoall", "alltoallv", "alltoallw")
REFUSED = {
    **dict.fromkeys(("Alltoallw", "Ialltoallw"), _EACH_ITS_TYPE),
    **{f"Neighbor_{name}": _NEIGHBORS for name in _NEIGHBOR_CALLS},
    **{f"Ineighbor_{name}": _NEIGHBORS for name in _NEIGHBOR_CALLS},
    **{f"{name}_init": _PERSISTENT for name in _PERSISTENT_CALLS},
    **dict.fromkeys(
        ("allgather", "allreduce", "alltoall", "bcast", "exscan", "gather", "reduce", "scan",
         "scatter", "send", "isend", "bsend", "ibsend", "ssend", "issend", "recv", "irecv",
         "sendrecv", "probe", "iprobe", "mprobe", "improbe"),
        _OBJECTS,
    ),
    **{
        name: _MODES
        for mode in "bsr"
        for name in (f"{mode.upper()}send", f"I{mode}send", f"{mode.upper()}send_init")
    },
    **dict.fromkeys(("Mprobe", "Improbe"), _MATCHED),
    **dict.fromkeys(("Isendrecv", "Isendrecv_replace"), "take Isend and Irecv"),
    **dict.fromkeys(("Psend_init", "Precv_init"), "take Send_init and Recv_init"),
    **dict.fromkeys(("Clone", "Idup", "Dup_with_info", "Idup_with_info"), "take Dup"),
    "Split_type": "take comm.node, the ranks of this node, or Split",
    **dict.fromkeys(
        ("Create_cart", "Create_graph", "Create_dist_graph", "Create_dist_graph_adjacent",
         "Get_topology", "Cart_map", "Graph_map"),
        _TOPOLOGY,
    ),
}  # fmt: skip
"""The reason, by name."""


class Refused:
    """Has a method of each of these names, which raises UnsupportedError. Local."""


def _refusing(name: str, reason: str) -> Callable[..., NoReturn]:
    def refuse(self: object, *_: object, **__: object) -> NoReturn:
        raise UnsupportedError(f"{name} is not served: {reason}")

    refuse.__name__, refuse.__doc__ = name, f"Not served: {reason}."
    return refuse


for _name, _reason in REFUSED.items():
    setattr(Refused, _name, _refusing(_name, _reason))
