"""Ports of RDMA devices from ``ibstat``, ``ibstatus``, ``ibv_devinfo`` and ``rdma link``."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rdmakit.topology.model import Gid, Nic, Port
from rdmakit.topology.text import Unread, lines_of

__all__ = ["PortTexts", "number_in", "parse_ports"]

_LAYERS = {"infiniband": "InfiniBand", "ethernet": "Ethernet", "iwarp": "iWARP"}
_TOOL_ERROR = re.compile(
    r"^\s*(?:ibpanic|ibwarn|ibstat|ibstatus|ibv_devinfo|rdma|Failed to|libibverbs|umad_|"
    r"device ')\S*.*(?:fail|error|No such|not found|can't|cannot|denied)",
    re.IGNORECASE,
)
_NOTHING_HERE = re.compile(r"No IB devices found|(ibstat|ibstatus|ibv_devinfo|rdma): .*not found")


@dataclass(frozen=True)
class PortTexts:
    """Devices that a text describes, in its order."""

    nics: tuple[Nic, ...] = ()
    errors: tuple[str, ...] = ()
    """What the tool itself said went wrong; the devices before it still count."""
    unread: tuple[Unread, ...] = ()


@dataclass
class _Device:
    """A device while its lines come in; fields as in :class:`Nic` and :class:`Port`."""

    name: str
    nic: dict[str, Any] = field(default_factory=dict)
    ports: dict[int, dict[str, Any]] = field(default_factory=dict)
    node_type: str = ""

    def port(self, number: int) -> dict[str, Any]:
        return self.ports.setdefault(number, {})

    def build(self) -> Nic:
        ports = []
        for number, fields in sorted(self.ports.items()):
            speed, width = fields.pop("speed", None), fields.get("width")
            if "rate_gbps" not in fields and speed is not None and width:
                fields["rate_gbps"] = _whole(speed * int(width.rstrip("X")))
            gids = tuple(fields.pop("gids", ()))
            ports.append(Port(number, gids=gids, **fields))
        return Nic(self.name, self.name, ports=tuple(ports), **self.nic)


def parse_ports(text: str) -> PortTexts:
    """Return the devices and ports in ``text``, of whichever of the tools. Never raises.

    One text may hold the output of several; a device named twice is one device.
    """
    reader = _Reader()
    for number, line in enumerate(lines_of(text), 1):
        reader.line(number, line)
    nics = tuple(device.build() for device in reader.devices.values())
    return PortTexts(nics, tuple(reader.errors), tuple(reader.unread))


class _Reader:
    def __init__(self) -> None:
        self.devices: dict[str, _Device] = {}
        self.errors: list[str] = []
        self.unread: list[Unread] = []
        self._device: _Device | None = None
        self._port: dict[str, Any] | None = None

    def line(self, number: int, line: str) -> None:
        """Take one line."""
        if _TOOL_ERROR.search(line) or _NOTHING_HERE.search(line):
            self.errors.append(line.strip())
            return
        if self._begins(line):
            return
        if match := re.match(
            r"(?:\d+/\d+:|link)\s+(\S+)/(\d{1,3}):?\s+(.*)", line.strip(), re.ASCII
        ):
            self._rdma_link(match[1], int(match[2]), match[3])
            return
        match = re.match(r"\s*([A-Za-z][\w /.-]*?)(?:\[\s*(\d{1,5})\])?\s*:\s*(.*?)\s*$", line)
        if match is None or self._device is None:
            return
        name, index, value = match[1].lower().replace("_", " "), match[2], match[3]
        if name == "gid" and index is not None:
            self._gid(int(index), value, number, line)
            return
        if self._port is not None and name in _PORT_FIELDS:
            key, read = _PORT_FIELDS[name]
            target = self._port
        elif name in _NIC_FIELDS:
            key, read = _NIC_FIELDS[name]
            target = self._device.nic
        else:
            return
        understood = read(value)
        if understood is None and value.lower() not in _SAYS_NOTHING:
            self.unread.append(Unread(number, line, f"{name} is not understood"))
        elif understood is not None:
            target[key] = understood

    def _begins(self, line: str) -> bool:
        """Return whether the line begins a device or a port, which it then does."""
        if match := re.match(
            r"\s*Infiniband device '([^'\s]+)' port (\d{1,3}) status",
            line,
            re.IGNORECASE | re.ASCII,
        ):
            self._open(match[1])
            self._port = self._open(match[1]).port(int(match[2]))
            return True
        if match := re.match(r"\s*CA '([^'\s]+)'|\s*hca_id:\s*(\S+)", line):
            self._open(match[1] or match[2])
            return True
        match = re.match(r"\s*port:?\s*(\d{1,3}):?\s*$", line, re.IGNORECASE | re.ASCII)
        if match and self._device is not None:
            self._port = self._device.port(int(match[1]))
            return True
        return False

    def _open(self, name: str) -> _Device:
        self._device = self.devices.setdefault(name, _Device(name))
        self._port = None
        return self._device

    def _rdma_link(self, name: str, number: int, rest: str) -> None:
        words = rest.split()
        values = dict(zip(words[::2], words[1::2], strict=False))
        port = self._open(name).port(number)
        self._device, self._port = None, None
        port |= {
            key: value
            for key, value in (
                ("state", values.get("state")),
                ("phys", values.get("physical_state")),
                ("netdev", values.get("netdev")),
                ("lid", number_in(values.get("lid", ""))),
                ("sm_lid", number_in(values.get("sm_lid", ""))),
            )
            if value is not None
        }
        if "subnet_prefix" in values or "sm_lid" in values:
            port.setdefault("link_layer", "InfiniBand")
        elif values.get("physical_state") == "NOP" or re.match(r"i40iw|iw_|cxgb", name):
            # iWARP drivers of that time had no physical state to tell.
            port.setdefault("link_layer", "iWARP")
        elif "netdev" in values:
            port.setdefault("link_layer", "Ethernet")

    def _gid(self, index: int, value: str, number: int, line: str) -> None:
        match = re.match(r"([0-9a-fA-F:.]+)(?:\s*,\s*(.+))?$", value)
        if match is None or self._port is None:
            self.unread.append(Unread(number, line, "GID is not understood"))
            return
        self._port.setdefault("gids", []).append(Gid(index, match[1].lower(), match[2]))


def number_in(text: str) -> int | None:
    """Return a decimal or 0x number, None for another text."""
    match = re.fullmatch(r"\s*(0x[0-9a-fA-F]{1,16}|\d{1,18})\s*", text, re.ASCII)
    return int(match[1], 0 if match[1].startswith("0x") else 10) if match else None


def _whole(value: float) -> float:
    return int(value) if value == int(value) else value


def _text(value: str) -> str | None:
    return value or None


def _part(value: str) -> str | None:
    """Return a part's number; a software device (Soft-RoCE, siw) has 0 for none."""
    return value if value.strip("0x") else None


