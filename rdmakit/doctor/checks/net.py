"""The node's network: the interface that TCP would take, its MTU, names, packet filters."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

from rdmakit.doctor.context import Context
from rdmakit.doctor.interfaces import Interface, tcp_candidates
from rdmakit.doctor.job import spread, usable_ports
from rdmakit.doctor.model import Check, Finding, Status
from rdmakit.doctor.software import Software, software, yes
from rdmakit.drivers.ucx_policy import version_tuple
from rdmakit.topology.netdevices import read_net_devices

__all__ = ["CHECKS", "tcp_choice"]

_BRIDGES_SKIPPED = (1, 16)
"""From this UCX on its tcp leaves bridges out (UCX_TCP_BRIDGE_ENABLE=n)."""


def tcp_choice(context: Context) -> list[Interface]:
    """Return the interfaces that UCX's tcp would use here, its first choice first. Local."""
    own = software(context)
    text = context.environ.get("UCX_NET_DEVICES")
    named = read_net_devices(text)[0] if text is not None else None
    return tcp_candidates(own.interfaces, named, bridges=_takes_bridges(own, context))


def _takes_bridges(own: Software, context: Context) -> bool:
    told = yes(context.environ, "UCX_TCP_BRIDGE_ENABLE")
    if told is not None:
        return told
    if own.ucx is not None and own.ucx.names:
        return "UCX_TCP_BRIDGE_ENABLE" not in own.ucx.names
    version = version_tuple(own.ucx_version)
    return bool(version) and version < _BRIDGES_SKIPPED


def _interface(context: Context) -> Iterator[Finding]:
    own = software(context)
    if not own.interfaces:
        yield INTERFACE.finding(Status.SKIPPED, "no network interfaces among the files")
        return
    found = tcp_choice(context)
    rdma = usable_ports(context)
    good = [one for one in found if not one.local and not one.tunnel]
    if not found:
        if "UCX_NET_DEVICES" in context.environ:
            yield INTERFACE.finding(
                Status.SKIPPED, "UCX_NET_DEVICES names no interface for tcp; see ucx.net_devices"
            )
            return
        addressed = [one for one in own.interfaces if one.address and not one.loopback]
        if not addressed or rdma:
            yield INTERFACE.finding(Status.SKIPPED, "no interface with an IPv4 address")
        else:
            yield INTERFACE.finding(
                Status.WARN if not spread(context) else Status.FAIL,
                "none of " + ", ".join(one.describe() for one in addressed) + " is up",
                expected="an interface that is up",
                cure=f"ip link set {addressed[0].name} up",
                urgency=12,
            )
        return
    bad = [one for one in found if one.local]
    named = "UCX_NET_DEVICES" in context.environ
    if bad and (bad[0] is found[0] or spread(context)) and not (rdma and not named):
        first = bad[0] is found[0]
        other = next((one.name for one in good), "the interface that joins the hosts")
        yield INTERFACE.finding(
            Status.FAIL if first and spread(context) else Status.WARN,
            f"UCX's tcp {'takes' if first else 'may take'} {bad[0].describe()}: it joins "
            "containers or guests of this host only, and other hosts have the same address",
            subject=bad[0].name,
            expected=good[0].describe() if good else "an interface that joins the hosts",
            cure=f"export UCX_NET_DEVICES={','.join(rdma) or other}",
            urgency=12,
        )
        return
    also = f"; also {', '.join(one.name for one in found[1:])}" if found[1:] else ""
    over = f"RDMA over {', '.join(rdma)}; tcp: " if rdma else ""
    yield INTERFACE.finding(Status.OK, f"{over}{found[0].describe()}{also}")


def _route(context: Context) -> Iterator[Finding]:
    own = software(context)
    defaults = [one for one in own.interfaces if one.default]
    found = [one for one in tcp_choice(context) if not one.local]
    if not own.interfaces:
        yield ROUTE.finding(Status.SKIPPED, "no network interfaces among the files")
    elif not defaults:
        yield ROUTE.finding(Status.OK, "no default route: a network of its own")
    else:
        more = ""
        if found and not found[0].default:
            more = f"; UCX's tcp takes {found[0].name}, which is faster"
        yield ROUTE.finding(Status.OK, f"through {', '.join(o.name for o in defaults)}{more}")


def _mtu(context: Context) -> Iterator[Finding]:
    found = [one for one in tcp_choice(context) if one.mtu]
    if not found:
        yield MTU.finding(Status.SKIPPED, "no interface with a known MTU")
        return
    small = [one for one in found if one.mtu and one.mtu < 1280 and not one.tunnel]
    for one in small:
        yield MTU.finding(
            Status.WARN,
            f"{one.describe()}: MTU {one.mtu}",
            subject=one.name,
            expected="1500, or 9000 on a network of its own",
            cure=f"ip link set {one.name} mtu 1500",
            urgency=45,
        )
    roce = {
        port.netdev: port.netdev_mtu
        for nic in context.machine.nics
        for port in nic.ports
        if port.link_layer == "Ethernet" and port.netdev and port.netdev_mtu
    }
    if not small:
        words = ", ".join(f"{one.name} {one.mtu}" for one in found)
        rdma = ", ".join(f"{name} {mtu}" for name, mtu in roce.items())
        yield MTU.finding(Status.OK, words + (f"; RoCE: {rdma}" if rdma else ""))


