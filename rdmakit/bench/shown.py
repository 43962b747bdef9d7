"""What a run shows and keeps: rows as they come, a summary at the end, a result file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rdmakit.bench.options import Options
from rdmakit.bench.summary import summarize
from rdmakit.errors import OutputError
from rdmakit.report.files import ResultFile
from rdmakit.report.schema import Result, Row
from rdmakit.report.table import LiveTable

__all__ = ["Shown"]


class Shown:
    """Gathers the rows of a run. Local; only the first rank prints and writes.

    Args:
        options: what was asked for.
        facts: the environment, for the result file.
        first: whether this is the rank that prints and writes.
        gpu: whether the arrays are on GPUs.

    Every method raises :class:`OutputError` where its output cannot be written.
    """

    def __init__(self, options: Options, facts: dict[str, Any], *, first: bool, gpu: bool) -> None:
        self.rows: list[Row] = []
        self._facts, self._output = facts, options.output
        self._table = LiveTable(quiet=options.quiet, gpu=gpu) if first else None
        self._file = ResultFile(options.output) if first and options.output else None

    def lines(self, lines: Sequence[str]) -> None:
        """Print lines."""
        if self._table is not None:
            for line in lines:
                self._table.text(line)

    def row(self, row: Row) -> None:
        """Take one more row."""
        self.rows.append(row)
        if self._table is not None:
            self._table.row(row)
        if self._file is not None:
            self._file.update(Result(environment=self._facts, rows=self.rows))

    def working(self, what: str) -> None:
        """Show on a terminal what is being measured."""
        if self._table is not None:
            self._table.working(what)

    def refuse(self, problem: str, lines: Sequence[str]) -> None:
        """Show why nothing is measured."""
        self.lines(lines)
        self._keep(summary=[problem], interrupted=False)

    def close(self) -> None:
        """Show the summary of the whole run."""
        summary = summarize(self.rows)
        self._keep(summary=summary, interrupted=False)
        self._sum_up(summary, interrupted=False)
        if self._file is not None:
            self.lines([f"  written: {self._output}"])

    def rescue(self) -> list[str]:
        """Show and keep what there is after an interrupt or an error.

        Returns:
            What of that failed; nothing is raised, since there is an error to be told already.
        """
        summary = summarize(self.rows)

        def keep() -> None:
            self._keep(summary=summary, interrupted=True)
            if self._file is not None:
                self.lines([f"  written: {self._output}"])

        parts: tuple[Callable[[], None], ...] = (
            lambda: self._sum_up(summary, interrupted=True),
            keep,
        )
        problems = []
        for part in parts:
            try:
                part()
            except OutputError as exc:
                problems.append(str(exc))
        return problems

    def _sum_up(self, summary: Sequence[str], *, interrupted: bool) -> None:
        if self._table is None:
            return
        self._table.stop()
        of = " of what was measured until the interrupt" if interrupted else ""
        self.lines(["", f"summary{of}", *(f"  {line}" for line in summary)])

    def _keep(self, *, summary: list[str], interrupted: bool) -> None:
        if self._file is not None:
            result = Result(
                environment=self._facts, rows=self.rows, summary=summary, interrupted=interrupted
            )
            self._file.update(result, final=True)