def _state(value: str) -> str | None:
    """``4: ACTIVE`` (ibstatus), ``PORT_ACTIVE (4)`` (ibv_devinfo), ``Active`` (ibstat)."""
    match = re.fullmatch(r"(?:\d+:\s*)?([A-Za-z][\w /-]*?)\s*(?:\(\d+\))?", value, re.ASCII)
    return match[1] if match else None


def _rate(value: str) -> float | None:
    """``400``, ``200 Gb/sec (4X HDR)``, ``2.5``, ``56 (FDR)``."""
    match = re.match(r"(\d{1,6}(?:\.\d{1,4})?)\s*(?:Gb/sec|Gbps|\(|$)", value, re.ASCII)
    return _whole(float(match[1])) if match else None


def _lane(value: str) -> float | None:
    match = re.match(r"(\d{1,5}(?:\.\d{1,4})?)\s*Gbps", value, re.ASCII)
    return float(match[1]) if match else None


def _width(value: str) -> str | None:
    match = re.match(r"(\d{1,2})X\b", value, re.ASCII)
    return f"{int(match[1])}X" if match else None


def _layer(value: str) -> str | None:
    return _LAYERS.get(value.lower())


def _mtu(value: str) -> int | None:
    match = re.match(r"(\d{2,5})\b", value, re.ASCII)
    return int(match[1]) if match else None


def _guid(value: str) -> str | None:
    digits = re.sub(r"^0x|[:\s]", "", value.lower())
    return digits if re.fullmatch(r"[0-9a-f]{16}", digits) else None


_SAYS_NOTHING = ("", "unknown", "unspecified", "n/a", "invalid")
_Field = tuple[str, Callable[[str], Any]]
_PORT_FIELDS: dict[str, _Field] = {
    "state": ("state", _state),
    "physical state": ("phys", _state),
    "phys state": ("phys", _state),
    "rate": ("rate_gbps", _rate),
    "base lid": ("lid", number_in),
    "port lid": ("lid", number_in),
    "sm lid": ("sm_lid", number_in),
    "link layer": ("link_layer", _layer),
    "default gid": ("default_gid", _text),
    "max mtu": ("max_mtu", _mtu),
    "active mtu": ("active_mtu", _mtu),
    "active width": ("width", _width),
    "active speed": ("speed", _lane),
}
_NIC_FIELDS: dict[str, _Field] = {
    "ca type": ("model", _text),
    "firmware version": ("firmware", _text),
    "fw ver": ("firmware", _text),
    "node guid": ("guid", _guid),
    "system image guid": ("image_guid", _guid),
    "sys image guid": ("image_guid", _guid),
    "board id": ("board", _text),
    "vendor part id": ("model", _part),
}
