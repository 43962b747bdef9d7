"""Matrices that a terminal broke at its width: rows put together again."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["unwrapped"]

_WORD = r"(?:X|NV\d+|PIX|PXB|PHB|NODE|SYS|SOC|OK|[CGT]?NS|DR|U)"
_DEVICE = r"(?:GPU\d+|NIC\d+|[a-z][a-z0-9]*_(?:bond_)?\d+|[a-z]+\d\w*)"
_NUMBERS = re.compile(r"\d[\d,-]*", re.ASCII)
_HEADER = re.compile(r"\s*GPU\d+(\s+(GPU|NIC|mlx|CPU)|\s*$)", re.ASCII)
_ROW = re.compile(rf"\s*{_DEVICE}\s+{_WORD}(\s|$)", re.ASCII)
_WHOLE = re.compile(rf"{_WORD}|{_DEVICE}|CPU|NUMA|GPU|ID|Affinity|N/A", re.ASCII)
_CLOSED = re.compile(r"X|PIX|PXB|PHB|NODE|SYS|SOC|OK|[CGT]?NS|DR|U|N/A|Affinity", re.ASCII)
"""Words that no number goes on with."""
_PIECE = re.compile(r"[\w,./-]{1,24}", re.ASCII)
_NARROWEST = 40


def unwrapped(lines: Sequence[str]) -> list[str]:
    """Return the lines with broken rows joined; line numbers stay, joined lines become empty.

    A terminal breaks at one column, also inside a cell. Done only where at least two rows, or
    header and row, are broken. Numbers that may be one or two get a ``?`` between them.
    """
    starts = [place for place, line in enumerate(lines) if _ROW.match(line) or _HEADER.match(line)]
    if len(starts) < 2 or any("\t" in lines[place] for place in starts):
        return list(lines)
    width = max(len(lines[place]) for place in starts)
    broken: dict[int, list[int]] = {}
    for place in starts:
        rest: list[int] = []
        for after in range(place + 1, len(lines)):
            if after in starts or not _continues(lines[after]):
                break
            rest.append(after)
        if rest:
            broken[place] = rest
    if len(broken) < 2 or width < _NARROWEST:
        return list(lines)
    found = list(lines)
    for place, rest in broken.items():
        for after in rest:
            found[place] = _joined(found[place], lines[after])
            found[after] = ""
    return found


def _continues(line: str) -> bool:
    words = line.split()
    return bool(words) and all(_PIECE.fullmatch(word) for word in words)


def _joined(first: str, second: str) -> str:
    """Join two pieces of a row: as one cell where the break is inside one."""
    if first[-1:].isspace() or second[:1].isspace():
        return f"{first} {second}"
    a, b = first.split()[-1], second.split()[0]
    if _NUMBERS.fullmatch(a) and _NUMBERS.fullmatch(b):
        return f"{first}?{second}"
    if _CLOSED.fullmatch(a) and _NUMBERS.fullmatch(b):
        return f"{first} {second}"
    if _WHOLE.fullmatch(b) and (_WHOLE.fullmatch(a) or _NUMBERS.fullmatch(a)):
        return f"{first} {second}"
    return first + second
