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
_LONGEST = 4096
"""Characters of a row by which its next break is judged."""


def unwrapped(lines: Sequence[str]) -> list[str]:
    """Return the lines with broken rows joined; line numbers stay, joined lines become empty.

    A terminal breaks at one column, also inside a cell. Done only where at least two rows, or
    header and row, are broken. Numbers that may be one or two get a ``?`` between them.
    """
    # A dict keeps the order, and is quick to look into.
    starts = {
        place: line for place, line in enumerate(lines) if _ROW.match(line) or _HEADER.match(line)
    }
    if len(starts) < 2 or any("\t" in line for line in starts.values()):
        return list(lines)
    width = max(map(len, starts.values()))
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
        found[place] = _joined([lines[number] for number in (place, *rest)])
        for after in rest:
            found[after] = ""
    return found


def _continues(line: str) -> bool:
    words = line.split()
    return bool(words) and all(_PIECE.fullmatch(word) for word in words)


def _joined(pieces: Sequence[str]) -> str:
    """Join the pieces of a row: as one cell where a break is inside one."""
    parts, before = [pieces[0]], pieces[0]
    for piece in pieces[1:]:
        between = _between(before, piece)
        parts += [between, piece]
        # What the next break is judged by: the end of what is joined, a whole word of it.
        lone = not between.isspace() and len(piece.split()) == 1 and not piece[:1].isspace()
        before = (before + between + piece)[-_LONGEST:] if lone else piece
    return "".join(parts)


def _between(first: str, second: str) -> str:
    """Return what belongs between two pieces of a row."""
    if first[-1:].isspace() or second[:1].isspace():
        return " "
    a, b = first.split()[-1], second.split()[0]
    if _NUMBERS.fullmatch(a) and _NUMBERS.fullmatch(b):
        return "?"
    if _CLOSED.fullmatch(a) and _NUMBERS.fullmatch(b):
        return " "
    if _WHOLE.fullmatch(b) and (_WHOLE.fullmatch(a) or _NUMBERS.fullmatch(a)):
        return " "
    return ""
