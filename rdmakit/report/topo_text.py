"""``rdmakit topo`` for people: one block for nodes that look alike, then ranks and differences."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rdmakit.report.terminal import on_terminal
from rdmakit.topology.cpulist import format_cpus
from rdmakit.topology.model import Machine, Nic, Port
from rdmakit.topology.netdevices import NetDevices
from rdmakit.topology.parsers.gids import choose_gid
from rdmakit.topology.placement import RankPlace
from rdmakit.topology.survey import Survey, SurveyNode
from rdmakit.topology.words import LEGEND, TECHNIQUES, relation_of

__all__ = ["print_lines", "print_topo"]

_WIDE = 400
"""Columns: tables are as wide as they need, wherever the output goes."""
_Say = Callable[..., None]
_COLOURS = {"NV": "green", "PIX": "green", "PXB": "green", "PHB": "yellow", "NODE": "yellow"}


def _console() -> Console:
    watched = on_terminal()
    return Console(file=sys.stdout, highlight=False, width=_WIDE, force_terminal=watched)


def _table(*columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", no_wrap=True)
    return table


def _show(console: Console, table: Table) -> None:
    """Print a table without the blanks that fill its last column."""
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        console.file.write(line.rstrip() + "\n")


def print_lines(lines: Iterable[str]) -> None:
    """Print lines as they are."""
    console = _console()
    for line in lines:
        console.print(Text(line), soft_wrap=True)


def print_topo(
    survey: Survey, net_devices: dict[int, NetDevices] | None = None, *, title: str = ""
) -> None:
    """Print everything to standard output; used by one rank only."""
    console = _console()

    def say(line: str = "", style: str = "") -> None:
        console.print(Text(line, style=style), soft_wrap=True)

    names = survey.names
    if title:
        say(title)
    for group in survey.alike:
        node = survey.nodes[group[0]]
        say()
        say(_heading(survey, group, names), "bold")
        _node(console, say, node)
    if any(node.machine.gpus or node.machine.nics for node in survey.nodes):
        say()
        _legend(say, survey)
    say()
    _ranks(console, say, survey, names)
    for rank in sorted(net_devices or {}):
        for warning in (net_devices or {})[rank].warnings:
            say(f"  warning: {warning}", "yellow")
    for note in survey.placement.notes:
        say(f"  note: {note}")
    if len(survey.nodes) > 1:
        say()
        _differences(say, survey, names)


def _heading(survey: Survey, group: Sequence[int], names: Sequence[str]) -> str:
    some = ", ".join(names[node] for node in group[:8])
    some += f" and {len(group) - 8} more" if len(group) > 8 else ""
    total = len(survey.nodes)
    if total == 1:
        return some
    if len(group) == total:
        return f"{some}: all {total} nodes look alike"
    if group == survey.alike[0] and len(group) > 1:
        return f"{some}: {len(group)} of {total} nodes look alike"
    return f"{some}: looks different from the others"


def _node(console: Console, say: _Say, node: SurveyNode) -> None:
    machine = node.machine
    software = ", ".join(f"{name} {value}" for name, value in machine.software.items())
    sources = ", ".join(machine.sources) or "nothing"
    say(f"  from {sources}" + (f"; {software}" if software else ""))
    for cpu in _cpu_lines(machine):
        say(f"  {cpu}")
    if not machine.gpus and not machine.nics:
        say("  no GPU and no RDMA device here: host memory inside the node, TCP between nodes")
    if machine.matrix.names:
        say()
        _show(console, _matrix(machine))
    if machine.gpus:
        say()
        _show(console, _gpus(machine))
        for gpu in machine.gpus:
            for mig in gpu.mig:
                say(f"    {gpu.label} MIG {mig.profile} {mig.uuid}")
    if machine.nics:
        say()
        _show(console, _ports(node))
    say(f"  compute fabric: {node.fabric.verdict}")
    _pcie(say, node)
    _texts(say, node)
    for note in machine.notes:
        say(f"  note: {note}", "yellow")


def _pcie(say: _Say, node: SurveyNode) -> None:
    """Say what is wrong on the way between GPUs and NICs, each thing once."""
    reasons = [reason for check in node.paths for reason in check.reasons]
    found = list(dict.fromkeys([*reasons, *node.remarks]))
    idle = [reason for reason in found if reason.startswith("INFO")]
    hidden = [check for check in node.paths if check.acs == "unknown"]
    if len(idle) > 1:
        say(f"  INFO: {len(idle)} links are slower now than they can be: idle GPUs do that; look")
        say("  again under load")
        found = [reason for reason in found if reason not in idle]
    if hidden:
        say(
            f"  UNKNOWN: access control (ACS) on {len(hidden)} GPU-NIC paths cannot be read "
            "without root; that does not mean that it is off"
        )
        found = [reason for reason in found if not reason.startswith("UNKNOWN")]
    for reason in found:
        say(f"  {reason}", "yellow" if not reason.startswith("INFO") else "")
    if node.paths and all(check.verdict == "PASS" for check in node.paths):
        say(f"  PCIe: {len(node.paths)} GPU-NIC paths below a common switch, all good")


def _texts(say: _Say, node: SurveyNode) -> None:
    texts = node.texts
    ucx = texts.ucx
    if any("ucx" in kinds for kinds in texts.kinds.values()):
        parts = [f"UCX {ucx.version}"] if ucx.version else ["UCX"]
        parts += [f"transports {', '.join(ucx.transports)}"] if ucx.transports else []
        parts += [f"{ucx.rails} RDMA port(s)"] if ucx.rails else []
        say("  " + "; ".join(parts))
        if ucx.verdict:
            say(f"  {ucx.verdict}", "yellow" if ucx.gpudirect_rdma is False else "")
    for finding in texts.log:
        say(f"  UCX log, line {finding.line}: {finding.problem}", "yellow")
        say(f"    cure: {finding.fix}")
    for unread in texts.unread:
        say(f"  not understood: {unread}")


def _cpu_lines(machine: Machine) -> Iterable[str]:
    nodes = [node for node in machine.numa_nodes if node.cpus]
    if nodes:
        threads = max((len(core) for core in machine.siblings), default=1)
        cpus = sum(len(node.cpus) for node in nodes)
        yield (
            f"{cpus} CPUs ({threads} per core) in {len(nodes)} NUMA node(s): "
            + "; ".join(f"{node.index}: {format_cpus(node.cpus)}" for node in nodes)
        )
    if machine.virtual:
        yield "virtual machine"


def _matrix(machine: Machine) -> Table:
    real = {nic.label: nic.name for nic in machine.nics if nic.name and nic.name != nic.label}
    table = _table("", *machine.matrix.names)
    for name in machine.matrix.names:
        cells: list[Text] = []
        for other in machine.matrix.names:
            cell = machine.matrix.cell(name, other) if name != other else "X"
            relation = relation_of(cell)
            style = _COLOURS.get(relation.path.name, "") if relation is not None else ""
            cells.append(Text(cell or "?", style=style))
        title = f"{name} = {real[name]}" if name in real else name
        table.add_row(title, *cells)
    return table


def _gpus(machine: Machine) -> Table:
    table = _table(
        "GPU", "model", "PCI", "NUMA", "CPUs", "PCIe", "NVLinks", "nearest NICs", right=("NUMA",)
    )
    real = {nic.label: nic.name or nic.label for nic in machine.nics}
    for gpu in machine.gpus:
        path, nics = machine.nearest_nics(gpu.label)
        near = f"{path.name} {', '.join(real[nic] for nic in nics)}" if path is not None else "-"
        numa = "?" if gpu.numa is None else str(gpu.numa)
        if gpu.gpu_numa_id and gpu.gpu_numa_id.isdigit():
            numa += f" (memory: {gpu.gpu_numa_id})"
        table.add_row(
            gpu.label,
            gpu.name or "?",
            gpu.pci or "?",
            numa,
            format_cpus(gpu.cpus) if gpu.cpus else gpu.cpu_affinity or "?",
            gpu.link.describe() or "?",
            "?" if gpu.nvlinks is None else str(gpu.nvlinks),
            near,
        )
    return table


def _ports(node: SurveyNode) -> Table:
    table = _table(
        "NIC",
        "port",
        "PCI",
        "NUMA",
        "PCIe",
        "state",
        "Gb/s",
        "layer",
        "MTU",
        "GID",
        "role",
        "why",
        right=("NUMA", "Gb/s", "MTU", "GID"),
    )
    machine = node.machine
    for found in node.fabric.ports:
        nic = machine.nic(found.nic) or Nic(found.nic)
        port = next((p for p in nic.ports if p.number == found.port), None) or Port(0)
        index = choose_gid(port)[0] if port.gids else None
        state = "?" if port.state is None else f"{port.state}/{port.phys or '?'}"
        speed = port.speed_gbps if port.active else None
        good = found.health.healthy is not False
        why = found.reason if good else f"{found.health.why}; {found.reason}"
        if good and found.health.why and found.health.healthy:
            why = f"{found.reason}; {found.health.why}"
        table.add_row(
            found.nic,
            found.device or "?",
            nic.pci or "?",
            "?" if nic.numa is None else str(nic.numa),
            nic.link.describe() or "?",
            state,
            "-" if speed is None else f"{speed:g}",
            port.link_layer or "?",
            str(port.active_mtu or port.netdev_mtu or "?"),
            "-" if index is None else str(index),
            found.role,
            why,
            style="" if good else "yellow",
        )
    return table


def _legend(say: _Say, survey: Survey) -> None:
    used = {
        relation.path
        for node in survey.nodes
        for row in node.machine.matrix.cells
        for cell in row
        if (relation := relation_of(cell)) is not None
    }
    for path, text in LEGEND.items():
        if path in used and path.value:
            say(f"  {text}", "dim")
    for text in TECHNIQUES:
        say(f"  {text}", "dim")


def _ranks(console: Console, say: _Say, survey: Survey, names: Sequence[str]) -> None:
    places = survey.placement.ranks
    say("proposed placement" if places else "no ranks to place", "bold")
    table = _table("rank", "host", "GPU", "UCX_NET_DEVICES", "cores", "why", right=("rank",))
    for place in places:
        table.add_row(
            str(place.rank),
            names[place.node],
            place.gpu or "-",
            _devices(place),
            format_cpus(place.cores) or "-",
            _why(place),
        )
    if places:
        _show(console, table)


def _devices(place: RankPlace) -> str:
    if place.net_devices:
        return ",".join(place.net_devices)
    return f"{', '.join(place.nics)} (RDMA name not known)" if place.nics else "-"


def _why(place: RankPlace) -> str:
    return f"GPU: {place.gpu_reason}; NIC: {place.nic_reason}; cores: {place.core_reason}"


def _differences(say: _Say, survey: Survey, names: Sequence[str]) -> None:
    if not survey.differences:
        say(f"the {len(survey.nodes)} nodes do not differ in anything that was compared", "bold")
        return
    say(f"differences between the {len(survey.nodes)} nodes", "bold")
    for difference in survey.differences:
        style = "yellow" if difference.grave else ""
        say(f"  {difference.describe(names)}", style)
