"""What /sys and /proc of a machine say. Local; reads files only; never raises."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rdmakit.discovery.rdma import read_nics
from rdmakit.drivers.host import HostTree
from rdmakit.topology.cpulist import parse_cpus
from rdmakit.topology.facts import SysfsFacts
from rdmakit.topology.model import Gpu, NumaNode, PciDevice, PcieLink, normal_address
from rdmakit.topology.pci_config import read_acs, read_control

__all__ = ["PCI", "read_sysfs"]

PCI = "/sys/bus/pci/devices"
_NVIDIA = "/proc/driver/nvidia"
_CONFIG_BYTES = 4096
_HYPERVISORS = re.compile(r"qemu|kvm|xen|vmware|virtualbox|bochs|virtual machine|hvm domu", re.I)
_MOST_CPUS = 4096


def read_sysfs(tree: HostTree) -> SysfsFacts:
    """Return the facts of the machine below ``tree``."""
    nics = read_nics(tree)
    numa = _numa_nodes(tree)
    reader = _Pci(tree, {nic.pci for nic in nics if nic.pci is not None})
    devices = reader.devices()
    gpus, notes = _gpus(tree, devices)
    software = _software(tree)
    online = parse_cpus(tree.read_text("/sys/devices/system/cpu/online"))
    siblings = _siblings(tree, online or ())
    if not numa and online:
        numa = (NumaNode(0, online),)
    empty = [node.index for node in numa if not node.cpus]
    if empty:
        notes.append(
            f"NUMA nodes {', '.join(map(str, empty))} have no CPUs (a device's memory): nothing "
            "is bound to them"
        )
    return SysfsFacts(
        (tree.read_text("/proc/sys/kernel/hostname") or "").strip(),
        gpus,
        nics,
        devices,
        numa,
        siblings,
        _available(tree),
        software,
        _is_virtual(tree),
        tuple(notes),
    )


@dataclass
class _Pci:
    """Reads GPUs, NICs, NVSwitches and the bridges above them, not all devices there are."""

    tree: HostTree
    nics: set[str]

    def devices(self) -> tuple[PciDevice, ...]:
        wanted: dict[str, tuple[str, str]] = {}
        for address in self.tree.listdir(PCI):
            kind = self._kind(address)
            if kind is None or normal_address(address) is None:
                continue
            chain = self._chain(address)
            for place, above in enumerate(chain):
                parent = chain[place - 1] if place else ""
                own = kind if above == address else "bridge"
                known = wanted.get(above)
                if known is None or own != "bridge":
                    wanted[above] = (parent, own)
        return tuple(
            self._device(address, *wanted[address])
            for address in sorted(wanted)
            if not address.startswith("pci")
        )

    def _kind(self, address: str) -> str | None:
        code = (self._text(address, "class") or "")[2:6]
        if address in self.nics:
            return "nic"
        if self._text(address, "vendor") == "0x10de":
            return {"0300": "gpu", "0302": "gpu", "0680": "nvswitch"}.get(code)
        return None

    def _chain(self, address: str) -> list[str]:
        """Return host bridge, bridges and device."""
        parts = self.tree.resolve(f"{PCI}/{address}").split("/")
        return [
            part
            for part in parts
            if normal_address(part) is not None or re.fullmatch(r"pci[0-9a-f]{4,8}:\w\w", part)
        ]

    def _text(self, address: str, name: str) -> str | None:
        text = self.tree.read_text(f"{PCI}/{address}/{name}")
        return text.strip() if text is not None else None

    def _device(self, address: str, parent: str, kind: str) -> PciDevice:
        numa = self._number(address, "numa_node")
        acs, known, control = None, False, None
        if kind == "bridge":
            config = self.tree.read_bytes(f"{PCI}/{address}/config", _CONFIG_BYTES)
            acs, known = read_acs(config or b"")
        elif kind in ("gpu", "nic"):
            control = read_control(self.tree.read_bytes(f"{PCI}/{address}/config", 256) or b"")
        ids = ":".join((self._text(address, name) or "")[2:] for name in ("vendor", "device"))
        return PciDevice(
            address,
            parent,
            kind,
            ids.strip(":"),
            numa if numa is not None and numa >= 0 else None,
            PcieLink(
                self._speed(address, "current_link_speed"),
                self._number(address, "current_link_width") or None,
                self._speed(address, "max_link_speed"),
                self._number(address, "max_link_width") or None,
            ),
            acs,
            known,
            control,
        )

    def _number(self, address: str, name: str) -> int | None:
        text = self._text(address, name) or ""
        return int(text) if re.fullmatch(r"-?\d{1,6}", text, re.ASCII) else None

    def _speed(self, address: str, name: str) -> float | None:
        match = re.match(r"(\d{1,3}(?:\.\d)?) GT/s", self._text(address, name) or "", re.ASCII)
        return float(match[1]) if match else None


def _gpus(tree: HostTree, devices: tuple[PciDevice, ...]) -> tuple[tuple[Gpu, ...], list[str]]:
    """Return NVIDIA's GPUs in nvidia-smi's order, which is by PCI address."""
    seen = {device.address: device for device in devices if device.kind == "gpu"}
    told = {}
    for name in tree.listdir(f"{_NVIDIA}/gpus"):
        address = normal_address(name)
        if address is not None:
            told[address] = _fields(tree.read_text(f"{_NVIDIA}/gpus/{name}/information") or "")
    notes = []
    listed = sorted(told) if told else sorted(seen)
    if seen and not told:
        notes.append(
            f"{len(seen)} NVIDIA GPU(s) on the PCI bus, but no NVIDIA driver is loaded"
            if not tree.exists(f"{_NVIDIA}/version")
            else f"the NVIDIA driver does not list the {len(seen)} GPU(s) on the PCI bus"
        )
    elif len(seen) > len(told):
        other = ", ".join(sorted(set(seen) - set(told)))
        notes.append(f"GPU(s) {other} are on the PCI bus but not with the NVIDIA driver")
    gpus = []
    for index, address in enumerate(listed):
        facts = told.get(address, {})
        minor = facts.get("Device Minor", "")
        device = seen.get(address, PciDevice(address))
        gpus.append(
            Gpu(
                index,
                facts.get("Model", ""),
                facts.get("GPU UUID", ""),
                address,
                int(minor) if minor.isascii() and minor.isdigit() else None,
                numa=device.numa,
                cpus=parse_cpus(tree.read_text(f"{PCI}/{address}/local_cpulist")),
                link=device.link,
            )
        )
    return tuple(gpus), notes


def _fields(text: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, colon, value in pairs if colon}


def _numa_nodes(tree: HostTree) -> tuple[NumaNode, ...]:
    found = []
    for name in tree.listdir("/sys/devices/system/node"):
        match = re.fullmatch(r"node(\d{1,5})", name, re.ASCII)
        if match:
            text = tree.read_text(f"/sys/devices/system/node/{name}/cpulist")
            found.append(NumaNode(int(match[1]), parse_cpus(text) or ()))
    return tuple(sorted(found, key=lambda node: node.index))


def _siblings(tree: HostTree, online: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    cores: set[tuple[int, ...]] = set()
    covered: set[int] = set()
    for cpu in online[:_MOST_CPUS]:
        if cpu in covered:
            continue
        base = f"/sys/devices/system/cpu/cpu{cpu}/topology"
        text = tree.read_text(f"{base}/thread_siblings_list")
        core = parse_cpus(text) or (cpu,)
        if text is None:
            return ()  # not told for one, not told for all
        cores.add(core)
        covered.update(core)
    return tuple(sorted(cores))


def _available(tree: HostTree) -> tuple[int, ...] | None:
    """Return the CPUs of this process's control group; None where none is told.

    Not its affinity: a launcher's binding is what a placement shall improve.
    """
    for line in (tree.read_text("/proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            base, name = "/sys/fs/cgroup", "cpuset.cpus.effective"
        elif "cpuset" in controllers.split(","):
            base, name = "/sys/fs/cgroup/cpuset", "cpuset.effective_cpus"
        else:
            continue
        # Inside a container the path may be the host's: then the nearest one above it counts.
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts), -1, -1):
            cpus = parse_cpus(tree.read_text("/".join([base, *parts[:depth], name])))
            if cpus is not None:
                return cpus
    return None


def _software(tree: HostTree) -> dict[str, str]:
    """Return versions that nodes of one job should share."""
    found = {"kernel": (tree.read_text("/proc/sys/kernel/osrelease") or "").strip()}
    version = tree.read_text(f"{_NVIDIA}/version") or ""
    match = re.search(r"Kernel Module(?: for \S+)?\s+(\d[\d.]+)", version)
    found["driver"] = match[1] if match else ""
    for module in ("nvidia_peermem", "nv_peer_mem", "gdrdrv", "ib_core", "mlx5_core"):
        base = f"/sys/module/{module}"
        if tree.exists(f"{base}/."):
            loaded = (tree.read_text(f"{base}/version") or "").strip()
            found[f"module {module}"] = loaded or "loaded"
    return {name: value for name, value in found.items() if value}


def _is_virtual(tree: HostTree) -> bool | None:
    """Return whether a hypervisor runs this machine; None where nothing tells."""
    told = [
        (tree.read_text(f"/sys/class/dmi/id/{name}") or "").strip()
        for name in ("sys_vendor", "product_name", "board_vendor")
    ]
    if _HYPERVISORS.search(" ".join(told)):
        return True
    cpu = tree.read_text("/proc/cpuinfo") or ""
    flags = re.search(r"^flags\s*:(.*)$", cpu, re.MULTILINE)
    if flags:
        return " hypervisor" in f"{flags[1]} "
    return False if any(told) else None
