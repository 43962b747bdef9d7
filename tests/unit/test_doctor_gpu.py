"""Checks of the NVIDIA driver, of the GPUs' state, and of what GPUDirect needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from rdmakit.doctor.fold import cures, fold
from rdmakit.doctor.messages import NodeReport
from rdmakit.doctor.model import Finding, Status
from rdmakit.topology.model import Gpu, Machine, Nic, PciDevice
from rdmakit.topology.parsers.kernel_log import Xid
from rdmakit.topology.texts import read_texts
from tests.unit import doctor_parts as ucx_parts
from tests.unit import doctor_texts as texts
from tests.unit.fake_node import BAD, alarms, ask, ask_one, node, write

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build\n"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Tue Mar  5 22:23:56 UTC 2024\n"
MACHINE = Machine(
    gpus=(
        Gpu(0, "NVIDIA H100 80GB HBM3", pci="0000:17:00.0", minor=0),
        Gpu(1, "NVIDIA H100 80GB HBM3", pci="0000:18:00.0", minor=1),
    ),
    nics=(Nic("mlx5_0", "mlx5_0", pci="0000:1a:00.0"),),
    pci=(
        PciDevice("0000:17:00.0", kind="gpu"),
        PciDevice("0000:18:00.0", kind="gpu"),
        PciDevice("0000:1a:00.0", kind="nic"),
    ),
    software={"kernel": "5.15.0-105-generic", "driver": "550.54.15"},
)


def with_software(**change: str) -> Machine:
    return replace(MACHINE, software={**MACHINE.software, **change})


def state(root: Path, name: str, *gpus: dict[str, str]) -> list[Finding]:
    """Return what a check finds where nvidia-smi -q tells of GPUs that differ so from good ones."""
    context = node(root, MACHINE, outputs={"nvidia-smi-q.txt": texts.query(*gpus)})
    return ask(context, name)


@pytest.mark.parametrize(
    ("name", "change", "status", "cure"),
    [
        ("gpu.mig", {"mig": "Enabled"}, Status.WARN, "-i 1 -mig 0"),
        ("gpu.ecc", {"lost": "2"}, Status.FAIL, "--gpu-reset -i 1"),
        ("gpu.ecc", {"failed": "Yes"}, Status.FAIL, "replaced"),
        ("gpu.ecc", {"pending": "Yes"}, Status.WARN, "--gpu-reset -i 1"),
        ("gpu.bar1", {"bar1_used": "131000"}, Status.WARN, "PIDS"),
        ("gpu.bar1", {"bar1": "256"}, Status.WARN, "Above 4G"),
        ("gpu.persistence", {"persistence": "Disabled"}, Status.WARN, "nvidia-persistenced"),
        ("gpu.compute_mode", {"compute": "Exclusive_Process"}, Status.WARN, "-i 1 -c DEFAULT"),
        ("gpu.compute_mode", {"compute": "Prohibited"}, Status.FAIL, "-i 1 -c DEFAULT"),
        ("gpu.clocks", {"thermal": "Active"}, Status.WARN, "TEMPERATURE"),
        ("gpu.fabric", {"fabric": "In Progress", "fabric_status": "N/A"}, Status.FAIL, "manager"),
    ],
)
def test_one_gpu_that_is_not_well(
    tmp_path: Path, name: str, change: dict[str, str], status: Status, cure: str
) -> None:
    (finding,) = state(tmp_path, name, {}, change)
    assert finding.status is status
    assert cure in finding.cure
    assert "GPU1" in f"{finding.subject} {finding.found}"
    (good,) = state(tmp_path, name, {}, {})
    assert good.status is Status.OK


def test_a_gpu_without_nvswitch_has_no_fabric(tmp_path: Path) -> None:
    (finding,) = state(tmp_path, "gpu.fabric", {"fabric": "N/A", "fabric_status": "N/A"})
    assert finding.status is Status.OK


def test_nvidia_smi_that_does_not_answer_is_unknown(tmp_path: Path) -> None:
    for name in ("gpu.mig", "gpu.ecc", "gpu.persistence", "gpu.compute_mode", "gpu.fabric"):
        assert ask_one(node(tmp_path, MACHINE), name).status is Status.UNKNOWN


@pytest.mark.parametrize(
    ("lines", "status", "subject"),
    [
        ((), Status.OK, ""),
        (("program",), Status.OK, ""),
        (("fell",), Status.FAIL, "GPU0"),
        (("program", "remapped"), Status.WARN, "GPU1"),
        (("timeout",), Status.WARN, "GPU0"),
        (("timeout", "fell"), Status.FAIL, "GPU0"),
    ],
)
def test_xid(tmp_path: Path, lines: tuple[str, ...], status: Status, subject: str) -> None:
    log = texts.DMESG_HEAD + "".join(texts.DMESG[name] for name in lines)
    finding = ask_one(node(tmp_path, MACHINE, outputs={"dmesg.txt": log}), "gpu.xid")
    assert (finding.status, finding.subject) == (status, subject)


def test_xids_of_programs_name_the_process(tmp_path: Path) -> None:
    log = texts.DMESG_HEAD + texts.DMESG["program"]
    finding = ask_one(node(tmp_path, MACHINE, outputs={"dmesg.txt": log}), "gpu.xid")
    assert finding.found == "only programs' own faults: Xid 31 of python3 (pid 4711)"
    log += texts.DMESG["timeout"]
    finding = ask_one(node(tmp_path, MACHINE, outputs={"dmesg.txt": log}), "gpu.xid")
    assert finding.found.startswith("Xid 109 of pt_main_thread (pid 4712): pid=4712, name=")
    assert finding.cure.startswith("look at pt_main_thread (pid 4712) first")
    assert "reboot" not in finding.cure
    log += texts.DMESG["fell"]  # a broken GPU comes before what its programs suffered
    finding = ask_one(node(tmp_path, MACHINE, outputs={"dmesg.txt": log}), "gpu.xid")
    assert finding.found.startswith("Xid 79: ")
    assert finding.cure.startswith("drain the node and reboot")


@pytest.mark.parametrize(
    ("text", "process"),
    [
        ("pid=4711, name=python3, Ch 0a", "python3 (pid 4711)"),
        ("pid='<unknown>', name=<unknown>, GPU has fallen off the bus.", ""),
        ("pid=7, name=<unknown>, x", "pid 7"),
        ("pid=11, Row Remapper: marked", "pid 11"),
        ("Contained: SM (0x1)", ""),
    ],
)
def test_process_of_an_xid(text: str, process: str) -> None:
    assert Xid("0000:17:00.0", 31, text).process == process


def test_an_unreadable_log_is_unknown_not_well(tmp_path: Path) -> None:
    assert ask_one(node(tmp_path, MACHINE), "gpu.xid").status is Status.UNKNOWN


def test_xid_of_a_gpu_that_is_gone(tmp_path: Path) -> None:
    outputs = {"dmesg.txt": texts.DMESG_HEAD + texts.DMESG["fell"]}
    finding = ask_one(node(tmp_path, Machine(), outputs=outputs), "gpu.xid")
    assert finding.status is Status.FAIL
    assert finding.subject == "0000:17:00.0"


def test_driver(tmp_path: Path) -> None:
    write(tmp_path, "/proc/driver/nvidia/version", OPEN)
    finding = ask_one(node(tmp_path, MACHINE), "gpu.driver")
    assert finding.status is Status.OK
    assert finding.found == "550.54.15, open kernel modules"
    write(tmp_path, "/proc/sys/kernel/hostname", "a\n")
    none = ask_one(node(tmp_path, replace(MACHINE, software={})), "gpu.driver")
    assert none.status is Status.FAIL
    assert "modprobe nvidia" in none.cure


def test_proprietary_modules_do_not_serve_grace(tmp_path: Path) -> None:
    write(tmp_path, "/proc/driver/nvidia/version", CLOSED.format("550.54.15"))
    assert ask_one(node(tmp_path, MACHINE), "gpu.driver").status is Status.OK
    grace = replace(MACHINE, gpus=(Gpu(0, "NVIDIA GH200 480GB", pci="0000:17:00.0"),))
    assert ask_one(node(tmp_path, grace), "gpu.driver").status is Status.FAIL


def test_libraries_of_another_version(tmp_path: Path) -> None:
    write(tmp_path, "/proc/driver/nvidia/version", OPEN)
    said = (
        "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 550.90\n"
    )
    outputs = {"nvidia-smi-q.txt": said}
    finding = ask_one(node(tmp_path, MACHINE, outputs=outputs), "gpu.version_match")
    assert finding.status is Status.FAIL
    assert "reboot" in finding.cure
    outputs = {"dmesg.txt": texts.DMESG_HEAD + texts.DMESG["mismatch"]}
    finding = ask_one(node(tmp_path, MACHINE, outputs=outputs), "gpu.version_match")
    assert finding.status is Status.FAIL
    assert "550.90.07" in finding.found
    good = {"nvidia-smi-q.txt": texts.query({}, {})}
    assert ask_one(node(tmp_path, MACHINE, outputs=good), "gpu.version_match").status is Status.OK


def test_gpus_hidden_from_a_container(tmp_path: Path) -> None:
    boxed = with_software(container="docker")
    finding = ask_one(node(tmp_path, boxed, live=True), "gpu.visible")
    assert finding.status is Status.FAIL
    assert "--gpus all" in finding.cure
    for name in ("nvidiactl", "nvidia0", "nvidia1", "nvidia-uvm"):
        write(tmp_path, f"/dev/{name}", "")
    assert ask_one(node(tmp_path, boxed, live=True), "gpu.visible").status is Status.OK
    (tmp_path / "dev/nvidia-uvm").unlink()
    assert ask_one(node(tmp_path, boxed, live=True), "gpu.visible").status is Status.WARN
    # The first CUDA process makes it.
    assert ask_one(node(tmp_path, MACHINE, live=True), "gpu.visible").status is Status.OK


def test_a_gpu_that_is_not_visible(tmp_path: Path) -> None:
    one = replace(MACHINE, gpus=MACHINE.gpus[:1])
    finding = ask_one(node(tmp_path, one), "gpu.visible")
    assert finding.status is Status.WARN
    assert "1 of 2" in finding.found
    assert "0000:18:00.0" in finding.found


# -- what GPUDirect needs ------------------------------------------------------------------------


def driver(root: Path, text: str = OPEN) -> None:
    write(root, "/proc/driver/nvidia/version", text)


def module_list(root: Path, *lines: str) -> None:
    write(root, "/proc/modules", "".join(f"{line} Live 0x0000000000000000\n" for line in lines))


def test_dmabuf_alone_is_enough(tmp_path: Path) -> None:
    driver(tmp_path)
    module_list(tmp_path, "ib_core 450560 3 mlx5_ib,ib_uverbs,rdma_cm,", "nvidia 60000000 8 -")
    context = node(tmp_path, MACHINE)
    for name in ("gpu.gpudirect", "gpu.dmabuf", "gpu.peermem"):
        assert ask_one(context, name).status is Status.OK, name


@pytest.mark.parametrize(
    ("kernel", "version", "text", "why"),
    [
        ("5.4.0-150-generic", "550.54.15", OPEN, "older than 5.12"),
        ("5.15.0-105-generic", "470.82.01", CLOSED.format("470.82.01"), "older than 515"),
        ("5.15.0-105-generic", "550.54.15", CLOSED.format("550.54.15"), "proprietary"),
    ],
)
def test_neither_is_a_failure(
    tmp_path: Path, kernel: str, version: str, text: str, why: str
) -> None:
    driver(tmp_path, text)
    module_list(tmp_path, "nvidia 60000000 8 -")
    context = node(tmp_path, with_software(kernel=kernel, driver=version))
    finding = ask_one(context, "gpu.gpudirect")
    assert finding.status is Status.FAIL
    assert why in finding.found
    assert finding.cure.startswith("modprobe nvidia_peermem")
    module_list(tmp_path, "nvidia_peermem 16384 0 -", "ib_core 450560 2 ib_uverbs,nvidia_peermem,")
    assert ask_one(context, "gpu.gpudirect").status is Status.OK
    assert ask_one(context, "gpu.peermem").status is Status.OK
    assert ask_one(context, "gpu.dmabuf").status is Status.OK


def test_loaded_is_not_usable(tmp_path: Path) -> None:
    driver(tmp_path, CLOSED.format("550.54.15"))
    module_list(tmp_path, "nvidia_peermem 12288 0 -", "ib_core 450560 2 ib_uverbs,mlx5_ib,")
    log = {"dmesg.txt": texts.DMESG_HEAD + texts.DMESG["symbol"]}
    context = node(tmp_path, MACHINE, outputs=log)
    finding = ask_one(context, "gpu.peermem")
    assert finding.status is Status.WARN
    assert "not registered" in finding.found
    assert "ib_register_peer_memory_client" in finding.found
    assert ask_one(context, "gpu.gpudirect").status is Status.FAIL
    write(tmp_path, "/sys/kernel/mm/memory_peers/nv_mem/version", "550.54.15\n")
    assert ask_one(context, "gpu.peermem").status is Status.OK
    assert ask_one(context, "gpu.gpudirect").status is Status.OK


def test_lsmod_serves_as_well(tmp_path: Path) -> None:
    driver(tmp_path, CLOSED.format("550.54.15"))
    told = read_texts(
        {"modules": "Module                  Size  Used by\nnvidia_peermem  12288  0\n"}
    )
    assert ask_one(node(tmp_path, MACHINE, texts=told), "gpu.peermem").status is Status.WARN


def test_the_old_module_beside_a_newer_driver(tmp_path: Path) -> None:
    driver(tmp_path)
    module_list(tmp_path, "nv_peer_mem 16384 0 -", "ib_core 450560 2 ib_uverbs,nv_peer_mem,")
    finding = ask_one(node(tmp_path, MACHINE), "gpu.peermem")
    assert finding.status is Status.WARN
    assert "nvidia-peer-memory-dkms" in finding.cure


def test_ucx_that_registers_host_memory_only(tmp_path: Path) -> None:
    bad = read_texts({"u": texts.UCX_D.format(memory="host (access,reg,cache)")})
    context = node(tmp_path, Machine(nics=MACHINE.nics), texts=bad)
    finding = ask_one(context, "gpu.gpudirect")
    assert finding.status is Status.FAIL
    assert "host memory only" in finding.found
    assert "modprobe nvidia_peermem" in finding.cure
    good = read_texts({"u": texts.UCX_D.format(memory="host (access,reg), cuda (access,reg)")})
    context = node(tmp_path, Machine(nics=MACHINE.nics), texts=good)
    assert ask_one(context, "gpu.gpudirect").status is Status.OK


def test_no_nic_or_no_gpu_is_no_fault(tmp_path: Path) -> None:
    for machine in (replace(MACHINE, nics=()), replace(MACHINE, gpus=()), Machine()):
        assert ask_one(node(tmp_path, machine), "gpu.gpudirect").status is Status.SKIPPED


def test_a_gpu_without_a_nic(tmp_path: Path) -> None:
    """It says that, and what can be proven of it and what cannot."""
    machine = replace(MACHINE, nics=(), pci=MACHINE.pci[:2])
    found = ask_one(node(tmp_path, machine), "gpu.gpudirect").found
    assert found.startswith("2 NVIDIA GPU(s), but no RDMA device (InfiniBand, RoCE)")
    assert "nothing of it can be proven on this node" in found
    assert "host memory over TCP, which --path proves, as CUDA IPC" in found
    assert "rdma.devices" not in found
    card = replace(MACHINE, nics=())
    assert "rdma.devices" in ask_one(node(tmp_path, card), "gpu.gpudirect").found
    assert "neither" in ask_one(node(tmp_path, Machine()), "gpu.gpudirect").found
    for name in ("gpu.peermem", "gpu.dmabuf"):
        finding = ask_one(node(tmp_path, machine), name)
        assert finding.found == "no RDMA device (InfiniBand, RoCE) is here"
    assert not {"gpu.gpudirect", "gpu.peermem"} & {f.check for f in alarms(node(tmp_path, machine))}


@pytest.mark.parametrize("idle", [False, True])
def test_one_failure_and_one_cure_where_it_is_impossible(tmp_path: Path, idle: bool) -> None:
    driver(tmp_path, CLOSED.format("550.54.15"))
    peermem = ("nvidia_peermem 12288 0 -",) if idle else ()
    module_list(tmp_path, "nvidia 60000000 8 -", "ib_core 45056 2 ib_uverbs,mlx5_ib,", *peermem)
    ucx = msgspec.structs.replace(
        ucx_parts.RDMA_UCX, registers={"host": ("mlx5_0", "mlx5_1"), "cuda": ("cuda_cpy",)}
    )
    context = node(
        tmp_path, MACHINE, live=True, runner=ucx_parts.Children(ucx), ranks=(), job_size=1
    )
    names = ("gpu.gpudirect", "gpu.peermem", "gpu.dmabuf", "ucx.gpu_memory")
    found = [ask_one(context, name) for name in names]
    assert [f.status for f in found] == [Status.FAIL, *[Status.WARN] * 3]
    (cure,) = cures(fold([NodeReport(host="n0", findings=found)]))
    assert set(cure.checks) == set(names)
    assert cure.text.startswith("rmmod nvidia_peermem" if idle else "modprobe nvidia_peermem")


def test_what_is_not_known_is_not_said(tmp_path: Path) -> None:
    context = node(tmp_path, replace(MACHINE, software={}))
    for name in ("gpu.gpudirect", "gpu.dmabuf", "gpu.peermem"):
        finding = ask_one(context, name)
        assert finding.status is Status.UNKNOWN, name
        assert finding.status not in BAD
