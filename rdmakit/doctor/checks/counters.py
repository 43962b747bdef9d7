"""Error and congestion counters of the compute ports: what rises now counts, not what has been.

Meanings: Linux, Documentation/ABI/stable/sysfs-class-infiniband, and NVIDIA's 'Understanding
mlx5 counters'. A transfer in which bits are lost is repeated; it is slow, not wrong.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rdmakit.doctor.context import Context
from rdmakit.doctor.facts import compute_ports
from rdmakit.doctor.model import Check, Finding, Status

__all__ = ["CHECKS", "judge_counters"]

_SECONDS = 1.0
"""Between the two readings."""
_MOST = 1 << 20


@dataclass(frozen=True)
class _Kind:
    """What it means that a counter rises."""

    status: Status
    meaning: str
    cure: str
    urgency: int


_CABLE = _Kind(
    Status.FAIL,
    "the link loses data: cable, transceiver or connector",
    "mlxlink -d DEVICE -m -c shows lanes and errors; reseat, clean or replace cable and "
    "transceiver, then perfquery -R sets the counters to zero",
    20,
)
_NOISE = _Kind(Status.WARN, "bits are wrong on the link", _CABLE.cure, 31)
_LOSS = _Kind(
    Status.WARN,
    "packets are lost or come in another order, and are sent again",
    "RoCE: the same priority flow control and ECN on NICs and switches (mlnx_qos -i NETDEV, "
    "cma_roce_tos, switch configuration); InfiniBand: ibqueryerrors shows errors on the way",
    29,
)
_CROWD = _Kind(
    Status.WARN,
    "congestion: the fabric or the receiver is slower than the sender",
    "look for other jobs and for many senders to one receiver; RoCE: thresholds of ECN on the "
    "switches; InfiniBand: adaptive routing in the subnet manager",
    66,
)
_FULL = _Kind(
    Status.WARN,
    "the host drops what arrives: it cannot keep up, or PCIe is too slow",
    "check pcie.link and pcie.read_request; larger rings: ethtool -G NETDEV rx 8192",
    33,
)

_COUNTERS: Mapping[str, _Kind] = {
    "link_downed": _CABLE,
    "link_error_recovery": _CABLE,
    "local_link_integrity_errors": _CABLE,
    "excessive_buffer_overrun_errors": _CABLE,
    "port_rcv_errors": _CABLE,
    "symbol_error": _NOISE,
    "rx_icrc_encapsulated": _NOISE,
    "rx_crc_errors": _NOISE,
    "out_of_sequence": _LOSS,
    "packet_seq_err": _LOSS,
    "implied_nak_seq_err": _LOSS,
    "local_ack_timeout_err": _LOSS,
    "roce_adp_retrans": _LOSS,
    "roce_slow_restart": _LOSS,
    # Names of rdma_rxe.
    "out_of_seq_request": _LOSS,
    "rcvd_seq_err": _LOSS,
    "retry_exceeded_err": _LOSS,
    "np_cnp_sent": _CROWD,
    "np_ecn_marked_roce_packets": _CROWD,
    "rp_cnp_handled": _CROWD,
    "port_xmit_discards": _CROWD,
    "rx_discards_phy": _FULL,
    "rx_missed_errors": _FULL,
    "rx_over_errors": _FULL,
}
_WAIT, _SENT = "port_xmit_wait", "port_xmit_data"
_MOST_WAIT = 0.1
"""Of ticks that a port waited per word of 4 bytes that it sent; below it is normal under load."""
_LEAST_TICKS = 100_000


def _read(context: Context) -> dict[str, dict[str, int]]:
    """Return the counters of each compute port, by its title."""
    found: dict[str, dict[str, int]] = {}
    for own, nic, port in compute_ports(context):
        if nic.name is None or port is None:
            continue
        base = f"/sys/class/infiniband/{nic.name}/ports/{port.number}"
        places = [f"{base}/counters", f"{base}/hw_counters"]
        if port.netdev and port.link_layer == "Ethernet":
            places.append(f"/sys/class/net/{port.netdev}/statistics")
        values: dict[str, int] = {}
        for place in places:
            for name in context.tree.listdir(place):
                if name not in _COUNTERS and name not in (_WAIT, _SENT):
                    continue
                text = context.read(f"{place}/{name}") or ""
                if text.isascii() and text.isdigit():
                    values[name] = int(text)
        if values:
            found[own.title] = values
    return found


def judge_counters(
    before: Mapping[str, int], after: Mapping[str, int]
) -> Iterator[tuple[_Kind, dict[str, int]]]:
    """Yield what rose between two readings of a port, by what it means, the worst first. Pure.

    A counter that fell was set to zero in between, or passed its end: it is left out.
    """
    rose = {name: after[name] - before[name] for name in before if name in after}
    kinds: dict[_Kind, dict[str, int]] = {}
    for name, kind in _COUNTERS.items():
        if rose.get(name, 0) > 0:
            kinds.setdefault(kind, {})[name] = rose[name]
    waited = rose.get(_WAIT, 0)
    if waited >= _LEAST_TICKS and waited > _MOST_WAIT * max(rose.get(_SENT, 0), 0):
        kinds.setdefault(_CROWD, {})[_WAIT] = waited
    yield from sorted(kinds.items(), key=lambda item: item[0].urgency)


def _past(counters: Mapping[str, Mapping[str, int]]) -> str:
    """Return what rose at some time since the driver was loaded, in a few words."""
    told = []
    for title, values in counters.items():
        grave = [
            f"{name} {values[name]}"
            for name, kind in _COUNTERS.items()
            if kind in (_CABLE, _NOISE, _LOSS) and values.get(name, 0) > 0
        ]
        if grave:
            told.append(f"{title}: {', '.join(grave[:3])}")
    more = f" and {len(told) - 4} more port(s)" if len(told) > 4 else ""
    return f"{'; '.join(told[:4])}{more}" if told else "no errors"


def _rising(context: Context) -> Iterator[Finding]:
    before = _read(context)
    if not before:
        yield COUNTERS.finding(Status.UNKNOWN, "the ports have no counters that can be read here")
        return
    if not context.live:
        yield COUNTERS.finding(
            Status.SKIPPED, f"needs two readings; since the driver was loaded: {_past(before)}"
        )
        return
    start = time.monotonic()
    time.sleep(_SECONDS)
    after, seconds = _read(context), time.monotonic() - start
    devices = {own.title: (nic, port) for own, nic, port in compute_ports(context)}
    risen = False
    for title, values in before.items():
        for kind, counts in judge_counters(values, after.get(title, {})):
            risen = True
            nic, port = devices[title]
            cure = kind.cure.replace("DEVICE", nic.name or nic.label)
            yield COUNTERS.finding(
                kind.status,
                f"in {seconds:.1f} s: {', '.join(f'{n} +{c}' for n, c in counts.items())}: "
                f"{kind.meaning}",
                subject=title,
                expected="no rise",
                cure=cure.replace("NETDEV", (port.netdev if port else None) or "NETDEV"),
                urgency=kind.urgency,
            )
    if not risen:
        yield COUNTERS.finding(
            Status.OK, f"none rises on {len(before)} port(s); before: {_past(before)}"
        )


COUNTERS = Check(
    "rdma.counters",
    "Error and congestion counters",
    "A bad cable or a crowded fabric shows first in counters that rise; old errors are history.",
    _rising,
    needs=("rdma",),
)

CHECKS = (COUNTERS,)
