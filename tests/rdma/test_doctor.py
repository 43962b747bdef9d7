"""``rdmakit doctor`` and ``bench --require`` on two machines with RDMA: sound, and with faults."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.rdma.conftest import Machines, Outcome
from tests.rdma.steps import LINK_DOWN, LINK_UP, MTU, Step, add, mtu

pytestmark = [pytest.mark.rdma, pytest.mark.slow, pytest.mark.timeout(1500)]

DOCTOR = ("-m", "rdmakit", "doctor", "--json")
PACKET = 4096
"""Bytes in a packet of rxe0 at most."""
NARROW = 1500
NOTHING = "rxe9:1"
"""A device that neither machine has."""
LOCKED = "import os, resource, sys; resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536)); "
"""The limit that ``ulimit -l 64`` sets, for the rank and its children: on both machines alike."""


def only(*names: str) -> tuple[str, ...]:
    return tuple(word for name in names for word in ("--only", name))


def bounded(*words: str) -> tuple[str, ...]:
    """Return the words of a rank that may lock 64 KiB, and no more as root either."""
    start = "[*'setpriv --bounding-set=-ipc_lock'.split(), sys.executable, *sys.argv[1:]]"
    return ("-c", f"{LOCKED}words = {start}; os.execvp(words[0], words)", *words)


SOUND = add(Step("doctor", (*DOCTOR, "--path", *only("path", "rdma", "host"))))
OVER_TCP = add(
    Step(
        "doctor-tcp",
        (*DOCTOR, "--path", *only("path", "ucx.tls")),
        env={"UCX_TLS": "tcp,self"},
    )
)
FAULTS = add(
    Step(
        "doctor-faults",
        bounded(*DOCTOR, *only("rdma", "job.mtu", "host.memlock", "ucx.net_devices")),
        env={"UCX_NET_DEVICES": NOTHING},
        before=((0, mtu(NARROW)), (1, LINK_DOWN)),
        after=((0, mtu(MTU)), (1, LINK_UP)),
    )
)
REQUIRED = add(
    Step(
        "bench-required",
        (
            *("-m", "rdmakit", "bench", "-b", "4K", "-e", "4K", "-n", "1", "-w", "0"),
            *("--layer", "inter", "--require", "rdma", "--output", "{folder}/{name}.rows.json"),
        ),
        env={"UCX_TLS": "tcp,self"},
    )
)


def told(outcome: Outcome, status: int) -> dict[str, Any]:
    """Return the report of a run that ended with ``status``, on both machines to the end."""
    text = f"{outcome.out}\n{outcome.err}\n{outcome.problems}"
    assert (outcome.rc, outcome.timed_out, list(outcome.problems)) == (status, False, []), text
    found: dict[str, Any] = json.loads(outcome.out)
    assert found["exit"] == status
    assert [(node["name"], node["complete"]) for node in found["nodes"]] == [
        ("node0", True),
        ("node1", True),
    ]
    return found


def findings(report: dict[str, Any], check: str, *statuses: str) -> list[dict[str, Any]]:
    """Return what a check found; without statuses all of it."""
    return [
        one
        for one in report["findings"]
        if one["check"] == check and (not statuses or one["status"] in statuses)
    ]


def pair(report: dict[str, Any]) -> dict[str, Any]:
    """Return the only pair of the only path report."""
    (path,) = report["paths"]
    (found,) = path["pairs"]
    assert (found["first"], found["second"]) == (0, 1)
    assert found["hosts"] == ["node0", "node1"]
    return dict(found)


def test_sound_machines(machines: Machines) -> None:
    report = told(machines[SOUND], 0)
    bad = [one for one in report["findings"] if one["status"] in ("fail", "warn")]
    assert bad == []
    for node in report["nodes"]:
        assert node["checks"]["rdma.state"] == node["checks"]["host.memlock"] == "ok"
        assert node["checks"]["rdma.mtu"] == "ok"


def test_path_over_rdma(machines: Machines) -> None:
    """The verdict stands on packets that rxe0 counted, and the driver's look agrees."""
    report = told(machines[SOUND], 0)
    (proof,) = findings(report, "path.proof", "ok")
    assert proof["found"].endswith("rdma-host")
    assert proof["subject"] == "ranks 0 -> 1 (node0 -> node1)"
    found = pair(report)
    verdict, evidence = found["verdict"], found["evidence"]
    assert (verdict["path"], verdict["missing"], verdict["disagreements"]) == ("rdma-host", [], [])
    assert ["rc_verbs", "rxe0:1"] in evidence["sender_lanes"]
    carried = {
        one["side"]: one
        for one in evidence["counters"]
        if (one["kind"], one["unit"]) == ("rdma", "packets")
    }
    assert set(carried) == {"sender", "receiver"}
    for one in carried.values():
        assert (one["port"], one["state"]) == ("rxe0:1", "agrees")
        assert one["during"] - one["idle"] >= evidence["sent"] // PACKET > 0
    for node, which in ((0, "sent_pkts"), (1, "rcvd_pkts")):
        assert machines[SOUND].packets(node, which) >= evidence["sent"] // PACKET


