"""RDMA devices, their ports, GIDs and net devices, from /sys. Local; never raises."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rdmakit.drivers.host import HostTree
from rdmakit.topology.model import Gid, Nic, PcieLink, Port, natural, normal_address
from rdmakit.topology.parsers.ports import number_in

__all__ = ["read_nics"]

_CLASS = "/sys/class/infiniband"
_NET = "/sys/class/net"
_MOST_GIDS = 256
_KINDS = {"IB/RoCE v1": "RoCE v1", "RoCE v1": "RoCE v1", "RoCE v2": "RoCE v2"}
_NO_GID = re.compile(r"[0:]*")


def read_nics(tree: HostTree) -> tuple[Nic, ...]:
    """Return the RDMA devices of a machine, in the order of their names."""
    default = _default_route(tree)
    names = sorted(tree.listdir(_CLASS), key=natural)
    return tuple(_Device(tree, name, default).nic() for name in names)


def _default_route(tree: HostTree) -> set[str]:
    """Return the net devices that carry a default route of IPv4."""
    found = set()
    for line in (tree.read_text("/proc/net/route") or "").splitlines()[1:]:
        words = line.split()
        if len(words) > 7 and words[1] == "00000000" and words[7] == "00000000":
            found.add(words[0])
    return found


@dataclass
class _Device:
    tree: HostTree
    name: str
    default: set[str]

    @property
    def base(self) -> str:
        return f"{_CLASS}/{self.name}"

    def _text(self, path: str) -> str | None:
        text = self.tree.read_text(f"{self.base}/{path}")
        return (text.strip() or None) if text is not None else None

    def nic(self) -> Nic:
        pci = self._pci()
        netdevs = self.tree.listdir(f"{self.base}/device/net")
        bonds = [bond for netdev in netdevs if (bond := self._bond(netdev))]
        numa = self._text("device/numa_node") or ""
        lower = {*netdevs, *bonds}
        return Nic(
            self.name,
            self.name,
            pci,
            int(numa) if numa.isascii() and numa.isdigit() else None,
            self._text("hca_type") or self._ids(),
            self._text("fw_ver"),
            self._text("board_id"),
            _guid(self._text("node_guid")),
            _guid(self._text("sys_image_guid")),
            self._physical(),
            bonds[0] if bonds else None,
            bool(lower & self.default) or self._vlan_default(lower),
            self._link(),
            tuple(self._ports(netdevs)),
        )

    def _pci(self) -> str | None:
        """Return the PCI device that it belongs to; None for a software device."""
        parts = self.tree.resolve(f"{self.base}/device").split("/")
        found = [part for part in parts if normal_address(part) == part]
        return found[-1] if found else None

    def _ids(self) -> str | None:
        ids = [(self._text(f"device/{part}") or "")[2:] for part in ("vendor", "device")]
        return ":".join(ids) if all(ids) else None

    def _physical(self) -> str | None:
        if not self.tree.exists(f"{self.base}/device/physfn/."):
            return None
        address = self.tree.resolve(f"{self.base}/device/physfn").rpartition("/")[2]
        return normal_address(address) or address

    def _bond(self, netdev: str) -> str | None:
        if not self.tree.exists(f"{_NET}/{netdev}/master/."):
            return None
        master = self.tree.resolve(f"{_NET}/{netdev}/master").rpartition("/")[2]
        return master if self.tree.exists(f"{_NET}/{master}/bonding/.") else None

    def _vlan_default(self, lower: set[str]) -> bool:
        """Return whether the default route goes over a VLAN on one of ``lower``."""
        return any(
            self.tree.exists(f"{_NET}/{device}/lower_{below}")
            for device in self.default
            for below in lower
        )

    def _link(self) -> PcieLink:
        def speed(name: str) -> float | None:
            match = re.match(
                r"(\d{1,3}(?:\.\d)?) GT/s", self._text(f"device/{name}") or "", re.ASCII
            )
            return float(match[1]) if match else None

        def width(name: str) -> int | None:
            return number_in(self._text(f"device/{name}") or "") or None

        return PcieLink(
            speed("current_link_speed"),
            width("current_link_width"),
            speed("max_link_speed"),
            width("max_link_width"),
        )

    def _ports(self, netdevs: tuple[str, ...]) -> list[Port]:
        numbers = [n for n in self.tree.listdir(f"{self.base}/ports") if n.isdigit()]
        iwarp = "RNIC" in (self._text("node_type") or "").upper()
        return [
            self._port(int(number), netdevs, only=len(numbers) == 1, iwarp=iwarp)
            for number in sorted(numbers, key=natural)
        ]

    def _port(self, number: int, netdevs: tuple[str, ...], *, only: bool, iwarp: bool) -> Port:
        base = f"ports/{number}"
        rate = re.match(
            r"(\d{1,6}(?:\.\d)?)\s*Gb/sec(?:\s*\((\d+X))?",
            self._text(f"{base}/rate") or "",
            re.ASCII,
        )
        gbps = float(rate[1]) if rate else None
        gids = self._gids(base)
        netdev = self._netdev(number, netdevs, gids, only=only)
        mtu = self.tree.read_text(f"{_NET}/{netdev}/mtu") if netdev else None
        return Port(
            number,
            _state(self._text(f"{base}/state")),
            _state(self._text(f"{base}/phys_state")),
            int(gbps) if gbps is not None and gbps == int(gbps) else gbps,
            "iWARP" if iwarp else self._text(f"{base}/link_layer"),
            number_in(self._text(f"{base}/lid") or ""),
            number_in(self._text(f"{base}/sm_lid") or ""),
            width=rate[2] if rate else None,
            netdev=netdev,
            netdev_mtu=number_in(mtu or ""),
            gids=gids,
        )

    def _gids(self, base: str) -> tuple[Gid, ...]:
        found = []
        for name in sorted(self.tree.listdir(f"{self.base}/{base}/gids"), key=natural)[:_MOST_GIDS]:
            gid = self._text(f"{base}/gids/{name}")
            if gid is None or not name.isdigit() or _NO_GID.fullmatch(gid):
                continue
            kind = self._text(f"{base}/gid_attrs/types/{name}")
            netdev = self._text(f"{base}/gid_attrs/ndevs/{name}")
            found.append(Gid(int(name), gid.lower(), _KINDS.get(kind or "", kind), netdev))
        return tuple(found)

    def _netdev(
        self, number: int, netdevs: tuple[str, ...], gids: tuple[Gid, ...], *, only: bool
    ) -> str | None:
        told = next((gid.netdev for gid in gids if gid.netdev), None)
        if told is not None:
            return told
        if only and len(netdevs) == 1:
            return netdevs[0]
        for netdev in netdevs:
            port = self.tree.read_text(f"{_NET}/{netdev}/dev_port") or ""
            if number_in(port) == number - 1:
                return netdev
        return None


def _state(text: str | None) -> str | None:
    """``4: ACTIVE`` -> ``ACTIVE``."""
    return text.partition(":")[2].strip() or text if text is not None else None


def _guid(text: str | None) -> str | None:
    digits = (text or "").replace(":", "").lower()
    return digits if re.fullmatch(r"[0-9a-f]{16}", digits) and int(digits, 16) else None
