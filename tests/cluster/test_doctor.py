"""``rdmakit doctor`` as a user starts it, on emulated hosts of which something is broken."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import JOB_SECONDS, MTU, TOOL, Hosts

pytestmark = [pytest.mark.cluster, pytest.mark.parallel, pytest.mark.slow, pytest.mark.quiet]

HOSTS = 3
BAD = ("fail", "warn", "unknown")
_JOB = ("hosts", "addresses", "mtu", "gid", "configuration", "versions", "settings", "clock")
Found = dict[str, Any]


class Doctor:
    """The command on the first hosts, a rank each."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.name, self.address = hosts.host, hosts.address

    def words(self, family: str, args: list[str], environ: dict[str, str]) -> list[str]:
        command = ["-m", "rdmakit", "doctor", "--json", *args]
        return self.hosts.words(family, [1] * HOSTS, command, environ)

    def text(self, family: str, *args: str, **environ: str) -> tuple[int, str]:
        """Return mpirun's exit status and everything that was printed."""
        done = self.hosts.tool(*self.words(family, list(args), environ), timeout=JOB_SECONDS)
        return done.returncode, done.stdout + done.stderr

    def __call__(self, family: str, *args: str, status: int = 0, **environ: str) -> Found:
        """Return the report, of which the exit status must be mpirun's too."""
        rc, out = self.text(family, *args, **environ)
        assert rc == status, out
        found = report_in(out)
        assert found["exit"] == status
        return found


def report_in(out: str) -> Found:
    assert '{\n "schema"' in out, out
    found, _ = json.JSONDecoder().raw_decode(out[out.index('{\n "schema"') :])
    return dict(found)


def bad(found: Found) -> dict[str, Found]:
    """Return what is not well, but what this machine itself warns of."""
    return {
        f["check"]: f
        for f in found["findings"]
        if f["status"] in BAD and (f["check"], f["status"]) != ("host.memlock", "warn")
    }


def cured(found: Found, check: str) -> str:
    return next(one["cure"] for one in found["cures"] if check in one["checks"])


@pytest.fixture
def doctor(hosts: Hosts) -> Doctor:
    return Doctor(hosts)


def test_healthy(doctor: Doctor, family: str) -> None:
    found = doctor(family, "--path")
    assert bad(found) == {}
    assert [(n["name"], n["complete"]) for n in found["nodes"]] == [
        (doctor.name(host), True) for host in range(HOSTS)
    ]
    status = {f["check"]: f["status"] for f in found["findings"] if not f["nodes"]}
    assert {check for check in status if check.startswith("job.")} == {
        f"job.{name}" for name in _JOB
    }
    assert {name for name, value in status.items() if value == "skipped"} <= {
        "job.gid",  # no RDMA device
        "path.proof",  # no GPU
    }
    assert status["net.reach"] == "ok"
    (report,) = found["paths"]
    assert len(report["pairs"]) == HOSTS * (HOSTS - 1) / 2
    for pair in report["pairs"]:
        assert pair["verdict"]["path"] == "tcp"
        counters = pair["evidence"]["counters"]  # of lo too, which carries nothing
        assert [one["state"] for one in counters].count("agrees") == 2, "both links counted"


def test_a_pair_that_is_cut(doctor: Doctor) -> None:
    """Of Open MPI's; MPICH's own MPI_Init does not end where two hosts are cut."""
    with doctor.hosts.cut(1, 2):
        found = doctor("openmpi", "--path", "--only", "net.reach", status=1)
    wrong = bad(found)
    assert set(wrong) == {"net.reach", "path.proof"}
    reach, path = wrong["net.reach"], wrong["path.proof"]
    assert reach["status"] == "fail"
    assert reach["subject"] == f"{doctor.name(1)} - {doctor.name(2)}"
    assert "iptables -I INPUT" in cured(found, "net.reach")
    assert path["status"] == "unknown"
    assert path["found"].startswith("not tried")


def test_mtu_of_one_host(doctor: Doctor) -> None:
    with doctor.hosts.mtu(1, 1500):
        found = doctor("openmpi", "--only", "job.mtu")
    wrong = bad(found)["job.mtu"]
    assert f"1500 on {doctor.name(1)}" in wrong["found"]
    assert f"mtu {MTU} on {doctor.name(1)}" in cured(found, "job.mtu")


def test_two_hosts_of_one_name(doctor: Doctor, family: str) -> None:
    with doctor.hosts.renamed(2, doctor.name(0)):
        found = doctor(family, "--only", "job.hosts", status=1)
    wrong = bad(found)["job.hosts"]
    assert wrong["status"] == "fail"
    assert doctor.address(2) in wrong["found"]
    assert "hostnamectl set-hostname" in cured(found, "job.hosts")
    names = [node["name"] for node in found["nodes"]]
    assert len(set(names)) == HOSTS, "three nodes, whatever they are called"


