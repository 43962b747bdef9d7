"""UCX_NET_DEVICES of each rank: what rdmakit would set, and whether a user's own choice is good."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rdmakit.topology.fabric import Fabric
from rdmakit.topology.model import Machine
from rdmakit.topology.placement import RankPlace

__all__ = ["NetDevices", "choose_net_devices", "read_net_devices"]


@dataclass(frozen=True)
class NetDevices:
    """``value`` goes into the UCX context's configuration as NET_DEVICES; None: leave it alone."""

    value: str | None
    reason: str
    warnings: tuple[str, ...] = ()


def read_net_devices(text: str) -> tuple[list[str] | None, list[str]]:
    """Return (devices, what is wrong) of a UCX_NET_DEVICES value; devices is None for ``all``.

    UCX up to 1.20 compares whole names (checked with 1.20.1): it knows no ``^`` and no patterns,
    takes such an entry for a device's name, and warns at most.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    wrong = []
    if not names:
        wrong.append("UCX_NET_DEVICES is empty: UCX then has no network device at all")
    if any(name == "all" for name in names):
        return None, wrong
    for name in names:
        if name.startswith("^"):
            wrong.append(
                f"UCX_NET_DEVICES={text}: UCX knows no ^ here and looks for a device called "
                f"{name!r}; name the devices to use"
            )
        elif set(name) & set("*?["):
            wrong.append(f"UCX_NET_DEVICES={text}: UCX knows no patterns here ({name!r})")
    return names, wrong


def choose_net_devices(
    place: RankPlace,
    machine: Machine,
    fabric: Fabric,
    user: str | None = None,
    *,
    offered: Sequence[str] | None = None,
) -> NetDevices:
    """Return what one rank's UCX should use. Pure and local; equal inputs, equal answer.

    Args:
        place: the rank's place.
        machine: its node.
        fabric: the node's ports.
        user: UCX_NET_DEVICES of its environment; None where it is not set. It is never
            overruled, only warned about.
        offered: network devices that this process's UCX has (``mlx5_0:1``, ``eth0``); None:
            not known. A UCX without InfiniBand must not be confined to devices it lacks.
    """
    if user is not None:
        return NetDevices(
            None, "UCX_NET_DEVICES is the user's", _warn(place, machine, fabric, user, offered)
        )
    if not place.nics:
        return NetDevices(None, f"UCX chooses: {place.nic_reason}")
    if place.net_devices is None:
        return NetDevices(
            None, f"UCX chooses: the RDMA names of {', '.join(place.nics)} are not known"
        )
    if offered is not None:
        missing = [device for device in place.net_devices if device not in offered]
        if missing:
            there = ", ".join(offered) or "none"
            return NetDevices(
                None,
                f"UCX chooses among {there}",
                (f"{', '.join(missing)} would serve, but this UCX has no such device",),
            )
    return NetDevices(",".join(place.net_devices), place.nic_reason)


def _warn(
    place: RankPlace,
    machine: Machine,
    fabric: Fabric,
    user: str,
    offered: Sequence[str] | None,
) -> tuple[str, ...]:
    names, warnings = read_net_devices(user)
    if names is None:
        if len(fabric.ports) > 1 and place.net_devices:
            other = [port.title for port in fabric.ports if port.role != "compute"]
            if other:
                warnings.append(
                    "UCX_NET_DEVICES=all lets UCX use ports that are no compute ports: "
                    + ", ".join(other)
                )
        return tuple(warnings)
    known = {port.title: port for port in fabric.ports}
    for name in names:
        if name in known:
            port = known[name]
            if port.health.healthy is False and not port.health.degraded:
                warnings.append(f"UCX_NET_DEVICES: {name} is not usable: {port.health.why}")
            elif port.role != "compute":
                warnings.append(f"UCX_NET_DEVICES: {name} is no compute port: {port.reason}")
        elif f"{name}:1" in known:
            warnings.append(
                f"UCX_NET_DEVICES: {name} lacks its port, and UCX will not find it: write {name}:1"
            )
        elif offered is not None and name not in offered:
            warnings.append(
                f"UCX_NET_DEVICES asks for {name}; this UCX has {', '.join(offered) or 'none'}"
            )
    if place.nics and offered and names and set(names) <= {*offered} - {*known}:
        warnings.append(
            f"UCX_NET_DEVICES={user} has none of this node's RDMA ports, as "
            f"{', '.join(place.nics)}: there is no RDMA with it"
        )
    far = _far(place, machine, [known[name].nic for name in names if name in known])
    return (*warnings, *far)


def _far(place: RankPlace, machine: Machine, nics: Sequence[str]) -> list[str]:
    if place.gpu is None or place.path is None or not nics:
        return []
    paths = [machine.relation(place.gpu, nic) for nic in nics]
    best = min((r.path for r in paths if r is not None), default=None)
    if best is None or best <= place.path:
        return []
    return [
        f"rank {place.rank}: UCX_NET_DEVICES gives {', '.join(nics)}, {best.name} from "
        f"{place.gpu}; {', '.join(place.nics)} is {place.path.name}"
    ]
