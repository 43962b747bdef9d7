"""Facts that several checks need, from whichever source the node has for them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from rdmakit.doctor.context import Context
from rdmakit.topology.fabric import FabricPort
from rdmakit.topology.model import Nic, PciDevice, Port
from rdmakit.topology.parsers.kernel_log import KernelLog, parse_kernel_log
from rdmakit.topology.parsers.lsmod import parse_modules
from rdmakit.topology.parsers.lspci import parse_lspci
from rdmakit.topology.parsers.smi_query import SmiQuery, parse_query
from rdmakit.topology.parsers.ucx_info import UcxInfo, parse_ucx_info

__all__ = [
    "compute_ports",
    "in_container",
    "kernel_log",
    "loaded",
    "made_by_software",
    "main_nics",
    "modules",
    "open_driver",
    "pci_devices",
    "query",
    "release",
    "ucx_info",
]


def release(text: str | None) -> tuple[int, ...] | None:
    """Return the numbers of a release: ``5.15.0-105-generic`` -> (5, 15, 0)."""
    match = re.match(r"\s*(\d{1,5}(?:\.\d{1,5})*)", text or "", re.ASCII)
    return tuple(int(part) for part in match[1].split(".")) if match else None


def query(context: Context) -> SmiQuery:
    """Return what ``nvidia-smi -q`` says, by a collected text or now."""
    told = context.texts.query
    if told.gpus or told.problem:
        return told
    return parse_query(context.output("nvidia-smi-q.txt") or "")


def kernel_log(context: Context) -> KernelLog:
    """Return the kernel's complaints; not ``known`` where the log cannot be read."""
    if context.texts.kernel.known:
        return context.texts.kernel
    return parse_kernel_log(context.output("dmesg.txt") or "")


def ucx_info(context: Context) -> UcxInfo:
    """Return what ``ucx_info -d`` says; it may be of another UCX than the job's."""
    told = context.texts.ucx
    if told.domains or told.loose:
        return told
    return parse_ucx_info(context.output("ucx_info-d.txt") or "")


def modules(context: Context) -> dict[str, tuple[str, ...]]:
    """Return who uses each loaded kernel module; empty where that is not known."""
    return parse_modules(context.read("/proc/modules") or "") or context.texts.modules


def loaded(context: Context, name: str) -> bool | None:
    """Return whether a kernel module is loaded or built in; None where nothing tells."""
    if context.tree.exists(f"/sys/module/{name}/."):
        return True
    listed = modules(context)
    return name in listed if listed else None


def open_driver(context: Context) -> bool | None:
    """Return whether NVIDIA's kernel module is the open one; None where nothing tells."""
    text = context.read("/proc/driver/nvidia/version") or ""
    if "NVRM version" not in text:
        return None
    return "Open Kernel Module" in text


def in_container(context: Context) -> str:
    """Return the kind of container that this is, or nothing."""
    return context.machine.software.get("container", "")


def pci_devices(context: Context) -> tuple[PciDevice, ...]:
    """Return the PCI devices, with what only ``lspci`` can tell where root ran it."""
    found = context.machine.pci
    if any(d.control is not None for d in found) or not found:
        return found
    told = {d.address: d for d in context.texts.lspci.devices}
    if not told:
        told = {d.address: d for d in parse_lspci(context.output("lspci-vvv.txt") or "").devices}
    return tuple(_with_control(device, told.get(device.address)) for device in found)


def _with_control(device: PciDevice, told: PciDevice | None) -> PciDevice:
    return device if told is None else replace(device, control=told.control)


def compute_ports(context: Context) -> Iterator[tuple[FabricPort, Nic, Port | None]]:
    """Yield the ports of the compute fabric, those that are down too."""
    for own in context.fabric.compute:
        nic = context.machine.nic(own.nic)
        if nic is not None:
            yield own, nic, next((p for p in nic.ports if p.number == own.port), None)


def made_by_software(context: Context, nic: Nic) -> bool:
    """Return whether an RDMA device is made by software on a net device, without a card."""
    known = context.tree.exists(f"/sys/class/infiniband/{nic.name}/.")
    return (nic.name or "").startswith(("rxe", "siw")) or (known and nic.pci is None)


def main_nics(context: Context) -> tuple[str, ...]:
    """Return the PCI addresses of the NICs that carry the job.

    All NICs where only ``lspci`` tells of them.
    """
    compute = {nic.pci for _, nic, _ in compute_ports(context) if nic.pci is not None}
    if not context.machine.nics:
        return tuple(d.address for d in context.machine.pci if d.kind == "nic")
    return tuple(d.address for d in context.machine.pci if d.address in compute)
