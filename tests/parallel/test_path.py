"""prove_path on one host, with real UCX, children and shared memory."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from rdmakit.proof import PathReport
from tests.mpi import FAMILIES, python_of, run_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.slow]

PROGRAM = Path(__file__).parent / "programs" / "path.py"


def report_in(out: str) -> PathReport:
    found = re.search(r"^report (\{.*\})$", out, re.MULTILINE)
    assert found, out
    return msgspec.json.decode(found[1], type=PathReport)


@pytest.mark.parametrize("family", FAMILIES)
def test_virtual_nodes(family: str) -> None:
    """Between them bytes turn round in the kernel; inside each the window is seen to be one."""
    env = {"RDMAKIT_RANKS_PER_NODE": "2", "UCX_TLS": "tcp,self"}
    args = ["inside=true", "nbytes=1048576"]
    result = run_ranks(4, PROGRAM, args, env=env, timeout=110, python=python_of(family))
    assert result.rc == 0, result.out
    between, *inside = report_in(result.out).pairs
    assert (between.first, between.second) == (0, 2)
    assert between.verdict.path == "unproven"
    assert between.evidence.one_stack
    assert between.evidence.wrong == 0
    assert "virtual nodes of one host" in " ".join(between.verdict.missing)
    (variant,) = between.evidence.variants
    assert variant.problem == ""
    assert variant.same_library
    assert variant.GBps
    assert {use.side for use in variant.uses} == {"sender", "receiver"}
    assert all(lane[0] == "tcp" for use in variant.uses for lane in use.lanes)
    for proof in inside:
        assert proof.evidence.window is not None
        assert proof.evidence.window.same
        assert proof.evidence.wrong == 0
        # Whatever else runs on this machine may keep its ports from being quiet.
        assert proof.verdict.path in ("shm", "unproven")
        assert not proof.verdict.disagreements


def test_a_demand_on_one_node() -> None:
    result = run_ranks(
        2, "-m", ["rdmakit", "bench", "--require", "rdma", "--quiet", "--device", "cpu"], timeout=60
    )
    assert result.rc == 1, result.out
    assert "rdma is required, but there is one node" in result.out


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--require", "fast"], "--require 'fast': one of rdma, gdr"),
        (["--require", "gdr", "--device", "cpu"], "--require gdr asks for GPU arrays"),
    ],
)
def test_bad_usage(args: list[str], text: str) -> None:
    result = run_ranks(2, "-m", ["rdmakit", "bench", *args], timeout=60)
    assert result.rc == 2, result.out
    assert text in result.out


def test_children_that_cannot_start() -> None:
    """The proof goes on without a table and says why there is none."""
    env = {"RDMAKIT_RANKS_PER_NODE": "1", "UCX_TLS": "tcp,self", "RDMAKIT_PROOF_TEST": "broken"}
    args = ["nbytes=1048576"]
    result = run_ranks(2, PROGRAM, args, env=env, timeout=90)
    assert result.rc == 0, result.out
    (proof,) = report_in(result.out).pairs
    assert proof.evidence.variants[0].problem.startswith("sender: the child has ended")
    assert proof.evidence.sender_lanes[0][0] == "tcp"


def test_without_ucx() -> None:
    env = {"RDMAKIT_RANKS_PER_NODE": "1", "RDMAKIT_UCX": "none"}
    result = run_ranks(2, PROGRAM, ["nbytes=1048576"], env=env, timeout=90)
    assert result.rc == 0, result.out
    (proof,) = report_in(result.out).pairs
    assert proof.verdict.path == "unproven"
    assert "(a) the messages go through MPI, which does not tell its lanes" in proof.verdict.missing
