"""What programs need to use RDMA devices: modules, device files, firmware."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rdmakit.discovery.sysfs import PCI
from rdmakit.doctor.context import Context
from rdmakit.doctor.facts import compute_ports, in_container, kernel_log, loaded, main_nics
from rdmakit.doctor.model import Check, Finding, Status
from rdmakit.topology.model import Nic, normal_address

__all__ = ["CHECKS"]

_VERBS = "/sys/class/infiniband_verbs"
_DEV = "/dev/infiniband"
_VENDORS = {"0x15b3": "mlx5_ib"}
"""Makers whose network cards are RDMA devices, and the module that makes them so."""
_CLASSES = ("0200", "0207")
_SHARE = (
    "docker run --device=/dev/infiniband --cap-add=IPC_LOCK (Kubernetes: the RDMA device plugin)"
)


def _cards(context: Context) -> list[tuple[str, str]]:
    """Return (address, module) of cards on the PCI bus that could do RDMA."""
    found = []
    for address in context.tree.listdir(PCI):
        vendor = context.read(f"{PCI}/{address}/vendor") or ""
        code = (context.read(f"{PCI}/{address}/class") or "")[2:6]
        if vendor in _VENDORS and code in _CLASSES and normal_address(address):
            found.append((address, _VENDORS[vendor]))
    return found


_ELSEWHERE = ("given to a virtual machine", "virtual function")


def _driver(context: Context, address: str) -> str:
    """Return the driver that a card is bound to, or nothing."""
    path = f"{PCI}/{address}/driver"
    target = context.tree.resolve(path).rpartition("/")[2]
    return "" if target == "driver" else target


def _why_idle(context: Context, address: str, *, drivers: bool) -> str:
    """Return why a card rightly has no RDMA device of its own; nothing where that is a fault.

    ``drivers``: whether a driver that is not in these files is known not to be there.
    """
    base = f"{PCI}/{address}"
    nets = context.tree.listdir(f"{base}/net")
    if any(context.tree.exists(f"{base}/net/{net}/master/bonding/.") for net in nets):
        return "member of a bond"
    driver = _driver(context, address)
    if driver.startswith("vfio"):
        return _ELSEWHERE[0]
    if context.tree.exists(f"{base}/physfn/."):
        return _ELSEWHERE[1]
    if in_container(context):
        return "perhaps not of this container"
    return "" if nets or driver or drivers else "of which nothing more is known"


def _devices(context: Context) -> Iterator[Finding]:
    nics = context.machine.nics
    cards = _cards(context)
    # All are asked: of a directory of files the others tell whether it has drivers at all.
    bound = [_driver(context, address) for address, _ in cards]
    drivers = context.live or any(bound)
    named = {nic.pci for nic in nics}
    idle = {
        address: _why_idle(context, address, drivers=drivers)
        for address, _ in cards
        if address not in named
    }
    lost = [
        address for address, why in idle.items() if (why not in _ELSEWHERE if not nics else not why)
    ]
    if lost:
        module = cards[0][1]
        there = loaded(context, module)
        boxed = not nics and there and in_container(context)
        yield DEVICES.finding(
            Status.FAIL if context.machine.gpus and not nics else Status.WARN,
            f"{len(lost)} card(s) on the PCI bus ({', '.join(lost[:4])}), and no RDMA device"
            + (f" of theirs beside the {len(nics)} of others" if nics else "")
            + (f": {module} is not loaded" if there is False else ""),
            expected="an RDMA device for each card in /sys/class/infiniband",
            cure="in a container: the network namespace has none of its own (docker run "
            "--network=host, or rdma system set netns shared on the host)"
            if boxed
            else f"modprobe {module} ib_uverbs rdma_ucm; dmesg | grep mlx5 says why not",
            urgency=9,
        )
    elif nics or idle:
        told = ", ".join(f"{count} {why}" for why, count in Counter(idle.values()).items())
        yield DEVICES.finding(
            Status.OK if nics else Status.SKIPPED,
            f"{len(nics)} RDMA device(s)"
            + (f"; {len(idle)} card(s) without one: {told}" if idle else ""),
        )
    elif context.tree.listdir("/sys/class") or context.tree.listdir(PCI):
        yield DEVICES.finding(Status.SKIPPED, "no RDMA device and no card for one: TCP alone")
    else:
        yield DEVICES.finding(Status.SKIPPED, "no RDMA device is in these sources")


def _modules(context: Context) -> Iterator[Finding]:
    wanted = {"ib_uverbs": "programs reach RDMA devices by it", "rdma_ucm": "UCX's rdmacm uses it"}
    states = {name: loaded(context, name) for name in wanted}
    if context.tree.listdir(_VERBS):
        states["ib_uverbs"] = True  # built in, it may have no directory of its own
    if context.tree.exists(f"{_DEV}/rdma_cm"):
        states["rdma_ucm"] = True
    missing = [name for name, state in states.items() if state is False]
    if missing:
        yield MODULES.finding(
            Status.FAIL if "ib_uverbs" in missing else Status.WARN,
            "; ".join(f"{name} is not loaded: {wanted[name]}" for name in missing),
            expected="loaded",
            cure=f"modprobe {' '.join(missing)}, and /etc/modules-load.d for the next boot",
            urgency=10 if "ib_uverbs" in missing else 50,
        )
    elif None in states.values():
        hidden = ", ".join(name for name, state in states.items() if state is None)
        yield MODULES.finding(Status.UNKNOWN, f"whether {hidden} is loaded is not known")
    else:
        yield MODULES.finding(Status.OK, f"{', '.join(wanted)} loaded")


def _why_closed(context: Context, path: str, there: Sequence[str]) -> str | None:
    """Return why a device file of those ``there`` is of no use; None: it is, or is not known."""
    if path.rpartition("/")[2] not in there:
        return "not here"
    return context.tree.why_closed(path) if context.live else None


def _files(context: Context) -> Iterator[Finding]:
    devices: dict[str, str] = {}
    for name in context.tree.listdir(_VERBS):
        device = context.read(f"{_VERBS}/{name}/ibdev")
        if device and name.startswith("uverbs"):
            devices[device] = f"{_DEV}/{name}"
    there = context.tree.listdir(_DEV)
    if not devices:
        yield FILES.finding(Status.UNKNOWN, f"{_VERBS} does not tell which file is whose")
        return
    nics = [nic for nic in context.machine.nics if nic.name in devices]
    own = {nic.label for _, nic, _ in compute_ports(context)}
    judged = [nic for nic in nics if nic.label in own] or nics
    every = {nic.label: _why_closed(context, devices[nic.name or ""], there) for nic in nics}
    closed = {
        devices[nic.name or ""]: why for nic in judged if (why := every[nic.label]) is not None
    }
    if closed:
        denied = any("denied" in why for why in closed.values())
        yield FILES.finding(
            Status.FAIL if len(closed) == len(judged) else Status.WARN,
            ", ".join(f"{path}: {why}" for path, why in list(closed.items())[:6])
            + ("" if len(closed) == len(judged) else f"; {len(judged)} NICs carry the job"),
            expected="device files that a program may open",
            cure=f"chmod 0666 {_DEV}/uverbs* (udev rule: 90-ib.rules, or the group rdma)"
            if denied
            else _SHARE
            if in_container(context) or not there
            else "modprobe ib_uverbs; udevadm trigger",
            urgency=9,
        )
    else:
        how = "there and open" if context.live else "there"
        other = sum(why is not None for why in every.values())
        yield FILES.finding(
            Status.OK,
            f"{len(judged)} device file(s) {how}"
            + (f"; {other} of NICs that do not carry the job cannot be opened" if other else ""),
        )


def _firmware(context: Context) -> Iterator[Finding]:
    groups: dict[tuple[str, str], list[Nic]] = {}
    for nic in context.machine.nics:
        if nic.model and nic.firmware:
            groups.setdefault((nic.model, nic.board or ""), []).append(nic)
    odd = 0
    for (model, _), nics in groups.items():
        counts = Counter(nic.firmware for nic in nics)
        usual = max(counts, key=lambda version: (counts[version], version or ""))
        others = [nic for nic in nics if nic.firmware != usual]
        if not others:
            continue
        odd += 1
        addresses = " ".join(nic.pci or nic.name or nic.label for nic in others[:8])
        yield FIRMWARE.finding(
            Status.WARN,
            ", ".join(f"{nic.name or nic.label}: {nic.firmware}" for nic in others[:8])
            + f", where {counts[usual]} equal card(s) ({model}) have {usual}",
            expected=f"one version on equal cards: {usual}",
            cure=f"mlxfwmanager -d DEVICE --online -u for {addresses}, then mlxfwreset -d DEVICE "
            "reset or a reboot",
            urgency=62,
        )
    if not groups:
        yield FIRMWARE.finding(Status.UNKNOWN, "models and firmware are not in these sources")
    elif not odd:
        told = ", ".join(f"{model} {nics[0].firmware}" for (model, _), nics in groups.items())
        yield FIRMWARE.finding(Status.OK, told)


def _cables(context: Context) -> Iterator[Finding]:
    log = kernel_log(context)
    main = main_nics(context)
    told = [(pci, why) for pci, why in log.cables if pci in main]
    if not log.known:
        yield CABLES.finding(Status.UNKNOWN, "the kernel's log cannot be read: dmesg as root tells")
        return
    for pci, why in told:
        nic = context.machine.nic(pci)
        name = (nic.name or nic.label) if nic is not None else pci
        yield CABLES.finding(
            Status.WARN,
            f"the card says: cable error, {why}",
            subject=name,
            expected="a cable that the card knows and reads",
            cure=f"mlxlink -d {name} -m -c: reseat or replace cable and transceiver; one that is "
            "too hot needs air",
            urgency=24,
        )
    if not told:
        yield CABLES.finding(Status.OK, "no cable error in the kernel's log")


DEVICES = Check(
    "rdma.devices",
    "RDMA devices",
    "A card whose RDMA module is not loaded is an ordinary net device: everything goes over TCP.",
    _devices,
)
MODULES = Check(
    "rdma.modules",
    "RDMA modules",
    "Programs reach RDMA devices through these modules of the kernel.",
    _modules,
    needs=("rdma",),
)
FILES = Check(
    "rdma.uverbs",
    "Device files of RDMA",
    "A container without them, or a user who may not open them, has no RDMA, and UCX takes TCP "
    "without a word.",
    _files,
    needs=("rdma",),
)
FIRMWARE = Check(
    "rdma.firmware",
    "Firmware of equal cards",
    "Equal cards of different firmware behave differently under load; the odd one is found last.",
    _firmware,
    needs=("rdma",),
)

CABLES = Check(
    "rdma.cables",
    "Cables and transceivers",
    "A card that cannot read its transceiver, or finds it too hot, switches the port off.",
    _cables,
    needs=("rdma",),
)

CHECKS = (DEVICES, MODULES, FILES, FIRMWARE, CABLES)
