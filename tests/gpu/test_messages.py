"""GPU arrays between nodes: UCX on device pointers, through pinned memory, and in steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi import python_of, run_ranks

PROGRAM = Path(__file__).parent / "programs" / "messages.py"


def run(env: dict[str, str], n: int, *args: str) -> str:
    result = run_ranks(n, PROGRAM, args, env, timeout=100, python=python_of("openmpi"))
    assert result.rc == 0, result.out
    assert not result.left, result.out
    return result.out


@pytest.mark.parametrize("direct", ["on", "off"])
@pytest.mark.parametrize(
    ("n", "per_node", "ways"),
    [(2, "1", "shards"), (4, "2", "shards"), (4, "3", "steps"), (8, "4", "shards")],
)
def test_between_nodes(mps: dict[str, str], direct: str, n: int, per_node: str, ways: str) -> None:
    env = mps | {"RDMAKIT_GPU_DIRECT": direct, "RDMAKIT_RANKS_PER_NODE": per_node}
    out = run(env, n, "few")
    rail = "steps" if direct == "on" else "host"
    assert f"ways {ways} {rail} kernels" in out, out
    said = "not proven" if direct == "on" else "pinned host memory: gpu_direct=off"
    assert said in out, out


def test_the_communicator_is_made_before_any_gpu_is_used(mps: dict[str, str]) -> None:
    run(mps | {"RDMAKIT_GPU_DIRECT": "on", "RDMAKIT_RANKS_PER_NODE": "1"}, 2, "few", "late")


@pytest.mark.parametrize(("n", "per_node"), [(2, "0"), (3, "2")])
def test_one_gpu_without_mps(gpu: None, n: int, per_node: str) -> None:
    """Kernels of different processes take turns then: the host steps through the plans."""
    env = {"CUDA_VISIBLE_DEVICES": "0", "RDMAKIT_RANKS_PER_NODE": per_node}
    out = run(env | {"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent"}, n, "few")
    assert "ways steps" in out, out
    assert "steps\n" in out.split("ways", 1)[1].split("note", 1)[0], out
