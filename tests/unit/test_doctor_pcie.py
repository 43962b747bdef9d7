"""Checks of PCIe: on whole machines, on lspci's text, on registers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmakit.discovery.machine import find_out
from rdmakit.doctor.model import Status
from rdmakit.drivers.host import HostTree
from rdmakit.topology.model import Machine, Nic, PciControl, PciDevice
from rdmakit.topology.pci_config import read_control
from tests.unit import doctor_texts as texts
from tests.unit import fake_machines as fakes
from tests.unit.fake_node import absent, ask, ask_one, node, texts_node


def control_config(control: int, *, at: int = 0x60, length: int = 256) -> bytes:
    """Return a configuration space whose PCI Express capability, the second, has ``control``."""
    config = bytearray(length)
    config[0x06] = 0x10
    config[0x34] = 0x40
    config[0x40:0x42] = bytes((0x01, at))
    config[at : at + 2] = bytes((0x10, 0))
    config[at + 8 : at + 10] = control.to_bytes(2, "little")
    return bytes(config)


def test_acs_on_the_path_of_each_rail(tmp_path: Path) -> None:
    fakes.hgx_h100(tmp_path, acs=0x1D)
    finding = ask_one(node(tmp_path), "pcie.acs")
    assert finding.status is Status.FAIL
    assert "8 of 8 paths" in finding.found
    assert "GPU0 (0000:19:00.0) to mlx5_0 (0000:1a:00.0)" in finding.found
    assert finding.cure.startswith("setpci -s 0000:17:01.0 ECAP_ACS+6.w=0000")
    # Bridges above the switch are not between the two.
    assert "0000:15:01.0" not in finding.cure


def test_acs_off_hidden_and_source_validation_alone(tmp_path: Path) -> None:
    for name, acs, status in (
        ("off", 0, Status.OK),
        ("valid", 0x1, Status.OK),
        ("hidden", None, Status.UNKNOWN),
    ):
        fakes.hgx_h100(tmp_path / name, acs=acs)
        assert ask_one(node(tmp_path / name), "pcie.acs").status is status, name


def test_acs_in_a_virtual_machine_is_right(tmp_path: Path) -> None:
    fakes.hgx_h100(tmp_path, acs=0x1D)
    machine = replace(find_out(HostTree(tmp_path), absent, {}).machine, virtual=True)
    finding = ask_one(node(tmp_path, machine), "pcie.acs")
    assert finding.status is Status.OK
    assert "ATS" in finding.found


def test_acs_of_lspci(tmp_path: Path) -> None:
    assert ask_one(texts_node(tmp_path, lspci=texts.lspci()), "pcie.acs").status is Status.OK
    finding = ask_one(texts_node(tmp_path, lspci=texts.lspci(acs="+")), "pcie.acs")
    assert finding.status is Status.FAIL
    assert finding.cure.startswith("setpci -s 0000:16:00.0 ")


def test_acs_lines_without_their_bridges(tmp_path: Path) -> None:
    lines = [line for line in texts.lspci(acs="+").splitlines() if "ACSCtl" in line]
    finding = ask_one(texts_node(tmp_path, grep="\n".join(lines)), "pcie.acs")
    assert finding.status is Status.WARN
    assert "1 of 2 bridges" in finding.found
    finding = ask_one(texts_node(tmp_path, grep=lines[1]), "pcie.acs")
    assert finding.status is Status.OK


def test_a_card_with_fewer_lanes(tmp_path: Path) -> None:
    assert ask_one(texts_node(tmp_path, lspci=texts.lspci()), "pcie.link").status is Status.OK
    (finding,) = ask(texts_node(tmp_path, lspci=texts.lspci(width="8")), "pcie.link")
    assert finding.status is Status.WARN
    assert "0000:18:00.0" in finding.subject
    assert "x8 of x16" in finding.found


def test_an_idle_gpu_is_no_fault(tmp_path: Path) -> None:
    text = "\tLnkCap: Port #0, Speed 16GT/s, Width x16\n"
    text += "\tLnkSta: Speed 2.5GT/s (downgraded), Width x16\n"
    finding = ask_one(texts_node(tmp_path, grep=text), "pcie.link")
    assert finding.status is Status.OK
    assert "idle" in finding.found


@pytest.mark.parametrize(
    ("change", "environ", "name", "status", "cure"),
    [
        ({}, {}, "pcie.relaxed_ordering", Status.OK, ""),
        ({"ordering": "-"}, {}, "pcie.relaxed_ordering", Status.WARN, "CAP_EXP+8.w=10:10"),
        (
            {},
            {"UCX_IB_PCI_RELAXED_ORDERING": "off"},
            "pcie.relaxed_ordering",
            Status.WARN,
            "unset UCX_IB_PCI_RELAXED_ORDERING",
        ),
        ({}, {}, "pcie.read_request", Status.OK, ""),
        ({"read": "512"}, {}, "pcie.read_request", Status.OK, ""),
        ({"read": "128"}, {}, "pcie.read_request", Status.WARN, "CAP_EXP+8.w=5000:7000"),
    ],
)
def test_control_register_by_lspci(
    tmp_path: Path,
    change: dict[str, str],
    environ: dict[str, str],
    name: str,
    status: Status,
    cure: str,
) -> None:
    machine = Machine(
        nics=(Nic("mlx5_0", "mlx5_0", pci="0000:18:00.0"),),
        pci=(PciDevice("0000:18:00.0", kind="nic", name="15b3:1021"),),
    )
    outputs = {"lspci-vvv.txt": texts.lspci(**change)}
    finding = ask_one(node(tmp_path, machine, outputs=outputs, environ=environ), name)
    assert finding.status is status
    assert cure in finding.cure
    hidden = ask_one(node(tmp_path, machine), name)
    assert hidden.status is Status.UNKNOWN
    assert "root" in hidden.found


@pytest.mark.parametrize(
    "ids", ["15b3:101e", "15b3:1018", "ConnectX Family mlx5Gen Virtual Function"]
)
def test_registers_of_a_virtual_function_say_nothing(tmp_path: Path, ids: str) -> None:
    machine = Machine(
        nics=(Nic("mlx5_0", "mlx5_0", pci="0000:18:00.0"),),
        pci=(PciDevice("0000:18:00.0", kind="nic", name=ids, control=PciControl(False, 128)),),
    )
    for name in ("pcie.relaxed_ordering", "pcie.read_request"):
        assert ask_one(node(tmp_path, machine), name).status is Status.SKIPPED


def test_control_register_by_sysfs(tmp_path: Path) -> None:
    fake = fakes.hgx_h100(tmp_path)
    for nic in find_out(HostTree(tmp_path), absent, {}).machine.nics:
        place = HostTree(tmp_path).resolve(f"/sys/bus/pci/devices/{nic.pci}")
        fake.write(f"{place}/config", control_config(0x2000))  # 512 bytes, ordering off
    finding = ask_one(node(tmp_path), "pcie.relaxed_ordering")
    assert finding.status is Status.WARN
    assert "0000:1a:00.0" in finding.found
    assert ask_one(node(tmp_path), "pcie.read_request").found == "512 bytes on 8 NIC(s)"


@settings(deadline=None)
@given(st.integers(0, 0xFFFF), st.sampled_from([0x44, 0x60, 0x80, 0xF0]))
def test_control_register(control: int, at: int) -> None:
    told = read_control(control_config(control, at=at))
    assert told is not None
    assert told.relaxed_ordering == bool(control & 0x10)
    size = control >> 12 & 7
    assert told.max_read == (128 * 2**size if size < 6 else None)


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_no_register_or_one(config: bytes) -> None:
    told = read_control(config)
    assert told is None or told.max_read in (None, 128, 256, 512, 1024, 2048, 4096)


def test_without_root_it_is_hidden() -> None:
    assert read_control(control_config(0x5010)[:64]) is None


def test_a_virtual_machine_that_hides_distances(tmp_path: Path) -> None:
    machine = Machine(virtual=True)
    assert ask_one(node(tmp_path, machine), "pcie.virtual").status is Status.OK
    fakes.hgx_h100(tmp_path)
    found = find_out(HostTree(tmp_path), absent, {}).machine
    assert ask_one(node(tmp_path, replace(found, virtual=True)), "pcie.virtual").status is Status.OK
    flat = replace(found, virtual=True, matrix=type(found.matrix)())
    assert ask_one(node(tmp_path, flat), "pcie.virtual").status is Status.UNKNOWN
