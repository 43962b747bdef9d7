"""The affinity columns of ``nvidia-smi topo``: what is printed, unless cells ran together."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from rdmakit.topology.cpulist import parse_cpus

__all__ = ["COLUMNS", "Affinity", "Cell", "read_affinity"]

COLUMNS = {"CPU2": "cpu", "NUMA2": "numa", "GPU3": "gpu_numa"}
"""By the first word of a heading and its number of words."""


@dataclass(frozen=True)
class Cell:
    """A word and where in its line it stands; -1 where that says nothing."""

    text: str
    at: int


@dataclass(frozen=True)
class Affinity:
    """As printed; None for an empty cell, a missing column, or text that cannot be trusted."""

    cpu: str | None = None
    numa: str | None = None
    gpu_numa: str | None = None


def read_affinity(
    cells: Sequence[Cell], titles: Sequence[Cell], *, tabs: bool, cut: bool
) -> tuple[Affinity, list[str]]:
    """Return what stands in the affinity columns of a GPU's row, and what is wrong with it.

    Args:
        cells: the row's cells behind the matrix.
        titles: the columns (``cpu``, ``numa``, ``gpu_numa``) that the header has.
        tabs: whether tabs divide the cells, so that an empty one still counts.
        cut: whether the text ends in this row.
    """
    names = [title.text for title in titles]
    # Tabs lost on the way leave two values in one cell.
    mixed = any(" " in cell.text for cell in cells)
    if mixed:
        cells = [Cell(word, -1) for cell in cells for word in cell.text.split()]
    if cut and cells and cells[-1].text:
        values = _placed(cells[:-1], titles, tabs=tabs and not mixed)
        problem = f"the text ends in {cells[-1].text!r}, which is not believed"
        return Affinity(**{k: v for k, v in values.items() if v}), [problem]
    values = _placed(cells, titles, tabs=tabs and not mixed)
    problems: list[str] = []
    if not names:
        # Without a header a list with a range in it can be nothing but CPUs.
        first = next((cell.text for cell in cells if cell.text), "")
        cpus = first if "-" in first and parse_cpus(first) is not None else None
        return Affinity(cpus), problems
    _divide(values, names, problems)
    if not tabs or mixed:
        _doubt(values, names, problems)
    cpu = values.get("cpu")
    if cpu and cpu.upper() != "N/A" and parse_cpus(cpu) is None:
        problems.append(f"CPU affinity {cpu!r} is no list of CPUs")
        values["cpu"] = None
    for name in ("numa", "gpu_numa"):
        value = values.get(name)
        if value and not re.fullmatch(r"N/A|\d+(?:[-,]\d+)*", value, re.ASCII | re.IGNORECASE):
            problems.append(f"{name.replace('_', ' ').upper()} {value!r} is not understood")
            values[name] = None
    return Affinity(values.get("cpu"), values.get("numa"), values.get("gpu_numa")), problems


def _placed(cells: Sequence[Cell], titles: Sequence[Cell], *, tabs: bool) -> dict[str, str | None]:
    """Return the text under each title."""
    names = [title.text for title in titles]
    if tabs:
        texts = [cell.text for cell in cells]
        # nvidia-smi puts one tab too many before its last column.
        while len(texts) > len(names) and "" in texts:
            del texts[len(texts) - 1 - texts[::-1].index("")]
        texts += [""] * (len(names) - len(texts))
        return {name: text or None for name, text in zip(names, texts, strict=False)}
    words = [cell for cell in cells if cell.text]
    values: dict[str, str | None] = dict.fromkeys(names)
    by_place = len(words) < len(titles) and all(c.at >= 0 for c in (*words, *titles))
    first = 0
    for word in words:
        choices = range(first, len(titles))
        if not choices:
            break
        best = first
        if by_place:
            best = min(choices, key=lambda t: abs(titles[t].at - word.at))
        values[names[best]] = word.text
        first = best + 1
    return values


def _divide(values: dict[str, str | None], names: list[str], problems: list[str]) -> None:
    """Take apart values that ran together and can be read in one way only: ``0N/A``."""
    for name, after in itertools.pairwise(names):
        match = re.fullmatch(r"([\d,-]*\d)(N/A)", values.get(name) or "", re.IGNORECASE)
        if match is None or (values.get(after) or "N/A").upper() != "N/A":
            continue
        target = names[-1] if name == "cpu" else after
        problems.append(f"{name.upper()} and the next cell ran together: {match[0]!r}")
        values[name], values[target] = match[1], match[2]


def _doubt(values: dict[str, str | None], names: list[str], problems: list[str]) -> None:
    """Drop a list of CPUs that may have the NUMA number at its end."""
    cpu = values.get("cpu")
    if "numa" not in names or values.get("numa") or not cpu or cpu.upper() == "N/A":
        return
    if len(cpu) > 1 and parse_cpus(cpu[:-1]) is not None:
        problems.append(
            f"{cpu!r} may be a list of CPUs with the NUMA number run into it: neither is believed"
        )
        values["cpu"] = None
