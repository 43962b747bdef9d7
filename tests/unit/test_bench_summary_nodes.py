"""What the node phases and the rail phase of an all-reduce take, by rows of known figures."""

from __future__ import annotations

import pytest

from rdmakit.bench.rows import phases
from rdmakit.bench.summary import summarize
from rdmakit.report.schema import Row, Times

SIZE = 67108864


def row(layer: str, case: str, nbytes: int, us: float, ranks: int, shape: str) -> Row:
    return Row(
        layer=layer, case=case, algorithm="hierarchical", nbytes=nbytes, count=nbytes // 4,
        dtype="float32", wire_dtype="float32", iterations=20, wrong=0, ranks=ranks, nodes=2,
        ranks_per_node=shape, time_us=Times(us, us, us, us, us), algbw_GBps=nbytes / us / 1e3,
    )  # fmt: skip


def run(size: int, ranks: int, shape: str) -> list[Row]:
    """Return the rows of a run whose node phases take 20 and 30 us, and whose rails 400 us."""
    blocks = -(-(size // 4) // ranks) * ranks * 4
    return [
        row("intra", "reduce_scatter", blocks, 20.0, ranks, shape),
        row("intra", "allgather", blocks, 30.0, ranks, shape),
        row("allreduce", "allreduce", size, 500.0, 2 * ranks, shape),
        *(row("inter", "rail allreduce", size // n, 400.0 * ranks / n, 2, shape) for n in (1, 4)),
    ]


@pytest.mark.parametrize(
    ("ranks", "shape"), [(2, "2x2"), (3, "2x3"), (4, "4+3"), (4, "3+4"), (6, "2x6"), (7, "7+1")]
)
def test_blocks_are_rounded_up_to_whole_elements(ranks: int, shape: str) -> None:
    rows = run(SIZE, ranks, shape)
    assert (rows[0].nbytes == SIZE) == (SIZE // 4 % ranks == 0)
    assert phases(rows, SIZE) == (50.0, pytest.approx(400.0))
    text = "\n".join(summarize(rows))
    assert "node phases take 0.05 ms and the rail phase 0.40 ms" in text
    assert "the limit is inter (rail phase); the whole is at 80 % of the slower" in text


def test_rows_of_another_size_are_not_taken() -> None:
    near = run(SIZE, 6, "2x6")
    other = run(SIZE + 6 * 4, 6, "2x6")[:2]
    assert phases([*near, *other], SIZE) == (50.0, pytest.approx(400.0))
    assert phases([*other, *near[2:]], SIZE) is None
    assert phases([*run(SIZE // 2, 6, "2x6")[:2], *near[2:]], SIZE) is None


@pytest.mark.parametrize("left", [(0,), (1,), ()])
def test_nothing_is_said_where_a_node_phase_was_not_measured(left: tuple[int, ...]) -> None:
    rows = run(SIZE, 8, "2x8")
    rows = [rows[index] for index in left] + rows[2:]
    assert phases(rows, SIZE) is None
    assert "alone the node phases" not in "\n".join(summarize(rows))


@pytest.mark.parametrize("shape", ["2x1", "1x1"])
def test_lone_ranks_have_no_node_phases(shape: str) -> None:
    rows = run(SIZE, 1, shape)[2:]
    assert phases(rows, SIZE) == (0.0, pytest.approx(400.0))
