"""Checks of the network between nodes: interfaces, names and packet filters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from rdmakit.doctor.checks.net import tcp_choice
from rdmakit.doctor.interfaces import read_interfaces, tcp_candidates
from rdmakit.doctor.model import Status
from rdmakit.drivers.host import CommandResult, HostTree
from tests.unit.doctor_parts import (
    UCX,
    Children,
    context,
    interface,
    rank,
    verdict,
    write,
)

FAIL, WARN, OK, SKIPPED = Status.FAIL, Status.WARN, Status.OK, Status.SKIPPED


def test_interfaces(tmp_path: Path) -> None:
    interface(tmp_path, "eth0", "192.0.2.7", speed=1000, default=True)
    interface(tmp_path, "eth1", "198.51.100.7", speed=25000)
    interface(tmp_path, "eth2", up=False)
    found = {one.name: one for one in read_interfaces(HostTree(tmp_path))}
    assert (found["eth0"].address, found["eth0"].prefix) == ("192.0.2.7", 24)
    assert found["eth0"].network == "192.0.2.0/24"
    assert found["eth1"].address == "198.51.100.7"
    assert not found["eth2"].up
    order = [one.name for one in tcp_candidates(list(found.values()))]
    assert order == ["eth1", "eth0"]
    assert [o.name for o in tcp_candidates(list(found.values()), ["eth0"])] == ["eth0"]


def old_ucx(version: str = "1.13.1") -> Children:
    return Children(msgspec.structs.replace(UCX, version=version, names=()))


def test_docker0(tmp_path: Path) -> None:
    """A bridge that is faster than the real interface; only an old UCX takes it."""
    interface(tmp_path, "eth0", "192.0.2.7", speed=1000, default=True)
    interface(tmp_path, "docker0", "172.17.0.1", speed=10000, bridge=True)
    ranks = (rank(0),)
    node = context(tmp_path, ranks=ranks, job_size=2)
    assert verdict("net.interface", node)[0] is OK
    assert [one.name for one in tcp_choice(node)] == ["eth0"]
    node = context(tmp_path, children=old_ucx(), ranks=ranks, job_size=2)
    status, found, cure = verdict("net.interface", node)
    assert status is FAIL
    assert "docker0 (172.17.0.1/24" in found
    assert cure == "export UCX_NET_DEVICES=eth0"
    alone = context(tmp_path, children=old_ucx(), ranks=ranks)
    assert verdict("net.interface", alone)[0] is WARN
    named = context(
        tmp_path, children=old_ucx(), ranks=ranks, job_size=2, environ={"UCX_NET_DEVICES": "eth0"}
    )
    assert verdict("net.interface", named)[0] is OK


def test_no_interface_up(tmp_path: Path) -> None:
    interface(tmp_path, "eth0", "192.0.2.7", up=False)
    status, _, cure = verdict("net.interface", context(tmp_path))
    assert status is WARN
    assert cure == "ip link set eth0 up"


@pytest.mark.parametrize(
    ("hosts", "job", "status"),
    [
        ("127.0.1.1 node\n", 2, WARN),
        ("127.0.1.1 node\n", 1, OK),
        ("127.0.0.1 localhost\n127.0.1.1 node.example.org node # Debian\n", 2, WARN),
        ("127.0.1.1 node\n192.0.2.7 node\n", 2, OK),
        ("192.0.2.7 node\n", 2, OK),
        ("127.0.0.1 localhost\n", 2, OK),
        ("not-an-address node\n", 2, OK),
    ],
)
def test_hostname(tmp_path: Path, hosts: str, job: int, status: Status) -> None:
    interface(tmp_path, "eth0", "192.0.2.7", default=True)
    write(tmp_path, "/proc/sys/kernel/hostname", "node\n")
    write(tmp_path, "/etc/hosts", hosts)
    found = verdict("net.hostname", context(tmp_path, ranks=(rank(0),), job_size=job))
    assert found[0] is status
    if status is WARN:
        assert "192.0.2.7 node" in found[2]


def test_firewall(tmp_path: Path) -> None:
    children = Children()
    status, found, _ = verdict("net.firewall", context(tmp_path, children=children))
    assert (status, found) == (
        SKIPPED,
        "neither nft nor iptables is here to tell packet filter rules",
    )

    def refused(argv: Sequence[str], timeout: float) -> CommandResult:
        if argv[0] == "nft":
            return CommandResult(tuple(argv), 1, "", "Operation not permitted (you must be root)\n")
        return children(argv, timeout)

    status, found, _ = verdict("net.firewall", replace(context(tmp_path), runner=refused))
    assert status is Status.UNKNOWN
    assert "nft: Operation not permitted (you must be root)" in found
    children.outputs["iptables-save"] = "*filter\n:INPUT ACCEPT [0:0]\nCOMMIT\n"
    assert "no packet filter" in verdict("net.firewall", context(tmp_path, children=children))[1]
    children.outputs["iptables-save"] = "*filter\n-A INPUT -s 10.0.0.0/8 -j DROP\nCOMMIT\n"
    status, found, _ = verdict("net.firewall", context(tmp_path, children=children))
    assert status is OK
    assert "1 rules, 1 drop" in found
