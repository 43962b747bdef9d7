"""Long texts of ``nvidia-smi topo -m``: time and memory grow with the text, not faster.

Before, each of these took minutes; the suite's own limit for a test would end it.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rdmakit.topology.parsers.smi_matrix import parse_matrices


def test_rows_beyond_the_most_are_told_as_unread() -> None:
    text = "\tGPU0\tGPU1\n" + "".join(f"GPU{i}\tX\tSYS\n" for i in range(30_000))
    (found,) = parse_matrices(text)
    assert len(found.devices) == len(found.matrix.cells) == 1024
    beyond = [one for one in found.unread if "more than 1024 rows" in one.why]
    assert len(beyond) == 30_000 - 1024
    assert str(beyond[0]) == "line 1026: the matrix has more than 1024 rows: 'GPU1024\\tX\\tSYS'"


def test_a_row_that_goes_on_and_on() -> None:
    for piece in ("SYS SYS\n", "0-3,\n"):
        text = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\tX\tSYS\n" + piece * 20_000
        (found,) = parse_matrices(text)
        assert found.devices[:2] == ("GPU0", "GPU1")
        assert found.matrix.cell("GPU0", "GPU1") == "SYS"


def test_rows_that_a_terminal_broke_into_many() -> None:
    lines = "".join(f"GPU{i} X SYS NODE PHB PXB PIX NV4 NV12 NV18 SYS {'SYS ' * 5}\n" for i in "01")
    (found,) = parse_matrices(lines.replace("\n", "\n" + "SYS\n" * 20_000))
    assert found.devices[:1] == ("GPU0",)


@settings(deadline=None)
@given(st.data())
def test_a_word_stands_under_the_nearest_column(data: st.DataObject) -> None:
    """Each cell, from the left, takes the nearest of the columns that are left to its right."""
    count = data.draw(st.integers(2, 8))
    gaps = data.draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    places, at = [], 8
    for gap in gaps:
        places.append(at)
        at += len("GPU0") + gap
    cells = data.draw(
        st.lists(st.integers(2, (at - 8) // 4), min_size=1, max_size=count - 1, unique=True)
    )
    cells = sorted(8 + 4 * cell for cell in cells)
    header, row = [" "] * at, list("GPU0".ljust(at + 8))
    for number, place in enumerate(places):
        header[place : place + 4] = f"GPU{number}"
    for place in cells:
        row[place : place + 3] = "SYS"
    expected: dict[int, str] = {}
    first = 0
    for place in cells:
        choices = range(first, count)
        if not choices:
            break
        best = min(choices, key=lambda c: abs(places[c] - place))
        expected[best] = "SYS"
        first = best + 1
    (found,) = parse_matrices("".join(header) + "\n" + "".join(row) + "\nend\n")
    shown = {c for c in range(1, count) if found.matrix.cells[0][c] == "SYS"}
    assert shown == {c for c in expected if c}  # under its own name a relation is refused
