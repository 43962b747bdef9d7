"""Which way the bytes between two devices take, in words, and what each part of it costs."""

from __future__ import annotations

import itertools

from rdmakit.errors import InvalidArgument
from rdmakit.topology.acs import check_path
from rdmakit.topology.fabric import Fabric
from rdmakit.topology.model import Gpu, Machine, Nic, PciDevice
from rdmakit.topology.tree import PciTree
from rdmakit.topology.words import LEGEND, Path, Relation, nvlink_gbytes, pcie_gbytes

__all__ = ["explain", "find_device"]

_P2P_WORDS = {
    "OK": "works",
    "CNS": "is not supported by the chipset",
    "GNS": "is not supported by the GPU (consumer cards have it switched off)",
    "TNS": "is not supported over this path",
    "NS": "is not supported",
    "DR": "is disabled by a driver setting",
    "U": "is unknown",
}


def find_device(machine: Machine, name: str) -> Gpu | Nic:
    """Return the GPU or NIC that a person means by ``name``: GPU0, NIC1, mlx5_0, mlx5_0:1.

    Raises:
        InvalidArgument: there is none; names those that there are.
    """
    wanted = name.strip()
    wanted_forms = {wanted, wanted.upper(), wanted.rpartition(":")[0] or wanted}
    for gpu in machine.gpus:
        if wanted_forms & ({gpu.label, gpu.uuid, gpu.pci} - {"", None}):
            return gpu
    for nic in machine.nics:
        if wanted_forms & ({nic.label, nic.name, nic.pci} - {"", None}):
            return nic
    there = [gpu.label for gpu in machine.gpus] + [nic.label for nic in machine.nics]
    raise InvalidArgument(
        f"no device {name!r}; there are {', '.join(there) or 'no GPU and no NIC'}"
    )


def explain(machine: Machine, fabric: Fabric, first: str, second: str) -> list[str]:
    """Return lines that tell the way from one device to another.

    Raises:
        InvalidArgument: one of them does not exist.
    """
    a, b = find_device(machine, first), find_device(machine, second)
    if a == b:
        return [f"{a.label} is one device: bytes do not leave it"]
    relation = machine.relation(a.label, b.label)
    lines = [f"{_title(a)} -> {_title(b)}: {relation or 'not known'}"]
    if relation is None:
        lines.append("  how they are connected is not in what was read")
    else:
        lines.append(f"  {LEGEND[relation.path]}")
    lines += _hops(machine, a, b, relation)
    if isinstance(a, Gpu) and isinstance(b, Gpu):
        lines += _between_gpus(machine, a, b, relation)
    elif isinstance(a, Gpu) or isinstance(b, Gpu):
        gpu, nic = (a, b) if isinstance(a, Gpu) else (b, a)
        assert isinstance(gpu, Gpu)
        assert isinstance(nic, Nic)
        lines += _gpu_to_nic(machine, fabric, gpu, nic, relation)
    return lines


def _title(device: Gpu | Nic) -> str:
    extra = [device.name] if device.name and device.name != device.label else []
    extra += [device.pci] if device.pci else []
    return f"{device.label} ({', '.join(extra)})" if extra else device.label


def _rate(gbytes: float | None) -> str:
    return f"{gbytes:.3g} GB/s each way" if gbytes is not None else "rate not known"


def _hops(machine: Machine, a: Gpu | Nic, b: Gpu | Nic, relation: Relation | None) -> list[str]:
    """Return one line for each link on the way."""
    if relation is not None and relation.path is Path.NV:
        return _nvlink_hop(a, b, relation)
    tree = PciTree(machine.pci)
    if a.pci is None or b.pci is None or not tree.chain(a.pci) or not tree.chain(b.pci):
        return _without_tree(machine, relation)
    meeting = tree.meeting(a.pci, b.pci)
    way = [a.pci, *tree.between(a.pci, b.pci), b.pci]
    lines = ["  the way over PCIe:"]
    narrow: list[float] = []
    for here, after in itertools.pairwise(way):
        lower = here if (device := tree.device(here)) and device.parent == after else after
        text, rate = _link(tree.device(lower), here, after)
        if here not in machine_addresses(machine) and after not in machine_addresses(machine):
            text = _across(tree, here, after)
        elif rate is not None:
            narrow.append(rate)
        lines.append(f"    {text}")
    if meeting is not None:
        what = "inside this switch" if tree.device(meeting) else "inside the CPU's host bridge"
        lines.append(f"    they meet at {meeting}, {what}")
    if narrow:
        lines.append(f"  the narrowest link carries {_rate(min(narrow))} at most")
    return lines


def machine_addresses(machine: Machine) -> set[str]:
    """Return the addresses of the devices and bridges that are known."""
    return {device.address for device in machine.pci}


def _link(device: PciDevice | None, here: str, after: str) -> tuple[str, float | None]:
    if device is None:
        return f"{here} -> {after}", None
    link = device.link
    rate = pcie_gbytes(link.max_speed or link.speed, link.width or link.max_width)
    text = link.describe()
    return f"{here} -> {after}" + (f": {text}, {_rate(rate)}" if text else ""), rate


def _across(tree: PciTree, here: str, after: str) -> str:
    return f"{here} -> {after}: through the CPU, from one host bridge to another"


