"""The nodes of a running job: each looked at once, what every rank sees, gathered on all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from rdmakit.bootstrap import MpiBootstrap
from rdmakit.config import Config
from rdmakit.discovery.collect import collect
from rdmakit.discovery.machine import find_out
from rdmakit.drivers.host import HostTree, run
from rdmakit.drivers.nvml import ask_nvml, have_pynvml
from rdmakit.nodes import find_nodes
from rdmakit.process.phase import current
from rdmakit.process.watchdog import abort_on_exception, install
from rdmakit.survey.local import local_software
from rdmakit.topology.facts import NvmlFacts, merge_nvml
from rdmakit.topology.model import Gpu, Machine
from rdmakit.topology.placement import RankFacts
from rdmakit.topology.visible import VARIABLES, visible_gpus

__all__ = ["Job", "gather"]


class _RankWords(msgspec.Struct, frozen=True):
    """What a rank tells all others of itself."""

    environ: dict[str, str]
    cpus: list[int]
    nvml: NvmlFacts | None
    """Where the launcher may hide GPUs from single ranks."""


@dataclass(frozen=True)
class Job:
    """All nodes; equal on all ranks."""

    rank: int
    machines: tuple[Machine, ...]
    ranks: tuple[tuple[RankFacts, ...], ...]
    net_devices: tuple[str | None, ...]
    """UCX_NET_DEVICES of each rank."""


def gather(config: Config, directory: Path | None = None) -> Job:
    """Look at every node of the job. Collective over COMM_WORLD, blocking.

    The first rank of each node looks at the machine; with ``directory`` it also writes what it
    found to a folder there that has its host's name.
    """
    first = MpiBootstrap(duplicate=False)
    install(first.rank, first.size, first.host, first.abort, config)
    abort_on_exception(first.rank, first.host, first.abort)
    with current.during("topo", timeout=config.timeout):
        bootstrap = MpiBootstrap()
        nodes = find_nodes(bootstrap, config.chosen(ranks_per_node=0)).layout.nodes
        words = _RankWords(
            {
                name: os.environ[name]
                for name in (*VARIABLES, "UCX_NET_DEVICES")
                if name in os.environ
            },
            sorted(os.sched_getaffinity(0)),
            _own_view(),
        )
        told = [
            msgspec.json.decode(text, type=_RankWords)
            for text in bootstrap.allgather(msgspec.json.encode(words))
        ]
        mine = next(index for index, ranks in enumerate(nodes) if bootstrap.rank in ranks)
        machine: Machine | None = None
        if bootstrap.rank == nodes[mine][0]:
            views = [told[rank].nvml for rank in nodes[mine]]
            machine = _look(bootstrap.host, [view for view in views if view], directory)
        answers = [
            msgspec.json.decode(text, type=Machine | None)
            for text in bootstrap.allgather(msgspec.json.encode(machine))
        ]
        bootstrap.free()
    machines = [answer for ranks in nodes if (answer := answers[ranks[0]]) is not None]
    return Job(
        first.rank,
        tuple(machines),
        tuple(
            tuple(_rank_facts(rank, told[rank], machine) for rank in ranks)
            for ranks, machine in zip(nodes, machines, strict=True)
        ),
        tuple(own.environ.get("UCX_NET_DEVICES") for own in told),
    )


def _own_view() -> NvmlFacts | None:
    """Return the GPUs that this rank may see, under a scheduler that can hide some from it."""
    if "SLURM_JOB_ID" not in os.environ or not have_pynvml():
        return None
    if not HostTree().exists("/proc/driver/nvidia/version"):
        return None
    return ask_nvml(run)


def _look(host: str, views: Sequence[NvmlFacts], directory: Path | None) -> Machine:
    software = local_software()
    software["MPI"] = str(MpiBootstrap.describe()["library"]).partition(",")[0]
    nvml = merge_nvml(views) if views else None
    if directory is not None:
        found = collect(directory / host, software=software, nvml=nvml)
    else:
        found = find_out(nvml=nvml)
    machine = found.machine
    return replace(machine, host=host, software={**machine.software, **software})


def _rank_facts(rank: int, words: _RankWords, machine: Machine) -> RankFacts:
    gpus: Sequence[Gpu] = machine.gpus
    if words.nvml is not None and words.nvml.gpus:
        own = {gpu.uuid for gpu in words.nvml.gpus}
        gpus = [gpu for gpu in machine.gpus if gpu.uuid in own]
    visible = visible_gpus(gpus, words.environ)
    return RankFacts(rank, visible.gpus, visible.devices, tuple(words.cpus))
