"""Checks of limits, memory, kernel, containers and the IOMMU on files that stand for a machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmakit.discovery.collect import collect
from rdmakit.doctor.context import Context, RankView
from rdmakit.doctor.model import Status
from rdmakit.drivers.host import HostTree
from rdmakit.topology.model import Gpu, Machine, Nic, NumaNode, PciDevice
from tests.unit.fake_node import absent, ask, ask_one, node, write

GPUS = Machine(
    gpus=(Gpu(0, pci="0000:17:00.0"),),
    nics=(Nic("mlx5_0", "mlx5_0", pci="0000:18:00.0"),),
    pci=(
        PciDevice("0000:17:00.0", kind="gpu"),
        PciDevice("0000:18:00.0", kind="nic"),
    ),
    numa_nodes=(NumaNode(0, (0, 1)), NumaNode(1, (2, 3))),
)


@dataclass
class Space(HostTree):
    """A tree whose file systems have the given (size, free)."""

    root: str
    told: tuple[int, int] | None

    def space(self, path: str) -> tuple[int, int] | None:
        return self.told


def live(root: Path, told: tuple[int, int] | None, **more: object) -> Context:
    return node(root, Machine(), tree=Space(str(root), told), live=True, **more)


def rank(number: int, pid: int = 100) -> RankView:
    return RankView(
        rank=number, local_rank=number, host="a", pid=pid + number, environ={}, facts={}
    )


def limits(root: Path, **soft: object) -> None:
    lines = [
        f"{name.replace('_', ' '):<26}{value!s:<21}{value!s:<21}" for name, value in soft.items()
    ]
    write(root, "/proc/self/limits", "\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("limit", "ranks", "status"),
    [
        ("unlimited", 4096, Status.OK),
        (1024, 1, Status.OK),
        (1024, 192, Status.OK),
        (1024, 193, Status.WARN),
        (1024, 2000, Status.FAIL),
    ],
)
def test_open_files(tmp_path: Path, limit: object, ranks: int, status: Status) -> None:
    limits(tmp_path, Max_open_files=limit)
    finding = ask_one(node(tmp_path, Machine(), job_size=ranks), "host.files")
    assert finding.status is status
    if status is not Status.OK:
        assert "ulimit -n" in finding.cure
        assert str(256 + 4 * ranks) in finding.expected


def test_processes_by_the_tighter_limit(tmp_path: Path) -> None:
    limits(tmp_path, Max_processes=4096)
    context = node(tmp_path, Machine(), ranks=tuple(rank(n) for n in range(8)))
    assert ask_one(context, "host.processes").status is Status.OK
    write(tmp_path, "/sys/fs/cgroup/pids.max", "512\n")
    finding = ask_one(context, "host.processes")
    assert finding.status is Status.WARN
    assert "512" in finding.found
    assert "pids.max" in finding.found
    assert "768" in finding.expected
    write(tmp_path, "/sys/fs/cgroup/pids.max", "max\n")
    assert ask_one(context, "host.processes").status is Status.OK


EVERY, IDENTITY, ROOTLESS = 0x1FFFFFFFFFF, "0 0 4294967295", "0 1000 1\n1 100000 65536"


@pytest.mark.parametrize(
    ("capabilities", "users", "limit", "status"),
    [
        (EVERY, IDENTITY, 65536, Status.OK),
        (1 << 14, IDENTITY, 65536, Status.OK),
        (EVERY & ~(1 << 14), IDENTITY, 65536, Status.FAIL),
        (0, IDENTITY, 65536, Status.FAIL),
        (EVERY, ROOTLESS, 65536, Status.FAIL),
        (EVERY, None, 65536, Status.FAIL),
        (None, IDENTITY, 65536, Status.FAIL),
        (EVERY & ~(1 << 14), IDENTITY, "unlimited", Status.OK),
    ],
)
def test_locked_memory_of_the_privileged(
    tmp_path: Path, capabilities: int | None, users: str | None, limit: object, status: Status
) -> None:
    root = tmp_path / "here"
    limits(root, Max_locked_memory=limit)
    if capabilities is not None:
        told = f"Name:\tx\nCapPrm:\t{EVERY:016x}\nCapEff:\t{capabilities:016x}\nCapBnd:\t0\n"
        write(root, "/proc/self/status", told)
    if users is not None:
        write(root, "/proc/self/uid_map", users + "\n")
    finding = ask_one(node(root, GPUS), "host.memlock")
    assert finding.status is status
    assert ("CAP_IPC_LOCK" in finding.found) == (status is Status.OK and limit != "unlimited")

    def look(_: object, tree: HostTree, outputs: object) -> None:
        ask_one(node(root, GPUS, tree=tree), "host.memlock")

    collect(tmp_path / "kept", HostTree(root), absent, look=look)
    assert ask_one(node(tmp_path / "kept", GPUS), "host.memlock") == finding


MIB = 1 << 20


@pytest.mark.parametrize(
    ("size", "free", "ranks", "status", "word"),
    [
        (1 * MIB, 1 * MIB, 2, Status.FAIL, "1 MiB"),
        (64 * MIB, 60 * MIB, 8, Status.FAIL, "asks for nothing"),
        (64 * MIB, 60 * MIB, 2, Status.WARN, "64 MiB"),
        (8 << 30, 10 * MIB, 4, Status.FAIL, "are free"),
        (8 << 30, 7 << 30, 4, Status.OK, "8 GiB"),
    ],
)
def test_shared_memory(
    tmp_path: Path, size: int, free: int, ranks: int, status: Status, word: str
) -> None:
    context = live(tmp_path, (size, free), ranks=tuple(rank(n) for n in range(ranks)))
    finding = ask_one(context, "host.shm")
    assert finding.status is status
    assert word in finding.found
    if status is Status.FAIL:
        assert "shm" in finding.cure


def test_shared_memory_that_is_not_there(tmp_path: Path) -> None:
    finding = ask_one(live(tmp_path, None), "host.shm")
    assert finding.status is Status.FAIL
    assert "mount -t tmpfs" in finding.cure


def test_a_larger_window_needs_more(tmp_path: Path) -> None:
    ranks = tuple(rank(n) for n in range(4))
    room = (256 * MIB, 256 * MIB)
    assert ask_one(live(tmp_path, room, ranks=ranks), "host.shm").status is Status.OK
    environ = {"RDMAKIT_WINDOW": "128M"}
    finding = ask_one(live(tmp_path, room, ranks=ranks, environ=environ), "host.shm")
    assert finding.status is Status.FAIL
    assert "544 MiB" in finding.expected


@pytest.mark.parametrize(
    ("options", "memory", "status"),
    [
        ("rw,nosuid,nodev,size=65536k", "", Status.WARN),
        ("rw,nosuid,size=1024k", "", Status.FAIL),
        ("rw,nosuid,nodev", "MemTotal:       131072000 kB\n", Status.OK),
        ("rw,nosuid,nodev,size=50%", "MemTotal:       131072000 kB\n", Status.OK),
        ("rw,size=odd", "", Status.UNKNOWN),
    ],
)
def test_shared_memory_of_collected_files(
    tmp_path: Path, options: str, memory: str, status: Status
) -> None:
    write(tmp_path, "/proc/mounts", f"proc /proc proc rw 0 0\nshm /dev/shm tmpfs {options} 0 0\n")
    write(tmp_path, "/proc/meminfo", memory)
    assert ask_one(node(tmp_path, Machine()), "host.shm").status is status


@settings(deadline=None)
@given(st.integers(1, 1 << 40), st.integers(1, 64))
def test_shared_memory_is_judged_by_the_ranks(size: int, ranks: int) -> None:
    context = live(Path("/nowhere"), (size, size), ranks=tuple(rank(n) for n in range(ranks)))
    need = ranks * (11 << 20)  # a window of 3 MiB, and 8 MiB for MPI and UCX
    assert (ask_one(context, "host.shm").status is Status.FAIL) == (size < need)


@pytest.mark.parametrize(
    ("environ", "free", "status"),
    [
        ({}, 0, Status.OK),
        ({"UCX_SYSV_HUGETLB_MODE": "y"}, 0, Status.FAIL),
        ({"UCX_SYSV_HUGETLB_MODE": "try"}, 0, Status.WARN),
        ({"UCX_SYSV_HUGETLB_MODE": "n"}, 0, Status.OK),
        ({"UCX_SYSV_HUGETLB_MODE": "No "}, 0, Status.OK),
        ({"UCX_SYSV_HUGETLB_MODE": "n", "UCX_ALLOC_PRIO": "huge"}, 0, Status.WARN),
        ({"UCX_ALLOC_PRIO": "huge,thp,heap"}, 12, Status.OK),
    ],
)
def test_huge_pages(tmp_path: Path, environ: dict[str, str], free: int, status: Status) -> None:
    write(
        tmp_path,
        "/proc/meminfo",
        f"HugePages_Total:      16\nHugePages_Free:       {free}\nHugepagesize:       2048 kB\n",
    )
    finding = ask_one(node(tmp_path, Machine(), environ=environ), "host.hugepages")
    assert finding.status is status
    if status in (Status.FAIL, Status.WARN):
        assert "nr_hugepages" in finding.cure


def test_kernel(tmp_path: Path) -> None:
    old = replace(GPUS, software={"kernel": "3.10.0-1160.el7.x86_64"})
    assert ask_one(node(tmp_path, old), "host.kernel").status is Status.WARN
    new = replace(GPUS, software={"kernel": "5.15.0-105-generic"})
    assert ask_one(node(tmp_path, new), "host.kernel").status is Status.OK
    write(tmp_path, "/lib/modules/5.15.0-117-generic/modules.dep", "")
    finding = ask_one(node(tmp_path, new, live=True), "host.kernel")
    assert finding.status is Status.WARN
    assert finding.cure.startswith("reboot")
    boxed = replace(new, software={**new.software, "container": "docker"})
    assert ask_one(node(tmp_path, boxed, live=True), "host.kernel").status is Status.OK


def test_numa_balancing(tmp_path: Path) -> None:
    write(tmp_path, "/proc/sys/kernel/numa_balancing", "1\n")
    finding = ask_one(node(tmp_path, GPUS), "host.numa_balancing")
    assert finding.status is Status.WARN
    assert "kernel.numa_balancing=0" in finding.cure
    no_gpu = replace(GPUS, gpus=())
    assert ask_one(node(tmp_path, no_gpu), "host.numa_balancing").status is Status.OK
    one = replace(GPUS, numa_nodes=GPUS.numa_nodes[:1])
    assert ask_one(node(tmp_path, one), "host.numa_balancing").status is Status.SKIPPED
    write(tmp_path, "/proc/sys/kernel/numa_balancing", "0\n")
    assert ask_one(node(tmp_path, GPUS), "host.numa_balancing").status is Status.OK


@pytest.mark.parametrize(
    ("now", "others", "status", "cure"),
    [
        ("tsc", "tsc hpet acpi_pm", Status.OK, ""),
        ("arch_sys_counter", "arch_sys_counter", Status.OK, ""),
        ("kvm-clock", "kvm-clock tsc", Status.OK, ""),
        ("hpet", "tsc hpet acpi_pm", Status.WARN, "echo tsc > /sys"),
        ("hpet", "hpet acpi_pm", Status.WARN, "tsc=reliable"),
    ],
)
def test_clock_source(tmp_path: Path, now: str, others: str, status: Status, cure: str) -> None:
    base = "/sys/devices/system/clocksource/clocksource0"
    write(tmp_path, f"{base}/current_clocksource", now + "\n")
    write(tmp_path, f"{base}/available_clocksource", others + "\n")
    finding = ask_one(node(tmp_path, Machine()), "host.clocksource")
    assert finding.status is status
    assert cure in finding.cure


@pytest.mark.parametrize(
    ("governor", "driver", "hint", "status"),
    [
        ("performance", "acpi-cpufreq", "", Status.OK),
        ("powersave", "intel_pstate", "balance_performance", Status.OK),
        ("powersave", "intel_pstate", "power", Status.WARN),
        ("ondemand", "acpi-cpufreq", "", Status.WARN),
        ("", "", "", Status.SKIPPED),
    ],
)
def test_governor(tmp_path: Path, governor: str, driver: str, hint: str, status: Status) -> None:
    for cpu in range(3):
        base = f"/sys/devices/system/cpu/cpufreq/policy{cpu}"
        if governor:
            write(tmp_path, f"{base}/scaling_governor", governor + "\n")
            write(tmp_path, f"{base}/scaling_driver", driver + "\n")
            write(tmp_path, f"{base}/energy_performance_preference", hint + "\n")
    finding = ask_one(node(tmp_path, Machine()), "host.governor")
    assert finding.status is status
    if status is Status.WARN:
        assert "3 of 3" in finding.found


def namespaces(root: Path, pid: int, ipc: int) -> None:
    for kind, number in (("pid", pid), ("ipc", ipc)):
        place = root / f"proc/7/ns/{kind}"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(f"{kind}:[{number}]")
    (root / "proc/self").symlink_to("7")


def test_a_container_of_its_own_is_no_fault(tmp_path: Path) -> None:
    namespaces(tmp_path, 4026532789, 4026532788)
    boxed = replace(GPUS, software={"container": "docker"})
    finding = ask_one(node(tmp_path, boxed), "host.container")
    assert finding.status is Status.OK
    assert "docker, with PID and IPC namespaces of its own" in finding.found


def test_the_hosts_own_namespaces(tmp_path: Path) -> None:
    namespaces(tmp_path, 4026531836, 4026531839)
    assert "of the host" in ask_one(node(tmp_path, GPUS), "host.container").found


def test_ranks_of_another_pid_namespace_are_told_of_once(tmp_path: Path) -> None:
    namespaces(tmp_path, 4026531836, 4026531839)
    write(tmp_path, "/proc/100/status", "")
    context = node(tmp_path, GPUS, live=True, ranks=(rank(0), rank(1)), job_size=2)
    assert ask_one(context, "host.container").status is Status.OK
    finding = ask_one(context, "ipc.namespaces")
    assert finding.status is Status.FAIL
    assert "of the 2 ranks of this node rank(s) 1 have another PID namespace" in finding.found
    assert "--pid=host" in finding.cure


def iommu(root: Path, gpu: str, nic: str, line: str = "") -> None:
    for address, kind in (("0000:17:00.0", gpu), ("0000:18:00.0", nic)):
        if kind:
            write(root, f"/sys/bus/pci/devices/{address}/iommu_group/type", kind + "\n")
    write(root, "/proc/cmdline", line + "\n")
    if gpu:
        write(root, "/sys/class/iommu/ivhd0/x", "")
    write(root, "/sys/class/net/lo/mtu", "65536\n")


@pytest.mark.parametrize(
    ("gpu", "nic", "machine", "status"),
    [
        ("identity", "identity", GPUS, Status.OK),
        ("DMA-FQ", "DMA-FQ", GPUS, Status.FAIL),
        ("DMA", "identity", GPUS, Status.FAIL),
        ("DMA-FQ", "", replace(GPUS, nics=(), pci=GPUS.pci[:1]), Status.WARN),
        ("", "", GPUS, Status.OK),
        ("DMA", "DMA", replace(GPUS, virtual=True), Status.SKIPPED),
        # Grace: CPU and GPU share their addresses over another link than PCIe.
        (
            "DMA-FQ",
            "DMA-FQ",
            replace(GPUS, numa_nodes=(NumaNode(0, (0,)), NumaNode(1, ()))),
            Status.WARN,
        ),
    ],
)
def test_iommu(tmp_path: Path, gpu: str, nic: str, machine: Machine, status: Status) -> None:
    iommu(tmp_path, gpu, nic)
    finding = ask_one(node(tmp_path, machine), "host.iommu")
    assert finding.status is status
    if status in (Status.FAIL, Status.WARN):
        assert "iommu=pt" in finding.cure


def test_iommu_by_the_command_line_alone(tmp_path: Path) -> None:
    write(tmp_path, "/sys/class/iommu/dmar0/x", "")
    write(tmp_path, "/proc/cmdline", "BOOT_IMAGE=/vmlinuz ro intel_iommu=on\n")
    assert ask_one(node(tmp_path, GPUS), "host.iommu").status is Status.WARN
    write(tmp_path, "/proc/cmdline", "BOOT_IMAGE=/vmlinuz ro intel_iommu=on iommu=pt\n")
    assert ask_one(node(tmp_path, GPUS), "host.iommu").status is Status.UNKNOWN


def test_nothing_known_is_unknown_not_well(tmp_path: Path) -> None:
    context = node(tmp_path, GPUS)
    for name in ("host.files", "host.processes", "host.shm", "host.hugepages", "host.kernel"):
        assert [f.status for f in ask(context, name)] == [Status.UNKNOWN], name
    for name in ("host.clocksource", "host.container", "host.iommu", "host.numa_balancing"):
        assert [f.status for f in ask(context, name)] == [Status.UNKNOWN], name
