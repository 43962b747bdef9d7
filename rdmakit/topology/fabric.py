"""Which RDMA ports belong to the compute fabric; the others with the reason why not.

No single rule is right on every machine, so signals are combined: who shares a PCIe switch with
a GPU, link layer, rate, how many equal ports there are, bonds, virtual functions, the default
route. The reason of each is kept, and a user's own choice goes before them all.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rdmakit.topology.health import Health, judge_ports, kind_of, usual_rates
from rdmakit.topology.model import Machine, Nic, Port, natural
from rdmakit.topology.words import Path

__all__ = ["Fabric", "FabricPort", "classify", "same_card"]

_NEAR = (Path.PIX, Path.PXB)


@dataclass(frozen=True)
class FabricPort:
    """A port and its part in the machine."""

    nic: str
    """Label of its NIC."""
    port: int | None
    """None: the text does not name ports."""
    device: str | None
    """``mlx5_0:1``, as UCX_NET_DEVICES takes it; None where the device's name is not known.

    Port 1 where ports are not known: all that a device of today has.
    """
    role: str
    """compute, storage, management, bond, vf or other."""
    reason: str
    health: Health
    rate_gbps: float | None = None
    """Rate of a port that is up; of its equals where it is not."""
    link_layer: str | None = None
    nearest: Path | None = None
    """Best relation to any GPU."""

    @property
    def usable(self) -> bool:
        """Whether ranks may be given it: a compute port that is not known to be down."""
        return self.role == "compute" and (self.health.healthy is not False or self.health.degraded)

    @property
    def title(self) -> str:
        """``mlx5_0:1``, or the matrix's label."""
        return self.device or self.nic


@dataclass(frozen=True)
class Fabric:
    """All ports of a machine, and what to say of them in a line."""

    ports: tuple[FabricPort, ...]
    verdict: str

    @property
    def compute(self) -> tuple[FabricPort, ...]:
        """Ports of the compute fabric, those that are down too."""
        return tuple(port for port in self.ports if port.role == "compute")

    @property
    def usable(self) -> tuple[FabricPort, ...]:
        """Ports that ranks may be given."""
        return tuple(port for port in self.ports if port.usable)


@dataclass
class _Entry:
    nic: Nic
    port: Port | None
    health: Health
    nominal: float | None
    nearest: Path | None
    bond: bool
    role: str = ""
    reason: str = ""

    @property
    def layer(self) -> str | None:
        return self.port.link_layer if self.port is not None else None

    def built(self) -> FabricPort:
        number = self.port.number if self.port is not None else None
        device = f"{self.nic.name}:{number or 1}" if self.nic.name else None
        return FabricPort(
            self.nic.label,
            number,
            device,
            self.role,
            self.reason,
            self.health,
            self.nominal,
            self.layer,
            self.nearest,
        )


def classify(machine: Machine, chosen: Sequence[str] = ()) -> Fabric:
    """Return the part that each port plays. Pure.

    Args:
        machine: with whatever is known of it.
        chosen: the user's own compute ports: ``mlx5_0``, ``mlx5_0:1`` or patterns of them.
    """
    entries = _entries(machine)
    if chosen:
        for entry in entries:
            titles = (entry.nic.label, entry.nic.name or "", entry.built().title)
            taken = any(fnmatch.fnmatchcase(t, c) for t in titles for c in chosen)
            entry.role = "compute" if taken else "other"
            entry.reason = f"{'' if taken else 'not '}among those chosen ({', '.join(chosen)})"
    else:
        # Where the matrix does not name its NICs, the named devices cannot be told to be them.
        for named in (True, False):
            _decide(machine, [e for e in entries if (e.nic.name is not None) == named])
    ports = tuple(entry.built() for entry in entries)
    return Fabric(ports, _verdict([port for port in ports if port.role == "compute"]))


