"""Ports' counters in fake trees: an InfiniBand card, rdma_rxe, one that counts bytes itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from rdmakit.drivers.host import HostTree
from rdmakit.proof.inside import WindowEnd, mapping_of
from rdmakit.proof.readings import network_stack, read_ports, rxe_mtu

NET = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop
    lo: 1000 10 0 0 0 0 0 0 1000 10 0 0 0 0 0 0
  eth0:5000000000 20 0 0 0 0 0 0 6000000000 30 0 0 0 0 0 0
"""


@pytest.fixture
def tree(tmp_path: Path) -> HostTree:
    files = {
        "proc/net/dev": NET,
        "proc/sys/kernel/random/boot_id": "b00t\n",
        "sys/class/net/eth0/mtu": "1500\n",
        "sys/class/infiniband/mlx5_0/ports/1/counters/port_xmit_data": "250\n",
        "sys/class/infiniband/mlx5_0/ports/1/counters/port_rcv_data": "75\n",
        "sys/class/infiniband/mlx5_0/ports/1/hw_counters/rx_bytes": "1\n",
        "sys/class/infiniband/rxe0/parent": "eth0\n",
        "sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts": "41\n",
        "sys/class/infiniband/rxe0/ports/1/hw_counters/rcvd_pkts": "42\n",
        "sys/class/infiniband/efa_0/ports/1/hw_counters/tx_bytes": "77\n",
        "sys/class/infiniband/efa_0/ports/1/hw_counters/rx_bytes": "78\n",
        "sys/class/infiniband/siw0/ports/1/state": "4: ACTIVE\n",
        "sys/class/infiniband/mlx5_1/ports/1/counters/port_xmit_data": "N/A (no PMA)\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return HostTree(tmp_path)


def test_ports(tree: HostTree) -> None:
    found = read_ports(tree)
    facts = {name: (r.kind, r.unit, r.sent, r.received, r.mtu) for name, r in found.items()}
    assert facts == {
        "lo": ("net", "bytes", 1000, 1000, 0),
        "eth0": ("net", "bytes", 6_000_000_000, 5_000_000_000, 0),
        "mlx5_0:1": ("rdma", "bytes", 1000, 300, 0),  # words of four bytes
        "rxe0:1": ("rdma", "packets", 41, 42, 1024),
        "efa_0:1": ("rdma", "bytes", 77, 78, 0),
        "siw0:1": ("rdma", "bytes", None, None, 0),
        "mlx5_1:1": ("rdma", "bytes", None, None, 0),
    }
    assert found["rxe0:1"].source == "hw_counters/sent_pkts, rcvd_pkts"


@pytest.mark.parametrize(
    ("xmit", "rcv", "want"),
    [
        (0xFFFFFFFF, 75, (None, 300)),
        (250, 0xFFFFFFFF, (1000, None)),
        (0xFFFFFFFF, 0xFFFFFFFF, (None, None)),
        (0xFFFFFFFE, 1 << 40, (4 * 0xFFFFFFFE, 4 << 40)),
        (0, 0, (0, 0)),
    ],
)
def test_a_counter_of_32_bits_stops_at_its_end(
    tree: HostTree, tmp_path: Path, xmit: int, rcv: int, want: tuple[int | None, int | None]
) -> None:
    base = tmp_path / "sys/class/infiniband/mlx5_0/ports/1/counters"
    (base / "port_xmit_data").write_text(f"{xmit}\n")
    (base / "port_rcv_data").write_text(f"{rcv}\n")
    reading = read_ports(tree)["mlx5_0:1"]
    assert (reading.sent, reading.received) == want


def test_nothing_there(tmp_path: Path) -> None:
    assert read_ports(HostTree(tmp_path)) == {}


@pytest.mark.parametrize(
    ("net", "want"), [(1500, 1024), (4200, 4096), (4175, 2048), (9000, 4096), (300, 0), (0, 0)]
)
def test_mtu_of_rxe(net: int, want: int) -> None:
    assert rxe_mtu(net) == want


def test_network_stack(tree: HostTree, tmp_path: Path) -> None:
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    (tmp_path / "proc/self/ns/net").symlink_to("net:[4026531840]")
    assert network_stack(tree) == "b00t net:[4026531840]"
    assert network_stack(HostTree()) == network_stack(HostTree())


MAPS = """7f0000000000-7f0000004000 rw-s 00001000 00:1b 77 /dev/shm/#77 (deleted)
7f0000008000-7f000000c000 rw-p 00000000 00:00 0
7f0000010000-7f0000014000 rw-p 00000000 08:01 99 /lib/x.so
"""


def test_mapping(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/maps").write_text(MAPS)
    tree = HostTree(tmp_path)
    assert mapping_of(tree, 0x7F0000001000) == "00:1b inode 77 offset 8192"
    assert mapping_of(tree, 0x7F0000008000) == ""  # nobody's file
    assert mapping_of(tree, 0x7F0000010000) == ""  # private
    assert mapping_of(tree, 0x10) == ""


def test_check_of_two_mappings() -> None:
    assert WindowEnd.check("shm", "00:1b inode 77 offset 0", "00:1b inode 77 offset 0").same
    assert not WindowEnd.check("shm", "00:1b inode 77 offset 0", "00:1b inode 78 offset 0").same
    assert not WindowEnd.check("shm", "", "").same
