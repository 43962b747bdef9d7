"""What a rank tells of itself: a child process could not know it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from rdmakit.bootstrap import MpiBootstrap, cuda_aware
from rdmakit.doctor.context import RankView, settings
from rdmakit.drivers.host import HostTree
from rdmakit.drivers.ucx_policy import decide
from rdmakit.drivers.ucx_probe import probe

__all__ = ["node_key", "own_view", "process_place"]


def own_view(rank: int, local_rank: int, policy: str = "auto") -> RankView:
    """Return this rank's view. Local, after MPI_Init; reads files for tens of milliseconds.

    Args:
        rank: of this process in COMM_WORLD.
        local_rank: as the launcher counts.
        policy: RDMAKIT_UCX.
    """
    mpi = MpiBootstrap.describe()
    found = probe()
    decision = decide(found, policy)
    files = [path for name, paths in found.mapped if name == "libucp" for path in paths]
    file = next(iter(files or decision.open[-1:]), "")
    facts = {
        "mpi": str(mpi["library"]),
        "mpi4py": str(mpi["mpi4py"]),
        "mpi_cuda": cuda_aware(),
        "ucx": f"{decision.version} {file}".strip() or "none",
        "ucx_why": decision.reason or decision.error,
    }
    return RankView(
        rank=rank,
        local_rank=local_rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        environ=settings(),
        facts={name: value for name, value in facts.items() if value},
    )


def node_key(node_id: str, tree: HostTree | None = None) -> str:
    """Return what is equal for ranks of one node only. Local.

    Two hosts can have one name, and containers of one host a boot id: each counts by itself, as
    limits, devices and settings may differ.

    Args:
        node_id: RDMAKIT_NODE_ID, in place of the boot id.
        tree: files of this machine.
    """
    tree = tree or HostTree()
    boot = (tree.read_text("/proc/sys/kernel/random/boot_id") or "").strip()
    return f"{node_id or boot}/{socket.gethostname()}"


def process_place() -> str:
    """Return what is equal for processes that can see each other by their numbers. Local."""
    try:
        space = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - not a path
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    return f"{boot}/{space}"
