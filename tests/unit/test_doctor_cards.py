"""Cards without an RDMA device beside others; device files of NICs that do not carry the job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rdmakit.discovery.collect import collect, read_machines
from rdmakit.doctor.model import Status
from rdmakit.drivers.host import HostTree
from rdmakit.topology.model import Machine, Nic
from tests.unit.fake_node import absent, ask_one, node, write
from tests.unit.topo_cases import port

PCI = "/sys/bus/pci/devices"
FIRST, SECOND = "0000:18:00.0", "0000:18:00.1"
ONE = Machine(nics=(Nic("mlx5_0", "mlx5_0", pci=FIRST),))


def link(root: Path, path: str, target: str) -> None:
    here = root / path.lstrip("/")
    here.parent.mkdir(parents=True, exist_ok=True)
    here.symlink_to(target)


def card(root: Path, address: str, *, driver: str = "", net: str = "", bond: bool = False) -> None:
    """Make a card on the bus, as far as its files are given."""
    base = f"{PCI}/{address}"
    for name, text in (("vendor", "0x15b3"), ("device", "0x1021"), ("class", "0x020000")):
        write(root, f"{base}/{name}", f"{text}\n")
    if driver:
        link(root, f"{base}/driver", f"../../../../bus/pci/drivers/{driver}")
    if net:
        write(root, f"{base}/net/{net}/mtu", "1500\n")
    if bond:
        write(root, "/sys/class/net/bond0/bonding/mode", "802.3ad 4\n")
        link(root, f"{base}/net/{net}/master", "/sys/class/net/bond0")


def test_a_card_without_a_device_beside_one_that_has_it(tmp_path: Path) -> None:
    card(tmp_path, FIRST, driver="mlx5_core", net="ens1f0")
    card(tmp_path, SECOND, driver="mlx5_core", net="ens1f1")
    finding = ask_one(node(tmp_path, ONE), "rdma.devices")
    assert finding.status is Status.WARN
    assert f"1 card(s) on the PCI bus ({SECOND})" in finding.found
    assert finding.expected == "an RDMA device for each card in /sys/class/infiniband"
    assert finding.cure.startswith("modprobe mlx5_ib")
    boxed = replace(ONE, software={"container": "docker"})
    finding = ask_one(node(tmp_path, boxed), "rdma.devices")
    assert finding.status is Status.OK
    assert "1 card(s) without one" in finding.found
    assert "bond" not in finding.found


def test_a_bond_has_one_device_for_its_members(tmp_path: Path) -> None:
    for address, net in ((FIRST, "ens1f0"), (SECOND, "ens1f1")):
        card(tmp_path, address, driver="mlx5_core", net=net, bond=True)
    finding = ask_one(node(tmp_path, ONE), "rdma.devices")
    assert (finding.status, finding.found) == (
        Status.OK,
        "1 RDMA device(s); 1 card(s) without one: 1 member of a bond",
    )


@pytest.mark.parametrize(
    ("driver", "physical", "word"),
    [("vfio-pci", False, "virtual machine"), ("mlx5_core", True, "virtual function")],
)
def test_cards_that_others_use(tmp_path: Path, driver: str, physical: bool, word: str) -> None:
    card(tmp_path, FIRST, driver="mlx5_core", net="ens1f0")
    card(tmp_path, SECOND, driver=driver)
    if physical:
        link(tmp_path, f"{PCI}/{SECOND}/physfn", f"../{FIRST}")
    finding = ask_one(node(tmp_path, ONE), "rdma.devices")
    assert finding.status is Status.OK
    assert word in finding.found


def test_only_cards_that_others_use(tmp_path: Path) -> None:
    card(tmp_path, FIRST, driver="vfio-pci")
    finding = ask_one(node(tmp_path, Machine()), "rdma.devices")
    assert finding.status is Status.SKIPPED
    assert "1 given to a virtual machine" in finding.found


def test_what_the_files_do_not_tell_is_no_fault(tmp_path: Path) -> None:
    for address in (FIRST, SECOND):
        card(tmp_path, address)
    finding = ask_one(node(tmp_path, ONE), "rdma.devices")
    assert finding.status is Status.OK
    assert "1 of which nothing more is known" in finding.found
    assert ask_one(node(tmp_path, ONE, live=True), "rdma.devices").status is Status.WARN
    link(tmp_path, f"{PCI}/{FIRST}/driver", "../../../../bus/pci/drivers/mlx5_core")
    finding = ask_one(node(tmp_path, ONE), "rdma.devices")
    assert finding.status is Status.WARN, "the other card's driver is told, this one has none"


@pytest.mark.parametrize("bond", [False, True])
def test_collected_files_tell_the_same(tmp_path: Path, bond: bool) -> None:
    for address, net in ((FIRST, "ens1f0"), (SECOND, "ens1f1")):
        card(tmp_path / "here", address, driver="mlx5_core", net=net, bond=bond)

    def look(_: object, tree: HostTree, outputs: object) -> None:
        ask_one(node(tmp_path / "here", ONE, tree=tree), "rdma.devices")

    collect(tmp_path / "kept", HostTree(tmp_path / "here"), absent, look=look)
    assert len(read_machines(tmp_path / "kept")) == 1
    there = ask_one(node(tmp_path / "here", ONE), "rdma.devices")
    assert there.status is (Status.OK if bond else Status.WARN)
    assert ask_one(node(tmp_path / "kept", ONE), "rdma.devices") == there


# -- device files ------------------------------------------------------------------------------


def files(root: Path, *there: str) -> None:
    """Make four devices' entries, and the device files of some."""
    for index in range(4):
        write(root, f"/sys/class/infiniband_verbs/uverbs{index}/ibdev", f"mlx5_{index}\n")
    write(root, "/dev/infiniband/rdma_cm", "")
    for name in there:
        write(root, f"/dev/infiniband/{name}", "")


@pytest.mark.parametrize(
    ("there", "status", "word"),
    [
        (("uverbs0", "uverbs1", "uverbs2", "uverbs3"), Status.OK, "2 device file(s) there"),
        (("uverbs0", "uverbs1"), Status.OK, "2 of NICs that do not carry the job"),
        (("uverbs0", "uverbs2", "uverbs3"), Status.WARN, "uverbs1: not here"),
        (("uverbs2", "uverbs3"), Status.FAIL, "uverbs0: not here"),
        ((), Status.FAIL, "uverbs0: not here"),
    ],
)
def test_device_files_of_the_nics_that_carry_the_job(
    tmp_path: Path, there: tuple[str, ...], status: Status, word: str
) -> None:
    files(tmp_path, *there)
    ports = [port(), port(), port(100, "Ethernet"), port(100, "Ethernet")]
    nics = tuple(
        Nic(f"mlx5_{index}", f"mlx5_{index}", ports=(own,)) for index, own in enumerate(ports)
    )
    finding = ask_one(node(tmp_path, Machine(nics=nics)), "rdma.uverbs")
    assert finding.status is status
    assert word in finding.found
    assert "uverbs2" not in finding.found
