"""What must hold of the public calls on GPU arrays, in jobs of several shapes.

Starting ranks and compiling their kernels takes longer than the calls, so each shape is one job
whose modes run in a row; a test looks at what became of its mode.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.mpi import Result, python_of, run_ranks

PROGRAM = Path(__file__).parent / "programs" / "calls.py"
pytestmark = pytest.mark.timeout(200)

ARRAYS = ("types", "cupys_bfloat16", "strided", "edges", "staged_kinds")
STALE = ("stale=10000", "scratch_on_two_streams")


@dataclass(frozen=True)
class Shape:
    """Ranks, ranks of a virtual node, and what they do: ``first`` must come first."""

    name: str
    n: int
    per_node: int
    modes: tuple[str, ...]


SHAPES = (
    Shape("1", 1, 0, ("strided", "edges", "staged_kinds")),
    Shape("2", 2, 0, ("first", *ARRAYS, "refused", "replays=1000", *STALE)),
    Shape("3", 3, 0, ("strided", "edges")),
    Shape("4", 4, 0, ("first", *ARRAYS, "refused", "replays=1000", *STALE)),
    Shape("2+2", 4, 2, ("first", *ARRAYS, "refused", "stale=1500", "scratch_on_two_streams")),
    Shape("3+1", 4, 3, ("first", *ARRAYS, "refused", "stale=500")),
)
_results: dict[str, Result] = {}


def result_of(shape: Shape, env: dict[str, str]) -> Result:
    """Return what became of the shape's job, which is run once."""
    if shape.name not in _results:
        _results[shape.name] = run_ranks(
            shape.n, PROGRAM, shape.modes, env | {"RDMAKIT_RANKS_PER_NODE": str(shape.per_node)},
            timeout=180, python=python_of("openmpi"),
        )  # fmt: skip
    return _results[shape.name]


@pytest.mark.parametrize(
    ("shape", "mode"),
    [pytest.param(s, mode, id=f"{s.name}-{mode}") for s in SHAPES for mode in s.modes],
)
def test_mode(mps: dict[str, str], shape: Shape, mode: str) -> None:
    """Each mode's docstring, in programs/arrays.py, capture.py and stress.py, says what it is."""
    result = result_of(shape, mps)
    before = shape.modes[: shape.modes.index(mode)]
    reached = all(f"ok {earlier}\n" in result.out for earlier in before)
    assert reached, f"not reached, since an earlier mode of {before} failed"
    assert f"ok {mode}\n" in result.out, result.out


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_end_of_the_job(mps: dict[str, str], shape: Shape) -> None:
    result = result_of(shape, mps)
    assert result.rc == 0, result.out
    assert not result.left, result.out
    through = "messages of GPU memory go through pinned host memory" in result.out
    assert through == ("+" in shape.name), result.out


def test_an_array_on_another_device(mps: dict[str, str]) -> None:
    code = "import cupy; print(cupy.cuda.runtime.getDeviceCount())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    if int(done.stdout) < 2:
        pytest.skip("one GPU is visible; an array on another needs two")
    result = run_ranks(2, PROGRAM, ["another_device"], mps, python=python_of("openmpi"))
    assert "ok another_device" in result.out, result.out
