"""What this process alone knows: its software, and ranks to propose where no job runs."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata

import rdmakit
from rdmakit.topology.model import Machine
from rdmakit.topology.placement import RankFacts, ranks_of
from rdmakit.topology.visible import visible_gpus

__all__ = ["local_ranks", "local_software"]


def local_ranks(
    machine: Machine, count: int | None, environ: Mapping[str, str] | None = None
) -> tuple[RankFacts, ...]:
    """Return ranks to propose a place for on this machine: one for each GPU that is visible."""
    env = os.environ if environ is None else environ
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    if "CUDA_VISIBLE_DEVICES" not in env:
        return tuple(replace(facts, cpus=cpus) for facts in ranks_of(machine, count))
    visible = visible_gpus(machine.gpus, env)
    number = count or len(visible.gpus or ()) or 1
    return tuple(RankFacts(rank, visible.gpus, visible.devices, cpus) for rank in range(number))


def local_software() -> dict[str, str]:
    """Return versions of what this process would run with. Starts a short command at most."""
    from rdmakit.drivers.ucx_policy import decide
    from rdmakit.drivers.ucx_probe import probe

    found = {"rdmakit": rdmakit.__version__, "Python": platform.python_version()}
    decision = decide(probe(), "auto")
    found["UCX"] = decision.version or "none"
    for name in ("mpi4py", "numpy", "cupy-cuda12x", "cupy-cuda13x"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
