"""Outputs of other tools, told apart by what is in them, not by their files' names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TypeVar

from rdmakit.topology.model import Nic, Port
from rdmakit.topology.parsers.gids import GidTables, parse_show_gids
from rdmakit.topology.parsers.kernel_log import KernelLog, parse_kernel_log
from rdmakit.topology.parsers.lsmod import parse_modules
from rdmakit.topology.parsers.lspci import Lspci, parse_lspci
from rdmakit.topology.parsers.ports import PortTexts, parse_ports
from rdmakit.topology.parsers.smi_list import SmiList, parse_list
from rdmakit.topology.parsers.smi_matrix import SmiMatrix, parse_matrices
from rdmakit.topology.parsers.smi_query import SmiQuery, parse_query
from rdmakit.topology.parsers.ucx_info import UcxInfo, parse_ucx_info
from rdmakit.topology.parsers.ucx_log import LogFinding, read_ucx_log
from rdmakit.topology.text import clean

__all__ = ["Texts", "kinds_of", "merge_nics", "read_texts"]

_SIGNS = {
    "matrix": r"^\s*#*\s*GPU\d+\s+(X|NV\d|PIX|PXB|PHB|NODE|SYS|SOC|OK|[CGT]?NS)\b",
    "list": r"^\s*GPU \d+: .*\(UUID:",
    "ports": r"^\s*CA '|^\s*Infiniband device '|^\s*hca_id:|\bphysical_state\b|^ibpanic|"
    r"No IB devices found|(ibstat|ibstatus|ibv_devinfo|rdma): .*not found",
    "gids": r"^\s*DEV\s+PORT\s+INDEX|n_gids_found|"
    r"^\S+\s+\d+\s+\d+\s+[0-9a-f]{1,4}(:[0-9a-f]{0,4}){3,7}\s.*v[12]\b",
    "lspci": r"^([0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\s+\S.*: |^\s*(LnkCap|LnkSta|ACSCtl):",
    "ucx": r"^\W*(Memory domain|Transport|Library version|memory types|Component):",
    "query": r"^=+NVSMI LOG=+|^Attached GPUs\s*:|^Failed to initialize NVML|^NVIDIA-SMI has failed",
    # UCX stamps its lines too, with ten digits of seconds.
    "kernel": r"^(<\d+>)?\[\s*\d{1,8}\.\d{6}\] (?!\[)|^\[\w{3} \w{3} [ \d]\d \d\d:|\bNVRM: ",
    "modules": r"^Module\s+Size\s+Used by|^\w+ \d+ \d+ \S+ Live 0x",
    "log": r"\bUCX\s+(WARN|ERROR|FATAL|DEBUG|DIAG|INFO)\b|pml_ucx|Caught signal \d",
}
_COMPILED = {kind: re.compile(sign, re.MULTILINE | re.IGNORECASE) for kind, sign in _SIGNS.items()}


@dataclass(frozen=True)
class Texts:
    """Everything that was understood of a machine's texts."""

    matrix: SmiMatrix | None = None
    p2p: SmiMatrix | None = None
    listed: SmiList = field(default_factory=SmiList)
    ports: PortTexts = field(default_factory=PortTexts)
    gids: GidTables = field(default_factory=lambda: GidTables({}))
    lspci: Lspci = field(default_factory=Lspci)
    ucx: UcxInfo = field(default_factory=UcxInfo)
    log: tuple[LogFinding, ...] = ()
    query: SmiQuery = field(default_factory=SmiQuery)
    kernel: KernelLog = field(default_factory=KernelLog)
    modules: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Who uses each loaded kernel module; empty: not known."""
    kinds: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """What is in each text, by its name."""
    problems: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


def kinds_of(text: str) -> tuple[str, ...]:
    """Return what is in a text, by the names of :class:`Texts`' readers (``matrix``, ``log``)."""
    text = clean(text)
    return tuple(kind for kind, sign in _COMPILED.items() if sign.search(text))


def read_texts(texts: Mapping[str, str]) -> Texts:
    """Return what the texts of one machine hold. Never raises.

    Of several outputs of one kind the fuller matrix counts, ports and devices are joined.
    """
    found = Texts()
    readers: dict[str, Callable[[Texts, str, str], Texts]] = {
        "matrix": _matrix,
        "list": _list,
        "ports": _ports,
        "gids": _gids,
        "lspci": _lspci,
        "ucx": _ucx,
        "query": _query,
        "kernel": _kernel,
        "modules": _modules,
        "log": _log,
    }
    kinds: dict[str, tuple[str, ...]] = {}
    for name in sorted(texts):
        kinds[name] = kinds_of(texts[name])
        for kind in kinds[name]:
            found = readers[kind](found, name, texts[name])
        if not kinds[name] and texts[name].strip():
            found = replace(
                found, problems=(*found.problems, f"{name}: nothing in it is understood")
            )
    return replace(found, kinds=kinds)


