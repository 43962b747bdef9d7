"""prove_path and its demands between emulated hosts: TCP is proven by the links' counters."""

from __future__ import annotations

import pytest

from tests.cluster.hosts import ROOT, Hosts
from tests.parallel.test_path import report_in

pytestmark = [pytest.mark.cluster, pytest.mark.parallel, pytest.mark.slow]

PROGRAM = ROOT / "tests" / "parallel" / "programs" / "path.py"


def run(hosts: Hosts, family: str, slots: list[int], args: list[str]) -> tuple[int, str]:
    """Run Python with ``args`` and return mpirun's status and all output."""
    done = hosts.job(family, slots, args)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("slots", [[1, 1], [2, 1, 1]], ids=str)
def test_tcp_is_proven(hosts: Hosts, family: str, slots: list[int]) -> None:
    rc, out = run(hosts, family, slots, [str(PROGRAM)])
    assert rc == 0, out
    report = report_in(out)
    assert len(report.pairs) == len(slots) * (len(slots) - 1) // 2
    for proof in report.pairs:
        assert proof.verdict.path == "tcp", proof.verdict
        assert not proof.evidence.one_stack
        assert set(proof.evidence.sender_lanes) == {("tcp", "link0")}
        assert len([m for m in proof.evidence.counters if m.state == "agrees"]) == 2
        (variant,) = proof.evidence.variants
        assert variant.problem == ""
        assert len(variant.uses) == 2


def test_demands(hosts: Hosts, family: str) -> None:
    bench = ["-m", "rdmakit", "bench", "--device", "cpu", "--layer", "inter", "-b", "64K", "-e",
             "64K", "-n", "2", "--time-budget", "2"]  # fmt: skip
    rc, out = run(hosts, family, [1, 1], [*bench, "--require", "rdma"])
    assert rc == 1, out
    assert "  tcp: ranks 0 -> 1" in out
    assert "(b) sender: link0 sent" in out
    assert f"rdma is required, but ranks 0 -> 1 ({hosts.name}0 -> {hosts.name}1) are tcp" in out
    assert "pair latency" not in out  # nothing was measured
    rc, out = run(hosts, family, [1, 1], bench)
    assert rc == 0, out
    assert "  tcp: ranks 0 -> 1" in out
    assert "pair latency" in out
