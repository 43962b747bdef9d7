"""Text of a hostfile to hosts and slots. Never raises: what is wrong becomes a problem."""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from rdmakit.errors import InvalidArgument
from rdmakit.hostfile.check import check_hosts, combine
from rdmakit.hostfile.model import DIALECTS, Entry, Hostfile, Problem
from rdmakit.hostfile.nodelist import expand, expand_counts

__all__ = ["detect_dialect", "parse_hostfile", "read_slurm"]

_SLOTS = ("slots", "slot", "cpu", "cpus", "count")
_MAX = ("max_slots", "max-slots", "slots_max", "slots-max", "max_cpus", "cpu_max", "cpu-max")
_USER = ("username", "user", "user_name", "user-name")
_HYDRA_KEYS = ("binding", "ifname", "iface", "user", "map-by", "bind-to")
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?", re.ASCII)
_MOST_SLOTS = 1 << 20


def parse_hostfile(
    text: str, dialect: str | None = None, own_names: Sequence[str] = ()
) -> Hostfile:
    """Return what a hostfile says. Pure; never raises for any text.

    Args:
        text: the file.
        dialect: one of :data:`DIALECTS`; None: found out from the lines.
        own_names: names and addresses of this machine, to see that two of them are one host.

    Raises:
        InvalidArgument: ``dialect`` is none of the known ones.
    """
    if dialect is not None and dialect not in DIALECTS:
        raise InvalidArgument(f"dialect {dialect!r}; one of {', '.join(DIALECTS)}")
    lines, problems = _lines(text)
    dialect = dialect or detect_dialect([line for _, line in lines])
    entries: list[Entry] = []
    expressions: list[tuple[int, str, tuple[str, ...]]] = []
    for number, line in lines:
        try:
            if dialect == "slurm":
                names = tuple(expand(line))
                expressions.append((number, line, names))
                entries += [Entry(number, name) for name in names]
            else:
                entries.append(_entry(number, line, dialect))
        except InvalidArgument as exc:
            problems.append(Problem("error", str(exc), number))
    if not entries and not any(problem.severity == "error" for problem in problems):
        problems.append(Problem("error", "no hosts in file"))
    hosts, found = combine(dialect, entries)
    problems += found
    parsed = Hostfile(dialect, tuple(entries), (), hosts, tuple(expressions))
    problems += check_hosts(parsed, own_names)
    return replace(
        parsed, problems=tuple(sorted(problems, key=lambda p: (p.severity, p.line or 0)))
    )


def read_slurm(nodelist: str, tasks: str = "") -> Hostfile:
    """Return the hosts of a Slurm job by SLURM_JOB_NODELIST and SLURM_TASKS_PER_NODE."""
    hostfile = parse_hostfile(nodelist, "slurm")
    if not tasks or hostfile.errors:
        return hostfile
    try:
        counts = expand_counts(tasks)
    except InvalidArgument as exc:
        return replace(hostfile, problems=(*hostfile.problems, Problem("error", str(exc))))
    if len(counts) != len(hostfile.entries):
        text = f"{len(hostfile.entries)} nodes, but tasks for {len(counts)}: {tasks}"
        return replace(hostfile, problems=(*hostfile.problems, Problem("error", text)))
    entries = [
        replace(entry, slots=count) for entry, count in zip(hostfile.entries, counts, strict=True)
    ]
    hosts, _ = combine("slurm", entries)
    return replace(hostfile, entries=tuple(entries), hosts=hosts)


def _lines(text: str) -> tuple[list[tuple[int, str]], list[Problem]]:
    """Return (number, text) of the lines with content, and what was wrong with the whole."""
    problems = []
    if text.startswith("\ufeff"):
        text = text.removeprefix("\ufeff")
        problems.append(
            Problem(
                "warning", "byte-order mark at the beginning: Open MPI refuses it; save without", 1
            )
        )
    if "\r" in text:
        problems.append(
            Problem(
                "warning",
                "line ends of Windows (CR): Open MPI refuses them and others take the CR into "
                "the name; convert the file",
            )
        )
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        bare = line.split("#", 1)[0].strip()
        if bare:
            found.append((number, bare))
    return found, problems


def detect_dialect(lines: Sequence[str]) -> str:
    """Return the dialect that most lines are written in; ``plain`` where only names are there."""
    kinds: Counter[str] = Counter()
    for line in lines:
        first = line.split()[0]
        if re.search(r"=", line):
            kinds["openmpi"] += 1
        elif re.fullmatch(r"[^:\[\]\s]+:\d+:[A-Za-z]\S*", first):
            kinds["mvapich"] += 1
        elif re.search(r"\[[\d,\s-]+\]", line) and not _is_ipv6(first):
            kinds["slurm"] += 1
        elif re.fullmatch(r"(\[[^\]]+\]|[^:\s]+):\S*", first):
            kinds["hydra"] += 1
        elif "," in line and not re.search(r"\s", line):
            kinds["slurm"] += 1
        else:
            kinds["plain"] += 1
    if kinds["mvapich"]:
        return "mvapich"  # its lines without a device look like hydra's
    told = [(count, kind) for kind, count in kinds.items() if kind != "plain"]
    return max(told)[1] if told else "plain"


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text.partition("]")[0].lstrip("[").partition("%")[0])
    except ValueError:
        return False
    return True


