"""Lines of ``nvidia-smi topo``: headings, and rows with their cells."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from rdmakit.topology.parsers.smi_affinity import COLUMNS, Cell
from rdmakit.topology.words import relation_of

__all__ = [
    "LONGEST_CELL",
    "MOST_DEVICES",
    "P2P",
    "Row",
    "cells_of",
    "heading_of",
    "is_affinity",
    "is_gpu",
    "is_word",
    "row_name",
]

_DEVICE = re.compile(r"(?=\S*[A-Za-z])(?=\S*\d)[A-Za-z][\w.:-]*", re.ASCII)
P2P = ("OK", "CNS", "GNS", "TNS", "NS", "DR", "U")
_HEADINGS = re.compile(r"CPU\s+Affinity|NUMA\s+Affinity|GPU\s+NUMA\s+ID", re.IGNORECASE)
MOST_DEVICES = 1024
LONGEST_CELL = 4096
"""Characters; no list of CPUs is as long, so no line goes on with such a cell."""


def is_gpu(name: str) -> bool:
    """Return whether a device is a GPU, by its label."""
    return re.fullmatch(r"GPU\d+", name, re.ASCII) is not None


def is_word(token: str) -> bool:
    """Return whether a cell is a relation, of a matrix of ways or of peer access."""
    return relation_of(token) is not None or token.upper() in P2P


def is_affinity(token: str) -> bool:
    """Return whether a cell may be of an affinity column."""
    return re.match(r"\d|N/A", token, re.IGNORECASE) is not None


def _tokens(line: str) -> list[Cell]:
    return [Cell(match[0], match.start()) for match in re.finditer(r"\S+", line)]


def cells_of(line: str) -> list[Cell]:
    """Return the cells of a row: fields where tabs divide it, else words. Empty fields count."""
    if "\t" not in line:
        return _tokens(line)
    cells: list[Cell] = []
    for part in line.split("\t"):
        words = part.split()
        # A name and its first relation, or relations, with a blank where a tab was.
        if len(words) > 1 and all(is_word(word) or _DEVICE.fullmatch(word) for word in words):
            cells += [Cell(word, -1) for word in words]
        else:
            cells.append(Cell(part.strip(), -1))
    while cells and not cells[0].text:
        cells.pop(0)
    return cells


def heading_of(line: str) -> tuple[list[Cell], list[Cell]] | None:
    """Return (device columns, affinity columns) of a header line, None for another line."""
    titles = list(_HEADINGS.finditer(line))
    devices = _tokens(line[: titles[0].start()] if titles else line)
    if not devices or len(devices) > MOST_DEVICES:
        return None
    if not all(_DEVICE.fullmatch(device.text) for device in devices):
        return None
    if any(is_word(device.text) for device in devices):
        return None
    return devices, [
        Cell(COLUMNS[t[0].split()[0].upper() + str(len(t[0].split()))], t.start()) for t in titles
    ]


def row_name(line: str) -> str | None:
    """Return the device that a row is of, None for another line."""
    words = line.split(maxsplit=2)
    if len(words) < 2 or not _DEVICE.fullmatch(words[0]) or is_word(words[0]):
        return None
    return words[0] if is_word(words[1]) else None


@dataclass
class Row:
    """A row of a matrix while its lines come in."""

    number: int
    name: str
    cells: list[Cell]
    """Everything after the name."""
    tabs: bool
    cut: bool
    """Whether the text ends inside this row."""
    whole: bool = False
    """Whether its last cell has a blank after it."""
    wrapped: bool = False
    """Whether it was put together from several lines."""
    relations: int = field(init=False)
    others: int = field(init=False)
    """Cells that are a relation, and cells that are neither that nor empty."""

    def __post_init__(self) -> None:
        given, self.cells = self.cells, []
        self.relations = self.others = 0
        self.extend(given)

    def extend(self, cells: Sequence[Cell]) -> None:
        """Put cells behind the others."""
        self.cells += cells
        self._count(cells, 1)

    def replace_last(self, text: str) -> None:
        """Give the last cell another text."""
        self._count(self.cells[-1:], -1)
        self.cells[-1] = Cell(text, -1)
        self._count(self.cells[-1:], 1)

    def _count(self, cells: Sequence[Cell], by: int) -> None:
        for cell in cells:
            if is_word(cell.text):
                self.relations += by
            elif cell.text:
                self.others += by
