"""``rdmakit hostfile``: for people as tables, for programs as ``rdmakit.hostfile/1``."""

from __future__ import annotations

import sys
from collections.abc import Callable

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rdmakit.hostfile.launch import Launch
from rdmakit.hostfile.model import DIALECTS, Hostfile, Problem
from rdmakit.pretty import pretty_json
from rdmakit.report.terminal import on_terminal
from rdmakit.topology.cpulist import runs

__all__ = ["SCHEMA", "encode_hostfile", "print_hostfile"]

SCHEMA = "rdmakit.hostfile/1"
_MOST_ROWS = 64
_Say = Callable[..., None]


class HostResult(msgspec.Struct, frozen=True, kw_only=True):
    """A host; ``slots`` is null where it is left to the launcher."""

    host: str
    slots: int | None
    slots_from: str
    max_slots: int | None
    user: str | None
    hca: list[str]
    lines: list[int]


class ExpressionResult(msgspec.Struct, frozen=True):
    """A node list of Slurm."""

    line: int
    text: str
    count: int
    hosts: list[str]


class ShareResult(msgspec.Struct, frozen=True):
    """What a host gets."""

    host: str
    names: list[str]
    slots: int | None
    ranks: list[int]


class LaunchResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a launcher would do."""

    launcher: str
    ranks: int
    refused: str
    oversubscribed: bool
    hosts: list[ShareResult]
    notes: list[str]


class HostfileResult(msgspec.Struct, frozen=True, kw_only=True):
    """The whole."""

    schema: str = SCHEMA
    file: str
    dialect: str
    hosts: list[HostResult]
    total: int | None
    """Slots; null where the launcher decides, or the file has errors."""
    problems: list[Problem]
    expressions: list[ExpressionResult]
    launch: LaunchResult | None


def encode_hostfile(file: str, hostfile: Hostfile, launch: Launch | None) -> str:
    """Return the JSON text."""
    result = HostfileResult(
        file=file,
        dialect=hostfile.dialect,
        hosts=[
            HostResult(
                host=host.name,
                slots=host.slots,
                slots_from=host.slots_from,
                max_slots=host.max_slots,
                user=host.user,
                hca=list(host.hcas),
                lines=list(host.lines),
            )
            for host in hostfile.hosts
        ],
        total=hostfile.total,
        problems=list(hostfile.problems),
        expressions=[
            ExpressionResult(line, text, len(names), list(names))
            for line, text, names in hostfile.expressions
        ],
        launch=None if launch is None else _launch(launch),
    )
    return pretty_json(result)


def _launch(launch: Launch) -> LaunchResult:
    return LaunchResult(
        launcher=launch.launcher,
        ranks=launch.ranks,
        refused=launch.refused,
        oversubscribed=launch.oversubscribed,
        hosts=[
            ShareResult(share.host, list(share.names), share.slots, list(share.ranks))
            for share in launch.shares
        ],
        notes=list(launch.notes),
    )


def print_hostfile(file: str, hostfile: Hostfile, launch: Launch | None) -> None:
    """Print a hostfile, its problems and what a launcher would do with it."""
    console = Console(file=sys.stdout, highlight=False, width=400, force_terminal=on_terminal())

    def say(line: str, style: str = "") -> None:
        console.print(Text(line, style=style), soft_wrap=True)

    total = "?" if hostfile.total is None else str(hostfile.total)
    say(f"{file}: {len(hostfile.hosts)} host(s), {total} slots")
    say(f"  read as {hostfile.dialect}: {DIALECTS[hostfile.dialect]}")
    for line, text, names in hostfile.expressions:
        say(f"  line {line}: {text}: {len(names)} hosts")
    for problem in hostfile.problems:
        say(f"  {problem}", "red" if problem.severity == "error" else "yellow")
    shares = {share.host: share for share in launch.shares} if launch is not None else {}
    merged = {name for share in shares.values() for name in share.names if name != share.host}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("host", "slots", "from", *(("ranks",) if shares else ())):
        table.add_column(column, justify="right" if column == "slots" else "left", no_wrap=True)
    for host in hostfile.hosts[:_MOST_ROWS]:
        share = shares.get(host.name)
        slots = share.slots if share is not None else host.slots
        source = share.slots_from if share is not None else host.slots_from
        ranks = _ranks(share.ranks) if share is not None else ""
        if host.name in merged:
            slots, source, ranks = None, "the same host as another name", ""
        cells = [host.name, "?" if slots is None else str(slots), source]
        table.add_row(*cells, *([ranks or "-"] if shares else []))
    if hostfile.hosts:
        with console.capture() as captured:
            console.print(table)
        for row in captured.get().splitlines():
            console.file.write(f"  {row.rstrip()}\n")
    if len(hostfile.hosts) > _MOST_ROWS:
        say(f"  ... {len(hostfile.hosts) - _MOST_ROWS} more hosts")
    if launch is not None:
        _print_launch(launch, say)


def _print_launch(launch: Launch, say: _Say) -> None:
    names = {
        "openmpi": "Open MPI's mpirun",
        "hydra": "mpirun of MPICH or Intel MPI",
        "slurm": "srun",
    }
    title = f"{names[launch.launcher]} -n {launch.ranks}"
    if launch.refused:
        say(f"  {title}: refused: {launch.refused}", "red")
    else:
        used = [share for share in launch.shares if share.ranks]
        placed = sum(len(share.ranks) for share in used)
        if placed:
            say(f"  {title}: {placed} ranks on {len(used)} of {len(launch.shares)} host(s)")
        if launch.oversubscribed:
            say("  oversubscribed: a host gets more ranks than it has slots", "yellow")
        idle = [share.host for share in launch.shares if not share.ranks]
        if placed and idle:
            say(f"  without a rank: {', '.join(idle[:8])}", "yellow")
    for note in launch.notes:
        say(f"  {note}", "yellow")


def _ranks(ranks: tuple[int, ...]) -> str:
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs(ranks))
