"""Ports of the compute fabric: state, rate, MTU, subnet manager, GIDs.

Ports of other roles (management, storage) are no fault of the job's, up or down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec

from rdmakit.doctor.context import Context
from rdmakit.doctor.facts import compute_ports, made_by_software
from rdmakit.doctor.model import Check, Finding, Status
from rdmakit.topology.fabric import FabricPort, same_card
from rdmakit.topology.health import kind_of, usual_rates
from rdmakit.topology.model import Nic, Port
from rdmakit.topology.parsers.gids import address_of, choose_gid
from rdmakit.topology.words import pcie_gbytes

__all__ = ["CHECKS"]

_NO_PORT = "no port of the compute fabric is known"
_BAD_LIDS = (0, 0xFFFF)


def _down(own: FabricPort) -> bool:
    return own.health.healthy is False and not own.health.degraded


def _netdev(port: Port | None) -> str:
    return (port.netdev if port is not None else None) or "NETDEV"


def _state_cure(context: Context, nic: Nic, port: Port | None) -> str:
    """Return the first thing to do with a port that is down."""
    name = nic.name or nic.label
    phys = ((port.phys if port else None) or "").lower().replace(" ", "")
    ethernet = port is not None and port.link_layer == "Ethernet"
    state = ((port.state if port else None) or "").upper()
    if "INIT" in state:
        return "start a subnet manager (opensm on one host, or the switch's own); sminfo shows it"
    if port is not None and port.active and port.link_up is False:
        return f"ibstat {name} and mlxlink -d {name}, until both states agree; reload the driver"
    if made_by_software(context, nic) and ethernet:  # Soft-RoCE follows its net device
        return f"ip link set dev {_netdev(port)} up; rdma link shows the state"
    if ethernet and phys in ("disabled", "", "linkup"):
        return (
            f"ip link set dev {_netdev(port)} up; if it stays down: cable, transceiver and switch "
            f"port (mlxlink -d {name})"
        )
    if phys == "disabled":
        return (
            f"ibportstate -C {name} enable, or mlxlink -d {name} -a UP; then cable and switch port"
        )
    return (
        f"mlxlink -d {name} (or ethtool -m {_netdev(port)}) shows cable and transceiver: reseat "
        "them, look at the switch port; restart what drives the port after that"
    )


def _state(context: Context) -> Iterator[Finding]:
    every = list(compute_ports(context))
    if not every:
        yield _no_port(context)
        return
    down = [entry for entry in every if _down(entry[0])]
    usable = [entry for entry in every if entry[0].usable and entry[0].health.healthy is not None]
    for own, nic, port in down:
        beside = any(same_card(nic, other) for _, other, _ in usable)
        # The free port of a two-port card is no lost rail.
        rail = not usable or (len(usable) > 1 and not beside)
        yield STATE.finding(
            Status.FAIL if rail else Status.WARN,
            own.health.why if usable else f"{own.health.why}; no port is usable",
            subject=own.title,
            expected="Active, LinkUp",
            cure=_state_cure(context, nic, port),
            urgency=11 if not usable else 24 if rail else 65,
        )
    unknown = [own.title for own, _, _ in every if own.health.healthy is None]
    if unknown:
        yield STATE.finding(
            Status.UNKNOWN, f"the state of {_names(unknown)} is not in these sources"
        )
    elif not down:
        yield STATE.finding(Status.OK, f"{len(every)} port(s) up: {context.fabric.verdict}")


def _names(titles: list[str]) -> str:
    return ", ".join(titles[:8]) + (f" and {len(titles) - 8} more" if len(titles) > 8 else "")


def _no_port(context: Context) -> Finding:
    reasons = Counter(port.reason for port in context.fabric.ports)
    told = "; ".join(reason for reason, _ in reasons.most_common(3))
    return STATE.finding(
        Status.WARN,
        f"{_NO_PORT}: {told or 'no device has a port'}",
        expected="one InfiniBand or RoCE port",
        cure="ibv_devinfo -v shows what the devices are; RDMAKIT_NICS names the ports to use",
        urgency=40,
    )


def _rate(context: Context) -> Iterator[Finding]:
    rates: Counter[float] = Counter()
    bad = 0
    known = usual_rates(context.machine.nics)
    for own, nic, port in compute_ports(context):
        if port is None or not port.active or not port.speed_gbps:
            continue
        rates[port.speed_gbps] += 1
        usual = known.get(kind_of(nic, port))
        if usual and port.speed_gbps > usual and nic.board and own.health.healthy:
            bad += 1  # which of them are right, the rates do not tell
            yield RATE.finding(
                Status.WARN,
                f"{port.speed_gbps:g} Gb/s, where most cards of the same board ({nic.board}) run "
                f"at {usual:g}: those lost lanes, or the other end is slower",
                subject=own.title,
                expected="one rate on equal cards",
                cure="mlxlink -d DEVICE -m -c on the slower ones shows lanes, cable and what the "
                "switch port offers",
                urgency=23,
            )
        narrow = port.link_layer == "InfiniBand" and port.width == "1X"
        if own.health.degraded or narrow:
            bad += 1
            lost = own.health.healthy is False and usual and port.speed_gbps <= usual / 2
            yield RATE.finding(
                Status.FAIL if lost else Status.WARN,
                own.health.why
                if own.health.degraded
                else f"{port.speed_gbps:g} Gb/s on one lane: the link lost the others",
                subject=own.title,
                expected=f"{usual:g} Gb/s" if own.health.degraded else "4 lanes",
                cure=f"mlxlink -d {nic.name or nic.label} -m -c shows lanes, cable and errors: "
                "reseat or replace the cable, then look at the switch port's speed",
                urgency=23,
            )
    if not rates:
        yield RATE.finding(Status.SKIPPED, "no port of the compute fabric is known to be up")
    elif not bad:
        told = ", ".join(f"{count} x {rate:g} Gb/s" for rate, count in rates.items())
        yield RATE.finding(Status.OK, f"{told}{_narrow_slot(context)}")


def _narrow_slot(context: Context) -> str:
    """Return a remark on cards whose PCIe link carries less than their port, by design."""
    for own, nic, port in compute_ports(context):
        link = nic.link
        carries = pcie_gbytes(link.speed, link.width)
        rate = port.speed_gbps if port is not None else None
        if carries and rate and carries * 8 < 0.9 * rate:
            return (
                f"; PCIe {link.describe()} carries {carries * 8:.0f} of {own.title}'s {rate:g} Gb/s"
            )
    return ""


def _mtu(context: Context) -> Iterator[Finding]:
    told: Counter[str] = Counter()
    bad, up = 0, 0
    for own, _, port in compute_ports(context):
        if port is None or not port.active:
            continue
        up += 1
        ethernet = port.link_layer == "Ethernet"
        small = port.active_mtu and port.max_mtu and port.active_mtu < port.max_mtu
        # 4096 bytes and the headers of RoCE v2 need 4200 on the wire.
        narrow = ethernet and not port.active_mtu and port.netdev_mtu and port.netdev_mtu < 4200
        if small or narrow:
            bad += 1
            now = f"MTU {port.active_mtu} of {port.max_mtu}" if small else ""
            device = f"net device {_netdev(port)} has MTU {port.netdev_mtu}" if narrow else ""
            yield MTU.finding(
                Status.WARN,
                now or device,
                subject=own.title,
                expected=f"{port.max_mtu or 4096}, equal on all hosts and switches",
                cure=f"ip link set dev {_netdev(port)} mtu 9000 on all hosts, after the switches "
                "allow it"
                if ethernet
                else "mtu=5 in the subnet manager's partition (opensm: partitions.conf "
                "'Default=0x7fff, ipoib, mtu=5 : ALL=full;'), then restart it",
                urgency=58,
            )
        elif port.active_mtu or port.netdev_mtu:
            told[f"{port.active_mtu or port.netdev_mtu}"] += 1
    if not up:
        yield MTU.finding(Status.SKIPPED, "no port of the compute fabric is known to be up")
    elif not told and not bad:
        yield MTU.finding(Status.UNKNOWN, "no source tells the ports' MTU (ibv_devinfo does)")
    elif not bad:
        yield MTU.finding(Status.OK, ", ".join(f"{mtu} on {n}" for mtu, n in told.items()))


def _subnet(context: Context) -> Iterator[Finding]:
    good: list[str] = []
    bad, seen = 0, 0
    for own, _, port in compute_ports(context):
        if port is None or port.link_layer != "InfiniBand":
            continue
        seen += 1
        waits = "INIT" in (port.state or "").upper()
        lost = port.active and (port.lid in _BAD_LIDS or port.sm_lid in _BAD_LIDS)
        if waits or lost:
            bad += 1
            yield SUBNET.finding(
                Status.FAIL,
                "waits for a subnet manager (Initializing)"
                if waits
                else f"LID {port.lid}, subnet manager's LID {port.sm_lid}",
                subject=own.title,
                expected="a LID, given by a subnet manager",
                cure="systemctl start opensm on one host of the fabric, or the switch's own "
                "subnet manager; sminfo shows it",
                urgency=13,
            )
        elif port.active and port.sm_lid is not None:
            good.append(str(port.sm_lid))
    if not seen:
        yield SUBNET.finding(Status.SKIPPED, "no InfiniBand port: Ethernet has no subnet manager")
    elif not bad and good:
        managers = ", ".join(sorted(set(good)))
        yield SUBNET.finding(Status.OK, f"{len(good)} port(s); subnet manager at LID {managers}")
    elif not bad:
        yield SUBNET.finding(Status.UNKNOWN, "no active port's LIDs are in these sources")


def _asked_index(context: Context) -> tuple[str, int] | None:
    for name in ("UCX_IB_GID_INDEX", "NCCL_IB_GID_INDEX"):
        value = context.environ.get(name, "").strip()
        if value.isascii() and value.isdigit():
            return name, int(value)
    return None


def _is_roce(port: Port) -> bool:
    if port.link_layer is None:
        return any((gid.kind or "").startswith("RoCE") for gid in port.gids)
    return port.link_layer == "Ethernet"


def _gid(context: Context) -> Iterator[Finding]:
    chosen: Counter[str] = Counter()
    unknown: list[str] = []
    bad: list[Finding] = []
    seen = 0
    asked = _asked_index(context)
    for own, _, port in compute_ports(context):
        if port is None or port.active is False or not _is_roce(port):
            continue
        seen += 1
        if not port.gids:
            unknown.append(own.title)
            continue
        finding = _gid_of(own, port, asked)
        if finding is not None:
            bad.append(finding)
        else:
            chosen[str(choose_gid(port)[0])] += 1
    for finding in bad:  # a job can do without a port whose equals are good
        grave = finding.status is Status.FAIL and chosen
        yield msgspec.structs.replace(finding, status=Status.WARN) if grave else finding
    if not seen:
        yield GID.finding(Status.SKIPPED, "no RoCE port is up: InfiniBand uses GID 0")
    elif unknown:
        yield GID.finding(Status.UNKNOWN, f"the GID table of {_names(unknown)} is not known")
    elif not bad:
        told = ", ".join(f"{index} on {count}" for index, count in chosen.items())
        yield GID.finding(Status.OK, f"RoCE v2 GID index {told} port(s)")


def _gid_of(own: FabricPort, port: Port, asked: tuple[str, int] | None) -> Finding | None:
    """Return what is wrong with a port's table, or with the index that a setting asks for."""
    best, why = choose_gid(port)
    if best is None and all(gid.kind is None for gid in port.gids):
        return GID.finding(
            Status.UNKNOWN,
            f"the types of the GIDs are not in these sources: {why}",
            subject=own.title,
        )
    if best is None:
        v1 = "no RoCE v2" in why
        return GID.finding(
            Status.FAIL if not v1 else Status.WARN,
            why,
            subject=own.title,
            expected="a RoCE v2 GID with a routable address",
            cure="cma_roce_mode -d DEVICE -p 1 -m 2; the card or driver may know RoCE v1 alone"
            if v1
            else f"ip addr add ADDRESS/PREFIX dev {_netdev(port)}",
            urgency=19,
        )
    if asked is None:
        return None
    name, index = asked
    gid = next((gid for gid in port.gids if gid.index == index), None)
    address = address_of(gid.gid) if gid is not None else None
    wrong = (
        "is not in the table"
        if gid is None
        else f"is {gid.kind}"
        if gid.kind not in ("RoCE v2", None)
        else "is a link-local address"
        if address is not None and address.is_link_local
        else ""
    )
    if not wrong:
        return None
    return GID.finding(
        Status.FAIL if gid is None else Status.WARN,
        f"{name}={index}, which {wrong}; index {best} serves ({why})",
        subject=own.title,
        expected=f"{name}={best}, or not set",
        cure=f"unset {name}",
        urgency=19,
    )


STATE = Check(
    "rdma.state",
    "State of the compute ports",
    "A rail that is down leaves its GPUs without a NIC of their own, or the node without RDMA.",
    _state,
    needs=("rdma",),
)
RATE = Check(
    "rdma.rate",
    "Rate of the compute ports",
    "An all-reduce over all rails runs at the slowest rail's pace.",
    _rate,
    needs=("rdma",),
)
MTU = Check(
    "rdma.mtu",
    "MTU of the compute ports",
    "Small packets cost a few percent; two ends that differ hang or fail with large messages.",
    _mtu,
    needs=("rdma",),
)
SUBNET = Check(
    "rdma.subnet",
    "Subnet manager",
    "Without a LID from the subnet manager an InfiniBand port carries nothing.",
    _subnet,
    needs=("rdma",),
)
GID = Check(
    "rdma.gid",
    "GID table (RoCE)",
    "RoCE v2 needs a GID with a routable address; a wrong index times out while it connects.",
    _gid,
    needs=("rdma",),
)

CHECKS = (STATE, RATE, MTU, SUBNET, GID)