def _hostname(context: Context) -> Iterator[Finding]:
    host = context.read("/proc/sys/kernel/hostname") or context.machine.host
    hosts = context.read("/etc/hosts")
    if not host or hosts is None:
        yield HOSTNAME.finding(Status.SKIPPED, "no /etc/hosts, or no host name, among the files")
        return
    own = _addresses_of(host, hosts)
    loop = [a for a in own if ipaddress.ip_address(a).is_loopback]
    real = [a for a in own if a not in loop]
    best = next((one.address for one in tcp_choice(context) if not one.local), "ADDRESS")
    if host in ("localhost", "localhost.localdomain", "(none)"):
        yield HOSTNAME.finding(
            Status.WARN if spread(context) is not True else Status.FAIL,
            f"this host is called {host!r}: others cannot tell it from themselves",
            expected="a name of its own",
            cure="hostnamectl set-hostname NAME",
            urgency=15,
        )
    elif loop and not real and spread(context):
        yield HOSTNAME.finding(
            Status.WARN,
            f"{host} is {loop[0]} in /etc/hosts: what asks for its own address, as MPI launchers "
            "do, tells other hosts this one",
            expected=f"{host} at an address that other hosts reach",
            cure=f"in /etc/hosts: '{best} {host}' in place of '{loop[0]} {host}'",
            urgency=30,
        )
    elif loop and not real:
        yield HOSTNAME.finding(Status.OK, f"{host} is {loop[0]} here, which serves on one host")
    elif real:
        yield HOSTNAME.finding(Status.OK, f"{host} is {real[0]} in /etc/hosts")
    else:
        yield HOSTNAME.finding(Status.OK, f"{host} is not in /etc/hosts: DNS tells its address")


def _addresses_of(host: str, text: str) -> list[str]:
    found = []
    for line in text.splitlines():
        address, *names = line.partition("#")[0].split() or [""]
        if host not in names and host.partition(".")[0] not in names:
            continue
        try:
            ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            continue
        found.append(address.partition("%")[0])
    return found


def _firewall(context: Context) -> Iterator[Finding]:
    """Only whether there are rules: what they do to a packet is for ``net.reach`` to find out."""
    told, refused = [], []
    for command in (("nft", "list", "ruleset"), ("iptables-save",), ("ip6tables-save",)):
        result = context.runner(command, 10.0)
        if not result.ok:
            if not result.absent:
                why = result.error or next(iter(result.stderr.strip().splitlines()), "")
                refused.append(f"{command[0]}: {why or f'exit status {result.rc}'}")
            continue
        rules = _rules(result.stdout)
        drops = len(re.findall(r"\b(drop|reject)\b", result.stdout, re.I))
        told.append((command[0], rules, drops))
    with_rules = [
        f"{name}: {rules} rules, {drops} drop or reject" for name, rules, drops in told if rules
    ]
    if with_rules:
        text = "; ".join(with_rules)
        yield FIREWALL.finding(
            Status.OK,
            f"there are packet filter rules ({text}); net.reach tells whether they matter",
        )
    elif told:
        yield FIREWALL.finding(Status.OK, "no packet filter rules")
    elif refused:
        text = "packet filter rules are not readable here (needs root?)"
        yield FIREWALL.finding(Status.UNKNOWN, f"{text}: {'; '.join(refused)}")
    else:
        yield FIREWALL.finding(
            Status.SKIPPED, "neither nft nor iptables is here to tell packet filter rules"
        )


def _rules(text: str) -> int:
    saved = len(re.findall(r"^-A ", text, re.M))
    if saved:
        return saved
    plain = [line.strip() for line in text.splitlines()]
    return sum(
        bool(line)
        and not line.endswith(("{", "}"))
        and not line.startswith(("#", ":", "*", "type ", "COMMIT", "policy "))
        for line in plain
    )


INTERFACE = Check(
    "net.interface",
    "Interface of UCX's tcp",
    "UCX takes the fastest interface that is up, which may lead nowhere outside the host.",
    _interface,
    seconds=60,
)
ROUTE = Check(
    "net.route",
    "Default route",
    "UCX prefers the interface of the default route, of equally fast ones.",
    _route,
    seconds=60,
)
MTU = Check(
    "net.mtu",
    "MTU of the interfaces",
    "Small packets cost time; packets larger than a switch takes vanish.",
    _mtu,
    seconds=60,
)
HOSTNAME = Check(
    "net.hostname",
    "Address of the host's own name",
    "Debian writes the host's name at 127.0.1.1: whoever asks for its address tells others that.",
    _hostname,
    seconds=60,
)
FIREWALL = Check(
    "net.firewall",
    "Packet filter rules",
    "A firewall that drops packets between nodes makes a job hang; rules alone say nothing yet.",
    _firewall,
    needs=("live",),
)

CHECKS = (INTERFACE, ROUTE, MTU, HOSTNAME, FIREWALL)
