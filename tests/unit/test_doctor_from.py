"""`rdmakit doctor --from`: what `rdmakit topo --collect` of several hosts wrote."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rdmakit.cli import main
from rdmakit.discovery.collect import collect
from rdmakit.doctor.collecting import read_for_checks
from rdmakit.drivers.host import HostTree
from rdmakit.process.launcher import LAUNCHER_VARIABLES
from tests.unit.doctor_parts import interface
from tests.unit.fake_node import absent, write

HOSTS = 3
Judge = Callable[..., dict[str, Any]]


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of three healthy hosts' directories."""
    for name in list(os.environ):
        if LAUNCHER_VARIABLES.match(name) or name.startswith(("UCX_", "NCCL_", "RDMAKIT_")):
            monkeypatch.delenv(name)
    for host in range(HOSTS):
        root = tmp_path / f"root{host}"
        write(root, "/proc/self/limits", "Max locked memory   unlimited   unlimited  bytes\n")
        write(root, "/proc/sys/kernel/hostname", f"h{host}\n")
        write(root, "/proc/sys/kernel/osrelease", "6.8.0-45-generic\n")
        write(root, "/proc/sys/kernel/random/boot_id", f"boot-{host}\n")
        write(root, "/etc/hosts", f"192.0.2.{host + 1} h{host}\n")
        interface(root, "eth0", f"192.0.2.{host + 1}", default=True)
        tree = HostTree(root)
        collect(tmp_path / "hosts" / f"h{host}", tree, absent, look=read_for_checks)
    return tmp_path / "hosts"


@pytest.fixture
def judge(capsys: pytest.CaptureFixture[str]) -> Judge:
    """Return a function that gives what the command finds in a directory."""

    def judge(folder: Path, status: int = 0) -> dict[str, Any]:
        with pytest.raises(SystemExit) as caught:
            main(["doctor", "--json", "--from", str(folder)])
        assert caught.value.code == status
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return judge


def bad(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {f["check"]: f for f in found["findings"] if f["status"] in ("fail", "warn")}


def test_no_false_alarm(hosts: Path, judge: Judge) -> None:
    found = judge(hosts)
    assert bad(found) == {}
    assert [node["name"] for node in found["nodes"]] == ["h0", "h1", "h2"]
    job = {f["check"]: f for f in found["findings"] if f["check"].startswith("job.")}
    assert job["job.hosts"]["status"] == job["job.addresses"]["status"] == "ok"
    assert job["job.versions"]["status"] == "skipped", "nothing told a version"
    one = judge(hosts / "h1")
    assert bad(one) == {}
    assert [node["name"] for node in one["nodes"]] == ["h1"]
    assert not [f for f in one["findings"] if f["check"].startswith("job.")]


def test_comparisons(hosts: Path, judge: Judge) -> None:
    write(hosts / "h2", "/proc/sys/kernel/hostname", "h0\n")
    (hosts / "h1/sys/class/net/eth0/mtu").write_text("9000\n")
    (hosts / "h1/environ.json").write_text('{"UCX_RNDV_THRESH": "8192"}')
    found = bad(judge(hosts, status=1))
    assert found["job.hosts"]["status"] == "fail"
    assert "2 hosts are called 'h0'" in found["job.hosts"]["found"]
    assert "192.0.2.3" in found["job.hosts"]["found"]
    assert "hostnamectl set-hostname" in found["job.hosts"]["cure"]
    assert "9000 on h1" in found["job.mtu"]["found"]
    assert "UCX_RNDV_THRESH is not set, but 8192 on h1" in found["job.settings"]["found"]


def test_one_address_of_two_hosts(hosts: Path, judge: Judge) -> None:
    shutil.copy(hosts / "h1/proc/net/fib_trie", hosts / "h2/proc/net/fib_trie")
    found = bad(judge(hosts, status=1))
    assert found["job.addresses"]["status"] == "fail"
    assert "192.0.2.2 (eth0) is the address of h1, h2" in found["job.addresses"]["found"]


def test_a_fault_of_one_host(hosts: Path, judge: Judge) -> None:
    (hosts / "h1/environ.json").write_text('{"UCX_TLS": "self,tpc"}')
    found = judge(hosts, status=1)
    tls = bad(found)["ucx.tls"]
    assert tls["nodes"] == ["h1"]
