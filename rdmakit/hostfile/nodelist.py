"""Slurm's node lists: ``node[001-016,020]`` to names and back. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import product

from rdmakit.errors import InvalidArgument

__all__ = ["MOST_HOSTS", "compress", "expand", "expand_counts"]

MOST_HOSTS = 65536
"""Names that one list may have; a longer one is taken for a typing error."""


def expand(text: str) -> list[str]:
    """Return the host names of a node list, in its order, repeated ones too.

    Zero padding is kept; commas inside brackets are not separators; a name may have several
    brackets, the last of which runs fastest.

    Raises:
        InvalidArgument: brackets do not match, a range runs backwards or is no number, or there
            are more than 65536 names.
    """
    hosts: list[str] = []
    for part in _split(text):
        pieces: list[list[str]] = []
        for match in re.finditer(r"\[([^\[\]]*)\]|([^\[\]]+)", part):
            pieces.append(_range(match[1], text) if match[2] is None else [match[2]])
        total = 1
        for piece in pieces:
            total *= len(piece)
        if len(hosts) + total > MOST_HOSTS:
            raise InvalidArgument(f"{text!r} names more than {MOST_HOSTS} hosts")
        hosts += ["".join(names) for names in product(*pieces)]
    return hosts


def _split(text: str) -> list[str]:
    """Return the parts between commas that are outside brackets."""
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        if letter == "[":
            depth += 1
        elif letter == "]":
            depth -= 1
        if depth not in (0, 1):
            raise InvalidArgument(f"{text!r}: brackets do not match at character {place + 1}")
        if letter == "," and depth == 0:
            parts.append(text[start:place])
            start = place + 1
    if depth:
        raise InvalidArgument(f"{text!r}: a bracket is not closed")
    parts.append(text[start:])
    parts = [part.strip() for part in parts]
    if not all(parts):
        raise InvalidArgument(f"{text!r}: an empty name between commas")
    bad = next((part for part in parts if re.search(r"[\s:=]", part)), None)
    if bad is not None:
        raise InvalidArgument(f"{text!r}: {bad!r} is more than a name; a node list has no counts")
    return parts


def _range(text: str, whole: str) -> list[str]:
    names: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,18})(?:-(\d{1,18}))?\s*", part, re.ASCII)
        if match is None:
            raise InvalidArgument(f"{whole!r}: {part.strip()!r} is no number and no range")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise InvalidArgument(f"{whole!r}: range {part.strip()!r} runs backwards")
        if len(names) + last - first >= MOST_HOSTS:
            raise InvalidArgument(f"{whole!r} names more than {MOST_HOSTS} hosts")
        names += [str(number).zfill(len(match[1])) for number in range(first, last + 1)]
    return names


def compress(hosts: Iterable[str]) -> str:
    """Return a node list of ``hosts``; ``expand`` gives them back in the same order.

    Only the last number of a name goes into brackets.
    """
    parts: list[str] = []
    stem: tuple[str, str] | None = None
    numbers: list[str] = []

    def flush() -> None:
        nonlocal numbers
        if stem is not None and numbers:
            parts.append(_written(stem, numbers))
        numbers = []

    for host in hosts:
        match = re.fullmatch(r"(.*?)(\d{1,18})(\D*)", host, re.ASCII)
        if match is None or set(host) & set("[],"):
            flush()
            stem = None
            parts.append(host)
            continue
        if stem != (match[1], match[3]):
            flush()
            stem = (match[1], match[3])
        numbers.append(match[2])
    flush()
    return ",".join(parts)


def _written(stem: tuple[str, str], numbers: Sequence[str]) -> str:
    if len(numbers) == 1:
        return f"{stem[0]}{numbers[0]}{stem[1]}"
    runs: list[list[str]] = []
    for number in numbers:
        last = runs[-1][-1] if runs else None
        follows = last is not None and number == str(int(last) + 1).zfill(len(runs[-1][0]))
        if follows and len(number) >= len(runs[-1][0]):
            runs[-1].append(number)
        else:
            runs.append([number])
    inside = ",".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{stem[0]}[{inside}]{stem[1]}"


def expand_counts(text: str) -> list[int]:
    """Return the tasks of each node from Slurm's ``8(x2),7``.

    Raises:
        InvalidArgument: the text has another form.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:\(x(\d{1,6})\))?\s*", part, re.ASCII)
        if match is None:
            raise InvalidArgument(f"{text!r}: {part.strip()!r} is no count of tasks")
        if len(counts) + int(match[2] or 1) > MOST_HOSTS:
            raise InvalidArgument(f"{text!r} names more than {MOST_HOSTS} hosts")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