def _nvlink_hop(a: Gpu | Nic, b: Gpu | Nic, relation: Relation) -> list[str]:
    version = a.nvlink_version if isinstance(a, Gpu) else None
    each = nvlink_gbytes(version)
    if each is None:
        return [
            f"  {relation.nvlinks} NVLinks; the rate of each depends on the generation (20 to 50 "
            "GB/s each way), which is not known here"
        ]
    return [
        f"  {relation.nvlinks} NVLinks of generation {version}: {relation.nvlinks} x {each:g} = "
        f"{_rate(relation.nvlinks * each)}"
    ]


def _without_tree(machine: Machine, relation: Relation | None) -> list[str]:
    steps = {
        Path.PIX: "device -> PCIe switch -> device",
        Path.PXB: "device -> PCIe switch -> PCIe switch -> device",
        Path.PHB: "device -> host bridge of the CPU -> device",
        Path.NODE: "device -> host bridge -> CPU's own interconnect -> host bridge -> device",
        Path.SYS: "device -> host bridge -> link between sockets -> host bridge -> device",
    }
    if relation is None or relation.path not in steps:
        return []
    return [f"  the way: {steps[relation.path]} (the PCI tree is not known: no addresses)"]


def _between_gpus(machine: Machine, a: Gpu, b: Gpu, relation: Relation | None) -> list[str]:
    lines = []
    status = machine.p2p.cell(a.label, b.label)
    if a.mig_mode or b.mig_mode or a.mig or b.mig:
        return ["  MIG: no P2P, CUDA IPC or NVLink; bytes go through host memory"]
    if status is not None and status != "OK":
        lines.append(
            f"  P2P {_P2P_WORDS.get(status, status)} ({status}): bytes are staged through host "
            "memory, twice over PCIe"
        )
        return lines
    if relation is not None and relation.path is Path.NV:
        lines.append("  CUDA IPC and P2P go over NVLink: peers address each other's memory")
    elif relation is not None:
        lines.append(
            {
                Path.PIX: "  P2P stays inside the switch: full PCIe rate, no load on the CPU",
                Path.PXB: "  P2P stays below the CPU: nearly full PCIe rate",
                Path.PHB: "  P2P passes the CPU's host bridge: some CPUs halve its rate",
                Path.NODE: "  P2P passes two host bridges: lower rate, not offered everywhere",
                Path.SYS: "  P2P crosses the sockets: slow or not offered; staging through host "
                "memory may be as fast",
            }[relation.path]
        )
    known = "works" if status == "OK" else "has to be tried: the path does not tell"
    lines.append(f"  whether P2P is on: {known}")
    return lines


def _gpu_to_nic(
    machine: Machine, fabric: Fabric, gpu: Gpu, nic: Nic, relation: Relation | None
) -> list[str]:
    lines = []
    for port in fabric.ports:
        if port.nic == nic.label:
            rate = (
                f"{port.rate_gbps:g} Gb/s = {port.rate_gbps / 8:.3g} GB/s"
                if (port.rate_gbps)
                else "rate not known"
            )
            state = {True: "up", False: "not usable", None: "state not known"}[port.health.healthy]
            why = f" ({port.health.why})" if port.health.healthy is False else ""
            lines.append(f"  port {port.title}: {rate}, {state}{why}; {port.role}: {port.reason}")
    costs = {
        Path.PIX: "full rate of the link, no load on the CPU",
        Path.PXB: "full rate of the link, no load on the CPU",
        Path.PHB: "through the CPU's host bridge: some CPUs read from a peer at half rate",
        Path.NODE: "through two host bridges: expect less than the link's rate",
        Path.SYS: "across the sockets: about half the rate or none; use a nearer NIC, or staging",
    }
    if relation is not None:
        lines.append(f"  GPUDirect RDMA: {costs.get(relation.path, '')}")
    lines += _acs_lines(machine, gpu, nic)
    lines.append(f"  {_registration(machine)}")
    best, nearest = machine.nearest_nics(gpu.label)
    if relation is not None and best is not None and relation.path > best:
        lines.append(f"  nearer to {gpu.label}: {', '.join(nearest)} ({best.name})")
    lines.append(
        "  without GPUDirect RDMA: GPUDirect shared memory, GPU -> pinned host buffer -> NIC, "
        "every byte twice over PCIe and through host memory"
    )
    return lines


def _acs_lines(machine: Machine, gpu: Gpu, nic: Nic) -> list[str]:
    if gpu.pci is None or nic.pci is None or not machine.pci:
        return []
    tree = PciTree(machine.pci)
    if tree.meeting(gpu.pci, nic.pci) is None:
        return []
    check = check_path(tree, gpu.pci, nic.pci)
    return [f"  {reason}" for reason in check.reasons] or [
        "  no bridge on the way redirects peer traffic (ACS)"
    ]


def _registration(machine: Machine) -> str:
    """Say what is known of the NIC's leave to register GPU memory: of the pair, not the GPU."""
    peermem = [
        name for name in ("module nvidia_peermem", "module nv_peer_mem") if name in machine.software
    ]
    if peermem:
        return (
            f"{peermem[0].removeprefix('module ')} is loaded; that it serves this NIC is shown by "
            "registering GPU memory only"
        )
    if not machine.software.get("kernel"):
        return "whether the NIC may register GPU memory is not known from here"
    return (
        "nvidia_peermem is not loaded: GPUDirect RDMA needs it, or dma-buf (kernel 5.12 and open "
        "NVIDIA modules); only registering GPU memory shows it"
    )
