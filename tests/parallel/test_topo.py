"""``rdmakit topo`` under the mpirun of both families."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.mpi import FAMILIES, python_of, run_ranks

pytestmark = pytest.mark.parallel
PROGRAM = Path(__file__).parent / "programs" / "topo_nodes.py"


@pytest.mark.parametrize("family", FAMILIES)
def test_one_node(family: str) -> None:
    result = run_ranks(3, "-m", ["rdmakit", "topo", "--json"], timeout=90, python=python_of(family))
    assert result.rc == 0, result.out
    assert not result.left
    found = json.loads(result.out[result.out.index("{") :])
    assert len(found["nodes"]) == 1
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1, 2]
    assert found["nodes"][0]["software"]["UCX"]
    assert found["nodes"][0]["software"]["MPI"].startswith(
        {"openmpi": "Open MPI", "mpich": "MPICH"}[family]
    )
    assert found["differences"] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_two_nodes_and_what_differs(family: str, tmp_path: Path) -> None:
    result = run_ranks(
        3, PROGRAM, ["--collect", str(tmp_path)], timeout=90, python=python_of(family)
    )
    assert result.rc == 0, result.out
    assert not result.left
    for text in (
        "topo: 3 ranks on 2 node(s)",
        "all 2 nodes look alike",
        "differences between the 2 nodes",
        "container: podman on ",
        "#1: lxc",
        "UCX knows no ^ here",
    ):
        assert text in result.out, result.out
    assert result.out.count("proposed placement") == 1, "one rank speaks"
    (folder,) = tmp_path.iterdir()
    assert (folder / "software.json").is_file()


def test_bad_options_end_all_ranks_with_one_message() -> None:
    result = run_ranks(2, "-m", ["rdmakit", "topo", "--graph", "x.png"], timeout=60)
    assert result.rc == 2, result.out
    assert result.out.count("must end in .svg") == 1
    assert "Traceback" not in result.out


def test_a_directory_needs_no_mpi(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\tGPU0\tGPU1\nGPU0\tX\tNV4\nGPU1\tNV4\tX\n")
    result = run_ranks(2, "-m", ["rdmakit", "topo", "--from", str(tmp_path)], timeout=60)
    assert result.rc == 0, result.out
    assert result.out.count("proposed placement") == 1
    assert "NV4" in result.out
