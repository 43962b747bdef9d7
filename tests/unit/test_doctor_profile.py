"""What is expected of types of machines: the files, their choice, and the comparison."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rdmakit.doctor.model import Status
from rdmakit.doctor.profile import (
    Expect,
    Match,
    Profile,
    choose_profile,
    load_profile,
    shipped_profiles,
)
from rdmakit.errors import InvalidArgument
from rdmakit.topology.model import Gpu, Machine, Nic, NumaNode, PciDevice, PcieLink, Port
from tests.unit import fake_machines as fakes
from tests.unit.fake_node import ask, ask_one, node, write

GEN5 = PcieLink(2.5, 16, 32.0, 16)
H100 = Machine(
    gpus=tuple(
        Gpu(i, "NVIDIA H100 80GB HBM3", pci=f"0000:{16 + i:02x}:00.0", link=GEN5, nvlinks=18)
        for i in range(8)
    ),
    nics=tuple(
        Nic(
            f"mlx5_{i}",
            f"mlx5_{i}",
            model="MT4129",
            link=GEN5,
            ports=(Port(1, "ACTIVE", "LinkUp", 400, "InfiniBand", 3, 1),),
        )
        for i in range(8)
    ),
    numa_nodes=(NumaNode(0, (0,)), NumaNode(1, (1,))),
    software={"driver": "550.54.15", "kernel": "5.15.0-105"},
)
DGX = "DGXH100"


def named(machine: Machine, product: str = "") -> str:
    return choose_profile(machine, product).name


def test_shipped_profiles() -> None:
    names = [profile.name for profile in shipped_profiles()]
    assert len(set(names)) == len(names) >= 8
    for profile in shipped_profiles():
        assert profile.match.conditions, profile.name
        assert profile.expect != Expect(), profile.name


def test_the_product_decides_before_the_gpu() -> None:
    assert named(H100) == "HGX H100 8-GPU"
    assert named(H100, "DGXH100") == "DGX H100"
    assert named(H100, "PowerEdge XE9680") == "HGX H100 8-GPU"
    assert named(replace(H100, gpus=H100.gpus[:2])) == ""
    assert named(Machine()) == ""
    assert named(Machine(), "DGXH100") == ""  # nothing is known of its GPUs


@pytest.mark.parametrize(
    ("gpu", "count", "product", "name"),
    [
        ("Tesla V100-SXM2-16GB", 8, "DGX-1 with V100-16", "DGX-1 (V100)"),
        ("Tesla V100-SXM2-16GB", 8, "", ""),
        ("NVIDIA A100-SXM4-40GB", 8, "DGXA100 920-23687-2530-000", "DGX A100"),
        ("NVIDIA A100-SXM4-80GB", 8, "", "HGX A100 8-GPU"),
        ("NVIDIA A100-SXM4-40GB", 4, "", ""),
        ("NVIDIA A800-SXM4-80GB", 8, "", ""),
        ("NVIDIA H200", 8, "DGXH200", "DGX H200"),
        ("NVIDIA H200", 8, "", "HGX H200 8-GPU"),
        ("NVIDIA H200 NVL", 8, "", ""),
        ("NVIDIA GH200 480GB", 1, "", "GH200"),
        ("NVIDIA H100 PCIe", 8, "", ""),
    ],
)
def test_choice(gpu: str, count: int, product: str, name: str) -> None:
    machine = Machine(gpus=tuple(Gpu(i, gpu) for i in range(count)))
    assert named(machine, product) == name


def test_a_sites_own_goes_first() -> None:
    own = Profile(name="ours", match=Match(gpu="*H100*"), expect=Expect(gpus=8))
    other = Profile(name="other", match=Match(gpu="*A100*"), expect=Expect(gpus=8))
    assert choose_profile(H100, "DGXH100", [other, own]).name == "ours"
    assert choose_profile(H100, "DGXH100", [other]).name == "DGX H100"


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text('[match]\ngpu = "*H100*"\n[expect]\ngpus = 8\nrate_gbps = 400\n')
    profile = load_profile(path)
    assert profile.name == "site"
    assert profile.expect == Expect(gpus=8, rate_gbps=400.0)
    assert profile.match.fits(H100, "")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[expect]\ngpu_count = 8\n", ("gpu_count", "[expect]: gpus, nvlinks")),
        ("[match]\nmodel = 'x'\n[expect]\ngpus = 8\n", ("model", "[match]: product, gpu")),
        ("[expects]\ngpus = 8\n", ("expects", "Known are name")),
        ("[expect]\ngpus = 'eight'\n", ("`int | null`", "$.expect.gpus")),
        ("[expect\n", ("no TOML",)),
        ("name = 'empty'\n", ("expects nothing",)),
    ],
)
def test_a_wrong_file(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    path = tmp_path / "site.toml"
    path.write_text(text)
    with pytest.raises(InvalidArgument) as told:
        load_profile(path)
    for word in (str(path), *words):
        assert word in str(told.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot be read"):
        load_profile(tmp_path / "none.toml")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidArgument, match="cannot be read"):
        load_profile(binary)


def judged(root: Path, machine: Machine, name: str, **more: object) -> list[tuple[str, Status]]:
    write(root, "/sys/class/dmi/id/product_name", DGX + "\n")
    return [(f.subject, f.status) for f in ask(node(root, machine, **more), name)]


def test_a_machine_as_it_should_be(tmp_path: Path) -> None:
    for name in ("profile.gpus", "profile.rails", "profile.software"):
        assert judged(tmp_path, H100, name) == [("", Status.OK)]


def test_a_gpu_is_missing(tmp_path: Path) -> None:
    seven = replace(H100, gpus=H100.gpus[:7])
    assert judged(tmp_path, seven, "profile.gpus") == [("", Status.WARN)]
    lost = replace(seven, pci=tuple(PciDevice(g.pci or "", kind="gpu") for g in seven.gpus))
    assert judged(tmp_path, lost, "profile.gpus") == [("", Status.FAIL)]


def test_links_of_gpus(tmp_path: Path) -> None:
    gpus = list(H100.gpus)
    gpus[2] = replace(gpus[2], nvlinks=16)
    gpus[5] = replace(gpus[5], link=PcieLink(2.5, 8, 32.0, 16))
    gpus[6] = replace(gpus[6], nvlinks=None)
    machine = replace(H100, gpus=tuple(gpus))
    assert judged(tmp_path, machine, "profile.gpus") == [
        ("GPU2", Status.WARN),
        ("GPU5", Status.WARN),
    ]


def test_rails(tmp_path: Path) -> None:
    six = replace(H100, nics=H100.nics[:6])
    assert judged(tmp_path, six, "profile.rails") == [("", Status.FAIL)]
    slow = replace(
        H100,
        nics=tuple(replace(n, ports=(replace(n.ports[0], rate_gbps=200),)) for n in H100.nics),
    )
    found = judged(tmp_path, slow, "profile.rails")
    assert len(found) == 8
    assert {status for _, status in found} == {Status.FAIL}


def test_software(tmp_path: Path) -> None:
    old = replace(H100, software={"driver": "515.65.01"})
    assert judged(tmp_path, old, "profile.software") == [("", Status.FAIL)]
    split = replace(H100, numa_nodes=tuple(NumaNode(i, (i,)) for i in range(4)))
    assert judged(tmp_path, split, "profile.software") == [("", Status.WARN)]


def test_the_profile_that_is_given(tmp_path: Path) -> None:
    own = Profile(name="ours", expect=Expect(rails=9, open_modules=True))
    closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue\n"
    write(tmp_path, "/proc/driver/nvidia/version", closed)
    assert judged(tmp_path, H100, "profile.rails", profile=own) == [("", Status.FAIL)]
    assert judged(tmp_path, H100, "profile.software", profile=own) == [("", Status.FAIL)]
    assert judged(tmp_path, H100, "profile.gpus", profile=own) == [("", Status.SKIPPED)]


def test_no_profile_is_no_fault(tmp_path: Path) -> None:
    fakes.workstation(tmp_path)
    finding = ask_one(node(tmp_path), "profile.gpus")
    assert finding.status is Status.SKIPPED
    assert "--profile" in finding.found


def test_the_dgx_a100_as_a_whole(tmp_path: Path) -> None:
    fakes.dgx_a100(tmp_path)
    write(tmp_path, "/sys/class/dmi/id/product_name", "DGXA100 920-23687-2530-000\n")
    for name in ("profile.gpus", "profile.rails", "profile.software"):
        finding = ask_one(node(tmp_path), name)
        assert finding.status is Status.OK
        assert finding.found.startswith("DGX A100: ")
