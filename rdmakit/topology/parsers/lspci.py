"""``lspci -vvv``: the PCI tree, links and access control, whole or as a few lines of it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from rdmakit.topology.model import Acs, PciControl, PciDevice, PcieLink, normal_address
from rdmakit.topology.text import lines_of

__all__ = ["Lspci", "parse_lspci"]

_DEVICE = re.compile(
    r"((?:[0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])\s+"
    r"([A-Z0-9][\w/() .+-]*?)(?:\s+\[[0-9a-f]{4}\])?:\s+(.*)$"
)
_RDMA_CARDS = re.compile(
    r"Mellanox|ConnectX|BlueField|Infiniband|BCM575|BCM576|E810|Pensando|Elastic Fabric", re.I
)


@dataclass(frozen=True)
class Lspci:
    """What the text tells. ``parent`` of a device is empty where its bridge is not in the text."""

    devices: tuple[PciDevice, ...] = ()
    loose_acs: tuple[Acs, ...] = ()
    """ACSCtl lines whose device is not in the text."""
    loose_links: tuple[PcieLink, ...] = ()
    """LnkCap and LnkSta lines whose device is not in the text."""
    denied: bool = False
    """Whether capabilities were hidden: lspci was not run as root."""
    titles: dict[str, str] = field(default_factory=dict)
    """Class of each device by its address."""


@dataclass
class _Device:
    address: str = ""
    title: str = ""
    name: str = ""
    numa: int | None = None
    secondary: str = ""
    capability: PcieLink = field(default_factory=PcieLink)
    status: PcieLink = field(default_factory=PcieLink)
    acs: Acs | None = None
    denied: bool = False
    capable: bool = False
    control: PciControl = field(default_factory=PciControl)

    def link(self) -> PcieLink:
        return replace(
            self.status, max_speed=self.capability.speed, max_width=self.capability.width
        )


def parse_lspci(text: str) -> Lspci:
    """Return the devices in ``text`` and the lines that belong to none. Never raises."""
    devices: list[_Device] = []
    loose: list[_Device] = [_Device()]
    acs: list[Acs] = []
    for line in lines_of(text):
        bare = re.sub(r"^\s*#+ ?", "", line) if line.lstrip().startswith("#") else line
        match = _DEVICE.match(bare)
        if match:
            address = normal_address(match[1])
            assert address is not None
            devices.append(_Device(address, match[2], match[3].strip()))
            continue
        if not devices:
            read = _read_acs(bare)
            if read is not None:
                acs.append(read)
            elif re.match(r"\s*LnkCap:", bare) and loose[-1].capability != PcieLink():
                loose.append(_Device())
            _read(bare, loose[-1])
            continue
        _read(bare, devices[-1])
    links = tuple(d.link() for d in loose if d.link() != PcieLink())
    parents = {device.secondary: device.address for device in devices if device.secondary}
    return Lspci(
        tuple(_built(device, parents) for device in devices),
        tuple(acs),
        links,
        any(device.denied for device in devices),
        {device.address: device.title for device in devices},
    )


def _built(device: _Device, parents: dict[str, str]) -> PciDevice:
    bus = device.address.rpartition(":")[0]
    parent = parents.get(bus, "")
    return PciDevice(
        device.address,
        parent if parent != device.address else "",
        _kind(device),
        device.name,
        device.numa,
        device.link(),
        device.acs,
        acs_known=device.acs is not None or (device.capable and not device.denied),
        control=device.control if device.control != PciControl() else None,
    )


def _kind(device: _Device) -> str:
    title = device.title.lower()
    if title == "pci bridge":
        return "bridge"
    if "nvidia" in device.name.lower():
        if title in ("3d controller", "vga compatible controller", "display controller"):
            return "gpu"
        return "nvswitch" if title == "bridge" else "other"
    if title.startswith("infiniband") or (
        title in ("ethernet controller", "network controller") and _RDMA_CARDS.search(device.name)
    ):
        return "nic"
    return "other"


def _read(line: str, device: _Device) -> None:
    """Take a line of a device's block."""
    if match := re.match(r"\s*NUMA node:\s*(\d{1,4})\s*$", line, re.ASCII):
        device.numa = int(match[1])
    elif match := re.match(r"\s*Bus:.*\bsecondary=([0-9a-f]{2})\b", line):
        device.secondary = f"{device.address.split(':')[0]}:{match[1]}"
    elif match := re.match(r"\s*LnkCap:\s*(.*)", line):
        device.capability = _link(match[1])
    elif match := re.match(r"\s*LnkSta:\s*(.*)", line):
        device.status = _link(match[1])
    elif match := re.match(r"\s*(?:DevCtl:.*)?\bRlxdOrd([+-])", line):
        device.control = replace(device.control, relaxed_ordering=match[1] == "+")
    elif match := re.search(r"\bMaxReadReq (\d{3,4}) bytes", line, re.ASCII):
        device.control = replace(device.control, max_read=int(match[1]))
    elif "<access denied>" in line:
        device.denied = True
    elif re.match(r"\s*Capabilities: \[[0-9a-f]+", line):
        device.capable = True
    read = _read_acs(line)
    if read is not None:
        device.acs = read


def _link(text: str) -> PcieLink:
    speed = re.search(r"Speed (\d{1,3}(?:\.\d)?)GT/s", text, re.ASCII)
    width = re.search(r"Width x(\d{1,2})\b", text, re.ASCII)
    return PcieLink(float(speed[1]) if speed else None, int(width[1]) or None if width else None)


def _read_acs(line: str) -> Acs | None:
    if not re.match(r"\s*ACSCtl:", line):
        return None
    bits = dict(re.findall(r"(\w+)([+-])", line))
    if "ReqRedir" not in bits:
        return None
    return Acs(
        bits.get("ReqRedir") == "+",
        bits.get("CmpltRedir") == "+",
        bits.get("UpstreamFwd") == "+",
        bits.get("SrcValid") == "+",
    )
