"""Each program in benchmarks/examples, on host arrays."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi import FAMILIES, python_of, run_ranks

pytestmark = pytest.mark.parallel

EXAMPLES = Path(__file__).resolve().parents[2] / "benchmarks" / "examples"
PROGRAM = Path(__file__).parent / "programs" / "examples.py"
SAYS = {
    "conjugate_gradient": "conjugate gradients, 301 unknowns",
    "heat": "points in {blocks} blocks",
    "train": "difference from one rank's losses",
    "transpose": "there and back",
}
SHAPES = ((4, 2, "2x2", "2x2"), (3, 2, "2+1", "1x3"), (1, 0, "1x1", "1x1"))


def test_all_are_run() -> None:
    assert {p.stem for p in EXAMPLES.glob("*.py")} == {*SAYS, "common"}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("n", "per_node", "shape", "blocks"), SHAPES)
def test_examples(family: str, n: int, per_node: int, shape: str, blocks: str) -> None:
    """All in one job: starting ranks is most of the time."""
    env = {"RDMAKIT_RANKS_PER_NODE": str(per_node), "RDMAKIT_CHECK": "1"}
    result = run_ranks(n, PROGRAM, list(SAYS), env=env, timeout=90, python=python_of(family))
    assert result.rc == 0, result.out
    lines = [line for line in result.out.splitlines() if line.startswith(f"{shape} ranks, NumPy: ")]
    assert len(lines) == len(SAYS), result.out
    for line, says in zip(lines, SAYS.values(), strict=True):
        assert says.format(blocks=blocks) in line
        assert line.endswith(": right")
    assert not result.left


@pytest.mark.parametrize("family", FAMILIES)
def test_an_example_by_itself(family: str) -> None:
    """As a user starts it."""
    result = run_ranks(2, EXAMPLES / "heat.py", timeout=60, python=python_of(family))
    assert result.rc == 0, result.out
    assert result.out.rstrip().endswith(": right"), result.out


def test_a_wrong_result_is_told(tmp_path: Path) -> None:
    """On every rank by the exit status, on rank 0 in words."""
    family = FAMILIES[0]
    program = tmp_path / "wrong.py"
    program.write_text(
        f"import sys\nsys.path.insert(0, {str(EXAMPLES)!r})\nfrom common import run\n"
        "run('', lambda comm, xp: (comm.rank != 1, 'of no use'))\n"
    )
    result = run_ranks(2, program, timeout=60, python=python_of(family))
    assert result.rc == 1, result.out
    assert "1x2 ranks, NumPy: of no use: wrong on 1 rank(s)" in result.out, result.out
