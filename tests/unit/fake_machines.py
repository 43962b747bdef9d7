"""Whole machines as trees of /sys and /proc, for tests of everything that looks at a machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.unit.fake_tree import Fake, acs_config


def dgx1(root: Path) -> Fake:
    """Eight V100, four NICs: one for each pair of GPUs, four GPUs on each socket."""
    m = Fake(root)
    m.base("dgx1")
    m.cpus(["0-19,40-59", "20-39,60-79"], siblings=40)
    m.driver("470.82.01")
    for socket in range(2):
        for half in range(2):
            bus = 0x05 + 0x80 * socket + 4 * half
            top = f"pci0000:{0x80 * socket:02x}/0000:{0x80 * socket:02x}:{2 + half:02x}.0"
            m.bridge(top, numa=socket, gen=3)
            up = m.bridge(f"{top}/0000:{bus:02x}:00.0", numa=socket, gen=3)
            for slot in range(2):
                port = m.bridge(f"{up}/0000:{bus + 1:02x}:{4 + 4 * slot:02x}.0", numa=socket, gen=3)
                m.gpu(
                    f"{port}/0000:{bus + 2 + slot:02x}:00.0",
                    "Tesla V100-SXM2-16GB",
                    numa=socket,
                    gen=3,
                    cpus=("0-19,40-59", "20-39,60-79")[socket],
                )
            port = m.bridge(f"{up}/0000:{bus + 1:02x}:0c.0", numa=socket, gen=3)
            # Names in another order than the buses, as on the real machine.
            m.nic(
                f"{port}/0000:{bus + 0x10:02x}:00.0",
                f"mlx5_{2 * socket + half}",
                rate=100,
                model="MT4115",
                numa=socket,
                gen=3,
            )
    return m


def dgx_a100(root: Path, host: str = "dgxa100", **change: object) -> Fake:
    """Eight A100 and eight NICs in pairs behind two levels of switches; two storage ports."""
    m = Fake(root)
    m.base(host)
    nodes = [f"{16 * n}-{16 * n + 15},{128 + 16 * n}-{143 + 16 * n}" for n in range(8)]
    m.cpus(nodes, siblings=128)
    m.driver()
    for pair, numa in enumerate((3, 1, 7, 5)):
        root_bus = 0x10 + 0x30 * pair
        top = f"pci0000:{root_bus - 1:02x}/0000:{root_bus - 1:02x}:01.1"
        m.bridge(top, numa=numa)
        up = m.bridge(f"{top}/0000:{root_bus:02x}:00.0", numa=numa)
        for slot in range(2):
            down = m.bridge(f"{up}/0000:{root_bus + 1:02x}:{slot:02x}.0", numa=numa)
            inner = m.bridge(f"{down}/0000:{root_bus + 2 + 8 * slot:02x}:00.0", numa=numa)
            port = m.bridge(f"{inner}/0000:{root_bus + 3 + 8 * slot:02x}:10.0", numa=numa)
            m.gpu(
                f"{port}/0000:{root_bus + 4 + 8 * slot:02x}:00.0",
                "NVIDIA A100-SXM4-40GB",
                numa=numa,
                now=1,
                cpus=nodes[numa],
            )
        for slot in range(2):
            down = m.bridge(f"{up}/0000:{root_bus + 1:02x}:{8 + slot:02x}.0", numa=numa)
            inner = m.bridge(f"{down}/0000:{root_bus + 0x18 + 4 * slot:02x}:00.0", numa=numa)
            port = m.bridge(f"{inner}/0000:{root_bus + 0x19 + 4 * slot:02x}:00.0", numa=numa)
            name = f"mlx5_{2 * pair + slot + (2 if pair > 1 else 0)}"
            m.nic(
                f"{port}/0000:{root_bus + 0x1A + 4 * slot:02x}:00.0",
                name,
                rate=200,
                model="MT4123",
                numa=numa,
                **change,
            )  # type: ignore[arg-type]
    top = m.bridge("pci0000:e0/0000:e0:01.1", numa=4)
    for function in range(2):  # mlx5_4 and mlx5_5: in the middle of the compute NICs
        m.nic(
            f"{top}/0000:e1:00.{function}", f"mlx5_{4 + function}", rate=200, model="MT4123", numa=4
        )
    return m


def hgx_h100(
    root: Path,
    host: str = "node01",
    *,
    roce: bool = False,
    down: Sequence[int] = (),
    absent: Sequence[int] = (),
    firmware: str = "28.41.1000",
    mtu: int = 4200,
    number: int = 1,
    driver: str = "550.54.15",
    acs: int | None = 0,
) -> Fake:
    """Eight H100 with a NIC each behind one switch, and a two-port card for storage."""
    m = Fake(root)
    m.base(host)
    cpus = ["0-55,112-167", "56-111,168-223"]
    m.cpus(cpus, siblings=112)
    m.driver(driver)
    config = acs_config(acs) if acs is not None else bytes(64)
    for index in range(8):
        numa, bus = index // 4, 0x16 + 0x1A * index
        if bus > 0xF0:
            bus -= 0x02
        top = m.bridge(
            f"pci0000:{bus - 1:02x}/0000:{bus - 1:02x}:01.0", numa=numa, gen=5, config=config
        )
        up = m.bridge(f"{top}/0000:{bus:02x}:00.0", numa=numa, gen=5, config=config)
        a = m.bridge(f"{up}/0000:{bus + 1:02x}:01.0", numa=numa, gen=5, config=config)
        b = m.bridge(f"{up}/0000:{bus + 1:02x}:02.0", numa=numa, gen=5, config=config)
        m.gpu(
            f"{a}/0000:{bus + 3:02x}:00.0",
            "NVIDIA H100 80GB HBM3",
            numa=numa,
            gen=5,
            now=1,
            cpus=cpus[numa],
        )
        if index in absent:
            continue
        broken = index in down
        m.nic(
            f"{b}/0000:{bus + 4:02x}:00.0",
            f"mlx5_{index if index < 4 else index + 2}",
            layer="Ethernet" if roce else "InfiniBand",
            numa=numa,
            gen=5,
            firmware=firmware,
            state="1: DOWN" if broken else "4: ACTIVE",
            rate=40 if broken else 400,
            phys="3: Disabled" if broken else "5: LinkUp",
            netdev=f"rail{index}" if roce else "",
            mtu=mtu,
            address=f"10.1.{index}.{number}" if roce else "",
        )
    top = m.bridge("pci0000:f8/0000:f8:01.0", numa=1, gen=5, config=config)
    for function in range(2):
        m.nic(
            f"{top}/0000:f9:00.{function}",
            f"mlx5_{4 + function}",
            rate=400,
            layer="Ethernet" if roce else "InfiniBand",
            numa=1,
            gen=5,
            firmware=firmware,
            netdev=f"stor{function}" if roce else "",
            address=f"10.9.{function}.{number}" if roce else "",
        )
    return m


def pcie_box(root: Path) -> Fake:
    """Four A100 PCIe on root ports of two sockets, one two-port RoCE card on the second."""
    m = Fake(root)
    m.base("pcie")
    cpus = ["0,2,4,6,8,10,12,14", "1,3,5,7,9,11,13,15"]
    m.cpus(cpus)
    m.driver()
    for index, numa in enumerate((0, 0, 1, 1)):
        host = f"pci0000:{(0x17, 0x3A, 0x85, 0xAE)[index]:02x}"
        bus = int(host[-2:], 16)
        top = m.bridge(f"{host}/0000:{bus:02x}:00.0", numa=numa)
        m.gpu(f"{top}/0000:{bus + 1:02x}:00.0", "NVIDIA A100-PCIE-40GB", numa=numa, cpus=cpus[numa])
    top = m.bridge("pci0000:d7/0000:d7:00.0", numa=1)
    for function in range(2):
        m.nic(
            f"{top}/0000:d8:00.{function}",
            f"mlx5_{function}",
            rate=100,
            layer="Ethernet",
            model="MT4125",
            numa=1,
            netdev=f"ens{function}",
            mtu=1500,
            address=f"192.168.{function}.7",
        )
    m.default_route("ens1")
    return m


def gh200(root: Path) -> Fake:
    """One GH200: GPU memory is a NUMA node without CPUs; two two-port Ethernet cards."""
    m = Fake(root)
    m.base("gh200", kernel="6.8.0-1008-nvidia-64k")
    m.write("/proc/cpuinfo", "processor\t: 0\nFeatures\t: fp asimd\n")
    m.cpus(["0-71", *[""] * 8])
    m.driver()
    top = m.bridge("pci0009:00/0009:00:00.0", gen=5)
    m.gpu(f"{top}/0009:01:00.0", "NVIDIA GH200 480GB", gen=5, cpus="0-71")
    for card in range(2):
        top = m.bridge(f"pci000{card}:00/000{card}:00:00.0", gen=5)
        for function in range(2):
            m.nic(
                f"{top}/000{card}:01:00.{function}",
                f"mlx5_{2 * card + function}",
                rate=200,
                layer="Ethernet",
                model="MT41692",
                gen=5,
                netdev=f"p{card}f{function}",
                address=f"10.{card}.{function}.3",
            )
    return m


def workstation(root: Path) -> Fake:
    """Two GPUs on root ports of one CPU, one NUMA node, which the firmware does not name."""
    m = Fake(root)
    m.base("desk")
    m.cpus(["0-23"], siblings=12)
    m.driver()
    for index in range(2):
        top = m.bridge(f"pci0000:00/0000:00:0{index + 1}.0", numa=-1)
        m.gpu(
            f"{top}/0000:0{index + 1}:00.0",
            "NVIDIA GeForce RTX 3090",
            numa=-1,
            now=1,
            width=16 if index == 0 else 4,
            max_width=16,
            cpus="0-23",
        )
    return m


def virtual_machine(root: Path) -> Fake:
    """A guest with one GPU on the root bus."""
    m = Fake(root)
    m.base("guest", virtual=True)
    m.cpus(["0-15"])
    m.driver()
    m.gpu("pci0000:00/0000:00:06.0", "NVIDIA H100 PCIe", numa=-1, gen=5, cpus="0-15")
    return m


def soft_roce(root: Path) -> Fake:
    """A guest whose RDMA device is software: below devices/virtual, with no ``device`` link."""
    m = Fake(root)
    m.base("soft", virtual=True)
    m.cpus(["0"])
    base = "/sys/devices/virtual/infiniband/rxe0"
    m.link("/sys/class/infiniband/rxe0", base)
    for name, text in {"node_type": "1: CA", "fw_ver": "", "parent": "eth1"}.items():
        m.write(f"{base}/{name}", text + "\n")
    m.write(f"{base}/node_guid", "5054:00ff:fe99:0101\n")
    port = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "link_layer": "Ethernet"}
    for name, text in (port | {"lid": "0x0", "rate": "2.5 Gb/sec (1X SDR)"}).items():
        m.write(f"{base}/ports/1/{name}", text + "\n")
    gids = ("fe80:0000:0000:0000:5054:00ff:fe99:0101", "0000:0000:0000:0000:0000:ffff:0a63:0102")
    for index, gid in enumerate(gids):
        m.write(f"{base}/ports/1/gids/{index}", gid + "\n")
        m.write(f"{base}/ports/1/gid_attrs/types/{index}", "RoCE v2\n")
        m.write(f"{base}/ports/1/gid_attrs/ndevs/{index}", "eth1\n")
    for index in range(2, 1024):
        m.write(f"{base}/ports/1/gids/{index}", "0000:0000:0000:0000:0000:0000:0000:0000\n")
    m.write("/sys/devices/pci0000:00/0000:00:05.0/virtio3/net/eth1/mtu", "1500\n")
    m.link("/sys/class/net/eth1", "/sys/devices/pci0000:00/0000:00:05.0/virtio3/net/eth1")
    return m


def nothing(root: Path) -> Fake:
    """A machine without GPU and without RDMA."""
    m = Fake(root)
    m.base("plain", virtual=True)
    m.cpus(["0-1"])
    return m


MACHINES = {
    "dgx1": dgx1,
    "dgx_a100": dgx_a100,
    "hgx_h100": hgx_h100,
    "pcie_box": pcie_box,
    "gh200": gh200,
    "workstation": workstation,
    "virtual_machine": virtual_machine,
    "soft_roce": soft_roce,
    "nothing": nothing,
}
