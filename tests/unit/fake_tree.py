"""A machine as a tree of /sys and /proc, built by device; fake_machines.py has whole ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

GEN = {1: "2.5 GT/s PCIe", 3: "8.0 GT/s PCIe", 4: "16.0 GT/s PCIe", 5: "32.0 GT/s PCIe"}


def acs_config(control: int) -> bytes:
    """Return a bridge's configuration space with access control set to ``control``."""
    config = bytearray(4096)
    # An unrelated capability first, then ACS.
    config[0x100:0x104] = ((0x140 << 20) | (1 << 16) | 0x0001).to_bytes(4, "little")
    config[0x140:0x144] = ((1 << 16) | 0x000D).to_bytes(4, "little")
    config[0x146:0x148] = control.to_bytes(2, "little")
    return bytes(config)


@dataclass
class Fake:
    """A machine below ``root`` while it is built."""

    root: Path
    gpus: int = 0
    files: dict[str, str] = field(default_factory=dict)

    def write(self, path: str, text: str | bytes) -> None:
        place = self.root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(text, bytes):
            place.write_bytes(text)
        else:
            place.write_text(text)

    def link(self, path: str, target: str) -> None:
        place = self.root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        ups = "../" * (path.strip("/").count("/"))
        place.symlink_to(ups + target.lstrip("/"))

    def base(self, host: str, *, virtual: bool = False, kernel: str = "5.15.0-105") -> None:
        self.write("/proc/sys/kernel/hostname", host + "\n")
        self.write("/proc/sys/kernel/osrelease", kernel + "\n")
        extra = " hypervisor" if virtual else ""
        self.write("/proc/cpuinfo", f"processor\t: 0\nflags\t\t: fpu vme sse2{extra} ht\n")
        self.write("/sys/class/dmi/id/sys_vendor", "QEMU\n" if virtual else "Maker\n")

    def cpus(self, nodes: Sequence[str], siblings: int = 0) -> None:
        """Add NUMA nodes with these CPU lists; ``siblings``: distance of a core's two threads."""
        every: list[int] = []
        for index, text in enumerate(nodes):
            self.write(f"/sys/devices/system/node/node{index}/cpulist", text + "\n")
            for part in filter(None, text.split(",")):
                first, _, last = part.partition("-")
                every += range(int(first), int(last or first) + 1)
        self.write("/sys/devices/system/node/online", "0\n")
        self.write("/sys/devices/system/cpu/online", f"0-{max(every)}\n")
        for cpu in every:
            other = cpu + siblings if cpu + siblings in every else cpu - siblings
            pair = sorted({cpu, other}) if siblings else [cpu]
            self.write(
                f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list",
                ",".join(map(str, pair)) + "\n",
            )

    def pci(
        self,
        path: str,
        code: str,
        ids: tuple[str, str],
        *,
        numa: int = 0,
        gen: int = 4,
        now: int | None = None,
        width: int = 16,
        max_width: int | None = None,
        cpus: str = "",
        config: bytes | None = None,
    ) -> str:
        """Add a PCI device at ``pci0000:00/0000:00:01.0/...``; return its address."""
        address = path.rpartition("/")[2]
        base = f"/sys/devices/{path}"
        self.write(f"{base}/class", f"0x{code}00\n")
        self.write(f"{base}/vendor", f"0x{ids[0]}\n")
        self.write(f"{base}/device", f"0x{ids[1]}\n")
        self.write(f"{base}/numa_node", f"{numa}\n")
        self.write(f"{base}/local_cpulist", cpus + "\n")
        self.write(f"{base}/current_link_speed", GEN[now or gen] + "\n")
        self.write(f"{base}/max_link_speed", GEN[gen] + "\n")
        self.write(f"{base}/current_link_width", f"{width}\n")
        self.write(f"{base}/max_link_width", f"{max_width or width}\n")
        if config is not None:
            self.write(f"{base}/config", config)
        self.link(f"/sys/bus/pci/devices/{address}", base)
        return address

    def bridge(self, path: str, *, numa: int = 0, gen: int = 4, config: bytes | None = None) -> str:
        self.pci(path, "0604", ("1000", "c010"), numa=numa, gen=gen, config=config)
        return path

    def driver(self, version: str = "550.54.15") -> None:
        self.write(
            "/proc/driver/nvidia/version",
            f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build\n",
        )

    def gpu(self, path: str, model: str, *, known: bool = True, **pci: object) -> str:
        address = self.pci(path, "0302", ("10de", "2330"), **pci)  # type: ignore[arg-type]
        index = self.gpus
        self.gpus += 1
        if known:
            self.write(
                f"/proc/driver/nvidia/gpus/{address}/information",
                f"Model: \t\t {model}\nIRQ:   \t\t 18\n"
                f"GPU UUID: \t GPU-{index:08d}-aaaa-bbbb-cccc-{index:012d}\n"
                f"Bus Location: \t {address}\nDevice Minor: \t {index}\n",
            )
        return address

    def nic(
        self,
        path: str,
        name: str,
        *,
        rate: int = 400,
        layer: str = "InfiniBand",
        state: str = "4: ACTIVE",
        phys: str = "5: LinkUp",
        model: str = "MT4129",
        firmware: str = "28.41.1000",
        netdev: str = "",
        mtu: int = 4200,
        address: str = "",
        exists: bool = False,
        **pci: object,
    ) -> str:
        place = path.rpartition("/")[2]
        if not exists:
            self.pci(path, "0207" if layer == "InfiniBand" else "0200", ("15b3", "1021"), **pci)  # type: ignore[arg-type]
        base = f"/sys/devices/{path}/infiniband/{name}"
        self.link(f"/sys/class/infiniband/{name}", base)
        self.link(f"{base}/device", f"/sys/devices/{path}")
        self.write(f"{base}/hca_type", model + "\n")
        self.write(f"{base}/fw_ver", firmware + "\n")
        self.write(f"{base}/board_id", "MT_0000000838\n")
        self.write(f"{base}/node_guid", f"a088:c203:00aa:{abs(hash(name)) % 65536:04x}\n")
        self.write(f"{base}/node_type", "1: CA\n")
        port = f"{base}/ports/1"
        self.write(f"{port}/state", state + "\n")
        self.write(f"{port}/phys_state", phys + "\n")
        self.write(f"{port}/rate", f"{rate} Gb/sec (4X NDR)\n")
        self.write(f"{port}/link_layer", layer + "\n")
        self.write(f"{port}/lid", "0x80\n" if layer == "InfiniBand" else "0x0\n")
        self.write(f"{port}/sm_lid", "0x1\n" if layer == "InfiniBand" else "0x0\n")
        gids = ["fe80:0000:0000:0000:a288:c2ff:fead:eab8"]
        kinds = ["IB/RoCE v1"]
        if address:
            parts = [int(part) for part in address.split(".")]
            mapped = "0000:0000:0000:0000:0000:ffff:" + (
                f"{parts[0]:02x}{parts[1]:02x}:{parts[2]:02x}{parts[3]:02x}"
            )
            gids += [gids[0], mapped, mapped]
            kinds += ["RoCE v2", "IB/RoCE v1", "RoCE v2"]
        for index, (gid, kind) in enumerate(zip(gids, kinds, strict=True)):
            self.write(f"{port}/gids/{index}", gid + "\n")
            self.write(f"{port}/gid_attrs/types/{index}", kind + "\n")
            if netdev:
                self.write(f"{port}/gid_attrs/ndevs/{index}", netdev + "\n")
        self.write(f"{port}/gids/{len(gids)}", "0000:0000:0000:0000:0000:0000:0000:0000\n")
        if netdev:
            self.write(f"/sys/devices/{path}/net/{netdev}/mtu", f"{mtu}\n")
            self.write(f"/sys/devices/{path}/net/{netdev}/dev_port", "0\n")
            self.link(f"/sys/class/net/{netdev}", f"/sys/devices/{path}/net/{netdev}")
        return place

    def default_route(self, netdev: str) -> None:
        self.write(
            "/proc/net/route",
            "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\n"
            f"{netdev}\t00000000\t0101000A\t0003\t0\t0\t100\t00000000\t0\n"
            f"{netdev}\t0001000A\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\n",
        )