def _entries(machine: Machine) -> list[_Entry]:
    health = judge_ports(machine.nics)
    usual = usual_rates(machine.nics)
    found = []
    for nic in sorted(machine.nics, key=lambda n: natural(n.label)):
        paths = [machine.relation(gpu.label, nic.label) for gpu in machine.gpus]
        nearest = min((r.path for r in paths if r is not None), default=None)
        if None in paths and nearest not in _NEAR:
            nearest = None  # a nearer GPU may be in the part of the text that is missing
        for port in nic.ports or (None,):
            # Only RoCE's bonds merge devices: one of IPoIB interfaces leaves the ports as they are.
            merged = nic.bond is not None and (port is None or port.link_layer != "InfiniBand")
            bond = merged or "bond" in (nic.name or "")
            rate = usual.get(kind_of(nic, port)) if port is not None else None
            found.append(
                _Entry(
                    nic,
                    port,
                    health[nic.label, port.number]
                    if port is not None
                    else Health(None, "its state is not in the text"),
                    rate,
                    nearest,
                    bond,
                )
            )
    return found


def _decide(machine: Machine, entries: list[_Entry]) -> None:
    """Set role and reason of each entry."""
    open_ = []
    here = {nic.pci for nic in machine.nics if nic.pci is not None}
    for entry in entries:
        if entry.layer == "iWARP":
            entry.role, entry.reason = "other", "iWARP: UCX has no rc or ud over it"
        elif entry.nic.virtual_of in here:  # alone, as in a pod, it is what there is
            entry.role = "vf"
            entry.reason = f"virtual function of {entry.nic.virtual_of}, which is here itself"
        else:
            open_.append(entry)
    groups: dict[tuple[bool, str | None, float | None], list[_Entry]] = {}
    for entry in open_:
        groups.setdefault((entry.bond, entry.layer, entry.nominal), []).append(entry)
    if not groups:
        return
    winner = max(groups.values(), key=lambda group: _weight(machine, group, groups.values()))
    plain = groups.get((False, None, None), [])
    if plain and plain is not winner and not winner[0].bond:
        winner += plain  # nothing tells them from the others but their place
        del groups[False, None, None]
    for group in groups.values():
        for entry in group:
            if group is winner:
                entry.role = "compute"
            else:
                _not_compute(entry, winner)
    _sort_by_place(machine, winner)
    left = [entry for entry in winner if entry.role == "compute"]
    for entry in left:
        entry.reason = _why_compute(entry, left)


def _weight(
    machine: Machine, group: list[_Entry], groups: Iterable[list[_Entry]]
) -> tuple[float, ...]:
    """Return how much speaks for a group of equal ports being the compute fabric."""
    groups = list(groups)
    active = [e for e in group if e.health.healthy is not False or e.health.degraded]
    fastest = max((e.nominal or 0 for g in groups for e in g), default=0)
    rated = all(e.nominal for g in groups for e in g if e.health.healthy)
    near = sum(any(_near(machine, gpu.label, e.nic.label) for e in group) for gpu in machine.gpus)
    slow = (group[0].nominal or fastest) < fastest / 2
    return (
        0 if slow else near,
        sum((e.nominal or 0) if rated else 1 for e in active),
        not group[0].bond,
        group[0].layer == "InfiniBand",
        len(group),
    )


def _near(machine: Machine, gpu: str, nic: str) -> bool:
    relation = machine.relation(gpu, nic)
    return relation is not None and relation.path in _NEAR


def _why_compute(entry: _Entry, group: list[_Entry]) -> str:
    parts = [f"one of {_describe(group)}" if len(group) > 1 else f"the only {_describe(group)}"]
    if entry.nearest is not None:
        parts.append(f"{entry.nearest.name} from its nearest GPU")
    return ", ".join(parts)


def _describe(group: list[_Entry]) -> str:
    first = group[0]
    rate = f" at {first.nominal:g} Gb/s" if first.nominal else ""
    if len(group) == 1:
        return f"{first.layer or 'RDMA'} port{rate}"
    return f"{len(group)} {first.layer or 'RDMA'} ports{rate}"


