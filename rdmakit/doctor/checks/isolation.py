"""Containers, namespaces and the IOMMU: what stands between ranks, and between devices."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rdmakit.doctor.context import Context
from rdmakit.doctor.facts import in_container, main_nics
from rdmakit.doctor.model import Check, Finding, Status

__all__ = ["CHECKS"]

_HOSTS_OWN = {"pid": 4026531836, "ipc": 4026531839}
"""Numbers of the first namespaces of their kind (include/linux/proc_ns.h of the kernel)."""


def _private(context: Context) -> list[str] | None:
    """Return the namespaces that are not the host's; None where that is not known."""
    found = []
    for kind, own in _HOSTS_OWN.items():
        target = context.tree.resolve(f"/proc/self/ns/{kind}")
        match = re.search(rf"/{kind}:\[(\d+)\]$", target)
        if match is None:
            return None
        if int(match[1]) != own:
            found.append(kind.upper())
    return found


def _container(context: Context) -> Iterator[Finding]:
    """Only what this process is in: whether ranks share it is for ``ipc.namespaces``."""
    kind = in_container(context)
    private = _private(context)
    title = kind or ("no container" if private in ([], None) else "a container, or a job's own")
    if private is None:
        yield CONTAINER.finding(
            Status.OK if kind else Status.UNKNOWN,
            f"{kind}; its namespaces are not known" if kind else "namespaces are not known",
        )
    elif private:
        yield CONTAINER.finding(
            Status.OK,
            f"{title}, with {' and '.join(private)} namespaces of its own: ranks in another "
            "container of this host would have neither CUDA IPC nor shared memory with these",
        )
    else:
        yield CONTAINER.finding(Status.OK, f"{title}, PID and IPC namespaces of the host")


def _iommu(context: Context) -> Iterator[Finding]:
    if context.machine.virtual:
        yield IOMMU.finding(Status.SKIPPED, "a virtual machine: the hypervisor's IOMMU is not seen")
        return
    gpus = [d.address for d in context.machine.pci if d.kind == "gpu"]
    nics = list(main_nics(context))
    kinds = {
        address: kind
        for address in (*gpus, *nics)
        if (kind := context.read(f"/sys/bus/pci/devices/{address}/iommu_group/type"))
    }
    translated = [address for address, kind in kinds.items() if kind.startswith("DMA")]
    line = context.read("/proc/cmdline") or ""
    units = context.tree.listdir("/sys/class/iommu")
    direct = bool(gpus and nics)
    cure = (
        "boot with iommu.passthrough=1"
        if any(name.startswith("smmu") for name in units)
        else "boot with iommu=pt (GRUB_CMDLINE_LINUX in /etc/default/grub, then update-grub), or "
        "switch VT-d or AMD-Vi off in the BIOS"
    )
    if translated:
        yield IOMMU.finding(
            Status.FAIL if direct and not _coherent(context) else Status.WARN,
            f"translates addresses of {len(translated)} of {len(kinds)} devices "
            f"({', '.join(translated[:4])}{', ...' if len(translated) > 4 else ''})",
            expected="off or pass-through",
            cure=cure,
            urgency=22,
        )
    elif kinds:
        yield IOMMU.finding(Status.OK, "pass-through for GPUs and NICs")
    elif units and re.search(r"\b(intel|amd)_iommu=on\b", line) and "iommu=pt" not in line:
        yield IOMMU.finding(
            Status.WARN,
            "on by the kernel's command line; whether it translates is not told",
            expected="off or pass-through",
            cure=cure,
            urgency=22,
        )
    elif units and (gpus or nics):
        yield IOMMU.finding(Status.UNKNOWN, "on; whether it translates for GPUs and NICs is hidden")
    elif units or context.tree.listdir("/sys/class"):
        yield IOMMU.finding(Status.OK, "on, without a GPU or NIC behind it" if units else "off")
    else:
        yield IOMMU.finding(Status.UNKNOWN, "/sys/class/iommu is not among the files")


def _coherent(context: Context) -> bool:
    """Return whether GPU and CPU share an address space by their link (Grace), SMMU on or not."""
    return any(gpu.gpu_numa_id not in (None, "N/A") for gpu in context.machine.gpus) or bool(
        [node for node in context.machine.numa_nodes if not node.cpus]
    )


CONTAINER = Check(
    "host.container",
    "Container and namespaces",
    "CUDA IPC and shared memory end at a container's PID and IPC namespaces.",
    _container,
)

IOMMU = Check(
    "host.iommu",
    "IOMMU",
    "An IOMMU that translates sends traffic between GPU and NIC up to the CPU: GPUDirect is slow, "
    "hangs or fails.",
    _iommu,
)

CHECKS = (CONTAINER, IOMMU)