def _matrix(found: Texts, name: str, text: str) -> Texts:
    for matrix in parse_matrices(text):
        slot = "p2p" if matrix.kind == "p2p" else "matrix"
        known = found.p2p if slot == "p2p" else found.matrix
        problems = found.problems
        if known is not None:
            if (known.gpus, known.nics) != (matrix.gpus, matrix.nics):
                problems = (*problems, f"{name}: a matrix of other devices, not used")
                found = replace(found, problems=problems)
                continue
            # topo -mp beside topo -m: the one that shows NVLink says more.
            if known.matrix.nvlink_known or not matrix.matrix.nvlink_known:
                continue
        found = replace(
            found,
            **{slot: matrix},  # type: ignore[arg-type]
            problems=(*problems, *(f"{name}: {problem}" for problem in matrix.problems)),
            unread=(*found.unread, *(f"{name}: {unread}" for unread in matrix.unread)),
        )
    return found


def _list(found: Texts, name: str, text: str) -> Texts:
    listed = parse_list(text)
    return replace(found, listed=listed) if len(listed.gpus) > len(found.listed.gpus) else found


def _ports(found: Texts, name: str, text: str) -> Texts:
    ports = parse_ports(text)
    return replace(
        found,
        ports=PortTexts(
            merge_nics(found.ports.nics, ports.nics), (*found.ports.errors, *ports.errors)
        ),
        problems=(*found.problems, *(f"{name}: {error}" for error in ports.errors)),
        unread=(*found.unread, *(f"{name}: {unread}" for unread in ports.unread)),
    )


def _gids(found: Texts, name: str, text: str) -> Texts:
    tables = parse_show_gids(text)
    announced = tables.announced
    problems = found.problems
    if announced is not None and announced != tables.count:
        problems = (*problems, f"{name}: {tables.count} of {announced} GIDs are in the text")
    merged = {**found.gids.tables, **tables.tables}
    return replace(found, gids=GidTables(merged, announced), problems=problems)


def _lspci(found: Texts, name: str, text: str) -> Texts:
    lspci = parse_lspci(text)
    return replace(found, lspci=lspci) if len(lspci.devices) >= len(found.lspci.devices) else found


def _ucx(found: Texts, name: str, text: str) -> Texts:
    ucx = parse_ucx_info(text)
    old = found.ucx
    return replace(
        found,
        ucx=UcxInfo(
            old.version or ucx.version,
            old.library or ucx.library,
            old.configure or ucx.configure,
            old.domains or ucx.domains,
            old.loose or ucx.loose,
        ),
    )


def _log(found: Texts, name: str, text: str) -> Texts:
    return replace(found, log=(*found.log, *read_ucx_log(text)))


def _query(found: Texts, name: str, text: str) -> Texts:
    query = parse_query(text)
    return replace(found, query=query) if len(query.gpus) >= len(found.query.gpus) else found


def _kernel(found: Texts, name: str, text: str) -> Texts:
    return replace(found, kernel=parse_kernel_log(text))


def _modules(found: Texts, name: str, text: str) -> Texts:
    return replace(found, modules=parse_modules(text) or found.modules)


def merge_nics(first: tuple[Nic, ...], second: tuple[Nic, ...]) -> tuple[Nic, ...]:
    """Return the devices of two sources by name; where both say something, the first counts."""
    merged = {nic.name or nic.label: nic for nic in first}
    for nic in second:
        key = nic.name or nic.label
        known = merged.get(key)
        merged[key] = nic if known is None else _joined(known, nic)
    return tuple(merged.values())


def _joined(a: Nic, b: Nic) -> Nic:
    ports = {port.number: port for port in a.ports}
    for port in b.ports:
        known = ports.get(port.number)
        ports[port.number] = port if known is None else _filled(known, port)
    return replace(_filled(a, b), ports=tuple(ports[n] for n in sorted(ports)))


_T = TypeVar("_T", Nic, Port)


def _filled(a: _T, b: _T) -> _T:
    """Return ``a`` with the fields that it lacks from ``b``."""
    lacking = {
        f.name: getattr(b, f.name)
        for f in fields(a)
        if getattr(a, f.name) in (None, "", ()) and getattr(b, f.name) not in (None, "", ())
    }
    return replace(a, **lacking)