def test_path_over_tcp(machines: Machines) -> None:
    """TCP where RDMA is there is a fault, whose cause is found too."""
    report = told(machines[OVER_TCP], 1)
    (proof,) = findings(report, "path.proof", "fail")
    assert ": tcp" in proof["found"]
    assert "both hosts have an active RDMA port" in proof["expected"]
    assert "unset UCX_TLS" in proof["cure"]
    assert pair(report)["verdict"]["path"] == "tcp"
    (shut,) = findings(report, "ucx.tls")
    assert (shut["status"], shut["nodes"]) == ("fail", ["node0", "node1"])
    assert "rxe0:1 would serve" in shut["found"]
    assert shut["cure"] == "unset UCX_TLS, or export UCX_TLS=tcp,self,rc"
    for node in (0, 1):
        assert machines[OVER_TCP].packets(node) == 0


def test_ports(machines: Machines) -> None:
    """One machine's link is down, the net device of the other's has a small MTU."""
    report = told(machines[FAULTS], 1)
    (down,) = findings(report, "rdma.state", "fail")
    assert down["nodes"] == ["node1"]
    assert "rxe0" in down["subject"] + down["found"]
    assert down["cure"]
    (narrow,) = findings(report, "rdma.mtu", "warn")
    assert narrow["nodes"] == ["node0"]
    assert "MTU 1024 of 4096" in narrow["found"]
    assert {one["found"] for one in findings(report, "job.mtu", "warn")} == {
        "rxe0:1 active MTU: 1024 on node0; node1: 4096",
        f"rxe0:1 net device MTU: {NARROW} on node0; node1: {MTU}",
    }


def test_locked_memory(machines: Machines) -> None:
    (locked,) = findings(told(machines[FAULTS], 1), "host.memlock")
    assert (locked["status"], locked["nodes"]) == ("fail", ["node0", "node1"])
    assert "64 KiB" in locked["found"]
    assert "ulimit -l unlimited" in locked["cure"]


def test_device_that_is_not_there(machines: Machines) -> None:
    found = findings(told(machines[FAULTS], 1), "ucx.net_devices", "fail")
    assert {one["subject"] for one in found} == {NOTHING}
    assert sorted(name for one in found for name in one["nodes"]) == ["node0", "node1"]
    assert all("no device that leads to other nodes is left" in one["found"] for one in found)
    on_node0 = next(one for one in found if "node0" in one["nodes"])
    assert on_node0["cure"] == "export UCX_NET_DEVICES=rxe0:1, or unset it"


def test_rdma_is_required(machines: Machines) -> None:
    """Over TCP the bench ends with the verdict and its evidence, before it measures a row."""
    outcome = machines[REQUIRED]
    text = f"{outcome.out}\n{outcome.err}"
    assert (outcome.rc, outcome.timed_out) == (1, False), text
    assert "rdma is required, but ranks 0 -> 1 (node0 -> node1) are tcp" in outcome.out, text
    assert "(b) sender: eth" in outcome.out, text
    written = machines.read("bench-required.rows.json")
    assert written["rows"] == []
    (path,) = written["environment"]["path"]["pairs"]
    assert path["verdict"]["path"] == "tcp"
    for node in (0, 1):
        assert outcome.packets(node) == 0
