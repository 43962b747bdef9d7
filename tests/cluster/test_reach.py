"""Faults of the network between emulated hosts, and what the doctor says of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from rdmakit.doctor.model import Finding, Status
from tests.cluster.hosts import MTU, TOOL, Hosts

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.quiet]

PROGRAM = Path(__file__).with_name("reach_node.py")
HOSTS = 3


def under_mpirun(hosts: Hosts) -> list[Finding]:
    """Run the program as a job of Open MPI, one rank on each host."""
    done = hosts.job("openmpi", [1] * HOSTS, [str(PROGRAM), "mpi", "0", str(HOSTS)], timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith("[{")]
    assert len(told) == HOSTS
    assert len(set(told)) == 1
    return msgspec.json.decode(told[0], type=list[Finding])


def findings_of(hosts: Hosts, folder: Path, environ: dict[str, str] | None = None) -> list[Finding]:
    """Run the program on all hosts; they must all say the same."""
    folder.mkdir()
    started = [
        subprocess.Popen(
            [str(TOOL), "run", str(host), sys.executable, str(PROGRAM), str(folder),
             str(host), str(HOSTS)],
            env={**hosts.env, **(environ or {})}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for host in range(HOSTS)
    ]  # fmt: skip
    told = [process.communicate(timeout=90) for process in started]
    for process, (out, err) in zip(started, told, strict=True):
        assert process.returncode == 0, out + err
    assert len({out for out, _ in told}) == 1
    return msgspec.json.decode(told[0][0], type=list[Finding])


@pytest.fixture
def run(hosts: Hosts, tmp_path: Path) -> Callable[..., dict[str, list[Finding]]]:
    """Return a function that gives the bad findings by check."""

    def run(**environ: str) -> dict[str, list[Finding]]:
        bad: dict[str, list[Finding]] = {}
        for finding in findings_of(hosts, tmp_path / "plane", environ):
            if finding.status in (Status.FAIL, Status.WARN):
                assert finding.cure
                bad.setdefault(finding.check, []).append(finding)
        return bad

    return run


Run = Callable[..., dict[str, list[Finding]]]


def test_healthy(run: Run) -> None:
    assert run() == {}


def test_packets_of_one_host_are_dropped(hosts: Hosts, run: Run) -> None:
    with hosts.cut(1, 2):
        bad = run()
    assert set(bad) == {"net.reach"}
    (finding,) = bad["net.reach"]
    assert finding.status is Status.FAIL
    assert f"{hosts.name}1" in finding.found
    assert f"{hosts.name}2" in finding.found
    assert f"{hosts.name}0" not in finding.found
    assert "nor the other way round" in finding.found
    assert "no answer within 2 s: a firewall drops" in finding.found
    assert "iptables -I INPUT" in finding.cure


@pytest.mark.parallel
def test_under_mpirun(hosts: Hosts) -> None:
    """MPI's own collectives hang where two ranks are cut off; a star over the first does not."""
    with hosts.cut(1, 2):
        found = under_mpirun(hosts)
    bad = [finding for finding in found if finding.status in (Status.FAIL, Status.WARN)]
    assert [finding.check for finding in bad] == ["net.reach"], bad
    assert f"{hosts.name}1 (link0" in bad[0].found
    assert f"does not reach {hosts.name}2" in bad[0].found


def test_a_route_that_leads_nowhere(hosts: Hosts, run: Run) -> None:
    there = hosts.address(0)
    hosts.on(1, f"ip route add unreachable {there}/32")
    try:
        bad = run()
    finally:
        hosts.on(1, f"ip route del unreachable {there}/32")
    texts = [finding.found for finding in bad["net.reach"]]
    assert any(f"{hosts.name}1 (link0" in text and "No route to host" in text for text in texts)
    assert all(f"{hosts.name}2" not in text for text in texts)
    assert any("ip route get" in finding.cure for finding in bad["net.reach"])


def test_a_switch_that_takes_small_packets_only(hosts: Hosts, run: Run) -> None:
    # Segments leave one by one: a kernel hands over larger pieces between its own links.
    for host in range(HOSTS):
        hosts.on(host, "ip link set link0 gso_max_segs 1")
    hosts.at_switch("link", "set", "port2", "mtu", "1500")
    try:
        bad = run()
    finally:
        hosts.at_switch("link", "set", "port2", "mtu", str(MTU))
        for host in range(HOSTS):
            hosts.on(host, "ip link set link0 gso_max_segs 65535")
    assert set(bad) == {"net.reach"}
    for finding in bad["net.reach"]:
        assert "small packets pass" in finding.found
        assert f"{hosts.name}2" in finding.found
        assert "mtu 1500" in finding.cure


def test_mtu_differs(hosts: Hosts, run: Run) -> None:
    with hosts.mtu(1, 1500):
        bad = run()
    (finding,) = bad["job.mtu"]
    assert f"1500 on {hosts.name}1; 9000 on {hosts.name}0, {hosts.name}2" in finding.found
    assert f"ip link set link0 mtu 9000 on {hosts.name}1" in finding.cure


def test_two_hosts_of_one_name(hosts: Hosts, run: Run) -> None:
    with hosts.renamed(2, hosts.host(0)):
        bad = run()
    (finding,) = bad["job.hosts"]
    assert f"2 hosts are called '{hosts.name}0'" in finding.found
    assert hosts.address(2) in finding.found
    assert "hostnamectl set-hostname" in finding.cure


def test_a_bridge_with_one_address_on_all_hosts(hosts: Hosts, run: Run) -> None:
    """UCX takes a bridge where it is told to; one that is older takes any."""
    with hosts.bridges(HOSTS):
        bad = run(UCX_NET_DEVICES="docker0", UCX_TCP_BRIDGE_ENABLE="y")
    (finding,) = bad["job.addresses"]
    assert finding.status is Status.FAIL
    assert "172.17.0.1 (docker0) is the address of" in finding.found
    assert "UCX_NET_DEVICES=" in finding.cure
    assert all("same address" in finding.found for finding in bad["net.reach"])
