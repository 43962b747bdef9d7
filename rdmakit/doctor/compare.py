"""What must be equal, or must differ, between the nodes of a job. Pure, over gathered facts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from rdmakit.doctor.context import Context
from rdmakit.doctor.model import Check, Finding, Status
from rdmakit.doctor.node_facts import NodeFacts, node_facts
from rdmakit.topology.compare import Difference, compare, facts_of
from rdmakit.topology.fabric import classify

__all__ = ["JOB_CHECKS", "NodeFacts", "compare_nodes", "node_facts"]

_CLOCK_SECONDS = 1.0
"""Clocks further apart than this mix up logs; measured to some milliseconds."""
_MUST_FIT = ("UCX", "MPI", "rdmakit")


def compare_nodes(nodes: Sequence[NodeFacts]) -> list[Finding]:
    """Return what is wrong between nodes, and ``ok`` for each comparison that finds nothing.

    Pure: equal facts give equal findings on every rank.
    """
    if len(nodes) < 2:
        return [check.finding(Status.SKIPPED, "one node") for check in JOB_CHECKS]
    names = _names(nodes)
    found: list[Finding] = []
    for check, look in _LOOKS:
        found += list(look(check, nodes, names)) or [_agree(check, nodes)]
    return found


_TOLD: Mapping[str, tuple[str, Callable[[NodeFacts], object]]] = {
    "job.hosts": ("its name", lambda node: node.host),
    "job.addresses": ("an address that UCX's tcp would take", lambda node: node.tcp),
    "job.mtu": ("an interface with an MTU", lambda node: node.mtus or node.machine.nics),
    "job.gid": ("an RDMA device", lambda node: node.machine.nics),
    "job.versions": ("versions of UCX, MPI and Python", lambda node: node.versions),
}
"""What a node must have told for a comparison: two that told nothing do not agree."""


def _agree(check: Check, nodes: Sequence[NodeFacts]) -> Finding:
    what, told = _TOLD.get(check.id, ("anything", lambda _: True))
    known = sum(bool(told(node)) for node in nodes)
    if known < 2:
        who = "no node" if not known else "one node alone"
        return check.finding(Status.SKIPPED, f"{who} told of {what}")
    rest = f"; {len(nodes) - known} told nothing of it" if known < len(nodes) else ""
    return check.finding(Status.OK, f"{known} nodes agree{rest}")


def _names(nodes: Sequence[NodeFacts]) -> list[str]:
    """Return a name for each node; those of one name get their address or place with it."""
    every = [node.host for node in nodes]
    return [
        f"{node.host or 'node'}"
        if every.count(node.host) == 1 and node.host
        else f"{node.host or 'node'} ({_address(node) or f'node {place}'})"
        for place, node in enumerate(nodes)
    ]


def _address(node: NodeFacts) -> str:
    return node.addresses.get(node.tcp[0], "") if node.tcp else ""


def _who(places: Sequence[int], names: Sequence[str], most: int = 6) -> str:
    text = ", ".join(names[place] for place in places[:most])
    return text + (f" and {len(places) - most} more" if len(places) > most else "")


def _same_host(one: NodeFacts, other: NodeFacts) -> bool:
    """Return whether two nodes are parts of one host (virtual nodes, containers)."""
    return bool(one.boot_id) and one.boot_id == other.boot_id


def _groups(
    nodes: Sequence[NodeFacts], key: Callable[[NodeFacts], str]
) -> Iterator[tuple[str, list[int]]]:
    """Yield (value, nodes) of values that several hosts share."""
    found: dict[str, list[int]] = {}
    for place, node in enumerate(nodes):
        if value := key(node):
            found.setdefault(value, []).append(place)
    for value, places in found.items():
        first = nodes[places[0]]
        if any(not _same_host(first, nodes[other]) for other in places[1:]):
            yield value, places


def _hosts(check: Check, nodes: Sequence[NodeFacts], names: Sequence[str]) -> Iterator[Finding]:
    for host, places in _groups(nodes, lambda node: node.host):
        yield check.finding(
            Status.FAIL,
            f"{len(places)} hosts are called {host!r}: {_who(places, names)}",
            subject=host,
            expected="a name of its own for each host",
            cure="hostnamectl set-hostname NAME on all but one of them, and a line for each in DNS "
            "or /etc/hosts",
            urgency=9,
        )


def _addresses(check: Check, nodes: Sequence[NodeFacts], names: Sequence[str]) -> Iterator[Finding]:
    told = set()
    for rank in range(max((len(node.tcp) for node in nodes), default=0)):

        def at(node: NodeFacts, rank: int = rank) -> str:
            return node.addresses.get(node.tcp[rank], "") if rank < len(node.tcp) else ""

        for address, places in _groups(nodes, at):
            if address in told:
                continue
            told.add(address)
            device = nodes[places[0]].tcp[rank]
            other = next((name for name in nodes[places[0]].tcp if name != device), "DEVICE")
            yield check.finding(
                Status.WARN if rank else Status.FAIL,
                f"{address} ({device}) is the address of {_who(places, names)}: a connection to "
                "it ends on the host that makes it",
                subject=address,
                expected="an address of its own for each host",
                cure=f"export UCX_NET_DEVICES={other} (the interface that joins the hosts), or "
                f"give {device} another address",
                urgency=11,
            )


def _mtu(check: Check, nodes: Sequence[NodeFacts], names: Sequence[str]) -> Iterator[Finding]:
    told = {
        place: node.mtus[node.tcp[0]]
        for place, node in enumerate(nodes)
        if node.tcp and node.tcp[0] in node.mtus
    }
    values = sorted(set(told.values()))
    if len(values) > 1:
        parts = [
            f"{mtu} on {_who([p for p, own in told.items() if own == mtu], names)}"
            for mtu in values
        ]
        low = next(p for p, own in told.items() if own == values[0])
        device = nodes[low].tcp[0]
        yield check.finding(
            Status.WARN,
            f"the MTU of the interface that UCX's tcp takes differs: {'; '.join(parts)}",
            subject=device,
            expected="one MTU on all hosts, and no larger than the switches'",
            cure=f"ip link set {device} mtu {values[-1]} on "
            f"{_who([p for p, own in told.items() if own == values[0]], names)} (where the "
            f"switches take it), or mtu {values[0]} on the others",
            urgency=18,
        )
    for difference in _differences(nodes):
        if re.search(r"(net device|active) MTU$", difference.what):
            yield check.finding(
                Status.WARN,
                difference.describe(names),
                subject=difference.what.rpartition(" ")[0],
                expected="one MTU on all hosts",
                cure="ip link set DEVICE mtu N, the same N on all hosts (RoCE: 4200 or more)",
                urgency=19,
            )


def _gid(check: Check, nodes: Sequence[NodeFacts], names: Sequence[str]) -> Iterator[Finding]:
    setting = next(
        (
            f"{name}={node.settings[name]}"
            for node in nodes
            for name in ("UCX_IB_GID_INDEX", "NCCL_IB_GID_INDEX")
            if node.settings.get(name, "auto") not in ("auto", "-1")
        ),
        "",
    )
    for difference in _differences(nodes):
        if not difference.what.endswith("RoCE v2 GID index"):
            continue
        lacks = "none" in (difference.usual, *(value for value, _ in difference.odd))
        status = Status.FAIL if setting or lacks else Status.OK
        yield check.finding(
            status,
            difference.describe(names)
            + (f"; {setting} is right on some of them only" if setting else "")
            + ("" if status is Status.FAIL else "; harmless with UCX_IB_GID_INDEX=auto"),
            subject=difference.what.partition(" ")[0],
            expected="a RoCE v2 entry with an IP address on every host",
            cure="ip addr add ADDRESS/PREFIX dev DEVICE where there is no RoCE v2 entry"
            if lacks
            else f"unset {setting.partition('=')[0]}"
            if setting
            else "",
            urgency=17,
        )


def _differences(nodes: Sequence[NodeFacts]) -> list[Difference]:
    return compare([facts_of(node.machine, classify(node.machine)) for node in nodes])


_ELSEWHERE = re.compile(r".*(MTU|GID index|GID table)|rdmakit|Python|UCX|MPI|mpi4py|numpy|cupy.*")


def _configuration(
    check: Check, nodes: Sequence[NodeFacts], names: Sequence[str]
) -> Iterator[Finding]:
    for difference in _differences(nodes):
        if _ELSEWHERE.fullmatch(difference.what):
            continue
        yield check.finding(
            Status.WARN if difference.grave else Status.OK,
            difference.describe(names),
            subject=difference.what,
            expected=f"{difference.usual or 'none'}, as on {len(difference.usual_nodes)} node(s)",
            cure=f"set up {_who(difference.odd[0][1], names)} as the others, or leave "
            f"{'it' if len(difference.odd[0][1]) == 1 else 'them'} out of the job"
            if difference.grave
            else "",
            urgency=55,
        )


def _odd(told: Mapping[int, str]) -> tuple[str, dict[str, list[int]]]:
    """Return (usual value, places by other value); of equals the first is usual."""
    values = list(told.values())
    usual = max(values, key=values.count)
    odd: dict[str, list[int]] = {}
    for place, value in told.items():
        if value != usual:
            odd.setdefault(value, []).append(place)
    return usual, odd


def _source(name: str) -> str:
    """Return what tells the release of ``name``: the packages are Python's to tell."""
    return name if name in ("UCX", "MPI") else "Python"


