"""NCCL's settings: those that contradict the machine, and names that NCCL does not know."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from rdmakit.doctor.context import Context
from rdmakit.doctor.job import usable_ports
from rdmakit.doctor.model import Check, Finding, Status
from rdmakit.doctor.nccl_names import NCCL_NAMES
from rdmakit.doctor.software import software, yes
from rdmakit.doctor.ucx_words import near
from rdmakit.topology.words import Path as Way

__all__ = ["CHECKS"]

_LEVELS = {"LOC": 0, "PIX": 1, "PXB": 2, "PXN": 3, "P2C": 3, "PHB": 4, "NODE": 5, "SYS": 6}


def _settings(context: Context) -> Iterator[Finding]:
    findings = [*_off(context), *_hca(context), *_ifname(context), *_gdr(context)]
    yield from findings
    if not findings:
        count = sum(name.startswith("NCCL_") for name in context.environ)
        yield SETTINGS.finding(Status.OK, f"none of {count} setting(s) is against the machine")


def _off(context: Context) -> Iterator[Finding]:
    env, gpus, ports = context.environ, len(context.machine.gpus), usable_ports(context)
    if yes(env, "NCCL_IB_DISABLE") and ports:
        yield _bad(
            Status.FAIL,
            "NCCL_IB_DISABLE",
            context,
            f"NCCL goes over TCP, though {', '.join(ports)} would serve",
            urgency=14,
        )
    if env.get("NCCL_NET", "").lower() == "socket" and ports:
        yield _bad(
            Status.FAIL,
            "NCCL_NET",
            context,
            f"NCCL goes over TCP, though {', '.join(ports)} would serve",
            urgency=14,
        )
    if gpus < 2:
        return
    for name, what in (
        ("NCCL_P2P_DISABLE", "GPUs of this node exchange data through host memory"),
        ("NCCL_SHM_DISABLE", "GPUs without P2P exchange data through the network"),
    ):
        if yes(env, name):
            yield _bad(Status.WARN, name, context, what, urgency=30)
    if env.get("NCCL_P2P_LEVEL", "").upper() in ("LOC", "0"):
        yield _bad(
            Status.WARN,
            "NCCL_P2P_LEVEL",
            context,
            "GPUs of this node exchange data through host memory",
            urgency=30,
        )


def _bad(status: Status, name: str, context: Context, what: str, *, urgency: int) -> Finding:
    return SETTINGS.finding(
        status,
        f"{name}={context.environ[name]}: {what}",
        subject=name,
        expected="not set",
        cure=f"unset {name}",
        urgency=urgency,
    )


def _fits(text: str, names: list[str]) -> tuple[list[str], list[str]]:
    """Return (names that a list of NCCL takes, its entries that fit nothing).

    ``mlx5`` takes all that begin so, ``=mlx5_0`` that one, ``^mlx5_3`` all but those.
    """
    exact = "=" in text[:2]
    entries = [part.strip() for part in text.lstrip("^=").split(",") if part.strip()]

    def fit(entry: str, name: str) -> bool:
        device, _, port = entry.partition(":")
        own, _, number = name.partition(":")
        same = own == device if exact else own.startswith(device)
        return same and (not port or not number or port == number)

    taken = [name for name in names if any(fit(entry, name) for entry in entries)]
    empty = [entry for entry in entries if not any(fit(entry, name) for name in names)]
    if text.startswith("^"):
        return [name for name in names if name not in taken], []
    return taken, empty


def _hca(context: Context) -> Iterator[Finding]:
    text = context.environ.get("NCCL_IB_HCA", "")
    names = [port.device for port in context.fabric.ports if port.device]
    if not text or not context.machine.nics or not names:
        return
    taken, empty = _fits(text, names)
    ports = usable_ports(context)
    if not taken:
        yield SETTINGS.finding(
            Status.FAIL if ports else Status.WARN,
            f"NCCL_IB_HCA={text} leaves no RDMA device of this node: NCCL goes over TCP",
            subject="NCCL_IB_HCA",
            expected=f"of {', '.join(names)}",
            cure=f"export NCCL_IB_HCA={','.join(p.partition(':')[0] for p in ports)}"
            if ports
            else "unset NCCL_IB_HCA",
            urgency=13,
        )
    elif empty:
        yield SETTINGS.finding(
            Status.WARN,
            f"NCCL_IB_HCA={text}: {', '.join(empty)} is no RDMA device of this node",
            subject="NCCL_IB_HCA",
            expected=f"of {', '.join(names)}",
            cure=f"export NCCL_IB_HCA={','.join(e for e in text.split(',') if e not in empty)}",
            urgency=30,
        )
    elif ports and not set(taken) & set(ports):
        yield SETTINGS.finding(
            Status.WARN,
            f"NCCL_IB_HCA={text} takes {', '.join(taken)}, of which none is a compute port that "
            "is up",
            subject="NCCL_IB_HCA",
            expected=f"of {', '.join(ports)}",
            cure=f"export NCCL_IB_HCA={','.join(p.partition(':')[0] for p in ports)}",
            urgency=14,
        )


def _ifname(context: Context) -> Iterator[Finding]:
    text = context.environ.get("NCCL_SOCKET_IFNAME", "")
    interfaces = [one for one in software(context).interfaces if one.up]
    if not text or not interfaces:
        return
    taken, _ = _fits(text, [one.name for one in interfaces])
    usable = [i for i in interfaces if i.name in taken and not i.loopback and not i.local]
    if usable:
        return
    good = [i for i in interfaces if i.address and not (i.loopback or i.local)]
    first = next((i.name for i in sorted(good, key=lambda i: not i.default)), "")
    yield SETTINGS.finding(
        Status.FAIL,
        f"NCCL_SOCKET_IFNAME={text} takes {', '.join(taken) or 'no interface of this node'}"
        + (", which leads to this host only" if taken else ": NCCL does not start"),
        subject="NCCL_SOCKET_IFNAME",
        expected=f"of {', '.join(i.describe() for i in good) or 'the interfaces that are up'}",
        cure=f"export NCCL_SOCKET_IFNAME={first}" if first else "unset NCCL_SOCKET_IFNAME",
        urgency=13,
    )


def _gdr(context: Context) -> Iterator[Finding]:
    text = context.environ.get("NCCL_NET_GDR_LEVEL", "").upper()
    machine = context.machine
    ports = usable_ports(context)
    level = int(text) if text.isascii() and text.isdigit() else _LEVELS.get(text)
    if level is None or not machine.gpus or not ports:
        return
    reach = [Way.SELF, Way.PIX, Way.PXB, Way.PXB, Way.PHB, Way.NODE, Way.SYS][min(level, 6)]
    far = [
        f"{gpu.label} ({path.name})"
        for gpu in machine.gpus
        if (path := machine.nearest_nics(gpu.label)[0]) is not None and path > reach
    ]
    # The next level up is what a site may shut out on purpose: only near pairs are a loss.
    near_ = [name for name in far if name.endswith(("(PIX)", "(PXB)"))]
    if near_ or (level == 0 and far):
        yield SETTINGS.finding(
            Status.FAIL if near_ else Status.WARN,
            f"NCCL_NET_GDR_LEVEL={text} turns GPUDirect RDMA off for {', '.join(near_ or far)}",
            subject="NCCL_NET_GDR_LEVEL",
            expected="PXB or more, or not set",
            cure="unset NCCL_NET_GDR_LEVEL",
            urgency=16,
        )
    elif yes(context.environ, "NCCL_NET_GDR_READ") is False:
        yield _bad(
            Status.WARN,
            "NCCL_NET_GDR_READ",
            context,
            "NCCL sends GPU memory through host memory",
            urgency=40,
        )


def _names(context: Context) -> Iterator[Finding]:
    names = sorted(name for name in context.environ if name.startswith("NCCL_"))
    if not names:
        yield NAMES.finding(Status.OK, "no NCCL_* variable is set")
        return
    library = _of_library(context)
    known = library | NCCL_NAMES
    unknown = [name for name in names if name not in known]
    rest = []
    for name in unknown:
        guess = near(name, sorted(known), 0.85)
        if guess:
            yield NAMES.finding(
                Status.WARN,
                f"{name} is no setting of NCCL: it does nothing; perhaps {guess} was meant",
                subject=name,
                cure=f"export {guess}={context.environ[name]}; unset {name}",
                urgency=26,
            )
        elif library:
            yield NAMES.finding(
                Status.WARN,
                f"{name} is not in the installed NCCL: it does nothing",
                subject=name,
                cure=f"unset {name}",
                urgency=70,
            )
        else:
            rest.append(name)
    if rest:
        yield NAMES.finding(
            Status.UNKNOWN,
            f"{', '.join(rest)}: not among the documented names; no NCCL here to ask",
        )
    elif not unknown:
        yield NAMES.finding(Status.OK, f"NCCL knows all of {', '.join(names)}")


def _of_library(context: Context) -> frozenset[str]:
    """Return the names in the installed NCCL, which holds each as a text; none without one."""
    report = software(context).python
    if report is None or not report.nccl:
        return frozenset()
    try:
        data = Path(report.nccl).read_bytes()
    except OSError:
        return frozenset()
    return frozenset(m.decode() for m in re.findall(rb"\bNCCL_[A-Z0-9_]{2,50}\b", data))


SETTINGS = Check(
    "nccl.settings",
    "NCCL settings against the machine",
    "NCCL does as it is told: without InfiniBand, or with devices that are not there.",
    _settings,
)
NAMES = Check(
    "nccl.names",
    "Names of NCCL_* variables",
    "NCCL ignores a variable whose name it does not know, without a word.",
    _names,
    seconds=90,
)

CHECKS = (SETTINGS, NAMES)
