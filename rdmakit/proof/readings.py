"""Reads what ports have counted, and which network stack this process has. Local; never raises."""

from __future__ import annotations

import re

from rdmakit.drivers.host import HostTree
from rdmakit.proof.counters import PortReading

__all__ = ["network_stack", "read_ports", "rxe_mtu"]

_CLASS = "/sys/class/infiniband"
_WORD = 4
"""port_xmit_data and port_rcv_data count words of four bytes (InfiniBand specification, PMA)."""
_END = (1 << 32) - 1
"""Where a counter of 32 bits stops (InfiniBand specification, PortCounters): it tells no more."""
_HARDWARE = (
    ("sent_pkts", "rcvd_pkts", "packets"),  # rdma_rxe
    ("tx_bytes", "rx_bytes", "bytes"),  # efa, bnxt_re
)
_RXE_HEADERS = 80
"""Bytes that rdma_rxe keeps of the net device's MTU for its headers (RXE_MAX_HDR_LENGTH)."""
_MTUS = (4096, 2048, 1024, 512, 256)


def network_stack(tree: HostTree) -> str:
    """Return what names this process's network stack: the kernel's boot and its namespace."""
    boot = (tree.read_text("/proc/sys/kernel/random/boot_id") or "").strip()
    return f"{boot} {tree.resolve('/proc/self/ns/net').rpartition('/')[2]}"


def read_ports(tree: HostTree) -> dict[str, PortReading]:
    """Return each RDMA port and net device by its name, as UCX's lanes name them."""
    found = {reading.port: reading for reading in _net(tree)}
    for device in tree.listdir(_CLASS):
        for port in tree.listdir(f"{_CLASS}/{device}/ports"):
            reading = _rdma(tree, device, port)
            found[reading.port] = reading
    return found


def _net(tree: HostTree) -> list[PortReading]:
    """Read /proc/net/dev: of this process's namespace, also where /sys shows another."""
    found = []
    for line in (tree.read_text("/proc/net/dev") or "").splitlines():
        name, colon, rest = line.partition(":")
        words = rest.split()
        if colon and len(words) >= 9 and words[0].isdigit() and words[8].isdigit():
            found.append(
                PortReading(
                    port=name.strip(),
                    kind="net",
                    unit="bytes",
                    sent=int(words[8]),
                    received=int(words[0]),
                    source="/proc/net/dev",
                )
            )
    return found


def _rdma(tree: HostTree, device: str, port: str) -> PortReading:
    base = f"{_CLASS}/{device}/ports/{port}"
    sent, received, unit, source, mtu = None, None, "bytes", "no counters", 0
    words = [_number(tree, f"{base}/counters/port_{way}_data") for way in ("xmit", "rcv")]
    if None not in words:
        sent, received = (_WORD * word if word not in (None, _END) else None for word in words)
        source = "counters/port_xmit_data, port_rcv_data"
    else:
        for out, into, what in _HARDWARE:
            values = [_number(tree, f"{base}/hw_counters/{name}") for name in (out, into)]
            if None not in values:
                sent, received = values
                unit, source = what, f"hw_counters/{out}, {into}"
                mtu = _mtu(tree, device, base) if what == "packets" else 0
                break
    return PortReading(
        port=f"{device}:{port}",
        kind="rdma",
        unit=unit,
        sent=sent,
        received=received,
        source=source,
        mtu=mtu,
    )


def _number(tree: HostTree, path: str) -> int | None:
    text = (tree.read_text(path) or "").strip()
    return int(text) if re.fullmatch(r"\d+", text) else None


def _mtu(tree: HostTree, device: str, base: str) -> int:
    """Return the MTU of a software device's packets, which only its net device tells in /sys."""
    parent = (tree.read_text(f"{_CLASS}/{device}/parent") or "").strip()
    parent = parent or (tree.read_text(f"{base}/gid_attrs/ndevs/0") or "").strip()
    return rxe_mtu(_number(tree, f"/sys/class/net/{parent}/mtu") or 0) if parent else 0


def rxe_mtu(net: int) -> int:
    """Return the InfiniBand MTU of rdma_rxe over a net device: the largest that fits; 0: none."""
    return next((mtu for mtu in _MTUS if mtu + _RXE_HEADERS <= net), 0)
