"""Which network devices each rank's UCX takes: looks at the machines only where RDMA is there."""

from __future__ import annotations

from collections.abc import Sequence

from rdmakit.config import Config
from rdmakit.drivers.host import HostTree
from rdmakit.errors import SetupError, TransportError
from rdmakit.inter.ucx import offered_devices
from rdmakit.protocols import Bootstrap

__all__ = ["choose_nics", "has_active_port"]

_CLASS = "/sys/class/infiniband"


def has_active_port(tree: HostTree) -> bool:
    """Return whether any RDMA port of this machine is active. Local."""
    return any(
        "ACTIVE" in (tree.read_text(f"{_CLASS}/{device}/ports/{port}/state") or "")
        for device in tree.listdir(_CLASS)
        for port in tree.listdir(f"{_CLASS}/{device}/ports")
    )


def choose_nics(
    bootstrap: Bootstrap,
    config: Config,
    host: str,
    machines: Sequence[Sequence[int]],
    *,
    virtual: bool,
    tree: HostTree | None = None,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return NET_DEVICES of each rank, and notes; equal on all ranks. Collective, blocking.

    Where no rank's machine has an active RDMA port it is one exchange of a byte. What cannot be
    found out is a note, and UCX chooses: then there are no devices.

    Args:
        bootstrap: control plane of the job.
        config: ``nics`` says whether, and from which ports.
        host: this machine's name.
        machines: ranks of each machine; virtual nodes are not machines.
        virtual: nodes are parts of one host.
        tree: the machine.
    """
    if config.nics == "off" or config.ucx == "none":
        return (), ()
    tree = tree or HostTree()
    if b"1" not in bootstrap.allgather(b"1" if has_active_port(tree) else b"0"):
        if not config.named_nics:
            return (), ()
        return (), (f"RDMAKIT_NICS={config.nics}: no RDMA port is active on any node",)
    # Here, since a machine without RDMA should not wait for them.
    from rdmakit.machines import gather
    from rdmakit.topology.confine import confine
    from rdmakit.topology.fabric import classify
    from rdmakit.topology.ranks import Node

    try:
        offered: tuple[str, ...] | None = offered_devices(config.ucx, virtual=virtual)
    except (SetupError, TransportError):
        offered = None  # the channel says why, when it is made
    job = gather(bootstrap, machines, host, {}, glance=tree, offered=offered)
    try:
        nodes = [
            Node(machine, classify(machine, config.named_nics), ranks)
            for machine, ranks in zip(job.machines, job.ranks, strict=True)
        ]
        found = confine(nodes, job.net_devices, job.offered)
    except Exception as exc:  # of the same facts, so on every rank alike
        text = f"network devices: UCX chooses; {type(exc).__name__} in the choice: {exc}"
        return (), (text,)
    return found.devices, found.notes
