"""PCIe between GPUs and NICs: access control, links, ordering, size of read requests."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rdmakit.doctor.context import Context
from rdmakit.doctor.facts import made_by_software, main_nics, pci_devices
from rdmakit.doctor.model import Check, Finding, Status
from rdmakit.topology.acs import check_path, judge_acs, judge_link, near_pairs
from rdmakit.topology.model import PciDevice
from rdmakit.topology.tree import PciTree
from rdmakit.topology.words import Path

__all__ = ["CHECKS"]

_LEAST_READ = 512
"""Bytes: below it a card needs more requests than it may have open for its line rate."""
_VIRTUAL_FUNCTION = re.compile(r"\b15b3:10(14|16|18|1a|1c|1e)\b|Virtual Function", re.I)
"""PCI ids of mlx5's virtual functions; lspci says it in words."""
_AS_ROOT = "only root can read it: sudo rdmakit doctor, or lspci -vvv as root"


def _tree(context: Context) -> PciTree:
    nodes = [node for node in context.machine.numa_nodes if node.cpus]
    return PciTree(context.machine.pci, len(nodes))


def _titles(context: Context) -> dict[str, str]:
    """Return a name with the address for each GPU and NIC."""
    found = {gpu.pci: gpu.label for gpu in context.machine.gpus if gpu.pci is not None}
    found |= {nic.pci: nic.name or nic.label for nic in context.machine.nics if nic.pci is not None}
    return {address: f"{name} ({address})" for address, name in found.items()}


def _cure_acs(bridges: list[str]) -> str:
    named = bridges or ["BRIDGE"]
    sets = "; ".join(f"setpci -s {bridge} ECAP_ACS+6.w=0000" for bridge in named[:8])
    more = f"; and so on for {len(named) - 8} more" if len(named) > 8 else ""
    return f"{sets}{more} (until the next boot); for good: switch ACS off in the BIOS"


def _acs(context: Context) -> Iterator[Finding]:
    tree, nics = _tree(context), main_nics(context)
    pairs = [(g, n) for g, n in near_pairs(tree, context.machine.pci) if n in nics]
    paths = [check_path(tree, gpu, nic) for gpu, nic in pairs]
    bad = [path for path in paths if path.acs == "redirect"]
    loose = context.texts.lspci.loose_acs
    if bad and context.machine.virtual:
        yield ACS.finding(Status.OK, "on, as it must be in a virtual machine, together with ATS")
    elif bad:
        bridges = [
            bridge
            for bridge in dict.fromkeys(b for path in bad for b in path.bridges)
            if (device := tree.device(bridge)) and device.acs is not None and device.acs.redirects
        ]
        titles = _titles(context)
        names = ", ".join(
            f"{titles.get(path.gpu, path.gpu)} to {titles.get(path.nic, path.nic)}"
            for path in bad[:4]
        )
        yield ACS.finding(
            Status.FAIL,
            f"{len(bridges)} bridge(s) on {len(bad)} of {len(paths)} paths between GPU and NIC "
            f"redirect their traffic to the CPU: {names}{', ...' if len(bad) > 4 else ''}",
            expected="ReqRedir-, CmpltRedir- and UpstreamFwd- on these bridges",
            cure=_cure_acs(bridges),
            urgency=21,
        )
    elif paths and any(path.acs == "unknown" for path in paths):
        hidden = sum(path.acs == "unknown" for path in paths)
        yield ACS.finding(
            Status.UNKNOWN,
            f"hidden on {hidden} of {len(paths)} paths between GPU and NIC: {_AS_ROOT}",
        )
    elif paths:
        yield ACS.finding(Status.OK, f"off on {len(paths)} path(s) between GPU and NIC")
    elif loose:
        verdict, text = judge_acs(loose)
        if verdict == "off":
            yield ACS.finding(Status.OK, text)
        else:
            yield ACS.finding(
                Status.WARN,
                text,
                expected="no redirection between a GPU and its NIC",
                cure=f"lspci -vvv as root, whole, to see which bridges these are; then "
                f"{_cure_acs([])}",
                urgency=21,
            )
    else:
        yield ACS.finding(Status.SKIPPED, "no GPU is known to share a PCIe switch with a NIC")


def _link(context: Context) -> Iterator[Finding]:
    tree, nics = _tree(context), main_nics(context)
    titles = _titles(context)
    seen = 0
    found: list[Finding] = []
    notes: list[str] = []
    for device in context.machine.pci:
        if device.kind != "gpu" and device.address not in nics:
            continue
        if not (device.link.speed or device.link.width):
            continue
        seen += 1
        above = tree.device(device.parent)
        text = judge_link(
            device.link, gpu=device.kind == "gpu", partner=above.link if above else None
        )
        kind, _, words = text.partition(": ")
        if kind == "WARN":
            what, _, cure = words.partition(": ")
            found.append(_slow_link(titles.get(device.address, device.address), what, cure))
        elif kind == "INFO":
            notes.append(device.address)
    for link in context.texts.lspci.loose_links:
        seen += 1
        text = judge_link(link, gpu=None)
        if text.startswith("WARN: "):
            what, _, cure = text.removeprefix("WARN: ").partition(": ")
            found.append(_slow_link("a device that the text does not name", what, cure))
        elif text:
            notes.append("a device that the text does not name")
    yield from found
    cards = [nic for nic in context.machine.nics if not made_by_software(context, nic)]
    if not seen and not context.machine.gpus and not cards:
        yield LINK.finding(Status.SKIPPED, "neither GPU nor RDMA card is here")
    elif not seen:
        yield LINK.finding(Status.UNKNOWN, "speed and width of the links are not in these sources")
    elif not found:
        idle = f"; {len(notes)} GPU link(s) are slow while idle, which is normal" if notes else ""
        yield LINK.finding(Status.OK, f"{seen} link(s) as fast as both ends can be{idle}")


