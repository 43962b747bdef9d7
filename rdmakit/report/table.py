"""Tables for people: a line as each row finishes, one heading for each layer."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.text import Text

from rdmakit.config import format_size
from rdmakit.report.schema import Row
from rdmakit.report.terminal import on_terminal

__all__ = ["LiveTable"]

_COLUMNS = (
    ("case", 16, "<"),
    ("algorithm", 13, "<"),
    ("transport", 17, "<"),
    ("bytes", 8, ">"),
    ("median us", 11, ">"),
    ("p99 us", 11, ">"),
    ("first us", 11, ">"),
    ("algbw GB/s", 10, ">"),
    ("busbw GB/s", 10, ">"),
    ("wire GB/s", 9, ">"),
    ("wrong", 6, ">"),
)
_WIDER = {"algorithm": 15, "transport": 29}
"""With GPU arrays: ``host-staged MPI``; ``cuda_ipc+host-staged+tcp/eth0``."""
_GPU_TITLES = {
    "memory": "memory: copies of each GPU, all ranks at once (the limit)",
    "intra": "intra: inside each node, between GPUs",
    "inter": "inter: between nodes, over messages",
    "allreduce": "allreduce: the whole job",
    "broadcast": "broadcast: over the number of ranks: a chain of pieces (ring), one sender (flat)",
}
_TITLES = {
    "memory": "memory: this host's own copy and add, all ranks of a node at once (the limit)",
    "intra": "intra: inside each node, over shared memory",
    "inter": "inter: between nodes, over messages",
    "allreduce": "allreduce: the whole job",
    "broadcast": "broadcast: over the number of ranks: a chain of pieces (ring), one sender (flat)",
}


class LiveTable:
    """Prints rows to ``file`` as they come; used by one rank only."""

    def __init__(self, *, quiet: bool = False, gpu: bool = False) -> None:
        self._titles = _GPU_TITLES if gpu else _TITLES
        self._columns = tuple(
            (name, _WIDER.get(name, width) if gpu else width, align)
            for name, width, align in _COLUMNS
        )
        watched = on_terminal()
        self._console = Console(
            file=sys.stdout, highlight=False, soft_wrap=True, force_terminal=watched
        )
        self._quiet = quiet
        self._layer = ""
        self._live: Live | None = None

    def text(self, line: str, style: str = "") -> None:
        """Print a line."""
        self._console.print(Text(line, style=style))
        self._console.file.flush()

    def working(self, what: str) -> None:
        """Show on a terminal what is being measured. No thread: it would disturb the times."""
        if not self._console.is_terminal or self._quiet:
            return
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(Text(f"measuring {what}", style="dim"), refresh=True)

    def stop(self) -> None:
        """Take the terminal's status line away."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def row(self, row: Row) -> None:
        """Print one row, its layer's heading before the first."""
        if self._quiet:
            return
        if row.layer != self._layer:
            self._layer = row.layer
            self.text("")
            self.text(self._titles.get(row.layer, row.layer), "bold")
            self.text(self._line([name for name, _, _ in _COLUMNS]), "dim")
        if row.skipped:
            size = format_size(row.nbytes) if row.nbytes else ""
            cells = [row.case, row.algorithm, row.transport, size]
            self.text(f"{self._line(cells)}  skipped: {row.skipped}", "dim")
            return
        assert row.time_us is not None
        cells = [
            row.case,
            row.algorithm,
            row.transport,
            format_size(row.nbytes),
            f"{row.time_us.median:.2f}",
            f"{row.time_us.p99:.2f}",
            _number(row.first_use_us, 1),
            _number(row.algbw_GBps, 2),
            _number(row.busbw_GBps, 2),
            _number(row.wire_GBps, 2),
            "-" if row.wrong is None else str(row.wrong),
        ]
        line = self._line(cells)
        if row.note:
            line += f"  {row.note}"
        self.text(line, "bold red" if row.wrong else "")

    def _line(self, cells: Sequence[str]) -> str:
        columns = self._columns
        padded = zip(columns, [*cells, *[""] * (len(columns) - len(cells))], strict=True)
        return " ".join(f"{cell:{align}{width}}" for (_, width, align), cell in padded).rstrip()


def _number(value: float | None, digits: int) -> str:
    """Return ``value`` with at least ``digits`` decimals and two that are not zero."""
    if value is None:
        return "-"
    while value and digits < 7 and abs(value) < 10 ** (1 - digits):
        digits += 1
    return f"{value:.{digits}f}"
