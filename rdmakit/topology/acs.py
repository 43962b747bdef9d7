"""Whether the PCIe path between a GPU and a NIC is good: access control and link widths.

Only bridges on the path count. Redirection (ReqRedir, CmpltRedir, UpstreamFwd) sends peer
traffic up to the CPU; SrcValid alone does not. A link is degraded only where both its ends can
do more; a GPU that idles at Gen1 is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rdmakit.topology.model import Acs, PciDevice, PcieLink
from rdmakit.topology.tree import PciTree
from rdmakit.topology.words import Path

__all__ = ["PathCheck", "check_path", "judge_acs", "judge_link", "near_pairs"]


@dataclass(frozen=True)
class PathCheck:
    """A GPU, a NIC and the bridges between them."""

    gpu: str
    nic: str
    bridges: tuple[str, ...]
    acs: str
    """``off``, ``redirect`` or ``unknown``."""
    verdict: str
    """PASS, WARN, FAIL or UNKNOWN."""
    reasons: tuple[str, ...]


def judge_acs(controls: Sequence[Acs]) -> tuple[str, str]:
    """Return (``off`` or ``redirect``, text) for ACSCtl lines of unknown bridges."""
    bad = [number for number, acs in enumerate(controls, 1) if acs.redirects]
    if bad:
        return "redirect", (
            f"{len(bad)} of {len(controls)} bridges redirect peer traffic to the CPU (ReqRedir, "
            "CmpltRedir, UpstreamFwd): GPUDirect is slow or fails if one is between GPU and NIC; "
            "which bridges these are is not in the text: give the whole lspci -vvv. Inside a "
            "virtual machine ACS with ATS is right"
        )
    return "off", f"none of {len(controls)} bridges redirects peer traffic"


def judge_link(link: PcieLink, *, gpu: bool | None, partner: PcieLink | None = None) -> str:
    """Return what is wrong with a link, starting ``INFO`` or ``WARN``; empty if nothing.

    Args:
        link: of the device.
        gpu: whether the device is a GPU, which lowers its link's speed when idle; None: unknown.
        partner: link of the bridge above it, where known.
    """
    can_speed, can_width = link.max_speed, link.max_width
    if partner is not None:
        can_speed = min((s for s in (can_speed, partner.max_speed) if s), default=None)
        can_width = min((w for w in (can_width, partner.max_width) if w), default=None)
    if link.width and can_width and link.width < can_width:
        return f"WARN: x{link.width} of x{can_width} lanes: reseat the card, check the riser"
    if link.speed and can_speed and link.speed < can_speed:
        text = f"{link.speed:g} of {can_speed:g} GT/s"
        if gpu is not False:
            return f"INFO: {text}; an idle GPU lowers it: look again under load"
        return f"WARN: {text}: check the slot, the riser and the BIOS"
    return ""


def check_path(tree: PciTree, gpu: str, nic: str) -> PathCheck:
    """Judge the path between two devices of ``tree``."""
    bridges = tuple(b for b in tree.between(gpu, nic) if tree.device(b) is not None)
    reasons: list[str] = []
    redirecting, hidden = [], []
    for address in bridges:
        device = tree.device(address)
        assert device is not None
        if device.acs is not None and device.acs.redirects:
            redirecting.append(address)
        elif not device.acs_known:
            hidden.append(address)
    acs = "redirect" if redirecting else "unknown" if hidden else "off"
    if redirecting:
        reasons.append(
            f"FAIL: ACS of {', '.join(redirecting)} redirects peer traffic to the CPU: GPUDirect "
            "is slow or fails; switch ACS off in the BIOS or with setpci (not inside a VM)"
        )
    elif hidden:
        reasons.append(f"UNKNOWN: ACS of {', '.join(hidden)} cannot be read without root")
    for address, is_gpu in ((gpu, True), (nic, False)):
        device = tree.device(address)
        above = tree.device(device.parent) if device is not None else None
        if device is not None:
            text = judge_link(
                device.link, gpu=is_gpu, partner=above.link if above is not None else None
            )
            reasons += [text.replace(": ", f": {address} runs at ", 1)] if text else []
    order = ("FAIL", "WARN", "UNKNOWN")
    worst = next((w for w in order if any(r.startswith(w) for r in reasons)), "PASS")
    return PathCheck(gpu, nic, bridges, acs, worst, tuple(reasons))


def near_pairs(tree: PciTree, devices: Sequence[PciDevice]) -> list[tuple[str, str]]:
    """Return each GPU with every NIC that shares a switch with it."""
    pairs = []
    for gpu in (device for device in devices if device.kind == "gpu"):
        for nic in (device for device in devices if device.kind == "nic"):
            relation = tree.relation(gpu.address, nic.address)
            if relation is not None and relation.path in (Path.PIX, Path.PXB):
                pairs.append((gpu.address, nic.address))
    return pairs
