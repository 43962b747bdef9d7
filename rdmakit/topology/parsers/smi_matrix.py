"""``nvidia-smi topo -m``, ``-mp``, ``-p2p``: old and new columns, whole or cut, tabs or blanks."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rdmakit.topology.model import Matrix, natural
from rdmakit.topology.parsers.smi_affinity import Affinity, Cell, read_affinity
from rdmakit.topology.parsers.smi_rows import (
    LONGEST_CELL,
    MOST_DEVICES,
    P2P,
    Row,
    cells_of,
    heading_of,
    is_affinity,
    is_gpu,
    is_word,
    row_name,
)
from rdmakit.topology.parsers.wrapped import unwrapped
from rdmakit.topology.text import Unread, lines_of

__all__ = ["SmiMatrix", "parse_matrices"]


@dataclass(frozen=True)
class SmiMatrix:
    """One matrix as the text shows it."""

    kind: str
    """``topo`` or ``p2p``."""
    devices: tuple[str, ...] = ()
    """All columns, then rows that have no column, in printed order."""
    matrix: Matrix = field(default_factory=Matrix)
    nic_names: dict[str, str] = field(default_factory=dict)
    """RDMA device name by label; a NIC that the text does not name is absent."""
    affinity: dict[str, Affinity] = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    """Which affinity columns there are: cpu, numa, gpu_numa."""
    problems: tuple[str, ...] = ()
    unread: tuple[Unread, ...] = ()

    @property
    def gpus(self) -> tuple[str, ...]:
        """Labels of the GPUs, in order."""
        return tuple(sorted((d for d in self.devices if is_gpu(d)), key=natural))

    @property
    def nics(self) -> tuple[str, ...]:
        """Labels of the NICs, in the order of the columns."""
        return tuple(d for d in self.devices if not is_gpu(d))


def parse_matrices(text: str) -> list[SmiMatrix]:
    """Return every matrix in ``text``. Never raises; a text without one gives an empty list."""
    tables: list[_Table] = []
    legend: dict[str, str] = {}
    lines = unwrapped(lines_of(text))
    for number, line in enumerate(lines, 1):
        # Jobs' scripts keep such listings as comments, wikis as tables.
        bare = re.sub(r"^\s*#+ ?", "", line)
        if bare.count("|") >= 3:
            bare = bare.replace("|", " ")
        if re.match(r"\s*NIC\d+\s*:", bare, re.ASCII):
            for label, name in re.findall(r"(NIC\d+)\s*:\s*([^\s,]+)", bare, re.ASCII):
                legend.setdefault(label, name)
            continue
        if tables and tables[-1].takes(bare):
            tables[-1].add(number, bare, last=number == len(lines))
        elif (table := _Table.begun_by(number, bare, last=number == len(lines))) is not None:
            tables.append(table)
    # Line by line: over many empty lines a pattern that may cross them takes very long.
    modern = any(re.match(r"\W*(SYS|NODE)\s*=", line) for line in lines)
    bonded = any(re.match(r"\W*NV#\s*=", line) for line in lines)
    found = [table.finish(legend, hides_nvlink=modern and not bonded) for table in tables]
    return [matrix for matrix in found if matrix is not None]


class _Table:
    """A matrix while its lines come in."""

    def __init__(self) -> None:
        self.columns: list[Cell] = []
        self.titles: list[Cell] = []
        self.rows: list[Row] = []
        self.named: set[str] = set()
        """Devices that have their row."""
        self.problems: list[str] = []
        self.unread: list[Unread] = []

    @classmethod
    def begun_by(cls, number: int, line: str, *, last: bool) -> _Table | None:
        """Return a table that ``line`` begins, as its header or, if that is lost, a row."""
        table = cls()
        heading = heading_of(line)
        if heading is not None and any(is_gpu(column.text) for column in heading[0]):
            table.columns, table.titles = heading
            return table
        if row_name(line) is None or not is_gpu(line.split()[0]):
            return None
        table.add(number, line, last=last)
        return table

    def takes(self, line: str) -> bool:
        """Return whether ``line`` goes on with this table."""
        if row_name(line) is not None:
            return line.split(maxsplit=1)[0] not in self.named
        if heading_of(line) is not None:
            return bool(self.columns) and not self.rows  # a header wrapped by the terminal
        words = line.split()
        if not words or not self.rows:
            return False
        row = self.rows[-1]
        if row.cells and len(row.cells[-1].text) > LONGEST_CELL:
            return False
        inside = not row.whole and words[0][0] in "-,0123456789"
        return (self._short(row) or self._lacks(row) or inside) and (
            all(is_word(word) or is_affinity(word) or word[0] in "-," for word in words)
        )

    def _lacks(self, row: Row) -> bool:
        """Return whether affinity cells are missing from a row."""
        return row.others < len(self.titles)

    def _short(self, row: Row) -> bool:
        return row.relations < len(self.columns)

    def add(self, number: int, line: str, *, last: bool) -> None:
        """Take a line: a row, or the rest of a wrapped header or row."""
        if row_name(line) is None:
            heading = heading_of(line)
            if heading is not None:
                self.columns += [Cell(c.text, -1) for c in heading[0]]
                self.titles += [Cell(c.text, -1) for c in heading[1]]
            else:
                self._go_on(self.rows[-1], line.split())
                self.rows[-1].cut = last
            return
        cells = cells_of(line)
        if len(self.rows) == MOST_DEVICES:
            why = f"the matrix has more than {MOST_DEVICES} rows"
            self.unread.append(Unread(number, line, why))
            return
        whole = line[-1:].isspace()
        self.named.add(cells[0].text)
        self.rows.append(Row(number, cells[0].text, cells[1:], "\t" in line, last, whole))

    def _go_on(self, row: Row, words: list[str]) -> None:
        """Add the rest of a row that a terminal wrapped, maybe in the middle of a cell."""
        row.wrapped = True
        before = row.cells[-1].text if row.cells else ""
        if before and not row.whole:
            joins = words[0][0] in "-," or (words[0][0].isdigit() and self._short(row))
            if joins:
                row.replace_last(before + words.pop(0))
            elif is_affinity(before) and is_affinity(words[0]):
                self.problems.append(
                    f"{row.name}: the line is wrapped between {before!r} and {words[0]!r}: neither "
                    "is believed"
                )
                row.replace_last("")
                words = ["", *words[1:]]
        row.extend([Cell(word, -1) for word in words])

    def finish(self, legend: dict[str, str], *, hides_nvlink: bool) -> SmiMatrix | None:
        """Return what the lines hold, None where they hold no row."""
        if not self.rows:
            return None
        named = bool(self.columns)
        width = len(self.columns)
        last = self.rows[-1]
        if not self._short(last) and {c.text for c in self.columns} <= {r.name for r in self.rows}:
            last.cut = False  # whole, only without a final line end
        taken = [self._split(row, width) for row in self.rows]
        columns = self._column_names(taken)
        names = list(dict.fromkeys([*columns, *(row.name for row in self.rows)]))
        names = [name for name in names if name]
        found = self._fill(names, columns, taken)
        words = {cell.upper() for row in found for cell in row if cell}
        kind = "p2p" if words & set(P2P) and not words - {*P2P, "X"} else "topo"
        affinity, titles = self._affinities(taken)
        self._report_missing(names, found, named=named, kind=kind)
        nics = [name for name in names if not is_gpu(name)]
        real = {n: n if not re.fullmatch(r"NIC\d+", n) else legend.get(n, "") for n in nics}
        if kind == "topo" and nics and not all(real.values()):
            lost = [name for name in nics if not real[name]]
            self.problems.append(
                f"the NIC legend is missing: the real names of {_some(lost)} are not known"
            )
        bonded = any(word.startswith("NV") for word in words)
        return SmiMatrix(
            kind,
            tuple(names),
            Matrix(
                tuple(names),
                tuple(tuple(row) for row in found),
                nvlink_known=kind == "topo" and (bonded or not hides_nvlink),
            ),
            {nic: name for nic, name in real.items() if name},
            affinity,
            titles,
            tuple(dict.fromkeys(self.problems)),
            tuple(self.unread),
        )

    def _split(self, row: Row, width: int) -> tuple[list[Cell], list[Cell]]:
        """Return (matrix cells, affinity cells) of a row."""
        if row.tabs and width:
            return row.cells[:width], row.cells[width:]
        count = 0
        for cell in row.cells:
            if is_word(cell.text) or (
                cell.text and not is_affinity(cell.text) and count < max(width, 1)
            ):
                count += 1
            else:
                break
        cells, rest = row.cells[:count], row.cells[count:]
        if 0 < count < width and not row.cut:
            cells = self._by_place(row, cells)
        return cells, rest

    def _by_place(self, row: Row, cells: list[Cell]) -> list[Cell]:
        """Give each word of a row with too few of them the column that it stands under."""
        self.problems.append(
            f"{row.name}: {len(cells)} cells for {len(self.columns)} columns; each is taken for "
            "the column above it"
        )
        if any(cell.at < 0 for cell in (*cells, *self.columns)):
            return cells
        placed = [Cell("", -1) for _ in self.columns]
        at = [column.at for column in self.columns]  # from left to right, as the cells
        place = 0
        for cell in cells:
            if place == len(at):
                break
            while place + 1 < len(at) and abs(at[place + 1] - cell.at) < abs(at[place] - cell.at):
                place += 1
            placed[place] = cell
            place += 1
        return placed

    def _column_names(self, taken: Sequence[tuple[list[Cell], list[Cell]]]) -> list[str]:
        """Return a name for each column; those that the header lacks are known by their X."""
        names = [column.text for column in self.columns]
        widest = min(max((len(cells) for cells, _ in taken), default=0), MOST_DEVICES)
        if widest > len(names):
            self.problems.append(
                f"the header names {len(names)} of {widest} columns; the others are known only "
                "where their own row has its X"
            )
        names += [""] * (widest - len(names))
        known = set(names)
        for row, (cells, _) in zip(self.rows, taken, strict=True):
            for place, cell in enumerate(cells[: len(names)]):
                if cell.text.upper() == "X" and not names[place] and row.name not in known:
                    names[place] = row.name
                    known.add(row.name)
        return names

    def _fill(
        self,
        names: list[str],
        columns: list[str],
        taken: Sequence[tuple[list[Cell], list[Cell]]],
    ) -> list[list[str | None]]:
        places = {name: place for place, name in enumerate(names)}
        found: list[list[str | None]] = [[None] * len(names) for _ in names]
        for row, (cells, _) in zip(self.rows, taken, strict=True):
            for place, (column, cell) in enumerate(zip(columns, cells, strict=False)):
                if not column or not cell.text:
                    continue
                last_word = row.cut and place == len(row.cells) - 1
                itself = (cell.text.upper() == "X") == (row.name == column)
                if is_word(cell.text) and itself and not last_word:
                    found[places[row.name]][places[column]] = cell.text.upper()
                else:
                    why = "the text ends in this cell" if last_word else "no relation"
                    self.unread.append(Unread(row.number, cell.text, f"{row.name} {column}: {why}"))
        self._compare(names, found, places)
        return found

    def _compare(
        self, names: list[str], found: list[list[str | None]], places: dict[str, int]
    ) -> None:
        """Tell of pairs whose two cells differ."""
        rows = sorted(places[row.name] for row in self.rows)  # the others have no cells
        for i, j in itertools.combinations(rows, 2):
            a, b = found[i][j], found[j][i]
            if a and b and a != b:
                self.problems.append(
                    f"{names[i]}-{names[j]} is {a} in one row and {b} in the other"
                )

    def _affinities(
        self, taken: Sequence[tuple[list[Cell], list[Cell]]]
    ) -> tuple[dict[str, Affinity], tuple[str, ...]]:
        found: dict[str, Affinity] = {}
        for row, (_, rest) in zip(self.rows, taken, strict=True):
            if is_gpu(row.name) and (self.titles or not row.wrapped):
                value, problems = read_affinity(rest, self.titles, tabs=row.tabs, cut=row.cut)
                found[row.name] = value
                self.problems += [f"{row.name}: {problem}" for problem in problems]
        return found, tuple(title.text for title in self.titles)

    def _report_missing(
        self, names: list[str], found: list[list[str | None]], *, named: bool, kind: str
    ) -> None:
        missing = [name for name in names if name not in self.named]
        if not named:
            self.problems.append("the header is missing: columns are known by their X only")
        if missing:
            gpus = [name for name in names if is_gpu(name)]
            self.problems.append(
                f"the text is incomplete: it names {len(gpus)} GPUs and "
                f"{len(names) - len(gpus)} NICs but has no row for {_some(missing)}"
            )
        empty = [
            f"{names[i]}-{names[j]}"
            for i in range(len(names))
            for j in range(i)
            if not (found[i][j] or found[j][i])
            if names[i] in self.named and names[j] in self.named
        ]
        if empty and kind == "topo":
            self.problems.append(f"no relation is given for {_some(empty)}")


def _some(names: Sequence[str], most: int = 6) -> str:
    def parts() -> Iterator[str]:
        yield from names[:most]
        if len(names) > most:
            yield f"{len(names) - most} more ({names[-1]} the last)"

    return ", ".join(parts())
