"""Whole machines: no false alarm on healthy ones, and collected files are judged alike."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmakit.discovery.collect import collect, read_machines
from rdmakit.doctor.catalog import CHECKS
from rdmakit.doctor.collecting import read_for_checks
from rdmakit.doctor.context import Context
from rdmakit.doctor.model import Finding, Status
from rdmakit.doctor.run import run_check
from rdmakit.drivers.host import CommandResult, HostTree
from rdmakit.topology.model import Gpu, Machine, Nic, NumaNode, PciDevice, PcieLink, Port
from rdmakit.topology.texts import kinds_of
from tests.unit import doctor_texts as texts
from tests.unit import fake_machines as fakes
from tests.unit.fake_node import alarms, assert_well_formed, node, write

REAL_FAULTS = {
    # Net devices of 1500 bytes on RoCE, and a GPU on four of sixteen lanes.
    "pcie_box": {("rdma.mtu", "mlx5_0:1"), ("rdma.mtu", "mlx5_1:1")},
    "soft_roce": {("rdma.mtu", "rxe0:1")},
    "workstation": {("pcie.link", "GPU1 (0000:02:00.0)")},
}


@pytest.mark.parametrize("name", fakes.MACHINES)
def test_no_false_alarm(tmp_path: Path, name: str) -> None:
    fakes.MACHINES[name](tmp_path)
    found = {(finding.check, finding.subject) for finding in alarms(node(tmp_path))}
    assert found == REAL_FAULTS.get(name, set())


def well(root: Path) -> None:
    """Add what a well-kept server's files say beside the fake machine's."""
    write(root, "/proc/self/limits", "Max locked memory   unlimited   unlimited  bytes\n")
    write(root, "/proc/mounts", "tmpfs /dev/shm tmpfs rw,nosuid,nodev 0 0\n")
    memory = (
        "MemTotal: 1056000000 kB\nHugePages_Total: 0\nHugePages_Free: 0\nHugepagesize: 2048 kB\n"
    )
    write(root, "/proc/meminfo", memory)
    write(root, "/proc/cmdline", "BOOT_IMAGE=/vmlinuz ro iommu=pt\n")
    write(root, "/proc/sys/kernel/numa_balancing", "0\n")
    write(
        root,
        "/proc/modules",
        "ib_uverbs 100000 2 mlx5_ib,rdma_ucm, Live 0x0\nrdma_ucm 30000 0 - Live 0x0\n"
        "mlx5_ib 400000 0 - Live 0x0\nib_core 450000 3 ib_uverbs,mlx5_ib,rdma_ucm, Live 0x0\n"
        "nvidia 60000000 8 - Live 0x0\n",
    )
    for index in range(10):
        write(root, f"/sys/class/infiniband_verbs/uverbs{index}/ibdev", f"mlx5_{index}\n")
        write(root, f"/dev/infiniband/uverbs{index}", "")
    for index in range(8):
        place = HostTree(root).resolve(f"/sys/class/infiniband/mlx5_{index}")
        write(root, f"{place}/ports/1/counters/symbol_error", "17\n")
    place = HostTree(root).resolve("/sys/devices/system/clocksource/clocksource0")
    write(root, f"{place}/current_clocksource", "tsc\n")


class Outputs:
    """A runner with the outputs of a machine that is well."""

    def __call__(self, argv: Sequence[str], timeout: float) -> CommandResult:
        outputs = {
            ("nvidia-smi", "-q"): texts.query(*[{}] * 8),
            ("dmesg",): texts.DMESG_HEAD,
            ("lspci", "-vvv"): texts.lspci(),
        }
        text = outputs.get(tuple(argv))
        if text is None:
            return CommandResult(tuple(argv), None, "", "", "command not found")
        return CommandResult(tuple(argv), 0, text, "")


def judge(context: Context) -> dict[tuple[str, str], tuple[Status, str]]:
    found = [finding for check in CHECKS for finding in run_check(check, context)]
    assert_well_formed(found)
    return {(f.check, f.subject): (f.status, f.found) for f in found}


def test_collected_files_are_judged_as_the_machine(tmp_path: Path) -> None:
    fakes.hgx_h100(tmp_path / "machine")
    well(tmp_path / "machine")
    tree = HostTree(tmp_path / "machine")
    found = collect(tmp_path / "out", tree, Outputs(), look=read_for_checks)
    (read,) = read_machines(tmp_path / "out")
    assert read.machine.gpus == found.machine.gpus
    outputs = {path.name: path.read_text() for path in (tmp_path / "out").glob("*.txt")}
    more = {"environ": {}, "live": False, "outputs": outputs}
    there = judge(Context(tree, found.machine, found.texts, **more))  # type: ignore[arg-type]
    here = judge(
        Context(HostTree(tmp_path / "out"), read.machine, read.texts, **more)  # type: ignore[arg-type]
    )
    assert here == there
    assert not [key for key, (status, _) in here.items() if status in (Status.WARN, Status.FAIL)]
    for name in ("rdma.uverbs", "rdma.cables", "host.shm", "gpu.ecc", "gpu.xid", "gpu.fabric"):
        assert here[name, ""][0] is Status.OK, name
    assert "symbol_error 17" in here["rdma.counters", ""][1]


def test_what_is_collected_is_understood(tmp_path: Path) -> None:
    fakes.hgx_h100(tmp_path / "machine")
    collect(tmp_path / "out", HostTree(tmp_path / "machine"), Outputs(), look=read_for_checks)
    for name in ("nvidia-smi-q.txt", "dmesg.txt", "lspci-vvv.txt"):
        assert kinds_of((tmp_path / "out" / name).read_text()), name
    (read,) = read_machines(tmp_path / "out")
    assert not [note for note in read.machine.notes if "understood" in note]


# -- any machine -------------------------------------------------------------------------------

NUMBERS = st.none() | st.integers(0, 20)
STATES = st.sampled_from([None, "ACTIVE", "DOWN", "INIT", "PORT_ACTIVE", "odd"])
PORTS = st.builds(
    Port,
    number=st.integers(1, 2),
    state=STATES,
    phys=st.sampled_from([None, "LinkUp", "Polling", "Disabled", "NOP", "odd"]),
    rate_gbps=st.sampled_from([None, 10, 100, 400]),
    link_layer=st.sampled_from([None, "InfiniBand", "Ethernet", "iWARP"]),
    lid=NUMBERS,
    sm_lid=NUMBERS,
    active_mtu=st.sampled_from([None, 1024, 4096]),
    max_mtu=st.sampled_from([None, 4096]),
    width=st.sampled_from([None, "1X", "4X"]),
)
LINKS = st.builds(
    PcieLink,
    st.sampled_from([None, 2.5, 16.0]),
    st.sampled_from([None, 4, 16]),
    st.sampled_from([None, 16.0, 32.0]),
    st.sampled_from([None, 16]),
)
GPUS = st.lists(
    st.builds(
        Gpu,
        index=st.integers(0, 15),
        name=st.sampled_from(["", "NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB", "GeForce RTX"]),
        pci=st.sampled_from([None, "0000:17:00.0", "0000:18:00.0"]),
        minor=st.none() | st.integers(0, 7),
        link=LINKS,
        nvlinks=st.none() | st.integers(0, 18),
        mig_mode=st.none() | st.booleans(),
    ),
    max_size=4,
    unique_by=lambda gpu: gpu.index,
)
NICS = st.lists(
    st.builds(
        Nic,
        label=st.sampled_from(["mlx5_0", "mlx5_1", "NIC2"]),
        name=st.sampled_from([None, "mlx5_0", "mlx5_1"]),
        pci=st.sampled_from([None, "0000:19:00.0"]),
        model=st.sampled_from([None, "MT4129"]),
        firmware=st.sampled_from([None, "1", "2"]),
        ports=st.lists(PORTS, max_size=2, unique_by=lambda port: port.number).map(tuple),
        link=LINKS,
    ),
    max_size=3,
    unique_by=lambda nic: nic.label,
)
MACHINES = st.builds(
    Machine,
    gpus=GPUS.map(tuple),
    nics=NICS.map(tuple),
    pci=st.lists(
        st.builds(
            PciDevice,
            st.sampled_from(["0000:17:00.0", "0000:19:00.0", "0000:20:00.0"]),
            st.sampled_from(["", "0000:20:00.0", "pci0000:00"]),
            st.sampled_from(["gpu", "nic", "bridge"]),
            link=LINKS,
        ),
        max_size=3,
        unique_by=lambda device: device.address,
    ).map(tuple),
    numa_nodes=st.sampled_from([(), (NumaNode(0, (0,)),), (NumaNode(0, (0,)), NumaNode(1))]),
    software=st.dictionaries(
        st.sampled_from(["kernel", "driver", "container"]),
        st.sampled_from(["", "odd", "5.15.0-105", "550.54.15", "3.10"]),
    ),
    virtual=st.sampled_from([None, True, False]),
)


@settings(max_examples=150, deadline=None)
@given(MACHINES)
def test_every_check_answers_on_any_machine(machine: Machine) -> None:
    found: list[Finding] = []
    for check in CHECKS:
        own = run_check(check, node(Path("/nowhere"), machine))
        assert own, check.id
        assert {finding.check for finding in own} == {check.id}
        found += own
    assert_well_formed(found)
