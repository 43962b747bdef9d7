"""Whole machines as file trees: what is found on them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rdmakit.discovery.collect import read_machines
from rdmakit.discovery.machine import find_out
from rdmakit.drivers.host import HostTree
from rdmakit.topology.cpulist import parse_cpus
from tests.unit import fake_machines as fakes
from tests.unit import topo_texts as texts
from tests.unit.topo_machines import Commands, found, survey


def test_dgx1(tmp_path: Path) -> None:
    fakes.dgx1(tmp_path)
    one = found(tmp_path)
    assert len(one.gpus) == 8
    assert one.matrix.cell("GPU0", "GPU1") == "PIX"
    assert one.matrix.cell("GPU0", "GPU2") == "PHB"
    assert one.matrix.cell("GPU0", "GPU4") == "SYS"
    assert [one.nearest_nics(f"GPU{i}")[1] for i in range(8)] == [
        (f"mlx5_{i // 2}",) for i in range(8)
    ]
    assert one.matrix.nvlinks("GPU0", "GPU1") is None, "sysfs does not tell NVLink"
    assert one.virtual is False
    assert one.software["driver"] == "470.82.01"


def test_dgx_a100_with_storage_in_the_middle(tmp_path: Path) -> None:
    fakes.dgx_a100(tmp_path)
    one = found(tmp_path)
    assert one.matrix.cell("GPU0", "mlx5_1") == "PXB"
    assert one.matrix.cell("mlx5_4", "mlx5_5") == "PIX"
    placed = survey(one).placement.ranks
    compute = [f"mlx5_{i}:1" for i in (0, 1, 2, 3, 6, 7, 8, 9)]
    assert [r.net_devices for r in placed] == [(name,) for name in compute]
    assert [one.gpus[i].numa for i in (0, 2, 4, 6)] == [3, 1, 7, 5]
    assert placed[2].cores == tuple([*range(16, 24), *range(144, 152)])
    assert one.gpus[0].link.generation == 1
    assert one.gpus[0].link.max_generation == 4


def test_hgx_h100_with_access_control(tmp_path: Path) -> None:
    fakes.hgx_h100(tmp_path / "good")
    good = survey(found(tmp_path / "good"))
    assert [r.path.name for r in good.placement.ranks if r.path] == ["PIX"] * 8
    assert {p.nic: p.role for p in good.nodes[0].fabric.ports}["mlx5_4"] == "storage"
    assert {check.verdict for check in good.nodes[0].paths} == {"PASS"}
    fakes.hgx_h100(tmp_path / "bad", acs=0x1D)
    bad = survey(found(tmp_path / "bad"))
    assert {check.verdict for check in bad.nodes[0].paths} == {"FAIL"}
    fakes.hgx_h100(tmp_path / "user", acs=None)
    user = survey(found(tmp_path / "user"))
    assert {check.acs for check in user.nodes[0].paths} == {"unknown"}


def test_pcie_box_spreads_two_ports_over_four_gpus(tmp_path: Path) -> None:
    fakes.pcie_box(tmp_path)
    one = found(tmp_path)
    assert one.matrix.cell("GPU0", "GPU1") == "NODE"
    assert one.nearest_nics("GPU0")[0].name == "SYS"  # type: ignore[union-attr]
    placed = survey(one).placement.ranks
    assert sorted(r.nics[0] for r in placed) == ["mlx5_0:1"] * 2 + ["mlx5_1:1"] * 2
    # Even CPUs on one socket, odd on the other.
    assert [sorted({cpu % 2 for cpu in r.cores}) for r in placed] == [[0], [0], [1], [1]]
    assert [nic.default_route for nic in one.nics] == [False, True]
    assert one.nics[0].ports[0].gids[3].kind == "RoCE v2"


def test_gh200_has_one_place_to_run(tmp_path: Path) -> None:
    fakes.gh200(tmp_path)
    one = found(tmp_path)
    assert len(one.numa_nodes) == 9
    assert one.matrix.cell("GPU0", "mlx5_0") == "NODE"
    (rank,) = survey(one).placement.ranks
    assert rank.cores == tuple(range(72))
    assert any("no CPUs" in note for note in one.notes)


def test_workstation_and_its_narrow_slot(tmp_path: Path) -> None:
    fakes.workstation(tmp_path)
    one = found(tmp_path)
    assert one.matrix.cell("GPU0", "GPU1") == "PHB"
    remarks = " ".join(survey(one).nodes[0].remarks)
    assert "0000:02:00.0 runs at x4 of x16" in remarks
    assert "FAIL" not in remarks


def test_virtual_machine_and_nothing(tmp_path: Path) -> None:
    fakes.virtual_machine(tmp_path / "vm")
    vm = found(tmp_path / "vm")
    assert vm.virtual
    assert len(vm.gpus) == 1
    fakes.nothing(tmp_path / "none")
    none = found(tmp_path / "none")
    assert not none.gpus
    assert not none.nics
    assert "no RDMA port" in survey(none).nodes[0].fabric.verdict
    empty = found(tmp_path / "empty")
    assert empty.gpus == ()
    assert empty.numa_nodes == ()


def test_software_device(tmp_path: Path) -> None:
    fakes.soft_roce(tmp_path)
    one = found(tmp_path, ibv_devinfo=texts.DEVINFO_RXE)
    (nic,) = one.nics
    assert (nic.name, nic.pci, nic.model, nic.firmware) == ("rxe0", None, None, "0.0.0")
    (port,) = nic.ports
    assert (port.state, port.rate_gbps, port.netdev) == ("ACTIVE", 2.5, "eth1")
    assert (port.netdev_mtu, port.active_mtu) == (1500, 1024)
    assert [gid.index for gid in port.gids] == [0, 1]
    (own,) = survey(one).nodes[0].fabric.ports
    assert (own.role, own.device) == ("compute", "rxe0:1")


def test_nothing_starts_no_command(tmp_path: Path) -> None:
    fakes.nothing(tmp_path)
    commands = Commands()
    find_out(HostTree(tmp_path), commands, {})
    assert commands.asked == []


def test_gpus_without_driver_are_seen_and_said(tmp_path: Path) -> None:
    fake = fakes.Fake(tmp_path)
    fake.base("x")
    fake.cpus(["0-3"])
    fake.gpu("pci0000:00/0000:00:06.0", "?", known=False)
    one = found(tmp_path)
    assert len(one.gpus) == 1
    assert any("no NVIDIA driver is loaded" in note for note in one.notes)


def test_virtual_functions_beside_their_physical_one(tmp_path: Path) -> None:
    fake = fakes.Fake(tmp_path)
    fake.base("x")
    fake.cpus(["0-3"])
    top = fake.bridge("pci0000:16/0000:16:01.0")
    fake.nic(f"{top}/0000:17:00.0", "mlx5_0")
    fake.nic(f"{top}/0000:17:00.4", "mlx5_1")
    fake.link(f"/sys/devices/{top}/0000:17:00.4/physfn", f"/sys/devices/{top}/0000:17:00.0")
    roles = {p.nic: p.role for p in survey(found(tmp_path)).nodes[0].fabric.ports}
    assert roles == {"mlx5_0": "compute", "mlx5_1": "vf"}


def test_bond_of_net_devices(tmp_path: Path) -> None:
    fake = fakes.hgx_h100(tmp_path, roce=True)
    fake.write("/sys/devices/virtual/net/bond0/bonding/mode", "802.3ad 4\n")
    fake.link("/sys/class/net/bond0", "/sys/devices/virtual/net/bond0")
    base = (tmp_path / "sys/class/net/stor0").resolve().relative_to(tmp_path.resolve())
    fake.link(f"/{base}/master", "/sys/devices/virtual/net/bond0")
    fake.default_route("bond0")
    nic = found(tmp_path).nic("mlx5_4")
    assert nic is not None
    assert (nic.bond, nic.default_route) == ("bond0", True)


@pytest.mark.parametrize(
    ("group", "file", "cpus"),
    [
        ("0::/slurm/job7/step0\n", "slurm/job7/cpuset.cpus.effective", "0-7,112-119"),
        ("0::/host/path/not/here\n", "cpuset.cpus.effective", "0-3"),
        ("5:cpu:/x\n3:cpuset:/a\n0::/\n", "cpuset/a/cpuset.effective_cpus", "56-63"),
        ("0::/\n", "nothing", ""),
    ],
)
def test_only_the_jobs_cpus_are_shared_out(
    tmp_path: Path, group: str, file: str, cpus: str
) -> None:
    fake = fakes.hgx_h100(tmp_path)
    fake.write("/proc/self/cgroup", group)
    fake.write(f"/sys/fs/cgroup/{file}", cpus + "\n")
    one = found(tmp_path)
    assert one.available == parse_cpus(cpus)
    allowed = set(parse_cpus(cpus) or range(224))
    placed = survey(one).placement.ranks
    assert {cpu for r in placed for cpu in r.cores} <= allowed
    assert all(r.cores for r in placed)


def test_gpus_that_nvlink_leaves_out_are_named(tmp_path: Path) -> None:
    cells = {("0", "1"): "NV4", ("1", "2"): "NODE", ("0", "2"): "NODE"}
    names = "012"
    rows = "".join(
        f"GPU{a}\t" + "\t".join("X" if a == b else cells[min((a, b), (b, a))] for b in names) + "\n"
        for a in names
    )
    (tmp_path / "a").write_text("\tGPU0\tGPU1\tGPU2\n" + rows)
    (node,) = survey(read_machines(tmp_path)[0].machine).nodes
    assert any("2 groups only (GPU0 GPU1; GPU2)" in remark for remark in node.remarks)