def _entry(number: int, line: str, dialect: str) -> Entry:
    """Return the host of a line.

    Raises:
        InvalidArgument: the line is not understood; the text says which part.
    """
    tokens = re.sub(r"\s*=\s*", "=", line).split()
    name, user, count, hca = _first(tokens[0], dialect, with_keys="=" in line)
    slots, most = count, None
    for token in tokens[1:]:
        key, equals, value = token.partition("=")
        key = key.lower()
        if not equals:
            raise InvalidArgument(
                f"token {token!r} not understood: one host per line (bad entry: {line!r})"
            )
        if key in _SLOTS:
            if slots is not None:
                raise InvalidArgument(f"the number of slots is given twice (bad entry: {line!r})")
            slots = _number(key, value)
        elif key in _MAX:
            most = _number(key, value)
        elif key in _USER:
            user = value or None
        elif dialect not in ("hydra", "intelmpi") or key not in _HYDRA_KEYS:
            raise InvalidArgument(f"{key!r} is no keyword of a hostfile (bad entry: {line!r})")
    if most is not None and slots is not None and most < slots:
        raise InvalidArgument(f"max_slots={most} is less than slots={slots}")
    if dialect == "deepspeed" and slots is None:
        raise InvalidArgument(f"DeepSpeed needs slots= on every line (bad entry: {line!r})")
    return Entry(number, name, slots, most, user, hca)


def _number(key: str, value: str) -> int:
    if not value:
        raise InvalidArgument(f"{key}= has no value")
    if not re.fullmatch(r"[+-]?\d{1,9}", value, re.ASCII):
        raise InvalidArgument(f"{key}={value} is not a whole number")
    number = int(value)
    if number == 0:
        raise InvalidArgument(
            f"{key}=0: no rank fits here (Open MPI takes it to exclude the host); leave the line "
            "out instead"
        )
    if not 0 < number <= _MOST_SLOTS:
        raise InvalidArgument(f"{key}={value} is not a number of ranks")
    return number


def _first(
    token: str, dialect: str, *, with_keys: bool
) -> tuple[str, str | None, int | None, str | None]:
    """Return (host, user, count, device) of a line's first token."""
    if "," in token:
        raise InvalidArgument(
            f"{token!r}: several hosts with commas are the form of mpirun --host; in a file each "
            "has its own line"
        )
    user, at, rest = token.rpartition("@")
    if at and not user:
        raise InvalidArgument(f"{token!r} has no user before the @")
    if rest.startswith("[") or rest.count(":") > 1:
        name, count, hca = _ipv6(rest, dialect, with_keys=with_keys)
    else:
        name, colon, text = rest.partition(":")
        count, hca = (_number("count", text) if colon else None), None
        if colon and dialect == "openmpi":
            raise InvalidArgument(
                f"{token!r}: Open MPI takes the whole for a name; write {name} slots={text}"
            )
    if name.startswith("+"):
        raise InvalidArgument(
            f"{token!r}: relative nodes of Open MPI (+n1, +e:2) name no host by themselves"
        )
    if name.startswith("^"):
        raise InvalidArgument(f"{token!r}: a host is excluded by leaving its line out")
    if not _is_ipv6(name) and _NAME.fullmatch(name) is None:
        hint = "; only Slurm expands brackets" if "[" in name else ""
        raise InvalidArgument(f"{name!r} is not a host name{hint}")
    return name, user or None, count, hca


def _ipv6(text: str, dialect: str, *, with_keys: bool) -> tuple[str, int | None, str | None]:
    """Return (host, count, device) of ``[addr]:8``, an address, or MVAPICH's ``host:4:device``."""
    match = re.fullmatch(r"\[([^\[\]]+)\](?::(.*))?", text)
    if match:
        if not _is_ipv6(match[1]):
            raise InvalidArgument(f"{match[1]!r} is not an IPv6 address")
        return match[1], None if match[2] is None else _number("count", match[2]), None
    whole = _is_ipv6(text)
    head, _, tail = text.rpartition(":")
    split = _is_ipv6(head) and re.fullmatch(r"\d{1,9}", tail, re.ASCII) is not None
    if whole and split and not with_keys:
        raise InvalidArgument(
            f"{text!r} is ambiguous: an address, or {head} with {tail} slots? Write "
            f"[{head}]:{tail} or {head} slots={tail}"
        )
    if whole:
        return text, None, None
    if split:
        return head, _number("count", tail), None
    match = re.fullmatch(r"([^:]+):(\d*):([A-Za-z][\w.:-]*)", text, re.ASCII)
    if match and dialect in ("mvapich", "plain"):
        return match[1], _number("count", match[2] or "1"), match[3]
    if match:
        raise InvalidArgument(f"third field {match[3]!r} not supported: that is MVAPICH's form")
    raise InvalidArgument(f"{text!r} is neither an IPv6 address nor host:count")
