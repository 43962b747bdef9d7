"""Whether the ranks of each node really address each other's GPU memory: a small sum, tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from rdmakit.doctor.context import Context
from rdmakit.doctor.model import Check, Finding, Status
from rdmakit.errors import RdmaKitError

if TYPE_CHECKING:
    from rdmakit.communicator import Communicator

__all__ = ["CUDA_IPC", "try_ipc"]

_COUNT = 1024
"""Elements: a few packets of every kernel."""


def _between(_: Context) -> Iterator[Finding]:
    yield CUDA_IPC.finding(Status.SKIPPED, "tried between ranks, not on one")


CUDA_IPC = Check(
    "ipc.cuda",
    "CUDA IPC between ranks",
    "Without it GPU arrays go through host memory inside the node, many times slower.",
    _between,
    needs=("gpu", "live", "job"),
)


class _Said(msgspec.Struct, frozen=True):
    """What a rank saw."""

    host: str
    ranks: int
    """Of its node."""
    way: str
    wrong: int
    notes: list[str]
    problem: str


def try_ipc(
    comm: Communicator, make: Callable[[int, float], Any], read: Callable[[Any], Any], host: str
) -> list[Finding]:
    """Add an array of each rank up inside its node. Collective over ``comm``, blocking.

    Args:
        comm: whose nodes they are.
        make: returns an array of so many float32 of one value, on this rank's GPU.
        read: returns what is in it, when all work on it is done.
        host: this rank's.

    Returns:
        A finding for each node of several ranks; equal on all ranks.
    """
    node = comm.node
    wrong, problem = 0, ""
    try:
        own, total = make(_COUNT, node.rank + 1), make(_COUNT, 0)
        node.Allreduce(own, total)
        wrong = int(np.sum(np.asarray(read(total)) != node.size * (node.size + 1) // 2))
    except RdmaKitError as exc:
        problem = f"{type(exc).__name__}: {exc}"
    said = _Said(host, node.size, node.device_way, wrong, list(comm.notes), problem)
    told = [
        msgspec.json.decode(text, type=_Said)
        for text in comm.bootstrap.allgather(msgspec.json.encode(said))
    ]
    firsts = [ranks[0] for ranks in comm.layout.nodes if len(ranks) > 1]
    if not firsts:
        return [CUDA_IPC.finding(Status.SKIPPED, "one rank on each node")]
    return [
        _judged([told[rank] for rank in ranks]) for ranks in comm.layout.nodes if len(ranks) > 1
    ]


def _judged(node: list[_Said]) -> Finding:
    first = node[0]
    about = f"{first.ranks} ranks of {first.host}"
    problem = next((one.problem for one in node if one.problem), "")
    wrong = sum(one.wrong for one in node)
    if problem or wrong:
        return CUDA_IPC.finding(
            Status.FAIL,
            f"{about}: {problem or f'{wrong} elements of a sum over peer memory are wrong'}",
            subject=first.host,
            expected="the sum of all ranks",
            cure="nvidia-smi topo -p2p rw and dmesg | grep -i -e xid -e iommu on that host; "
            "CUDA_VISIBLE_DEVICES with all GPUs for every rank",
            urgency=12,
        )
    if first.way == "device":
        return CUDA_IPC.finding(
            Status.OK, f"{about} address each other's GPU memory", subject=first.host
        )
    why = next((n for one in node for n in one.notes if "host memory" in n), first.way)
    return CUDA_IPC.finding(
        Status.FAIL,
        f"{about} do not: {why}",
        subject=first.host,
        expected="GPU memory of all ranks of a node mapped by all of them",
        cure="let every rank see all GPUs of the node (srun --gpu-bind=none, the same "
        "CUDA_VISIBLE_DEVICES), and one IPC and PID namespace for all (docker run --ipc=host "
        "--pid=host)",
        urgency=12,
    )