def _slow_link(subject: str, what: str, cure: str) -> Finding:
    return LINK.finding(
        Status.WARN,
        what,
        subject=subject,
        expected="what both ends of the link can do",
        cure=f"{cure}; lspci -vvv -s ADDRESS (LnkCap, LnkSta) after each step",
        urgency=32,
    )


def _controlled(context: Context) -> tuple[list[PciDevice], int]:
    """Return the job's NICs whose control register is known, and how many NICs there are.

    Without virtual functions, whose registers say nothing: their physical function's count.
    """
    nics = [
        device
        for device in pci_devices(context)
        if device.address in main_nics(context)
        and not context.machine.virtual
        and not _VIRTUAL_FUNCTION.search(device.name)
    ]
    return [d for d in nics if d.control is not None], len(nics)


def _ordering(context: Context) -> Iterator[Finding]:
    setting = context.environ.get("UCX_IB_PCI_RELAXED_ORDERING", "")
    known, total = _controlled(context)
    off = [d.address for d in known if d.control and d.control.relaxed_ordering is False]
    if not total:
        yield ORDERING.finding(Status.SKIPPED, "no physical RDMA card is here")
    elif off:
        yield ORDERING.finding(
            Status.WARN,
            f"off on {', '.join(off[:8])}",
            expected="RlxdOrd+ in DevCtl",
            cure="; ".join(f"setpci -s {address} CAP_EXP+8.w=10:10" for address in off[:8])
            + " (until the next boot); for good: the BIOS's 'PCIe relaxed ordering', or mlxconfig "
            "-d DEVICE set PCI_WR_ORDERING=1",
            urgency=55,
        )
    elif setting.strip().lower() in ("n", "no", "off", "0"):
        yield ORDERING.finding(
            Status.WARN,
            f"the cards may use it, but UCX_IB_PCI_RELAXED_ORDERING={setting} forbids it",
            expected="auto or on",
            cure="unset UCX_IB_PCI_RELAXED_ORDERING",
            urgency=55,
        )
    elif len(known) < total:
        yield ORDERING.finding(
            Status.UNKNOWN, f"hidden on {total - len(known)} of {total} NICs: {_AS_ROOT}"
        )
    else:
        yield ORDERING.finding(Status.OK, f"allowed on {total} NIC(s)")


def _read_size(context: Context) -> Iterator[Finding]:
    known, total = _controlled(context)
    sizes = {d.address: d.control.max_read for d in known if d.control and d.control.max_read}
    small = {address: size for address, size in sizes.items() if size < _LEAST_READ}
    if not total:
        yield READ.finding(Status.SKIPPED, "no physical RDMA card is here")
    elif small:
        yield READ.finding(
            Status.WARN,
            ", ".join(f"{address}: {size} bytes" for address, size in small.items()),
            expected="512 bytes or more; 4096 is best",
            # 5 in bits 14 to 12 of Device Control is 4096 bytes.
            cure="; ".join(f"setpci -s {a} CAP_EXP+8.w=5000:7000" for a in list(small)[:8])
            + " (until the next boot)",
            urgency=56,
        )
    elif len(sizes) < total:
        yield READ.finding(
            Status.UNKNOWN, f"hidden on {total - len(sizes)} of {total} NICs: {_AS_ROOT}"
        )
    else:
        text = ", ".join(f"{size}" for size in sorted(set(sizes.values())))
        yield READ.finding(Status.OK, f"{text} bytes on {total} NIC(s)")


def _virtual(context: Context) -> Iterator[Finding]:
    machine = context.machine
    if not machine.virtual:
        told = "no virtual machine" if machine.virtual is False else "nothing speaks for one"
        yield VIRTUAL.finding(Status.OK, told)
        return
    near = [
        gpu.label
        for gpu in machine.gpus
        if (best := machine.nearest_nics(gpu.label)[0]) is not None and best <= Path.PXB
    ]
    if not machine.gpus or not machine.nics:
        yield VIRTUAL.finding(Status.OK, "a virtual machine, without GPUs and NICs to be matched")
    elif near:
        yield VIRTUAL.finding(
            Status.OK, f"a virtual machine whose PCI tree shows NICs near {len(near)} GPU(s)"
        )
    else:
        yield VIRTUAL.finding(
            Status.UNKNOWN,
            "a virtual machine: its PCI tree shows no NIC near a GPU; which NIC belongs to which "
            "GPU only the provider's topology file tells",
        )


ACS = Check(
    "pcie.acs",
    "PCIe access control (ACS) between GPU and NIC",
    "With redirection GPUDirect goes up to the CPU and back, at a fraction of the rate, or hangs.",
    _acs,
)
LINK = Check(
    "pcie.link",
    "PCIe links",
    "A card that lost lanes or speed is the slowest rail, and all wait for it.",
    _link,
)
ORDERING = Check(
    "pcie.relaxed_ordering",
    "PCIe relaxed ordering",
    "Where a NIC's writes must keep their order, many root complexes and hypervisors halve the "
    "rate.",
    _ordering,
    needs=("rdma",),
)
READ = Check(
    "pcie.read_request",
    "Size of PCIe read requests",
    "A NIC that asks in small pieces cannot read memory as fast as it sends.",
    _read_size,
    needs=("rdma",),
)
VIRTUAL = Check(
    "pcie.virtual",
    "Virtual machine",
    "A hypervisor may show a PCI tree that has nothing to do with the real distances.",
    _virtual,
)

CHECKS = (ACS, LINK, ORDERING, READ, VIRTUAL)
