"""Each program in benchmarks/examples, on host arrays, as a user runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi import FAMILIES, python_of, run_ranks

pytestmark = pytest.mark.parallel

EXAMPLES = Path(__file__).resolve().parents[2] / "benchmarks" / "examples"
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
@pytest.mark.parametrize("name", SAYS)
@pytest.mark.parametrize(("n", "per_node", "shape", "blocks"), SHAPES)
def test_example(family: str, name: str, n: int, per_node: int, shape: str, blocks: str) -> None:
    env = {"RDMAKIT_RANKS_PER_NODE": str(per_node), "RDMAKIT_CHECK": "1"}
    result = run_ranks(n, EXAMPLES / f"{name}.py", env=env, timeout=90, python=python_of(family))
    assert result.rc == 0, result.out
    lines = [line for line in result.out.splitlines() if line.startswith(f"{shape} ranks, NumPy: ")]
    assert len(lines) == 1, result.out
    assert SAYS[name].format(blocks=blocks) in lines[0]
    assert lines[0].endswith(": right")
    assert not result.left


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
