"""``rdmakit doctor`` under the mpirun of both families, with nodes that hang, stop and die."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.mpi import FAMILIES, Job, python_of, run_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.quiet]
PROGRAM = Path(__file__).parent / "programs" / "doctor_nodes.py"
LIMIT = 100.0


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def start(family: str, folder: Path, *options: str, limits: str = "{}") -> Job:
    return Job(4, PROGRAM, [str(folder), limits, *options], python=python_of(family))


def seize(job: Job, folder: Path, rank: int, number: signal.Signals) -> None:
    """Send a signal to a rank while the checks of all nodes are running."""
    job.until(lambda: all((folder / f"held{r}").exists() for r in range(4)), LIMIT)
    os.kill(int((folder / f"rank{rank}").read_text()), number)


def flat(text: str) -> str:
    return " ".join(text.split())


def test_one_node(family: str, tmp_path: Path) -> None:
    files = [f"--{kind}={tmp_path / kind}" for kind in ("junit", "prometheus")]
    result = run_ranks(
        3,
        "-m",
        ["rdmakit", "doctor", "--only", "host.memlock", "--json", *files],
        timeout=LIMIT,
        python=python_of(family),
    )
    assert result.rc in (0, 1), result.out
    assert not result.left
    found = json.loads(result.out[result.out.index("{") : result.out.rindex("}") + 1])
    assert found["schema"] == "rdmakit.doctor/1"
    assert found["exit"] == result.rc
    (node,) = found["nodes"]
    assert node["ranks"] == [0, 1, 2]
    assert node["complete"]
    assert list(node["checks"]) == ["host.memlock"]
    assert ElementTree.parse(tmp_path / "junit").find(".//testcase") is not None
    assert 'check="host.memlock"' in (tmp_path / "prometheus").read_text()


def test_every_node_is_checked(family: str, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    result = start(family, tmp_path, "-v").wait(LIMIT)
    assert result.rc == 0, result.out
    assert not result.left
    text = flat(result.out)
    for part in (
        "4 ranks on 4 node(s)",
        "warn t.held [3 of 4 nodes: n1, n2, n3]: made to warn",
        "warn t.held [n0]: made to warn",
        "ok t.first [all 4 nodes]: right",
        "1. cure B (t.held; 3 of 4 nodes: n1, n2, n3) 2. cure A (t.held; n0)",
        "checks: 4 warn, 8 ok",
    ):
        assert part in text, result.out
    for rank in range(4):
        assert f"ok t.last [n{rank}]: 4 ranks, here {rank}" in text


def test_a_check_that_hangs(family: str, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    (tmp_path / "hang2").touch()
    result = start(family, tmp_path).wait(LIMIT)
    assert result.rc == 0, result.out
    assert not result.left, "what the check had started is ended"
    text = flat(result.out)
    assert "unknown t.held [n2]: gave no answer within 6 s, was ended" in text
    assert "last seen running sleep 600" in text
    assert "warn t.held [2 of 4 nodes: n1, n3]" in text
    assert "ok t: first, last [all 4 nodes]" in text


def test_a_rank_that_is_stopped(family: str, tmp_path: Path) -> None:
    job = start(family, tmp_path)
    seize(job, tmp_path, 2, signal.SIGSTOP)
    (tmp_path / "go").touch()
    result = job.wait(LIMIT)
    assert not result.timed_out, result.out
    assert result.rc == 1, result.out
    assert not result.left
    text = flat(result.out)
    assert "fail doctor.node rank 2 [n2]: node n2: no report within 8 s (rank 2" in text
    assert "last heard in t.held" in text
    assert "warn t.held [2 of 4 nodes: n1, n3]: made to warn" in text, "the others report"
    assert "no whole report from: n2" in text
    assert text.index("1. look at that node") < text.index("2. cure B")


@pytest.mark.parametrize("rank", [2, 0])
def test_a_rank_that_dies(family: str, tmp_path: Path, rank: int) -> None:
    job = start(family, tmp_path)
    seize(job, tmp_path, rank, signal.SIGKILL)
    result = job.wait(LIMIT)
    assert not result.timed_out, result.out
    assert result.rc != 0, result.out
    assert not result.left
    text = flat(result.out)
    assert "4 ranks on 4 node(s), as far as they reported" in text, result.out
    assert f"fail doctor.node rank {rank} [n{rank}]: node n{rank}: died before it reported" in text
    assert "checks: 1 fail, 3 could not be found out" in text
    assert "ok t: first" in text, "what was reported before is kept"


def test_rank_0_that_is_stopped(family: str, tmp_path: Path) -> None:
    job = start(family, tmp_path, "--json")
    seize(job, tmp_path, 0, signal.SIGSTOP)
    result = job.wait(LIMIT)
    assert not result.timed_out, result.out
    assert result.rc == 1, result.out
    assert "rank 1: rank 0 gave no sign of life for 8 s; ending the job" in result.out
    place = result.out.index('{\n "schema"')
    found, _ = json.JSONDecoder().raw_decode(result.out[place:])
    assert [node["complete"] for node in found["nodes"]] == [False] * 4
    assert "node n0: no report within 8 s" in found["findings"][0]["found"]
    assert found["exit"] == 1


def test_mpi_init_that_does_not_end(family: str, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    job = start(family, tmp_path, limits='{"init": 12, "own": 8}')
    job.until(lambda: (tmp_path / "rank2").exists(), LIMIT)
    os.kill(int((tmp_path / "rank2").read_text()), signal.SIGSTOP)
    result = job.wait(LIMIT)
    assert not result.timed_out, result.out
    assert result.rc != 0, result.out
    assert "rdmakit: rank 0 (host " in result.out
    assert "MPI_Init has not ended within 12 s" in result.out
    assert "OMPI_MCA_btl_tcp_if_include" in result.out
    assert "lo 127.0.0.1" in result.out
    assert "warn: t.held: made to warn; cure: cure A" in result.out, "this node's own findings"


def test_mpi_init_that_ends_a_rank() -> None:
    """MPICH itself goes over UCX, and ends the rank: what is wrong is told all the same."""
    result = run_ranks(
        2,
        "-m",
        ["rdmakit", "doctor", "--only", "ucx.tls"],
        {"UCX_TLS": "self"},
        timeout=LIMIT,
        python=python_of("mpich"),
    )
    assert not result.timed_out, result.out
    assert result.rc != 0
    assert result.out.count("ended in MPI_Init, without a word to rdmakit") == 1, result.out
    assert "fail: ucx.tls: UCX_TLS=self leaves no transport between nodes" in result.out
    assert "cure: unset UCX_TLS" in result.out


def test_path_is_proven_where_other_checks_are_chosen() -> None:
    args = ["--path", "--only", "host.kernel", "--json"]
    result = run_ranks(2, "-m", ["rdmakit", "doctor", *args], timeout=LIMIT)
    assert result.rc == 0, result.out
    found, _ = json.JSONDecoder().raw_decode(result.out[result.out.index("{") :])
    assert {f["check"] for f in found["findings"]} == {"host.kernel", "path.proof"}


def test_bad_usage_ends_all_ranks_with_one_message() -> None:
    result = run_ranks(2, "-m", ["rdmakit", "doctor", "--only", "nothing"], timeout=LIMIT)
    assert result.rc == 2, result.out
    assert result.out.count("no check 'nothing'") == 1
    assert "Traceback" not in result.out


def test_files_and_lists_need_no_mpi(tmp_path: Path) -> None:
    for host, limit in (("a", "65536"), ("b", "unlimited")):
        path = tmp_path / host / "proc/self"
        path.mkdir(parents=True)
        (path / "limits").write_text(f"Max locked memory  {limit}  {limit}  bytes\n")
    options = ["--only", "host.memlock", "--json", "--strict", "--from", str(tmp_path)]
    result = run_ranks(2, "-m", ["rdmakit", "doctor", *options], timeout=LIMIT)
    assert result.rc == 3, result.out
    found, _ = json.JSONDecoder().raw_decode(result.out[result.out.index("{") :])
    assert [(node["name"], node["status"]) for node in found["nodes"]] == [
        ("a", "warn"),
        ("b", "ok"),
    ]
    result = run_ranks(2, "-m", ["rdmakit", "doctor", "--list"], timeout=LIMIT)
    assert result.rc == 0, result.out
    assert result.out.count("host.memlock: Locked memory") == 1