def _versions_of(
    check: Check, nodes: Sequence[NodeFacts], names: Sequence[str]
) -> Iterator[Finding]:
    for name in dict.fromkeys(name for node in nodes for name in node.versions):
        told = {
            place: node.versions.get(name, "none")
            for place, node in enumerate(nodes)
            if node.versions and _source(name) not in node.untold
        }
        usual, odd = _odd(told)
        for value, places in odd.items():
            yield check.finding(
                Status.FAIL if name in _MUST_FIT else Status.WARN,
                f"{name} is {usual}, but {value} on {_who(places, names)}",
                subject=name,
                expected=f"{name} {usual} on all nodes",
                cure="start all ranks with one environment, on a file system that all nodes share"
                + (
                    f"; or on {_who(places, names)}: pip install '{name}=={usual}'"
                    if name not in ("UCX", "MPI", "Python")
                    else ": mpirun -x PATH -x LD_LIBRARY_PATH"
                ),
                urgency=16 if name in _MUST_FIT else 50,
            )
    for name in dict.fromkeys(name for node in nodes for name in node.untold):
        silent = [place for place, node in enumerate(nodes) if name in node.untold]
        yield check.finding(
            Status.UNKNOWN,
            f"the release of {name} could not be found out on {_who(silent, names)}",
            subject=name,
            expected="the same on all nodes",
        )


