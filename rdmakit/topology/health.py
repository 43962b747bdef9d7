"""Whether a port can carry RDMA traffic now, by what its source says, and why not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from rdmakit.topology.model import Nic, Port

__all__ = ["Health", "judge_port", "judge_ports", "kind_of", "usual_rates"]


@dataclass(frozen=True)
class Health:
    """``healthy`` is None where the text does not say."""

    healthy: bool | None
    why: str = ""
    degraded: bool = False
    """Up, but slower than its equals."""


_PHYSICAL = {
    "polling": "Polling: looks for a partner; check cable, transceiver and switch port",
    "disabled": "Disabled: port is off, its net device is down or no cable is in",
    "sleep": "Sleep: port is asleep",
    "linkerrorrecovery": "LinkErrorRecovery: the cable or transceiver is bad",
    "portconfigurationtraining": "training its link: cable or transceiver, if it stays so",
    "training": "training its link: cable or transceiver, if it stays so",
}


def judge_port(port: Port) -> Health:
    """Return the health of a port by itself."""
    phys = (port.phys or "").lower().replace("_", "").replace(" ", "")
    if port.active is None:
        return Health(None, "its state is not in the text")
    if not port.active:
        if port.state and "INIT" in port.state.upper():
            return Health(False, "Initializing: waits for a subnet manager")
        if port.link_up:
            return Health(
                False,
                f"state {port.state} on a link that is up: subnet manager, or the net device "
                "is down",
            )
        return Health(False, _PHYSICAL.get(phys, f"state {port.state}"))
    if port.link_up is False:
        return Health(
            False,
            f"contradiction: state {port.state} needs a link that is up, but the physical state "
            f"is {port.phys}; neither is believed",
        )
    return Health(True, "; ".join(_remarks(port)))


def _remarks(port: Port) -> Iterable[str]:
    if port.link_layer == "iWARP":
        yield "iWARP: UCX has no rc or ud over it"
    if port.default_gid == "unknown":
        yield "no GID: not usable for RDMA"
    if port.active_mtu and port.max_mtu and port.active_mtu < port.max_mtu:
        yield (
            f"MTU {port.active_mtu} of {port.max_mtu}"
            + (
                ": the net device's MTU is small (1500 gives 1024, 4200 and more gives 4096)"
                if port.link_layer == "Ethernet"
                else ""
            )
            + "; both ends must agree"
        )


Kind = tuple[str | None, str | None, str | None]
"""Type of card, board, link layer."""


def kind_of(nic: Nic, port: Port) -> Kind:
    """Return what equal ports have in common: type of card, board (its PSID), link layer.

    Boards of one type are sold with other rates (HDR and HDR100).
    """
    return nic.model, nic.board, port.link_layer


def usual_rates(nics: Iterable[Nic]) -> dict[Kind, float]:
    """Return the usual rate of active ports of each kind; of equals the highest."""
    rates: dict[Kind, Counter[float]] = {}
    for nic in nics:
        for port in nic.ports:
            if port.active and port.speed_gbps:
                rates.setdefault(kind_of(nic, port), Counter())[port.speed_gbps] += 1
    return {key: max(count, key=lambda rate: (count[rate], rate)) for key, count in rates.items()}


def judge_ports(nics: Iterable[Nic]) -> dict[tuple[str, int], Health]:
    """Return the health of every port by (label, number), compared with its equals.

    A port slower than most active ports of its kind is degraded: an all-reduce over all rails runs
    at its pace.
    """
    nics = tuple(nics)
    usual = usual_rates(nics)
    found: dict[tuple[str, int], Health] = {}
    for nic in nics:
        for port in nic.ports:
            health = judge_port(port)
            rate = usual.get(kind_of(nic, port))
            if health.healthy and rate and port.speed_gbps and port.speed_gbps < rate:
                peers = sum(
                    other.speed_gbps == rate
                    for n in nics
                    for other in n.ports
                    if kind_of(n, other) == kind_of(nic, port)
                )
                text = (
                    f"{port.speed_gbps:g} Gb/s where {peers} equal port(s) run at {rate:g}: lanes "
                    "or cable degraded"
                )
                if peers > 1:
                    health = Health(False, text, degraded=True)
                else:
                    health = Health(True, f"{text}, or another use", degraded=True)
            found[nic.label, port.number] = health
    return found
