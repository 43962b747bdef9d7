"""Whole machines as file trees: what is found, collected, compared, explained and drawn."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmakit.discovery.collect import collect, read_machines
from rdmakit.discovery.machine import COMMANDS, find_out
from rdmakit.drivers import nvml
from rdmakit.drivers.host import CommandResult, HostTree
from rdmakit.errors import InvalidArgument
from rdmakit.pretty import pretty_json
from rdmakit.report.topo_schema import SCHEMA, TopoResult, topo_result
from rdmakit.report.topo_svg import draw
from rdmakit.report.topo_text import print_topo
from rdmakit.topology.compare import Difference, Facts, compare
from rdmakit.topology.cpulist import parse_cpus
from rdmakit.topology.explain import explain
from rdmakit.topology.facts import NvLink, NvmlFacts, NvmlGpu
from rdmakit.topology.model import Machine
from rdmakit.topology.survey import Survey, make_survey
from tests.unit import fake_machines as fakes
from tests.unit import topo_texts as texts

ROOT = Path(__file__).resolve().parents[2]


class Commands:
    """A runner that has the outputs of another machine."""

    def __init__(self, **outputs: str) -> None:
        self.outputs = outputs
        self.asked: list[tuple[str, ...]] = []

    def __call__(self, argv: Sequence[str], timeout: float) -> CommandResult:
        self.asked.append(tuple(argv))
        assert timeout <= 30
        name = "nvml" if tuple(argv) == nvml.COMMAND else Path(argv[0]).name
        name = {"nvidia-smi": "_".join(["smi", *argv[1:]])}.get(name, name)
        if name in self.outputs:
            return CommandResult(tuple(argv), 0, self.outputs[name], "")
        return CommandResult(tuple(argv), None, "", "", f"{argv[0]}: command not found")


def found(root: Path, **outputs: str) -> Machine:
    return find_out(HostTree(root), Commands(**outputs), {}).machine


def survey(*machines: Machine) -> Survey:
    return make_survey(machines)


@pytest.fixture(params=list(fakes.MACHINES))
def any_machine(request: pytest.FixtureRequest, tmp_path: Path) -> Machine:
    fakes.MACHINES[request.param](tmp_path)
    return found(tmp_path)


# -- discovery -----------------------------------------------------------------------------------


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


NVML = NvmlFacts(
    "550.54.15",
    "12.4",
    tuple(
        NvmlGpu(
            i,
            "NVIDIA H100 80GB HBM3",
            f"GPU-{i}",
            f"0000:{0x19 + 0x1A * i:02x}:00.0",
            i,
            nvlinks=(NvLink("switch"),) * 18,
            nvlink_version=4,
            generation=1,
            max_generation=5,
        )
        for i in range(3)
    ),
    ancestors=((None, "NODE", "NODE"),) * 3,
    p2p=(("X", "OK", "OK"), ("OK", "X", "OK"), ("OK", "OK", "X")),
)


@pytest.fixture
def with_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rdmakit.discovery.machine.have_pynvml", lambda: True)


@pytest.mark.usefixtures("with_nvml")
def test_nvml_knows_gpus_best(tmp_path: Path) -> None:
    fakes.hgx_h100(tmp_path)
    one = found(tmp_path, nvml=msgspec.json.encode(NVML).decode())
    assert len(one.gpus) == 3
    assert one.matrix.cell("GPU0", "GPU2") == "NV18"
    assert one.gpus[1].numa == 0
    assert one.nearest_nics("GPU1") == (2, ("mlx5_1",))
    assert any("5 of 8 GPUs" in note for note in one.notes)
    assert one.software["CUDA of the driver"] == "12.4"
    lines = " ".join(explain(one, survey(one).nodes[0].fabric, "GPU0", "GPU1"))
    assert "18 x 25 = 450 GB/s" in lines


@pytest.mark.usefixtures("with_nvml")
@pytest.mark.parametrize("answer", ["", "no json", '{"gpus": 7}', '{"problem": "NVML: gone"}'])
def test_bad_answers_of_nvml_fall_back_to_nvidia_smi(tmp_path: Path, answer: str) -> None:
    fakes.workstation(tmp_path)
    smi = texts.TABS.replace("\tNIC0\tNIC1", "").split("NIC0")[0].replace("\tPIX\tSYS", "")
    smi = smi.replace("\tSYS\tPXB", "")
    one = found(tmp_path, nvml=answer, **{"smi_topo_-m": smi})
    assert one.matrix.cell("GPU0", "GPU1") == "NV4"
    assert any("nvidia-smi is asked" in note for note in one.notes)


def test_nvml_driver_reads_what_the_library_says(monkeypatch: pytest.MonkeyPatch) -> None:
    class Remote:
        busId = b"FFFFFFFF:FF:FF.0"

    class Pci:
        busId = b"00000000:19:00.0"

    class Fake:
        """Stands for pynvml; what it lacks an old library lacks."""

        NVMLError = type("NVMLError", (Exception,), {})

        def nvmlInit(self) -> None: ...
        def nvmlShutdown(self) -> None: ...

        def __getattr__(self, name: str):
            table = {
                "nvmlDeviceGetCount": lambda: 1,
                "nvmlDeviceGetHandleByIndex": lambda i: "handle",
                "nvmlSystemGetDriverVersion": lambda: b"580.1",
                "nvmlSystemGetCudaDriverVersion_v2": lambda: 13000,
                "nvmlDeviceGetName": lambda h: "NVIDIA H200",
                "nvmlDeviceGetUUID": lambda h: "GPU-1",
                "nvmlDeviceGetPciInfo": lambda h: Pci,
                "nvmlDeviceGetCpuAffinity": lambda h, n: [0x3, 0x1],
                "nvmlDeviceGetNvLinkState": lambda h, link: 1 if link < 2 else self.refuse(),
                "nvmlDeviceGetNvLinkRemoteDeviceType": lambda h, link: 2,
                "nvmlDeviceGetNvLinkRemotePciInfo": lambda h, link: Remote,
                "nvmlDeviceGetNvLinkVersion": lambda h, link: 6,
                "nvmlDeviceGetMigMode": lambda h: self.refuse(),
            }
            if name not in table:
                raise AttributeError(name)
            return table[name]

        def refuse(self) -> None:
            raise self.NVMLError("not supported")

    monkeypatch.setitem(sys.modules, "pynvml", Fake())
    monkeypatch.setattr(nvml, "have_pynvml", lambda: True)
    facts = nvml.read_nvml()
    assert (facts.driver, facts.cuda, facts.problem) == ("580.1", "13.0", "")
    (gpu,) = facts.gpus
    assert (gpu.pci, gpu.cpus, gpu.mig_mode) == ("0000:19:00.0", (0, 1, 64), None)
    assert gpu.nvlinks == (NvLink("switch"), NvLink("switch"))
    assert gpu.nvlink_version == 4
    assert nvml.decode_nvml(msgspec.json.encode(facts).decode()) == facts


# -- collected directories -----------------------------------------------------------------------


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


# -- comparison ----------------------------------------------------------------------------------


def test_odd_node_is_named_and_equal_ones_shown_once(tmp_path: Path) -> None:
    for number in range(3):
        odd = number == 1
        fakes.hgx_h100(
            tmp_path / f"n{number}",
            f"node{number}",
            roce=True,
            number=number + 1,
            firmware="28.39.1002" if odd else "28.41.1000",
            mtu=1500 if odd else 4200,
            driver="535.1" if odd else "550.1",
            down=(2,) if odd else (),
        )
    whole = survey(*(found(tmp_path / f"n{number}") for number in range(3)))
    assert whole.alike == ((0, 2), (1,))
    told = {d.what: d for d in whole.differences}
    assert set(told) >= {"driver", "mlx5_0 firmware", "mlx5_0:1 net device MTU", "mlx5_2:1 state"}
    assert told["driver"].odd == (("535.1", (1,)),)
    assert "node1: 535.1" in told["driver"].describe(whole.names)
    assert not any("GID" in what or "role" in what for what in told), "addresses do not differ"


def test_missing_device_is_one_difference(tmp_path: Path) -> None:
    fakes.hgx_h100(tmp_path / "a", "a")
    fakes.hgx_h100(tmp_path / "b", "b", absent=(5,))
    whole = survey(found(tmp_path / "a"), found(tmp_path / "b"))
    assert [d.what for d in whole.differences] == ["RDMA devices"]


def test_gid_index_differs(tmp_path: Path) -> None:
    fakes.hgx_h100(tmp_path / "a", "a", roce=True)
    fake = fakes.hgx_h100(tmp_path / "b", "b", roce=True, number=2)
    port = "/sys/class/infiniband/mlx5_0/ports/1"
    real = (fake.root / port.lstrip("/")).resolve()
    (real / "gids/4").write_text((real / "gids/3").read_text())
    (real / "gid_attrs/types/4").write_text("RoCE v2\n")
    (real / "gid_attrs/types/3").write_text("IB/RoCE v1\n")
    whole = survey(found(tmp_path / "a"), found(tmp_path / "b"))
    told = {d.what: d for d in whole.differences}
    assert told["mlx5_0:1 RoCE v2 GID index"].usual == "3"
    assert told["mlx5_0:1 RoCE v2 GID index"].odd == (("4", (1,)),)


def test_compare_majority_and_order() -> None:
    facts = [Facts({"kernel": k, "driver": d}, {}) for k, d in (("1", "a"), ("2", "b"), ("2", "a"))]
    first, second = compare(facts)
    assert (first.what, first.usual, first.odd) == ("driver", "a", (("b", (1,)),))
    assert (second.what, second.usual, second.grave) == ("kernel", "2", False)
    assert compare(facts[:1]) == []


def test_of_two_nodes_that_differ_both_are_named() -> None:
    """No number tells which of them is wrong."""
    usual_of_two = Difference("MTU", "1500", (0,), (("4200", (1,)),))
    assert usual_of_two.describe(["a", "b"]) == "MTU: 1500 on a; b: 4200"
    usual_of_three = Difference("MTU", "1500", (0, 2), (("4200", (1,)),))
    assert usual_of_three.describe(["a", "b", "c"]) == "MTU: 1500 on 2 node(s); b: 4200"


# -- what is shown -------------------------------------------------------------------------------


def test_every_machine_is_shown_drawn_and_written(
    any_machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = survey(any_machine)
    print_topo(whole, title="topo")
    out = capsys.readouterr().out
    assert "proposed placement" in out
    assert "\x1b" not in out
    for gpu in any_machine.gpus:
        assert gpu.label in out
    for nic in any_machine.nics:
        assert nic.label in out
    root = ET.fromstring(draw(whole))
    drawn = " ".join(
        element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")
    )
    for gpu in any_machine.gpus:
        assert gpu.label in drawn
    for nic in any_machine.nics:
        assert nic.label in drawn
    result = msgspec.json.decode(pretty_json(topo_result(whole)), type=TopoResult)
    assert result.schema == SCHEMA
    assert len(result.ranks) == max(1, len(any_machine.gpus))


def boxes(svg: str) -> list[tuple[float, float, float, float]]:
    """Return the boxes of a picture, without the background and the colour key."""
    found = []
    for rect in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}rect"):
        if rect.get("rx"):
            x, y, w, h = (float(rect.get(name, "0")) for name in ("x", "y", "width", "height"))
            found.append((x, y, x + w, y + h))
    return found


def test_nothing_overlaps_in_a_picture(any_machine: Machine) -> None:
    svg = draw(survey(any_machine))
    found = boxes(svg)
    root = ET.fromstring(svg)
    for i, (x1, y1, x2, y2) in enumerate(found):
        assert x1 >= 0
        assert x2 <= float(root.get("width", "0"))
        assert y2 <= float(root.get("height", "0"))
        for a1, b1, a2, b2 in found[:i]:
            assert x2 <= a1 or a2 <= x1 or y2 <= b1 or b2 <= y1


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=40), st.text(max_size=40))
def test_picture_is_xml_whatever_the_names(host: str, name: str) -> None:
    one = Machine(host, gpus=(), nics=(), notes=(name,))
    text = (texts.TABS + texts.NAMES).replace("mlx5_3", name.split()[0] if name.split() else "x")
    from rdmakit.topology.assemble import assemble
    from rdmakit.topology.texts import read_texts

    drawn = draw(survey(replace(assemble(texts=read_texts({"a": text})), host=host), one))
    ET.fromstring(drawn)


def test_nvlinks_are_drawn(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(texts.TABS + texts.NAMES)
    svg = draw(survey(read_machines(tmp_path)[0].machine))
    assert "GPU0 - GPU1: NV4" in svg


def test_explanations(tmp_path: Path) -> None:
    fakes.hgx_h100(tmp_path, acs=0x1C)
    one = found(tmp_path)
    fabric = survey(one).nodes[0].fabric
    near = "\n".join(explain(one, fabric, "GPU0", "mlx5_0:1"))
    assert "0000:19:00.0 -> 0000:17:01.0" in near
    assert "they meet at 0000:16:00.0" in near
    assert "63 GB/s" in near
    assert "400 Gb/s = 50 GB/s" in near
    assert "FAIL: ACS" in near
    far = "\n".join(explain(one, fabric, "gpu0", "mlx5_6"))
    assert "across the sockets" in far
    assert "from one host bridge to another" in far
    assert "nearer to GPU0: mlx5_0 (PIX)" in far
    peers = "\n".join(explain(one, fabric, "GPU0", "GPU5"))
    assert "P2P crosses the sockets" in peers
    with pytest.raises(InvalidArgument, match="GPU9"):
        explain(one, fabric, "GPU0", "GPU9")


def test_consumer_card_without_p2p(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("\tGPU0\tGPU1\nGPU0\tX\tPHB\nGPU1\tPHB\tX\n")
    (tmp_path / "b").write_text(" \tGPU0\tGPU1\n GPU0\tX\tGNS\n GPU1\tGNS\tX\n")
    (one,) = read_machines(tmp_path)
    lines = " ".join(explain(one.machine, survey(one.machine).nodes[0].fabric, "GPU0", "GPU1"))
    assert "staged through host memory" in lines


# -- the command ---------------------------------------------------------------------------------


def rdmakit(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rdmakit", *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), **env},
    )


def test_command_here_and_from_a_directory(tmp_path: Path) -> None:
    here = rdmakit("topo", "--collect", str(tmp_path / "here"))
    assert here.returncode == 0, here.stderr
    assert "proposed placement" in here.stdout
    fakes.hgx_h100(tmp_path / "h100")
    svg = tmp_path / "a.svg"
    other = rdmakit("topo", "--from", str(tmp_path / "h100"), "--json", "--graph", str(svg))
    assert other.returncode == 0, other.stderr
    result = json.loads(other.stdout)
    assert result["nodes"][0]["relations"]["GPU0"]["mlx5_0"] == "PIX"
    assert result["ranks"][7]["ucx_net_devices"] == "mlx5_9:1"
    ET.fromstring(svg.read_text())
    told = rdmakit("topo", "--from", str(tmp_path / "h100"), "--explain", "GPU0", "GPU5")
    assert "SYS" in told.stdout
    assert "GPUDirect RDMA" in told.stdout
    chosen = rdmakit("topo", "--from", str(tmp_path / "h100"), "--json", "--nics", "mlx5_4,mlx5_5")
    assert {r["ucx_net_devices"] for r in json.loads(chosen.stdout)["ranks"]} == {
        "mlx5_4:1",
        "mlx5_5:1",
    }


@pytest.mark.parametrize(
    "args",
    [
        ["--from", "/nonexistent"],
        ["--graph", "picture.png"],
        ["--graph", "/nonexistent/a.svg"],
        ["--explain", "GPU0", "GPU77"],
        ["--ranks-per-node", "0"],
        ["--from", ".", "--collect", "x"],
    ],
)
def test_bad_usage_is_status_2_in_one_line(args: list[str]) -> None:
    result = rdmakit("topo", *args)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("rdmakit: ")


def test_import_loads_nothing_heavy() -> None:
    code = (
        "import sys, rdmakit, rdmakit.topology.survey, rdmakit.hostfile.parse;"
        "print([m for m in ('numpy','rich','click','msgspec','mpi4py','pynvml','ucxx')"
        " if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert out.stdout.strip() == "[]", out.stderr


def test_every_command_is_known_to_the_collection() -> None:
    assert {command[0] for command in COMMANDS.values()} == {
        "nvidia-smi",
        "ibstat",
        "ibstatus",
        "ibv_devinfo",
        "rdma",
        "show_gids",
        "lspci",
        "ucx_info",
        "dmesg",
        "lsmod",
    }