def _settings(check: Check, nodes: Sequence[NodeFacts], names: Sequence[str]) -> Iterator[Finding]:
    cure = "mpirun -x {0} (Open MPI), -genv {0} VALUE (MPICH), or export it for all ranks alike"
    for name in sorted({name for node in nodes for name in node.settings}):
        usual, odd = _odd({p: n.settings.get(name, "not set") for p, n in enumerate(nodes)})
        if odd:
            other = "; ".join(f"{value} on {_who(places, names)}" for value, places in odd.items())
            yield check.finding(
                Status.WARN,
                f"{name} is {usual}, but {other}",
                subject=name,
                expected="the same on all ranks",
                cure=cure.format(name),
                urgency=24,
            )
    for place, node in enumerate(nodes):
        for name, theirs in node.apart.items():
            rank, value = next(iter(theirs.items()))
            yield check.finding(
                Status.WARN,
                f"{name} differs between ranks of {names[place]}: rank {rank} has {value}, the "
                f"first rank {node.settings.get(name, 'not set')}",
                subject=name,
                expected="the same on all ranks",
                cure=cure.format(name),
                urgency=24,
            )


def _clock(check: Check, nodes: Sequence[NodeFacts], names: Sequence[str]) -> Iterator[Finding]:
    told = {place: node.clock for place, node in enumerate(nodes) if node.clock is not None}
    if not told:
        yield check.finding(Status.SKIPPED, "the clocks were not read together")
        return
    middle = sorted(told.values())[len(told) // 2]
    for place, clock in told.items():
        if abs(clock - middle) > _CLOCK_SECONDS:
            yield check.finding(
                Status.WARN,
                f"the clock of {names[place]} is {clock - middle:+.1f} s off the others'",
                subject=names[place],
                expected=f"less than {_CLOCK_SECONDS:g} s",
                cure="chronyc makestep, or systemctl enable --now chronyd (systemd-timesyncd)",
                urgency=60,
            )


def _job_check(name: str, title: str, why: str) -> Check:
    def between(_: Context) -> Iterator[Finding]:
        yield check.finding(Status.SKIPPED, "compared between nodes, not on one")

    check = Check(f"job.{name}", title, why, between, needs=("job",))
    return check


_Look = Callable[[Check, Sequence[NodeFacts], Sequence[str]], Iterator[Finding]]
_LOOKS: tuple[tuple[Check, _Look], ...] = (
    (
        _job_check(
            "hosts",
            "Names of hosts",
            "Launchers and MPI tell hosts apart by name: two of one name are taken for one node.",
        ),
        _hosts,
    ),
    (
        _job_check(
            "addresses",
            "Addresses of hosts",
            "An address that several hosts have, as docker0's, leads back to the host itself.",
        ),
        _addresses,
    ),
    (
        _job_check(
            "mtu",
            "MTU between hosts",
            "What a host with a larger MTU sends is lost at one with a smaller: small messages "
            "pass, large ones hang.",
        ),
        _mtu,
    ),
    (
        _job_check(
            "gid",
            "RoCE GID index between hosts",
            "One GID index for all hosts is wrong where their tables differ.",
        ),
        _gid,
    ),
    (
        _job_check(
            "configuration",
            "Equal nodes",
            "The slowest node sets the pace: one that lacks a GPU, a link or a lane slows all.",
        ),
        _configuration,
    ),
    (
        _job_check(
            "versions",
            "Equal software",
            "Different releases of UCX or MPI do not understand each other.",
        ),
        _versions_of,
    ),
    (
        _job_check(
            "settings",
            "Equal settings",
            "A setting that reaches some ranks only makes them choose other ways than their peers.",
        ),
        _settings,
    ),
    (
        _job_check(
            "clock", "Clocks", "Logs of nodes whose clocks differ cannot be read side by side."
        ),
        _clock,
    ),
)
JOB_CHECKS = tuple(check for check, _ in _LOOKS)
"""Their identifiers and reasons; they run in :func:`compare_nodes`, not on a node."""
