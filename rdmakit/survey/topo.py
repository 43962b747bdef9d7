"""``rdmakit topo``: looks at this machine, at all nodes of a job, or at collected directories."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import rdmakit
from rdmakit.config import Config
from rdmakit.discovery.collect import collect, read_machines
from rdmakit.discovery.machine import find_out
from rdmakit.errors import InvalidArgument
from rdmakit.pretty import pretty_json
from rdmakit.process.launcher import launcher_of
from rdmakit.report.topo_schema import topo_result
from rdmakit.report.topo_svg import draw
from rdmakit.report.topo_text import print_lines, print_topo
from rdmakit.topology.explain import explain
from rdmakit.topology.model import Machine
from rdmakit.topology.netdevices import NetDevices, choose_net_devices
from rdmakit.topology.ranks import RankFacts, ranks_of
from rdmakit.topology.survey import Survey, make_survey
from rdmakit.topology.visible import visible_gpus
from rdmakit.topology.words import LEGEND, TECHNIQUES

__all__ = ["TopoOptions", "run_topo"]


@dataclass(frozen=True)
class TopoOptions:
    """What was asked for."""

    source: Path | None = None
    """Directory (or text file) of another machine; None: this one."""
    collect: Path | None = None
    graph: Path | None = None
    explain: tuple[str, str] | None = None
    json: bool = False
    nics: tuple[str, ...] = ()
    """Compute ports that the user names."""
    ranks_per_node: int | None = None

    def __post_init__(self) -> None:
        if self.source is not None and self.collect is not None:
            raise InvalidArgument("--from reads and --collect writes: give one of them")
        if self.graph is not None and self.graph.suffix != ".svg":
            raise InvalidArgument(f"--graph {self.graph}: the name must end in .svg")
        if self.ranks_per_node is not None and not 1 <= self.ranks_per_node <= 4096:
            raise InvalidArgument(f"--ranks-per-node {self.ranks_per_node}: 1 to 4096")


def run_topo(options: TopoOptions, config: Config) -> int:
    """Run and return the exit status. Collective under a launcher, else local; blocking.

    Raises:
        InvalidArgument: there is nothing to read, or a file cannot be written.
    """
    launcher = launcher_of(os.environ)
    user: dict[int, str | None] = {}
    if options.source is not None:
        if launcher.rank:
            return 0
        found = read_machines(options.source)
        survey = make_survey(
            [one.machine for one in found],
            texts=[one.texts for one in found],
            chosen=options.nics,
            ranks_per_node=options.ranks_per_node,
        )
        title = f"rdmakit {rdmakit.__version__} topo: {options.source}"
    elif launcher.size > 1:
        from rdmakit.survey.job import look  # MPI, which one machine alone does not need

        first, job = look(config, options.collect)
        if not first:
            return 0
        survey = make_survey(job.machines, job.ranks, chosen=options.nics or config.named_nics)
        user = dict(enumerate(job.net_devices))
        title = (
            f"rdmakit {rdmakit.__version__} topo: {sum(map(len, job.ranks))} ranks on "
            f"{len(job.machines)} node(s)"
        )
    else:
        survey, user = _alone(options, options.nics or config.named_nics)
        title = f"rdmakit {rdmakit.__version__} topo"
    _show(options, survey, _net_devices(survey, user), title)
    return 0


def _alone(options: TopoOptions, chosen: Sequence[str]) -> tuple[Survey, dict[int, str | None]]:
    """Look at this machine without MPI."""
    if options.collect is not None:
        from rdmakit.doctor.collecting import read_for_checks
        from rdmakit.machines import software

        found = collect(options.collect, software=software(), look=read_for_checks)
        print(f"written: {options.collect}", file=sys.stderr)
    else:
        found = find_out()
    machine = found.machine
    ranks = _local_ranks(machine, options.ranks_per_node)
    survey = make_survey([machine], [ranks], [found.texts], chosen=chosen)
    return survey, dict.fromkeys(range(len(ranks)), os.environ.get("UCX_NET_DEVICES"))


def _local_ranks(machine: Machine, count: int | None) -> tuple[RankFacts, ...]:
    """Return ranks to propose a place for: one for each GPU that is visible here."""
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        return tuple(replace(facts, cpus=cpus) for facts in ranks_of(machine, count))
    visible = visible_gpus(machine.gpus, os.environ)
    number = count or len(visible.gpus or ()) or 1
    return tuple(RankFacts(rank, visible.gpus, visible.devices, cpus) for rank in range(number))


def _net_devices(survey: Survey, user: dict[int, str | None]) -> dict[int, NetDevices]:
    found = {}
    for place in survey.placement.ranks:
        node = survey.nodes[place.node]
        found[place.rank] = choose_net_devices(
            place, node.machine, node.fabric, user.get(place.rank)
        )
    return found


def _show(options: TopoOptions, survey: Survey, devices: dict[int, NetDevices], title: str) -> None:
    if options.graph is not None:
        try:
            options.graph.write_text(draw(survey), encoding="utf-8")
        except OSError as exc:
            raise InvalidArgument(f"--graph {options.graph}: cannot be written: {exc}") from exc
    if options.json:
        sys.stdout.write(pretty_json(topo_result(survey, devices)))
        return
    if options.explain is not None:
        print_lines(_explained(survey, options.explain))
        return
    print_topo(survey, devices, title=title)
    if options.graph is not None:
        print_lines([f"written: {options.graph}"])


def _explained(survey: Survey, pair: Sequence[str]) -> list[str]:
    """Explain a pair on one node of each group that looks alike."""
    lines: list[str] = []
    for group in survey.alike:
        node = survey.nodes[group[0]]
        if len(survey.alike) > 1:
            lines.append(f"{', '.join(survey.names[member] for member in group[:6])}:")
        lines += explain(node.machine, node.fabric, pair[0], pair[1])
    lines += ["", "the words, nearest first:"]
    lines += [f"  {text}" for text in LEGEND.values()]
    return lines + [f"  {text}" for text in TECHNIQUES]
