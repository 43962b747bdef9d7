"""Calls that do not block, messages and parts of communicators, under mpirun of both families.

tests/parallel/programs/engine.py has what the ranks do.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.conformance import messages, nonblocking, parts
from tests.mpi import FAMILIES, Job, Result, python_of, run_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.quiet]

PROGRAM = Path(__file__).parent / "programs" / "engine.py"
CASES = (*messages.CASES, *nonblocking.CASES, *parts.CASES)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def run(family: str, n: int, mode: str, env: Mapping[str, str] | None = None) -> Result:
    result = run_ranks(n, PROGRAM, [mode], env, timeout=100, python=python_of(family))
    assert result.rc == 0, result.out
    assert result.out.count("] end\n") == n, result.out
    assert not result.left
    return result


def told(result: Result, what: str) -> list[str]:
    """Return what each rank said after ``what``, by rank."""
    lines = [line for line in result.out.splitlines() if f"] {what}" in line]
    return [line.partition(f"] {what}")[2].strip() for line in sorted(lines)]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_every_case(family: str, n: int) -> None:
    """Over UCX and over MPI, in one node, in nodes of one rank and of two: in one job."""
    result = run(family, n, "cases")
    for case in CASES:
        assert f"ok auto 0 {case.__name__} " in result.out, result.out
        if n > 1:
            assert f"ok auto 1 {case.__name__} " in result.out, result.out
            assert f"ok none 1 {case.__name__} " in result.out, result.out


def test_without_threads_in_mpi(family: str) -> None:
    run(family, 3, "single")


def test_messages_longer_than_mpi_counts(family: str) -> None:
    run(family, 2, "large")


@pytest.mark.parametrize("turn", range(2))
def test_left_open_at_exit(family: str, turn: int) -> None:
    """Five jobs at once end more often at odd moments than one after the other."""
    python = python_of(family)
    jobs = [Job(2, PROGRAM, ["left_open"], python=python) for _ in range(5)]
    for job in jobs:
        result = job.wait(60)
        assert result.rc == 0, result.out
        assert result.out.count("] end\n") == 2, result.out
        assert "rdmakit:" not in result.out
        assert "ERROR" not in result.out
        assert not result.left


def test_dropped_without_close(family: str) -> None:
    run(family, 2, "dropped")


def test_closed_parts_hold_nothing(family: str) -> None:
    run(family, 4, "descriptors")


def test_the_one_line_form(family: str) -> None:
    texts = told(run(family, 2, "one_line"), "refused:")
    assert len(texts) == 2
    assert all("ranks_per_node" in text for text in texts)


def test_a_rank_that_does_not_come(family: str) -> None:
    result = run(family, 3, "timeout")
    for number in range(3):
        texts = told(result, f"timeout {number}:")
        assert len(texts) == 2, result.out
        assert all("allreduce/ring" in text and "limit 0.5 s" in text for text in texts)
        assert any("rank 2" in text.partition(":")[2] for text in texts), texts
        assert len(told(result, f"receive {number}: ended")) == 2, result.out
        assert len(told(result, f"closed {number}:")) == 2, result.out


def test_a_forked_child_is_no_rank(family: str) -> None:
    run(family, 2, "fork")


def test_several_threads(family: str) -> None:
    run(family, 2, "threads")
