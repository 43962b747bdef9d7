"""The communicator between real processes, under the mpirun of both families.

tests/parallel/programs/communicator.py has what the ranks do.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.mpi import FAMILIES, Job, Result, leftovers, python_of, run_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.quiet]

PROGRAM = Path(__file__).parent / "programs" / "communicator.py"
DEBIAN = Path("/usr/bin/mpirun.openmpi")


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _nothing_stays_in_shared_memory() -> Iterator[None]:
    before = leftovers()
    yield
    left = leftovers() - before
    assert not left, left


def run(
    family: str, n: int, mode: str, env: Mapping[str, str] | None = None, name: str = PROGRAM.name
) -> Result:
    program = PROGRAM.with_name(name)
    result = run_ranks(n, program, [mode], env, timeout=60, python=python_of(family))
    assert result.rc == 0, result.out
    assert result.out.count("] end\n") == n, result.out
    assert not result.left
    return result


def told(result: Result, what: str) -> list[str]:
    """Return what each rank said after ``what``, by rank."""
    lines = [line for line in result.out.splitlines() if f"] {what}" in line]
    return [line.partition(f"] {what}")[2].strip() for line in sorted(lines)]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_results(family: str, n: int) -> None:
    """Nodes of all, 1, 2 and 3 ranks, over UCX and over MPI, in one job."""
    result = run(family, n, "matrix")
    assert len(told(result, "ok auto")) == min(n, 3) + 1
    if n > 1:
        assert any(line.startswith("1 tcp") for line in told(result, "ok auto")), result.out
        assert any(line.startswith("1 mpi") for line in told(result, "ok none")), result.out


def test_another_version_on_one_rank(family: str) -> None:
    texts = told(run(family, 3, "version"), "SetupError:")
    assert len(texts) == 3
    assert set(texts) == {texts[0]}
    assert "rdmakit: " in texts[0]
    assert "'9.9.9' on rank(s) [1]" in texts[0]


def test_nodes_named_by_hand(family: str) -> None:
    run(family, 3, "node_id")


def test_shared_memory_that_is_too_small(family: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("a small /dev/shm needs a mount namespace, and that needs root")
    result = run(family, 2, "small_shm")
    if why := told(result, "no namespace:"):
        pytest.skip(f"no mount namespace here: {why[0]}")
    texts = told(result, "SetupError:")
    assert len(texts) == 2
    for text in texts:
        assert "/dev/shm has 1048576 bytes free and this rank needs" in text
        assert "RDMAKIT_WINDOW" in text


def test_two_at_once(family: str) -> None:
    run(family, 4, "two")


def test_over_a_part_of_the_job(family: str) -> None:
    assert run(family, 3, "part").seconds < 15


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


def test_a_receive_that_nobody_sent_to(family: str) -> None:
    """Close raises on its rank; all have closed together, so none waits for another at exit."""
    result = run(family, 2, "alone", name="late.py")
    (text,) = told(result, "late:")
    assert "receive from rank 1 (tag 9)" in text
    assert "rdmakit:" not in result.out


def test_a_receive_on_a_part_that_nobody_sent_to(family: str) -> None:
    """Inside its parent's close: the others do not wait for its rank there."""
    result = run(family, 3, "in_parts", name="late.py")
    (text,) = told(result, "late:")
    assert re.search(r"tag 7.*receive from rank 1 \(tag 9\)", text), text  # the latest first
    (text,) = told(result, "request:")
    assert "receive from rank 1 (tag 9)" in text, text
    assert "rdmakit:" not in result.out


def test_a_part_with_such_a_receive_leaves_the_others_usable(family: str) -> None:
    (text,) = told(run(family, 3, "in_a_part", name="late.py"), "late:")
    assert "receive from rank 0 (tag 3)" in text


@pytest.mark.parametrize("mode", ["before_mpi", "before_rdmakit_loads_it", "spawned"])
def test_a_child_made_before_mpi_was_loaded_is_no_rank(family: str, mode: str) -> None:
    """It has the launcher's variables of its parent, or its MPI, and must use neither."""
    result = run(family, 2, mode, name="forked.py")
    texts = told(result, "child:")
    assert len(texts) == 2, result.out
    what = "started by multiprocessing in rank" if mode == "spawned" else "forked from a rank"
    assert all(f"this process was {what}" in text for text in texts), texts


