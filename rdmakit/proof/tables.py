"""UCX's protocol tables, as ``UCX_PROTO_INFO=y`` prints them; pure.

A table has a line for the endpoint and the operation, then one for each range of sizes::

    +--------------------------+----------------------------------------------------------------+
    | NAME inter-node cfg#1    | tagged message by ucp_tag_send*(multi) from host memory        |
    +--------------------------+------------------------------------------+---------------------+
    |                  0..2007 | eager short                              | rc_mlx5/mlx5_0:1    |
    |                2008..inf | (?) rendezvous zero-copy read from remote | 50% on rc_mlx5/... |
    +--------------------------+------------------------------------------+---------------------+

``(?)`` marks what the receiver decides. It prints a table of its own, of the operation
``rendezvous data fetch``, where its choice was not part of that estimate; and so does the sender
of ``rendezvous data send``. (UCX 1.20 takes y, n or a pattern for operations; ``used`` of later
releases is a pattern there that matches none.)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rdmakit.proof.evidence import TableUse

__all__ = ["Row", "Table", "copies_host", "parse_tables", "use_of"]

_PREFIX = re.compile(r"^\s*(?:\[[^\]]*\]\s*){0,2}(?:\S+\.c:\d+\s+UCX\s+\w+\s+)?(?=[|+])")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGTPE]?)B?|inf", re.IGNORECASE)
_LANE = re.compile(r"(?:(\d+)%\s+on\s+)?([a-z]\w*)/([\w.:\-]+(?:\[\d+\])?(?:/path\d+)?)")
_UNITS = {unit: 1 << (10 * power) for power, unit in enumerate(("", "K", "M", "G", "T", "P", "E"))}
_SEND = "tagged message by ucp_tag_send*"
_LATER = ("rendezvous data fetch", "rendezvous data send")
_COPIES = ("copy-in", "copy-out", "cuda_copy", "gdr_copy", "frag ", "fragmented", "pipeline")


@dataclass(frozen=True)
class Row:
    """A range of sizes; ``high`` None: without end."""

    low: int
    high: int | None
    text: str
    estimate: bool
    lanes: tuple[tuple[str, str, int], ...]
    """Transport, device, share in per cent."""


@dataclass(frozen=True)
class Table:
    """The protocols of one operation on one kind of memory."""

    endpoint: str
    operation: str
    memory: str
    """``host``, ``cuda``, ...; of the side that printed it."""
    other: str
    """Of the other side, where it is known."""
    rows: tuple[Row, ...]


def parse_tables(text: str) -> tuple[Table, ...]:
    """Return the tables among whatever else was printed; unreadable rows are left out."""
    tables: list[Table] = []
    head: tuple[str, str] | None = None
    rows: list[Row] = []
    for line in text.splitlines():
        cells = _cells(line)
        if len(cells) == 2:
            _add(tables, head, rows)
            head, rows = (cells[0], cells[1]), []
        elif len(cells) == 3 and head is not None and (row := _row(*cells)) is not None:
            rows.append(row)
    _add(tables, head, rows)
    return tuple(tables)


def _add(tables: list[Table], head: tuple[str, str] | None, rows: list[Row]) -> None:
    found = re.match(r"(.*?)\s+(?:from|into)\s+(.+)$", head[1]) if head is not None else None
    if head is None or found is None or not rows:
        return
    mine, _, other = re.sub(r"\s+(?:from|to)\s+", "\0", found[2]).partition("\0")
    tables.append(Table(head[0], found[1], _kind(mine), _kind(other), tuple(rows)))


def _kind(memory: str) -> str:
    """Return ``cuda`` of ``cuda/GPU0`` and ``host`` of ``host memory``."""
    return re.split(r"[/ ]", memory.strip())[0]


def _cells(line: str) -> list[str]:
    bare = _PREFIX.sub("", line.rstrip(), count=1)
    if not (bare.startswith("|") and bare.endswith("|")):
        return []
    return [cell.strip() for cell in bare[1:-1].split("|")]


def _row(sizes: str, text: str, config: str) -> Row | None:
    low, _, high = sizes.partition("..")
    first, last = _size(low), _size(high or low)
    if first is None:
        return None
    lanes = tuple(
        (m[2], re.sub(r"/path\d+$", "", m[3]), int(m[1] or 100)) for m in _LANE.finditer(config)
    )
    estimate = text.startswith("(?)")
    return Row(first, last, text.removeprefix("(?)").strip(), estimate, lanes)


def _size(text: str) -> int | None:
    found = _SIZE.fullmatch(text.strip())
    if not found or found[1] is None:
        return None
    return int(float(found[1]) * _UNITS[found[2].upper()])


def use_of(tables: Sequence[Table], memory: str, nbytes: int, side: str) -> TableUse | None:
    """Return what one side's tables say of sending ``nbytes`` from ``memory``; None: nothing.

    ucxx sends with ``(multi)``; the other tables of that operation are made for every endpoint.

    Args:
        tables: of one process.
        memory: ``host`` or ``cuda``.
        nbytes: of a message.
        side: whose tables they are.
    """
    sends = [t for t in tables if t.operation.startswith(_SEND) and t.memory == memory]
    sends.sort(key=lambda table: "(multi)" not in table.operation)
    table = sends[0] if sends else None
    row = _at(table, nbytes)
    if table is None or row is None:
        return None
    certain = not row.estimate
    for later in tables:
        if certain or not later.operation.startswith(_LATER) or later.memory != memory:
            continue
        settled = _at(later, nbytes)
        if settled is not None and not settled.estimate:
            table, row, certain = later, settled, True
    return TableUse(
        operation=table.operation,
        memory=table.memory,
        text=row.text,
        lanes=row.lanes,
        certain=certain,
        side=side,
    )


def _at(table: Table | None, nbytes: int) -> Row | None:
    for row in table.rows if table is not None else ():
        if row.low <= nbytes and (row.high is None or nbytes <= row.high):
            return row
    return None


def copies_host(use: TableUse) -> bool:
    """Return whether the protocol passes bounce buffers instead of the memory itself.

    Zero-copy counts only with rendezvous: an eager message waits in the receiver's buffers.
    """
    words = f"{use.operation} {use.text}"
    direct = "rendezvous" in words and "zero-copy" in use.text
    return not direct or any(word in use.text for word in _COPIES)
