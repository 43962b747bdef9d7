"""Network interfaces of a node, and the one that UCX's tcp would take. Local; files only.

Addresses of a machine that is only files are told from its routes; of this machine the kernel
is asked, which knows which of two interfaces of one subnet has which.
"""

from __future__ import annotations

import fcntl
import ipaddress
import re
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from rdmakit.drivers.host import HostTree

__all__ = ["Interface", "read_interfaces", "tcp_candidates"]

_NET = "/sys/class/net"
_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8
_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B
_NO_SPEED = 100.0
"""Mb/s that UCX's tcp takes where a driver tells no speed (uct/tcp/tcp_net.c)."""
_LOCAL_NAMES = re.compile(
    r"docker\d*|virbr\d+|br-[0-9a-f]{12}|cni\d*|cbr\d+|lxcbr\d+|lxdbr\d+|podman\d+|nerdctl\d+|"
    r"veth\w*|vmnet\d+|cali\w+|flannel\S*|kube-\w+|tap\w*|vnet\d+"
)
_TUNNEL_NAMES = re.compile(r"tun\d*|tailscale\d*|wg\d+|ppp\d+|zt\w+|utun\d+")


@dataclass(frozen=True)
class Interface:
    """A network interface."""

    name: str
    up: bool
    mtu: int | None = None
    speed: float | None = None
    """Mb/s; None where the driver does not tell."""
    address: str = ""
    """First IPv4 address."""
    prefix: int = 0
    loopback: bool = False
    bridge: bool = False
    local: bool = False
    """Whether it joins containers or guests of this host, by its name or kind."""
    tunnel: bool = False
    default: bool = False
    """Whether the default route goes through it."""
    rdma: bool = False
    """Whether it is the net device of an RDMA device."""

    @property
    def network(self) -> str:
        """Its IPv4 subnet; empty without an address."""
        if not self.address:
            return ""
        return str(ipaddress.ip_interface(f"{self.address}/{self.prefix}").network)

    def describe(self) -> str:
        """Return ``eth0 (10.0.0.1/24, MTU 1500, 1 Gb/s)`` with what is known."""
        parts = [f"{self.address}/{self.prefix}"] if self.address else ["no IPv4 address"]
        if self.mtu:
            parts.append(f"MTU {self.mtu}")
        if self.speed:
            parts.append(f"{self.speed / 1000:g} Gb/s")
        if self.default:
            parts.append("default route")
        return f"{self.name} ({', '.join(parts)})"


def read_interfaces(tree: HostTree) -> tuple[Interface, ...]:
    """Return the interfaces of a machine by name; nothing where its files tell of none."""
    names = [name for name in tree.listdir(_NET) if tree.exists(f"{_NET}/{name}/.")]
    routes = _routes(tree.read_text("/proc/net/route") or "")
    local = _local_addresses(tree.read_text("/proc/net/fib_trie") or "")
    found = []
    for name in names:
        address, prefix = _address(name) if tree.root == "/" else _told(name, routes, local)
        found.append(_interface(tree, name, address, prefix, _defaults(routes)))
    return tuple(found)


def _interface(
    tree: HostTree, name: str, address: str, prefix: int, defaults: Sequence[str]
) -> Interface:
    def text(what: str) -> str:
        return (tree.read_text(f"{_NET}/{name}/{what}") or "").strip()

    flags = int(text("flags"), 16) if re.fullmatch(r"0x[0-9a-f]+", text("flags")) else None
    state = text("operstate")
    # A loopback or tunnel says "unknown" and is up; /sys has no IFF_RUNNING in flags.
    up = state != "down" and (flags is None or bool(flags & _IFF_UP)) and text("carrier") != "0"
    speed, mtu = text("speed"), text("mtu")
    bridge = tree.exists(f"{_NET}/{name}/bridge/.")
    tunnel = tree.exists(f"{_NET}/{name}/tun_flags") or bool(_TUNNEL_NAMES.fullmatch(name))
    return Interface(
        name,
        up,
        int(mtu) if mtu.isascii() and mtu.isdigit() else None,
        float(speed) if speed.isascii() and speed.isdigit() and int(speed) > 0 else None,
        address,
        prefix,
        loopback=name == "lo" or bool(flags and flags & _IFF_LOOPBACK),
        bridge=bridge,
        local=bool(_LOCAL_NAMES.fullmatch(name)),
        tunnel=tunnel,
        default=name in defaults,
        rdma=bool(tree.listdir(f"{_NET}/{name}/device/infiniband")),
    )


def tcp_candidates(
    interfaces: Sequence[Interface], named: Sequence[str] | None = None, *, bridges: bool = False
) -> list[Interface]:
    """Return the interfaces that UCX's tcp would use between hosts, its first choice first. Pure.

    UCX prefers the fastest and, of equals, the one of the default route. Loopback is left out:
    it serves inside a host only.

    Args:
        interfaces: all of the node.
        named: devices of UCX_NET_DEVICES; None: all.
        bridges: whether this UCX takes bridges too (releases without UCX_TCP_BRIDGE_ENABLE, or
            with it set).
    """
    usable = [
        one
        for one in interfaces
        if one.up
        and one.address
        and not one.loopback
        and (bridges or not one.bridge)
        and (named is None or one.name in named)
    ]
    return sorted(usable, key=lambda one: (-(one.speed or _NO_SPEED), not one.default, one.name))


def _routes(text: str) -> list[tuple[str, ipaddress.IPv4Network, bool]]:
    """Return (interface, destination, whether through a gateway) of /proc/net/route."""
    found = []
    for line in text.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 8 or not all(
            re.fullmatch(r"[0-9A-Fa-f]{8}", fields[i]) for i in (1, 2, 7)
        ):
            continue
        destination, gateway, mask = (
            str(ipaddress.IPv4Address(int.from_bytes(bytes.fromhex(fields[i]), "little")))
            for i in (1, 2, 7)
        )
        network = ipaddress.IPv4Network(f"{destination}/{mask}", strict=False)
        found.append((fields[0], network, gateway != "0.0.0.0"))
    return found


def _defaults(routes: Sequence[tuple[str, ipaddress.IPv4Network, bool]]) -> list[str]:
    return [name for name, network, _ in routes if network.prefixlen == 0]


def _local_addresses(text: str) -> list[str]:
    """Return the machine's own addresses out of /proc/net/fib_trie."""
    found = re.findall(r"\|-- (\d+\.\d+\.\d+\.\d+)\n\s+/32 host LOCAL", text)
    return [address for address in dict.fromkeys(found) if not address.startswith("127.")]


def _told(
    name: str,
    routes: Sequence[tuple[str, ipaddress.IPv4Network, bool]],
    local: Sequence[str],
) -> tuple[str, int]:
    for owner, network, far in routes:
        if owner == name and not far and network.prefixlen:
            for address in local:
                if ipaddress.IPv4Address(address) in network:
                    return address, network.prefixlen
    return "", 0


def _address(name: str) -> tuple[str, int]:
    """Return (address, prefix length) of one of this machine's interfaces."""
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as door:
        try:
            address = fcntl.ioctl(door.fileno(), _SIOCGIFADDR, request)[20:24]
            mask = fcntl.ioctl(door.fileno(), _SIOCGIFNETMASK, request)[20:24]
        except OSError:
            return "", 0  # no IPv4 address
    return socket.inet_ntoa(address), int.from_bytes(mask, "big").bit_count()
