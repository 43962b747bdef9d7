"""What `rdmakit topo` says of two machines with a software RDMA device, and of faults on them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.rdma.conftest import Machines
from tests.rdma.steps import AGENT, LINK_DOWN, LINK_UP, MTU, Step, add, mtu

pytestmark = [pytest.mark.rdma, pytest.mark.slow, pytest.mark.timeout(1500)]

TOPO = ("-m", "rdmakit", "topo", "--json")
LOOK = "cat /sys/class/infiniband/rxe0/ports/1/state /sys/class/net/eth1/mtu"

HEALTHY = add(Step("topo", TOPO))
FAULTS = add(
    Step(
        "topo-faults",
        TOPO,
        before=((0, mtu(1500)), (1, LINK_DOWN)),
        after=((0, mtu(MTU)), (1, LINK_UP)),
    )
)
RESTORED = add(Step("look", ("/bin/sh", "-c", f"{LOOK} && {AGENT} node1 '{LOOK}'"), ranks=0))


def topo(machines: Machines, step: Step) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(machines[step].succeeded().out)
    assert [node["host"] for node in found["nodes"]] == ["node0", "node1"]
    return found


def test_healthy(machines: Machines) -> None:
    found = topo(machines, HEALTHY)
    for index, node in enumerate(found["nodes"]):
        (nic,) = node["nics"]
        assert (nic["name"], nic["pci"], nic["model"], nic["virtual_of"]) == ("rxe0", *[None] * 3)
        (port,) = node["ports"]
        assert (port["device"], port["state"], port["phys"]) == ("rxe0:1", "ACTIVE", "LinkUp")
        assert (port["link_layer"], port["netdev"], port["netdev_mtu"]) == ("Ethernet", "eth1", MTU)
        assert (port["active_mtu"], port["max_mtu"], port["role"]) == (4096, 4096, "compute")
        assert port["gid"]["why"] == f"RoCE v2, 10.99.1.{index + 1}"
    assert [rank["ucx_net_devices"] for rank in found["ranks"]] == ["rxe0:1", "rxe0:1"]
    assert found["differences"] == []


def test_faults(machines: Machines) -> None:
    """The MTU of one machine's fabric is small, and the link of the other's is down."""
    found = topo(machines, FAULTS)
    narrow, down = (node["ports"][0] for node in found["nodes"])
    assert (narrow["state"], narrow["netdev_mtu"], narrow["active_mtu"]) == ("ACTIVE", 1500, 1024)
    assert "MTU 1024 of 4096" in narrow["why"]
    assert (down["state"], down["phys"], down["healthy"]) == ("DOWN", "Disabled", False)
    assert down["netdev_mtu"] == MTU
    differing = {difference["what"] for difference in found["differences"]}
    assert {"rxe0:1 net device MTU", "rxe0:1 state"} <= differing
    # No rank may be confined to a device that cannot reach the others.
    assert found["ranks"][1]["nics"] == []


def test_faults_are_taken_back(machines: Machines) -> None:
    assert machines[RESTORED].succeeded().out.split() == ["4:", "ACTIVE", str(MTU)] * 2
