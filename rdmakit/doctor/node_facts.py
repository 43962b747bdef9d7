"""What a node tells the others of a job of itself, for them to be compared."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from rdmakit.doctor.checks.net import tcp_choice
from rdmakit.doctor.context import Context
from rdmakit.doctor.software import software
from rdmakit.topology.model import Machine

__all__ = ["NodeFacts", "node_facts"]

_OWN = re.compile(
    r"RDMAKIT_(NODE_ID|CLUSTER|TEST_\w+)|"
    r"OMPI_(COMM_WORLD|UNIVERSE|FILE|FIRST|NUM|APP|ARGV|COMMAND|WORLD)\w*|"
    r"OMPI_MCA_(PREFIXES|cpu_type|num_procs|(ess|orte|prte|pmix|plm|initial|hwloc_base)\w*)|"
    r"UCX_(NET_DEVICES|LOG_FILE|STATS_DEST)|NCCL_(DEBUG_FILE|IB_HCA|HOSTID)|I_MPI_(INFO|DEBUG)\w*"
)
"""Settings that a launcher or a user gives each rank its own value of."""
_COMPARED = re.compile(
    r"(UCX|NCCL|RDMAKIT|MPICH|MPIR_CVAR|FI|I_MPI|CUPY)_\w+|OMPI_MCA_\w+|CUDA_DEVICE_ORDER|"
    r"LD_PRELOAD|LD_LIBRARY_PATH"
)


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a node tells the others of itself."""

    host: str
    boot_id: str = ""
    """Tells hosts apart, whatever they are called."""
    machine_id: str = ""
    kernel: str = ""
    addresses: dict[str, str] = {}
    """IPv4 address by interface that is up, loopback left out."""
    prefixes: dict[str, int] = {}
    """Length of their subnets' prefixes."""
    mtus: dict[str, int] = {}
    tcp: tuple[str, ...] = ()
    """Interfaces that UCX's tcp would use between hosts, its first choice first."""
    clock: float | None = None
    """Seconds that this node's clock is ahead of the first node's; None: not measured."""
    versions: dict[str, str] = {}
    untold: tuple[str, ...] = ()
    """Of UCX, MPI and Python (with its packages): whose release could not be found out."""
    settings: dict[str, str] = {}
    """Of the node's first rank."""
    apart: dict[str, dict[str, str]] = {}
    """Settings of other ranks of the node that differ: by name, then by rank."""
    machine: Machine = Machine()


def node_facts(context: Context) -> NodeFacts:
    """Return what this node tells the others. Local; looks at software as its checks do."""
    own = software(context)
    up = [one for one in own.interfaces if one.up and one.address and not one.loopback]
    environ = _settings(context.environ)
    apart: dict[str, dict[str, str]] = {}
    for view in context.ranks:
        theirs = _settings(view.environ)
        for name in sorted({*theirs, *environ}):
            if theirs.get(name, "") != environ.get(name, ""):
                apart.setdefault(name, {})[str(view.rank)] = theirs.get(name, "not set")
    return NodeFacts(
        host=context.read("/proc/sys/kernel/hostname") or context.machine.host,
        boot_id=context.read("/proc/sys/kernel/random/boot_id") or "",
        machine_id=context.read("/etc/machine-id") or "",
        kernel=context.read("/proc/sys/kernel/osrelease") or "",
        addresses={one.name: one.address for one in up},
        prefixes={one.name: one.prefix for one in up},
        mtus={one.name: one.mtu for one in up if one.mtu},
        tcp=tuple(one.name for one in tcp_choice(context)),
        versions=_versions(context),
        untold=_untold(context),
        settings=environ,
        apart=apart,
        machine=context.machine,
    )


def _settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what ranks should have in common."""
    found = {
        name: value
        for name, value in environ.items()
        if _COMPARED.fullmatch(name) and not _OWN.fullmatch(name)
    }
    if "LD_LIBRARY_PATH" in found:
        # Launchers put their own folder in front, on some nodes once more than on others.
        parts = dict.fromkeys(filter(None, found["LD_LIBRARY_PATH"].split(":")))
        found["LD_LIBRARY_PATH"] = ":".join(parts)
    return found


def _untold(context: Context) -> tuple[str, ...]:
    own = software(context)
    mpi = own.mpi
    silent = {
        "UCX": own.ucx is not None and own.ucx.silent,
        # A library that is there tells its release, if it answers in time.
        "MPI": mpi is not None and (mpi.silent or bool(mpi.path and not mpi.library)),
        "Python": own.python is not None and bool(own.python.problem),
    }
    return tuple(name for name, unknown in silent.items() if unknown)


def _versions(context: Context) -> dict[str, str]:
    own = software(context)
    found = {}
    if own.ucx_version:
        found["UCX"] = own.ucx_version
    if own.mpi is not None and own.mpi.library:
        found["MPI"] = " ".join(own.mpi.library.partition(", package")[0].split())
    if own.python is not None and own.python.python:
        found["Python"] = own.python.python
        found |= own.python.packages
    return found
