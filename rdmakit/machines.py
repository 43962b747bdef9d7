"""The machines under a job's ranks: each looked at once, what every rank sees, known to all."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import msgspec

import rdmakit
from rdmakit.discovery.collect import Look, collect
from rdmakit.discovery.machine import find_out
from rdmakit.discovery.sysfs import read_sysfs
from rdmakit.drivers.host import HostTree, run
from rdmakit.drivers.nvml import ask_nvml, have_pynvml
from rdmakit.drivers.ucx_policy import decide
from rdmakit.drivers.ucx_probe import probe
from rdmakit.protocols import Bootstrap
from rdmakit.topology.assemble import assemble
from rdmakit.topology.facts import NvmlFacts, merge_nvml
from rdmakit.topology.model import Gpu, Machine
from rdmakit.topology.ranks import RankFacts
from rdmakit.topology.visible import VARIABLES, visible_gpus

__all__ = ["Job", "gather", "software"]


class _RankWords(msgspec.Struct, frozen=True):
    """What a rank tells all others of itself."""

    environ: dict[str, str]
    cpus: list[int]
    nvml: NvmlFacts | None
    """Where the launcher may hide GPUs from single ranks."""
    offered: list[str] | None = None


@dataclass(frozen=True)
class Job:
    """All machines; equal on all ranks."""

    machines: tuple[Machine, ...]
    ranks: tuple[tuple[RankFacts, ...], ...]
    """Ranks of each machine; the place is the local rank."""
    net_devices: tuple[str | None, ...]
    """UCX_NET_DEVICES of each rank; None where it is not set."""
    offered: tuple[tuple[str, ...] | None, ...] = ()
    """Network devices of each rank's UCX; None where it was not asked."""


def gather(
    bootstrap: Bootstrap,
    nodes: Sequence[Sequence[int]],
    host: str,
    facts: Mapping[str, str],
    directory: Path | None = None,
    *,
    glance: HostTree | None = None,
    offered: Sequence[str] | None = None,
    look: Look | None = None,
) -> Job:
    """Look at every machine of a job. Collective, blocking for seconds.

    The first rank of each node looks at the machine and starts commands by posix_spawn.

    Args:
        bootstrap: control plane of all ranks.
        nodes: ranks of each node, equal on all ranks.
        host: this machine's name.
        facts: versions to compare between nodes, beside those that are found here.
        directory: where the first rank of each node writes what it found, in a folder that has
            its host's name; None: nowhere.
        glance: read its files only: no commands, no versions; milliseconds. What fails is a note
            of the machine. NVML is asked under Slurm alone, which hides GPUs from ranks.
        offered: network devices of this process's UCX.
        look: with ``directory``: reads what else shall be kept there.
    """
    words = _RankWords(
        {name: os.environ[name] for name in (*VARIABLES, "UCX_NET_DEVICES") if name in os.environ},
        sorted(os.sched_getaffinity(0)),
        _own_view(),
        None if offered is None else list(offered),
    )
    told = [
        msgspec.json.decode(text, type=_RankWords)
        for text in bootstrap.allgather(msgspec.json.encode(words))
    ]
    mine = next(ranks for ranks in nodes if bootstrap.rank in ranks)
    machine: Machine | None = None
    if bootstrap.rank == mine[0]:
        views = [view for rank in mine if (view := told[rank].nvml) is not None]
        if glance is not None:
            machine = _glance(host, views, glance)
        else:
            machine = _look(host, views, {**software(), **facts}, directory, look)
    answers = [
        msgspec.json.decode(text, type=Machine | None)
        for text in bootstrap.allgather(msgspec.json.encode(machine))
    ]
    machines = [answers[ranks[0]] or Machine() for ranks in nodes]
    return Job(
        tuple(machines),
        tuple(
            tuple(_rank_facts(rank, told[rank], machine) for rank in ranks)
            for ranks, machine in zip(nodes, machines, strict=True)
        ),
        tuple(own.environ.get("UCX_NET_DEVICES") for own in told),
        tuple(None if own.offered is None else tuple(own.offered) for own in told),
    )


def _own_view() -> NvmlFacts | None:
    """Return the GPUs that this rank may see, under a scheduler that can hide some from it."""
    if "SLURM_JOB_ID" not in os.environ or not have_pynvml():
        return None
    if not HostTree().exists("/proc/driver/nvidia/version"):
        return None
    return ask_nvml(run)


def _look(
    host: str,
    views: Sequence[NvmlFacts],
    facts: Mapping[str, str],
    directory: Path | None,
    look: Look | None,
) -> Machine:
    nvml = merge_nvml(views) if views else None
    if directory is not None:
        found = collect(directory / host, software=facts, nvml=nvml, look=look)
    else:
        found = find_out(nvml=nvml)
    machine = found.machine
    return replace(machine, host=host, software={**machine.software, **facts})


def _glance(host: str, views: Sequence[NvmlFacts], tree: HostTree) -> Machine:
    try:
        machine = assemble(read_sysfs(tree), merge_nvml(views) if views else None)
    except Exception as exc:  # the others wait for an answer: the note is one
        return Machine(host, notes=(f"{host} cannot be read: {type(exc).__name__}: {exc}",))
    return replace(machine, host=host)


def _rank_facts(rank: int, words: _RankWords, machine: Machine) -> RankFacts:
    gpus: Sequence[Gpu] = machine.gpus
    if words.nvml is not None and words.nvml.gpus:
        own = {gpu.uuid for gpu in words.nvml.gpus}
        gpus = [gpu for gpu in machine.gpus if gpu.uuid in own]
    visible = visible_gpus(gpus, words.environ)
    return RankFacts(rank, visible.gpus, visible.devices, tuple(words.cpus))


def software() -> dict[str, str]:
    """Return versions of what this process would run with. Local; starts short commands."""
    found = {"rdmakit": rdmakit.__version__, "Python": platform.python_version()}
    found["UCX"] = decide(probe(), "auto").version or "none"
    for name in ("mpi4py", "numpy", "cupy-cuda12x", "cupy-cuda13x"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
