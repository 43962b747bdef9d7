"""Checks of RDMA devices and their ports, on texts and on whole machines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmakit.doctor.checks import counters
from rdmakit.doctor.checks.counters import judge_counters
from rdmakit.doctor.model import Finding, Status
from rdmakit.drivers.host import HostTree
from rdmakit.topology.model import Gid, Machine, Nic, PciDevice, Port
from tests.unit import fake_machines as fakes
from tests.unit.doctor_texts import DMESG, DMESG_HEAD, ibstat
from tests.unit.fake_node import BAD, alarms, ask, ask_one, node, texts_node, write


def rails(count: int, **odd: dict[str, object]) -> str:
    """Return ibstat of equal rails, but for those named."""
    names = [f"mlx5_{index}" for index in range(count)]
    return "".join(ibstat(name, **odd.get(name, {})) for name in names)  # type: ignore[arg-type]


def of(root: Path, name: str, text: str) -> dict[str, Finding]:
    """Return the findings of a check by subject."""
    return {finding.subject: finding for finding in ask(texts_node(root, text=text), name)}


MANAGEMENT = {
    "layer": "Ethernet",
    "rate": 40,
    "state": "Down",
    "phys": "Disabled",
    "model": "MT4117",
}


def test_management_ports_down_beside_good_rails(tmp_path: Path) -> None:
    text = rails(8) + ibstat("mlx5_8", **MANAGEMENT) + ibstat("mlx5_9", **MANAGEMENT)  # type: ignore[arg-type]
    assert alarms(texts_node(tmp_path, text=text)) == []


@pytest.mark.parametrize(
    ("odd", "word", "cure"),
    [
        ({"state": "Down", "phys": "Polling", "rate": 10}, "Polling", "mlxlink -d mlx5_3"),
        ({"state": "Down", "phys": "Disabled", "rate": 10}, "Disabled", "ibportstate -C mlx5_3"),
        ({"state": "Initializing", "lid": 65535, "sm_lid": 0}, "subnet manager", "opensm"),
    ],
)
def test_a_rail_that_is_down(tmp_path: Path, odd: dict[str, object], word: str, cure: str) -> None:
    found = of(tmp_path, "rdma.state", rails(8, mlx5_3=odd))
    assert set(found) == {"mlx5_3:1"}
    assert found["mlx5_3:1"].status is Status.FAIL
    assert word in found["mlx5_3:1"].found
    assert cure in found["mlx5_3:1"].cure


def test_a_roce_rail_that_is_down(tmp_path: Path) -> None:
    fakes.hgx_h100(tmp_path, roce=True, down=(2,))
    (finding,) = ask(node(tmp_path), "rdma.state")
    assert (finding.status, finding.subject) == (Status.FAIL, "mlx5_2:1")
    assert "ip link set dev rail2 up" in finding.cure


def test_the_free_port_of_a_card_is_no_lost_rail(tmp_path: Path) -> None:
    guid = "0x00112233aabbcc00"
    text = ibstat("mlx5_0", guid=guid) + ibstat("mlx5_1", guid=guid, state="Down", phys="Polling")
    found = of(tmp_path, "rdma.state", text)
    assert found["mlx5_1:1"].status is Status.WARN


def test_no_usable_port(tmp_path: Path) -> None:
    found = of(tmp_path, "rdma.state", ibstat("mlx5_0", state="Down", phys="Disabled"))
    assert found["mlx5_0:1"].status is Status.FAIL
    assert "no port is usable" in found["mlx5_0:1"].found


def test_states_that_contradict(tmp_path: Path) -> None:
    found = of(tmp_path, "rdma.state", ibstat("mlx5_0", phys="Polling"))
    assert found["mlx5_0:1"].status is Status.FAIL
    assert "contradiction" in found["mlx5_0:1"].found


def soft_roce(root: Path, *, up: bool = True, mtu: int = 1500) -> None:
    """Make a Soft-RoCE device on eth0."""
    base = "/sys/devices/virtual/infiniband/rxe0"
    fake = fakes.Fake(root)
    fake.base("vm", virtual=True)
    fake.cpus(["0"])
    fake.link("/sys/class/infiniband/rxe0", base)
    write(root, f"{base}/node_guid", "5054:00ff:fe99:0001\n")
    port = f"{base}/ports/1"
    write(root, f"{port}/state", "4: ACTIVE\n" if up else "1: DOWN\n")
    write(root, f"{port}/phys_state", "5: LinkUp\n" if up else "2: Polling\n")
    write(root, f"{port}/rate", "2.5 Gb/sec (1X SDR)\n")
    write(root, f"{port}/link_layer", "Ethernet\n")
    write(root, f"{port}/gids/0", "fe80:0000:0000:0000:5054:00ff:fe99:0001\n")
    write(root, f"{port}/gids/1", "0000:0000:0000:0000:0000:ffff:0a00:0001\n")
    for index in range(2):
        write(root, f"{port}/gid_attrs/types/{index}", "RoCE v2\n")
        write(root, f"{port}/gid_attrs/ndevs/{index}", "eth0\n")
    write(root, "/sys/class/net/eth0/mtu", f"{mtu}\n")


def test_soft_roce(tmp_path: Path) -> None:
    soft_roce(tmp_path / "good", mtu=9000)
    assert alarms(node(tmp_path / "good")) == []
    assert ask_one(node(tmp_path / "good"), "pcie.link").status is Status.SKIPPED
    soft_roce(tmp_path / "down", up=False)
    (finding,) = ask(node(tmp_path / "down"), "rdma.state")
    assert finding.status is Status.FAIL
    assert finding.cure.startswith("ip link set dev eth0 up")
    assert ask_one(node(tmp_path / "down"), "rdma.mtu").status is Status.SKIPPED


def test_half_rate(tmp_path: Path) -> None:
    found = of(tmp_path, "rdma.rate", rails(8, mlx5_5={"rate": 200}))
    assert set(found) == {"mlx5_5:1"}
    assert found["mlx5_5:1"].status is Status.FAIL
    assert found["mlx5_5:1"].expected == "400 Gb/s"
    assert "mlxlink -d mlx5_5" in found["mlx5_5:1"].cure
    found = of(tmp_path, "rdma.rate", rails(8, mlx5_5={"rate": 300}))
    assert found["mlx5_5:1"].status is Status.WARN


@pytest.mark.parametrize(
    ("rates", "fast"),
    [
        ((200, 200, 200, 400), ["mlx5_3:1"]),
        ((200, 200, 200, 200), []),
        ((400, 400, 200, 200), []),  # of equals the faster one is right
    ],
)
def test_a_faster_minority_of_one_board(
    tmp_path: Path, rates: tuple[int, ...], fast: list[str]
) -> None:
    nics = tuple(
        Nic(f"mlx5_{i}", f"mlx5_{i}", model="MT4129", board="MT_0000000838",
            ports=(Port(1, "ACTIVE", "LinkUp", rate, "InfiniBand", 3, 1),))
        for i, rate in enumerate(rates)
    )  # fmt: skip
    found = ask(node(tmp_path, Machine(nics=nics)), "rdma.rate")
    warned = [f for f in found if f.status is Status.WARN and "most cards of" in f.found]
    assert [f.subject for f in warned] == fast
    assert all("200" in f.found and "mlxlink" in f.cure for f in warned)
    unknown = tuple(replace(nic, board=None) for nic in nics)
    found = ask(node(tmp_path, Machine(nics=unknown)), "rdma.rate")
    assert not [f for f in found if "most cards of" in f.found], "cards may differ"


def test_one_lane(tmp_path: Path) -> None:
    port = Port(1, "ACTIVE", "LinkUp", 100, "InfiniBand", 3, 1, width="1X")
    machine = Machine(nics=(Nic("mlx5_0", "mlx5_0", ports=(port,)),))
    finding = ask_one(node(tmp_path, machine), "rdma.rate")
    assert finding.status is Status.WARN
    assert "one lane" in finding.found


@settings(deadline=None)
@given(st.lists(st.sampled_from([100, 200, 400]), min_size=3, max_size=10))
def test_only_the_minority_is_slow(rates: list[int]) -> None:
    text = "".join(ibstat(f"mlx5_{i}", rate=rate) for i, rate in enumerate(rates))
    found = of(Path("/nowhere"), "rdma.rate", text)
    slow = {subject for subject, finding in found.items() if finding.status in BAD}
    usual = max(set(rates), key=lambda rate: (rates.count(rate), rate))
    assert slow <= {f"mlx5_{i}:1" for i, rate in enumerate(rates) if rate < usual}


@pytest.mark.parametrize(
    ("port", "status", "cure"),
    [
        (Port(1, "ACTIVE", link_layer="InfiniBand", active_mtu=4096, max_mtu=4096), Status.OK, ""),
        (
            Port(1, "ACTIVE", link_layer="InfiniBand", active_mtu=2048, max_mtu=4096),
            Status.WARN,
            "mtu=5",
        ),
        (
            Port(1, "ACTIVE", link_layer="Ethernet", active_mtu=1024, max_mtu=4096, netdev="ens1"),
            Status.WARN,
            "ip link set dev ens1 mtu 9000",
        ),
        (
            Port(1, "ACTIVE", link_layer="Ethernet", netdev="ens1", netdev_mtu=1500),
            Status.WARN,
            "ip link set dev ens1 mtu 9000",
        ),
        (Port(1, "ACTIVE", link_layer="Ethernet", netdev="ens1", netdev_mtu=9000), Status.OK, ""),
        (Port(1, "ACTIVE", link_layer="Ethernet"), Status.UNKNOWN, ""),
    ],
)
def test_mtu(tmp_path: Path, port: Port, status: Status, cure: str) -> None:
    machine = Machine(nics=(Nic("mlx5_0", "mlx5_0", ports=(port,)),))
    finding = ask_one(node(tmp_path, machine), "rdma.mtu")
    assert finding.status is status
    assert cure in finding.cure


def test_subnet_manager(tmp_path: Path) -> None:
    assert of(tmp_path, "rdma.subnet", rails(2))[""].status is Status.OK
    found = of(tmp_path, "rdma.subnet", rails(2, mlx5_1={"sm_lid": 0}))
    assert found["mlx5_1:1"].status is Status.FAIL
    assert "opensm" in found["mlx5_1:1"].cure
    ethernet = ibstat("mlx5_0", layer="Ethernet", lid=0, sm_lid=0)
    assert of(tmp_path, "rdma.subnet", ethernet)[""].status is Status.SKIPPED


LOCAL = Gid(0, "fe80:0000:0000:0000:5054:00ff:fe99:0001", "RoCE v2")
V1 = Gid(2, "0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v1")
V2 = Gid(3, "0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2")


@pytest.mark.parametrize(
    ("gids", "environ", "status", "word"),
    [
        ((LOCAL, V1, V2), {}, Status.OK, "index 3"),
        ((LOCAL,), {}, Status.FAIL, "link-local"),
        ((V1,), {}, Status.WARN, "no RoCE v2"),
        ((), {}, Status.UNKNOWN, "not known"),
        ((LOCAL, V1, V2), {"UCX_IB_GID_INDEX": "auto"}, Status.OK, ""),
        ((LOCAL, V1, V2), {"UCX_IB_GID_INDEX": "3"}, Status.OK, ""),
        ((LOCAL, V1, V2), {"UCX_IB_GID_INDEX": "2"}, Status.WARN, "RoCE v1"),
        ((LOCAL, V1, V2), {"NCCL_IB_GID_INDEX": "0"}, Status.WARN, "link-local"),
        ((LOCAL, V1, V2), {"NCCL_IB_GID_INDEX": "5"}, Status.FAIL, "not in the table"),
    ],
)
def test_gid_table(
    tmp_path: Path, gids: tuple[Gid, ...], environ: dict[str, str], status: Status, word: str
) -> None:
    port = Port(1, "ACTIVE", "LinkUp", 100, "Ethernet", netdev="ens1", gids=gids)
    machine = Machine(nics=(Nic("mlx5_0", "mlx5_0", ports=(port,)),))
    finding = ask_one(node(tmp_path, machine, environ=environ), "rdma.gid")
    assert finding.status is status
    assert word in finding.found


# -- devices, modules, files, firmware ---------------------------------------------------------


def test_a_card_without_its_module(tmp_path: Path) -> None:
    base = "/sys/bus/pci/devices/0000:18:00.0"
    for name, text in (("vendor", "0x15b3"), ("device", "0x1021"), ("class", "0x020700")):
        write(tmp_path, f"{base}/{name}", text + "\n")
    write(tmp_path, "/proc/modules", "mlx5_core 2000000 0 - Live 0x0\n")
    finding = ask_one(node(tmp_path), "rdma.devices")
    assert finding.status is Status.WARN
    assert "mlx5_ib is not loaded" in finding.found
    assert finding.cure.startswith("modprobe mlx5_ib")


def verbs(root: Path, *names: str) -> None:
    for index, name in enumerate(names):
        write(root, f"/sys/class/infiniband_verbs/uverbs{index}/ibdev", name + "\n")
        write(root, f"/dev/infiniband/uverbs{index}", "")


@dataclass
class Closed(HostTree):
    """A tree whose device files nobody may open."""

    root: str

    def why_closed(self, path: str) -> str | None:
        return "Permission denied"


def test_device_files(tmp_path: Path) -> None:
    machine = Machine(nics=(Nic("mlx5_0", "mlx5_0"), Nic("mlx5_1", "mlx5_1")))
    assert ask_one(node(tmp_path, machine), "rdma.uverbs").status is Status.UNKNOWN
    verbs(tmp_path, "mlx5_0", "mlx5_1")
    assert ask_one(node(tmp_path, machine), "rdma.uverbs").status is Status.OK
    assert ask_one(node(tmp_path, machine, live=True), "rdma.uverbs").status is Status.OK
    denied = ask_one(node(tmp_path, machine, live=True, tree=Closed(str(tmp_path))), "rdma.uverbs")
    assert denied.status is Status.FAIL
    assert "chmod" in denied.cure
    (tmp_path / "dev/infiniband/uverbs1").unlink()
    finding = ask_one(node(tmp_path, machine), "rdma.uverbs")
    assert finding.status is Status.WARN, "the other one serves"
    assert "uverbs1: not here" in finding.found


def test_a_container_without_device_files(tmp_path: Path) -> None:
    write(tmp_path, "/sys/class/infiniband_verbs/uverbs0/ibdev", "mlx5_0\n")
    boxed = Machine(nics=(Nic("mlx5_0", "mlx5_0"),), software={"container": "docker"})
    finding = ask_one(node(tmp_path, boxed), "rdma.uverbs")
    assert finding.status is Status.FAIL
    assert "--device=/dev/infiniband" in finding.cure


def test_modules(tmp_path: Path) -> None:
    machine = Machine(nics=(Nic("mlx5_0", "mlx5_0"),))
    assert ask_one(node(tmp_path, machine), "rdma.modules").status is Status.UNKNOWN
    write(tmp_path, "/proc/modules", "ib_uverbs 1000 1 - Live 0x0\nrdma_ucm 1000 1 - Live 0x0\n")
    assert ask_one(node(tmp_path, machine), "rdma.modules").status is Status.OK
    write(tmp_path, "/proc/modules", "ib_uverbs 1000 1 - Live 0x0\n")
    assert ask_one(node(tmp_path, machine), "rdma.modules").status is Status.WARN
    write(tmp_path, "/proc/modules", "rdma_ucm 1000 1 - Live 0x0\n")
    finding = ask_one(node(tmp_path, machine), "rdma.modules")
    assert finding.status is Status.FAIL
    assert finding.cure.startswith("modprobe ib_uverbs")


def test_firmware_of_equal_cards(tmp_path: Path) -> None:
    assert of(tmp_path, "rdma.firmware", rails(4))[""].status is Status.OK
    found = of(tmp_path, "rdma.firmware", rails(4, mlx5_2={"firmware": "28.39.1002"}))
    assert found[""].status is Status.WARN
    assert "mlx5_2: 28.39.1002" in found[""].found
    other = {"model": "MT4125", "firmware": "22.39.1002"}
    assert of(tmp_path, "rdma.firmware", rails(4, mlx5_2=other))[""].status is Status.OK


def test_cables(tmp_path: Path) -> None:
    machine = Machine(
        nics=(Nic("mlx5_0", "mlx5_0", pci="0000:18:00.0", ports=(Port(1, "DOWN"),)),),
        pci=(PciDevice("0000:18:00.0", kind="nic"),),
    )
    assert ask_one(node(tmp_path, machine), "rdma.cables").status is Status.UNKNOWN
    good = {"dmesg.txt": DMESG_HEAD}
    assert ask_one(node(tmp_path, machine, outputs=good), "rdma.cables").status is Status.OK
    bad = {"dmesg.txt": DMESG_HEAD + DMESG["cable"]}
    finding = ask_one(node(tmp_path, machine, outputs=bad), "rdma.cables")
    assert (finding.status, finding.subject) == (Status.WARN, "mlx5_0")
    assert "High Temperature" in finding.found


# -- counters ----------------------------------------------------------------------------------


def test_what_each_counter_means() -> None:
    def worst(before: dict[str, int], after: dict[str, int]) -> list[tuple[Status, list[str]]]:
        return [(kind.status, list(counts)) for kind, counts in judge_counters(before, after)]

    assert worst({"symbol_error": 9000}, {"symbol_error": 9000}) == []
    assert worst({"symbol_error": 9}, {"symbol_error": 12}) == [(Status.WARN, ["symbol_error"])]
    assert worst({"link_downed": 1}, {"link_downed": 2}) == [(Status.FAIL, ["link_downed"])]
    assert worst({"np_cnp_sent": 7}, {"np_cnp_sent": 2}) == []  # set to zero in between
    quiet = {"port_xmit_wait": 0, "port_xmit_data": 0}
    assert worst(quiet, {"port_xmit_wait": 10**7, "port_xmit_data": 10**9}) == []
    assert worst(quiet, {"port_xmit_wait": 10**9, "port_xmit_data": 10**9}) == [
        (Status.WARN, ["port_xmit_wait"])
    ]
    both = worst(
        {"out_of_sequence": 0, "port_rcv_errors": 0}, {"out_of_sequence": 5, "port_rcv_errors": 1}
    )
    assert both == [(Status.FAIL, ["port_rcv_errors"]), (Status.WARN, ["out_of_sequence"])]


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(counters._COUNTERS)), st.integers(0, 1 << 40)))
def test_constant_counters_are_history(values: dict[str, int]) -> None:
    assert list(judge_counters(values, values)) == []


class Rising(HostTree):
    """A machine one of whose counters rises each time that it is read."""

    def __init__(self, root: Path, name: str) -> None:
        super().__init__(root)
        self.name, self.reads = name, 0

    def listdir(self, path: str) -> tuple[str, ...]:
        place, _, own = f"mlx5_1/ports/1/{self.name}".rpartition("/")
        more = (own,) if path.endswith(place) else ()
        return (*super().listdir(path), *more)

    def read_text(self, path: str) -> str | None:
        if path.endswith(f"mlx5_1/ports/1/{self.name}"):
            self.reads += 1
            return f"{100 + self.reads}\n"
        return super().read_text(path)


@pytest.mark.parametrize(
    ("name", "status", "cure"),
    [
        ("counters/link_downed", Status.FAIL, "mlxlink -d mlx5_1"),
        ("counters/symbol_error", Status.WARN, "mlxlink -d mlx5_1"),
        ("hw_counters/out_of_sequence", Status.WARN, "ibqueryerrors"),
        ("hw_counters/np_cnp_sent", Status.WARN, "ECN"),
    ],
)
def test_two_readings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, status: Status, cure: str
) -> None:
    monkeypatch.setattr(counters, "_SECONDS", 0.0)
    fakes.hgx_h100(tmp_path)
    base = tmp_path / "sys/class/infiniband/mlx5_1/ports/1"
    write(base, "counters/port_rcv_errors", "12345\n")
    context = node(tmp_path, tree=Rising(tmp_path, name), live=True)
    (finding,) = ask(context, "rdma.counters")
    assert (finding.status, finding.subject) == (status, "mlx5_1:1")
    assert f"{name.rpartition('/')[2]} +1" in finding.found
    assert cure in finding.cure
    still = ask_one(node(tmp_path, live=True), "rdma.counters")
    assert still.status is Status.OK
    assert "port_rcv_errors 12345" in still.found
    collected = ask_one(node(tmp_path), "rdma.counters")
    assert collected.status is Status.SKIPPED
    assert "port_rcv_errors 12345" in collected.found
