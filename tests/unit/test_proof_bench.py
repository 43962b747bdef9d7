"""What a benchmark run demands of the path, and what its rows say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rdmakit.bench.options import Options
from rdmakit.bench.path import RunPath, demand_of, prove_run
from rdmakit.errors import InvalidArgument
from rdmakit.proof import PathReport
from tests.unit.test_proof_judge import DIRECT, GDR, RC, STAGED, between, changed, report, tables

GIVEN: dict[str, Any] = {
    "begin": "8", "end": None, "factor": 2, "iterations": 1, "warmup": 0, "check": 1, "op": "sum",
    "dtype": "float32", "layers": (), "algorithms": (), "time_budget": 1.0, "output": None,
    "quiet": False,
}  # fmt: skip


def options(device: str = "cpu", require: str | None = None, **more: Any) -> Options:
    made = Options.of(**{**GIVEN, "device": "auto", "require": require, **more})
    return made.placed(device)


def comm(gpu_direct: str = "auto", why_staged: str = "", channel: object = "x") -> Any:
    config = SimpleNamespace(gpu_direct=gpu_direct)
    return SimpleNamespace(config=config, why_staged=why_staged, channel=channel)


def test_usage() -> None:
    assert options(require="rdma").require == "rdma"
    assert options().require == ""
    with pytest.raises(InvalidArgument, match="--require 'gpu': one of rdma, gdr"):
        options(require="gpu")
    with pytest.raises(InvalidArgument, match="--require gdr asks for GPU arrays"):
        Options.of(**{**GIVEN, "device": "cpu", "require": "gdr"})


@pytest.mark.parametrize(
    ("device", "direct", "require", "want"),
    [
        ("cpu", "auto", None, ""),
        ("cpu", "on", None, ""),
        ("cpu", "auto", "rdma", "rdma"),
        ("gpu", "on", None, "gdr"),
        ("gpu", "on", "rdma", "gdr"),
        ("gpu", "auto", "rdma", "rdma"),
    ],
)
def test_demand(device: str, direct: str, require: str | None, want: str) -> None:
    assert demand_of(options(device, require), comm(direct)) == want


class Prove:
    """Stands for prove_path and notes what it was asked."""

    def __init__(self, result: PathReport) -> None:
        self.result, self.asked = result, list[dict[str, Any]]()

    def __call__(self, comm: Any, **given: Any) -> PathReport:
        self.asked.append(given)
        return self.result


def test_what_is_looked_at() -> None:
    prove = Prove(report(between(RC)))
    found = prove_run(comm(), options(), prove=prove)
    assert prove.asked[-1] == {"memory": "host", "thorough": False, "most": 1}
    assert found.problem == ""
    assert found.of("inter", "") == "rdma-host"
    assert found.of("intra", "auto") == found.of("inter", "mpi") == ""
    found = prove_run(comm(), options(require="rdma"), prove=prove)
    assert prove.asked[-1] == {"memory": "host", "thorough": True, "most": 28}
    assert found.problem == ""
    found = prove_run(comm(), options(layers=("memory",)), prove=prove)
    assert len(prove.asked) == 2
    assert found.lines(always=True) == []


def test_a_demand_that_is_not_met() -> None:
    staged = changed(GDR, variants=(tables(STAGED),))
    found = prove_run(comm("on"), options("gpu"), prove=Prove(report(staged, memory="gpu")))
    assert found.problem.endswith("are host-staged over rdma")
    lines = found.lines(always=False)
    assert lines[-1] == found.problem
    assert any(STAGED in line for line in lines)  # with the evidence
    met = prove_run(comm("on"), options("gpu"), prove=Prove(report(GDR, memory="gpu")))
    assert met.problem == ""
    assert any(DIRECT in line for line in met.lines(always=True))


def test_one_node() -> None:
    prove = Prove(report())
    alone = comm(channel=None)
    assert prove_run(alone, options(), prove=prove) == RunPath(None, "", "")
    assert "one node" in prove_run(alone, options(require="rdma"), prove=prove).problem
    assert prove_run(comm("on", channel=None), options("gpu"), prove=prove).problem == ""
    assert prove.asked == []


def test_rows_of_the_other_way_say_nothing() -> None:
    direct = prove_run(comm(), options("gpu"), prove=Prove(report(GDR, memory="gpu")))
    assert (direct.of("inter", "gpu-direct"), direct.of("inter", "host-staged")) == (
        "gdr-dmabuf",
        "",
    )
    assert direct.of("inter", "staged") == "gdr-dmabuf"
    ours = report(between(RC, "gpu", staged="off"), memory="gpu")
    staged = prove_run(comm(why_staged="off"), options("gpu"), prove=Prove(ours))
    assert staged.of("inter", "host-staged") == "host-staged over rdma"
    assert staged.of("inter", "gpu-direct") == ""