def _not_compute(entry: _Entry, winner: list[_Entry]) -> None:
    other = winner[0]
    odd = []
    if entry.layer != other.layer:
        odd.append(f"link layer {entry.layer}")
    if entry.nominal and entry.nominal != other.nominal:
        odd.append(f"{entry.nominal:g} Gb/s")
    elif not entry.nominal and entry.health.healthy is False:
        odd.append("down")
    if entry.port is not None and entry.port.default_gid == "unknown":
        odd.append("no GID")
    what = ", ".join(odd) or "another kind"
    entry.role = "bond" if entry.bond else "management" if entry.nic.default_route else "other"
    kind = {
        "bond": "bond",
        "management": "carries the default route",
        "other": "storage or management",
    }[entry.role]
    entry.reason = f"{kind}: {what}, where the compute fabric has {_describe(winner)}"


def _sort_by_place(machine: Machine, group: list[_Entry]) -> None:
    """Take those out of the compute group that share no PCIe switch with a GPU, as others do."""
    near = [entry for entry in group if entry.nearest in _NEAR]
    far = [entry for entry in group if entry.nearest is not None and entry.nearest not in _NEAR]
    if not near or not far:
        return
    pairs = {entry.nic.label for entry in group if _partner(machine, entry, group)}
    near_pairs = any(entry.nic.label in pairs for entry in near)
    for entry in far:
        assert entry.nearest is not None
        place = (
            f"{entry.nearest.name} from every GPU"
            if entry.nearest is Path.SYS
            else (f"at best {entry.nearest.name} from a GPU")
        )
        paired = entry.nic.label in pairs and not near_pairs
        enough = len(near) >= len(machine.gpus)
        if not (enough or paired or entry.nearest is Path.SYS):
            continue
        entry.role = "management" if entry.nic.default_route else "storage" if paired else "other"
        kind = {
            "management": "carries the default route",
            "storage": "port of a two-port card (storage)",
            "other": "storage or management",
        }[entry.role]
        entry.reason = (
            f"{kind}: {place}, while {len(near)} equal ports share a PCIe switch with a GPU"
        )


def same_card(a: Nic, b: Nic) -> bool | None:
    """Return whether two devices are ports of one card; None where the source does not tell."""
    if a is b:
        return True
    if a.pci and b.pci:
        return a.pci.rpartition(".")[0] == b.pci.rpartition(".")[0]
    return True if a.image_guid and a.image_guid == b.image_guid else None


def _partner(machine: Machine, entry: _Entry, group: list[_Entry]) -> bool:
    """Return whether another port of the group is on the same card."""
    for other in group:
        if other is entry:
            continue
        a, b = entry.nic, other.nic
        known = same_card(a, b)
        if known:
            return True
        if known is None and entry.nearest not in _NEAR and other.nearest not in _NEAR:
            relation = machine.relation(a.label, b.label)
            if relation is not None and relation.path is Path.PIX:
                return True
    return False


def _verdict(ports: Sequence[FabricPort]) -> str:
    if not ports:
        return "no RDMA port is visible: RDMA between nodes is not possible from here"
    layers = {port.link_layer for port in ports}
    kind = next(iter(layers)) if len(layers) == 1 else None
    rates = {port.rate_gbps for port in ports if port.rate_gbps}
    rate = f" at {max(rates):g} Gb/s" if rates else ""
    total = f"{len(ports)} {kind or 'RDMA'} rail{'s' if len(ports) > 1 else ''}{rate}"
    down = [p for p in ports if p.health.healthy is False and not p.health.degraded]
    slow = [p for p in ports if p.health.degraded]
    unknown = [p for p in ports if p.health.healthy is None]
    if len(down) == len(ports):
        return f"FAIL: no usable port: {_list(down)}"
    parts = []
    if down:
        parts.append(f"WARN: {len(down)} of {len(ports)} down: {_list(down)}")
    if slow:
        parts.append(
            f"WARN: {len(slow)} of {len(ports)} degraded: {_list(slow)}; all rails run at the "
            "slowest's pace"
        )
    if unknown:
        parts.append(f"state of {len(unknown)} not known")
    return f"{total}: {'; '.join(parts) or 'all good'}"


def _list(ports: Sequence[FabricPort]) -> str:
    return ", ".join(f"{port.title} ({port.health.why.partition(':')[0]})" for port in ports)