def test_a_forked_child_is_no_rank(family: str) -> None:
    result = run(family, 2, "forked")
    for name in ("call", "new", "wait", "test", "all"):
        texts = told(result, f"child {name}:")
        assert len(texts) == 2, result.out
        assert all("this process was forked from a rank and is none" in text for text in texts)


def test_closed_communicators_hold_nothing(family: str) -> None:
    run(family, 2, "descriptors")


def test_dropped_without_close(family: str) -> None:
    run(family, 3, "dropped")


def test_operations_bound_to_mpi(family: str) -> None:
    texts = told(run(family, 3, "bound_mpi"), "mismatch:")
    assert len(texts) == 3
    assert len(set(texts)) == 1
    assert "call 3: allreduce count=3" in texts[0]


def test_calls_that_differ(family: str) -> None:
    texts = told(run(family, 3, "mismatch"), "mismatch:")
    assert len(texts) == 6
    for text in texts:
        assert text.startswith("2 rank(s): call 2: allreduce")
        assert "but rank 2: call 2: allreduce count=10 dtype=float64 op=max" in text


def test_a_rank_that_does_not_come(family: str) -> None:
    """The others name it, their communicator is closed, and the job still ends well."""
    result = run(family, 3, "timeout")
    for number in range(4):
        texts = told(result, f"timeout {number}:")
        assert len(texts) == 2, result.out
        assert all("allreduce/hierarchical" in text for text in texts)
        assert any("rank 2" in text.partition(":")[2] for text in texts), texts
        closed = told(result, f"closed {number}:")
        assert len(closed) == 2
        assert all("unusable: TransferTimeout" in text for text in closed)


def test_memory_that_comes_and_goes(family: str) -> None:
    places = told(run(family, 2, "memory"), "places")
    assert all(int(number) < 25 for number in places), "no address came twice: nothing was tested"


def test_no_warning_from_inside(family: str) -> None:
    run(family, 2, "quiet", {"PYTHONWARNINGS": "error::RuntimeWarning,error::DeprecationWarning"})


def test_checking_and_settings_from_the_environment(family: str) -> None:
    env = {"RDMAKIT_CHECK": "1", "RDMAKIT_WINDOW": "64K", "RDMAKIT_TIMEOUT": "30"}
    run(family, 2, "two", env)


def test_a_variable_that_is_not_understood(family: str) -> None:
    result = run(family, 1, "variables")
    for variable in ("RDMAKIT_UCX", "RDMAKIT_WINDOW", "RDMAKIT_CHECK"):
        assert f"InvalidArgument: {variable}=" in result.out, result.out


def test_many_ranks_open_and_close(family: str) -> None:
    """Who is through the last barrier first closes while others still wait for it."""
    run(family, 12, "open_and_close")


def test_the_distribution_open_mpi(tmp_path: Path) -> None:
    """Debian's Open MPI with this environment's mpi4py: MPI carries the messages, and says why."""
    if not DEBIAN.is_file():
        pytest.skip(f"{DEBIAN} is not installed (Debian and Ubuntu: openmpi-bin)")
    library = next(iter(sorted(Path("/usr/lib").glob("*/libmpi.so.40"))), None)
    if library is None:
        pytest.skip("no libmpi.so.40 under /usr/lib beside mpirun.openmpi")
    if shutil.which("ompi_info.openmpi") is None and not Path("/usr/bin/ompi_info").exists():
        pytest.skip("mpirun.openmpi is there but Open MPI's own tools are not")
    result = run_ranks(
        4, PROGRAM, ["debian"], {"MPI4PY_LIBMPI": str(library)}, timeout=90, python=sys.executable,
        mpirun=DEBIAN, mpirun_args=["--oversubscribe", "--bind-to", "none"],
    )  # fmt: skip
    assert result.rc == 0, result.out
    assert result.out.count("] end\n") == 4, result.out
    assert "Open MPI" in told(result, "vendor")[0]
    assert told(result, "channel") == ["mpi"], result.out
    assert "messages go through MPI, since UCX cannot be used" in told(result, "notes")[0]