@pytest.mark.parametrize(
    ("name", "value", "check", "cure"),
    [
        ("UCX_NET_DEVICES", "mlx5_0:1", "ucx.net_devices", "export UCX_NET_DEVICES=link0"),
        ("UCX_NET_DEVICES", "lo", "ucx.net_devices", "export UCX_NET_DEVICES=link0"),
        ("UCX_TLS", "self,sm", "ucx.tls", "export UCX_TLS=self,sm,tcp"),
    ],
)
def test_settings(doctor: Doctor, name: str, value: str, check: str, cure: str) -> None:
    found = doctor("openmpi", "--only", "ucx.tls", "--only", "ucx.net_devices", "--only",
                   "job.settings", status=1, **{name: value})  # fmt: skip
    wrong = bad(found)
    assert set(wrong) == {check}
    assert wrong[check]["status"] == "fail"
    assert len(wrong[check]["nodes"]) == HOSTS
    assert f"{name}={value}" in wrong[check]["found"]
    assert cure in cured(found, check)


@pytest.mark.parametrize(
    ("name", "value", "check"),
    [("UCX_TLS", "self,sm", "ucx.tls"), ("UCX_NET_DEVICES", "mlx5_0:1", "ucx.net_devices")],
)
def test_settings_that_end_mpi_init(doctor: Doctor, name: str, value: str, check: str) -> None:
    """MPICH goes over UCX itself and ends its ranks; each host tells what is wrong there."""
    only = ("--only", "ucx.tls", "--only", "ucx.net_devices")
    rc, out = doctor.text("mpich", *only, **{name: value})
    assert rc not in (0, None), out
    for host in range(HOSTS):
        assert f"(host {doctor.name(host)}): ended in MPI_Init" in out
        assert re.search(rf"{doctor.name(host)}: fail: {check}: .*{name}={value}.*; cure: ", out)


def test_a_bridge_with_one_address_on_all_hosts(doctor: Doctor) -> None:
    ways = {"UCX_NET_DEVICES": "docker0", "OMPI_MCA_btl_tcp_if_include": "link0"}
    only = ("--only", "ucx.net_devices", "--only", "job.addresses", "--only", "net.reach")
    with doctor.hosts.bridges(HOSTS):
        left_out = doctor("openmpi", *only, status=1, **ways)
        taken = doctor("openmpi", *only, status=1, UCX_TCP_BRIDGE_ENABLE="y", **ways)
    assert set(bad(left_out)) == {"ucx.net_devices"}
    assert bad(left_out)["ucx.net_devices"]["status"] == "fail"
    assert "UCX_NET_DEVICES=link0" in cured(left_out, "ucx.net_devices")
    wrong = bad(taken)["job.addresses"]
    assert wrong["status"] == "fail"
    assert "172.17.0.1 (docker0) is the address of" in wrong["found"]
    assert "UCX_NET_DEVICES=" in cured(taken, "job.addresses")


def test_an_mpi_whose_own_messages_go_astray(doctor: Doctor) -> None:
    """Open MPI takes docker0 as well, and what ranks send there comes back to the host itself."""
    with doctor.hosts.bridges(HOSTS):
        rc, out = doctor.text("openmpi", "--only", "host.files")
    if "failed to TCP connect to a peer MPI process" in out:
        # Nobody listens there: MPI itself names the address and ends all ranks at once.
        assert rc not in (0, None), out
        assert "172.17.0.1" in out
        return
    assert rc == 1, out  # somebody does, and the messages are lost
    found = report_in(out)
    (wrong,) = [f for f in found["findings"] if f["subject"] == "rank 2"]
    assert wrong["check"] == "doctor.node"
    assert "no word within 20 s after MPI_Init" in wrong["found"]
    assert "OMPI_MCA_btl_tcp_if_include" in wrong["cure"]


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_rank_that_is_seized(doctor: Doctor, number: signal.Signals) -> None:
    """While the checks of its host run."""
    words = doctor.words("openmpi", ["--only", "host", "--only", "ucx"], {})
    job = subprocess.Popen(
        [str(TOOL), *words], env=doctor.hosts.env, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        os.kill(first_rank(doctor.name(2)), number)
        out, _ = job.communicate(timeout=JOB_SECONDS)
    finally:
        job.kill()
    assert job.returncode != 0, out
    found = report_in(out)
    nodes = {node["name"]: node for node in found["nodes"]}
    assert not nodes[doctor.name(2)]["complete"]
    assert found["exit"] == 1
    assert any(doctor.name(2) in f["nodes"] for f in found["findings"] if f["status"] == "fail")
    if number is signal.SIGSTOP:
        assert nodes[doctor.name(0)]["complete"]
        assert nodes[doctor.name(1)]["complete"]
        assert bad(found)["doctor.node"]["nodes"] == [doctor.name(2)]


def first_rank(host: str) -> int:
    """Return the process of a host's first rank, once its worker is there."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        listed = subprocess.run(
            ["ip", "netns", "pids", host], capture_output=True, text=True, check=True
        )
        for pid in listed.stdout.split():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if b"rdmakit.doctor.worker" in words:
                    return int(words[words.index(b"rdmakit.doctor.worker") + 1])
        time.sleep(0.05)
    raise AssertionError(f"no checks on {host} within 60 s")
