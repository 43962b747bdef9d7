"""Collected directories and texts: read again they are the machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmakit.discovery.collect import collect, read_machines
from rdmakit.drivers.host import HostTree
from rdmakit.errors import InvalidArgument
from rdmakit.topology.model import Machine
from tests.unit import fake_machines as fakes
from tests.unit import topo_texts as texts
from tests.unit.topo_machines import Commands, any_machine, found, survey

__all__ = ["any_machine"]  # a fixture


def test_a_collected_directory_is_the_machine(any_machine: Machine, tmp_path: Path) -> None:
    collect(tmp_path / "out", HostTree(tmp_path), Commands())
    (again,) = read_machines(tmp_path / "out")
    expected = replace(any_machine, notes=(), sources=())
    assert replace(again.machine, notes=(), sources=()) == expected


def test_texts_are_told_apart_by_content(tmp_path: Path) -> None:
    (tmp_path / "one").write_text(texts.TABS + texts.NVLINK + texts.NAMES)
    (tmp_path / "two.log").write_text(texts.ibstat("mlx5_3", texts.UP))
    (tmp_path / "utf16.txt").write_text(texts.ibstat("mlx5_bond_0", texts.UP), encoding="utf-16")
    (tmp_path / "notes.md").write_text("bring milk\n")
    (tmp_path / "binary").write_bytes(b"\x7fELF\0\0\0")
    (one,) = read_machines(tmp_path)
    machine = one.machine
    assert machine.host == tmp_path.name
    assert [(nic.label, nic.name) for nic in machine.nics] == [
        ("NIC0", "mlx5_3"),
        ("NIC1", "mlx5_bond_0"),
    ]
    assert machine.nics[0].ports[0].rate_gbps == 400
    assert any("notes.md: nothing" in note for note in machine.notes)


def test_devices_outside_the_matrix_are_said_to_be(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(texts.TABS)
    (tmp_path / "b").write_text(texts.ibstat("mlx5_0", texts.UP))
    (one,) = read_machines(tmp_path)
    assert [nic.name for nic in one.machine.nics] == [None, None, "mlx5_0"]
    assert any("which is which cannot be known" in note for note in one.machine.notes)


def test_several_hosts_and_bad_places(tmp_path: Path) -> None:
    for host in ("b", "a"):
        fakes.workstation(tmp_path / host)
    assert [one.machine.host for one in read_machines(tmp_path)] == ["desk", "desk"]
    (tmp_path / "file.txt").write_text(texts.LISTED)
    (single,) = read_machines(tmp_path / "file.txt")
    assert [len(gpu.mig) for gpu in single.machine.gpus] == [2, 0]
    for bad in ("nowhere", "a/sys/bus"):
        with pytest.raises(InvalidArgument):
            read_machines(tmp_path / bad)


@settings(max_examples=40, deadline=None)
@given(st.text(max_size=200), st.binary(max_size=100))
def test_any_content_of_a_tree_is_survived(
    tmp_path_factory: pytest.TempPathFactory, text: str, data: bytes
) -> None:
    root = tmp_path_factory.mktemp("tree")
    fake = fakes.workstation(root)
    base = "/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0"
    for name in ("class", "numa_node", "current_link_speed", "max_link_width", "local_cpulist"):
        (root / f"{base}/{name}".lstrip("/")).write_bytes(data + text.encode(errors="replace"))
    fake.write("/sys/devices/system/node/node0/cpulist", text.encode(errors="replace"))
    fake.write("/proc/net/route", text.encode(errors="replace"))
    fake.write("/proc/cpuinfo", data)
    fake.nic("pci0000:00/0000:00:09.0", "mlx5_0", state=text.replace("\0", ""))
    one = found(root)
    survey(one)
