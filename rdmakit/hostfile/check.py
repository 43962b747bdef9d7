"""What lines mean together: repeated hosts, names that are one machine. Pure.

Open MPI's rules were tried with 5.0.11 (``mpirun --display allocation --do-not-launch``).
"""

from __future__ import annotations

from collections.abc import Sequence

from rdmakit.hostfile.model import Entry, Host, Hostfile, Problem, is_address, short_name

__all__ = ["LOCAL", "check_hosts", "combine", "is_local", "launcher_key"]

LOCAL = ("localhost", "localhost.localdomain", "ip6-localhost", "::1")
_ADDING = ("hydra", "intelmpi", "mvapich", "slurm")
"""Dialects in which lines of one host add up."""


def is_local(name: str, own_names: Sequence[str] = ()) -> bool:
    """Return whether ``name`` is the machine that reads it."""
    bare = name.strip("[]").lower()
    return bare in LOCAL or bare.startswith("127.") or bare in [own.lower() for own in own_names]


def combine(dialect: str, entries: Sequence[Entry]) -> tuple[tuple[Host, ...], list[Problem]]:
    """Return the hosts of a file, each once, and what is wrong with repeated ones."""
    by_name: dict[str, list[Entry]] = {}
    for entry in entries:
        by_name.setdefault(entry.host, []).append(entry)
    counted = any(
        len(own) > 1 and all(entry.slots is None for entry in own) for own in by_name.values()
    )
    hosts: list[Host] = []
    problems: list[Problem] = []
    for name, own in by_name.items():
        if dialect in _ADDING:
            slots, source = _added(dialect, own)
        else:
            slots, source, problem = _open_mpi(name, own, counted=counted)
            problems += [problem] if problem is not None else []
        hosts.append(
            Host(
                name,
                slots,
                source,
                tuple(entry.line for entry in own),
                next((entry.max_slots for entry in own if entry.max_slots is not None), None),
                next((entry.user for entry in own if entry.user), None),
                tuple(dict.fromkeys(entry.hca for entry in own if entry.hca)),
            )
        )
    return tuple(hosts), problems


def _added(dialect: str, own: Sequence[Entry]) -> tuple[int | None, str]:
    if dialect == "slurm":
        if any(entry.slots is None for entry in own):
            return None, "left to Slurm"
        return sum(entry.slots or 0 for entry in own), "tasks per node"
    slots = sum(1 if entry.slots is None else entry.slots for entry in own)
    if len(own) > 1:
        return slots, f"{len(own)} lines added up"
    return slots, "given" if own[0].slots is not None else "not given: hydra counts 1"


def _open_mpi(
    name: str, own: Sequence[Entry], *, counted: bool
) -> tuple[int | None, str, Problem | None]:
    """Return (slots, source, problem) of a host's lines.

    Lines with names only count one slot each once any host is repeated so; slots may be given
    in one line, the first.
    """
    given = [entry for entry in own if entry.slots is not None]
    if not given and len(own) > 1:
        return len(own), f"one for each of {len(own)} lines", None
    if not given and counted:
        return (
            1,
            "one line, as other hosts are repeated",
            Problem(
                "warning",
                f"{name} stands once without slots: here it counts 1 like the repeated names, but "
                "Open MPI 5 gives it as many slots as it has cores; write slots=1",
                own[0].line,
            ),
        )
    if not given:
        return None, "not given: Open MPI counts the host's cores, hydra 1", None
    if len(given) > 1 or given[0] is not own[0]:
        second = next(entry for entry in own[1:] if entry.slots is not None)
        return (
            None,
            "given twice",
            Problem(
                "error",
                f"multiple definitions of the slot count for {name} (lines "
                f"{', '.join(str(entry.line) for entry in own)}): neither sum nor choice is right",
                second.line,
            ),
        )
    slots = given[0].slots or 0
    if len(own) > 1:
        return (
            slots + len(own) - 1,
            "given, and one for each further line",
            Problem(
                "warning",
                f"{name} has slots={slots} in line {own[0].line} and stands again without: Open "
                "MPI adds one slot for each such line",
                own[1].line,
            ),
        )
    return slots, "given", None


def launcher_key(name: str, own_names: Sequence[str] = ()) -> str:
    """Return what Open MPI takes a host for: names with equal keys are one host to it."""
    return "localhost" if is_local(name, own_names) else short_name(name)


def check_hosts(hostfile: Hostfile, own_names: Sequence[str] = ()) -> list[Problem]:
    """Return what is suspicious about the hosts of a file."""
    problems: list[Problem] = []
    hosts = hostfile.hosts
    local = [host for host in hosts if is_local(host.name, own_names)]
    loop = [host for host in local if is_local(host.name)]
    if len(local) > 1:
        slots = [host.slots for host in local]
        total = "" if None in slots else f": {sum(s or 0 for s in slots)} ranks on one node, not "
        problems.append(
            Problem(
                "warning",
                f"{' and '.join(host.name for host in local)} are all this machine"
                + (f"{total}{len(local)} nodes" if total else "")
                + "; Open MPI takes them for one host, and refuses slots given twice for it",
                local[1].lines[0],
            )
        )
    if loop and len(local) < len(hosts):
        problems.append(
            Problem(
                "warning",
                f"{loop[0].name} beside remote names: the other nodes cannot reach it by that "
                "name; use the name that they know",
                loop[0].lines[0],
            )
        )
    problems += _merged(hosts, own_names)
    problems += _alike(hosts)
    counts = [host.slots for host in hosts if host.slots is not None]
    if len(set(counts)) > 1 and len(counts) == len(hosts):
        problems.append(
            Problem(
                "warning",
                "hosts have different numbers of slots ("
                + ", ".join(f"{host.name}: {host.slots}" for host in hosts[:6])
                + (", ..." if len(hosts) > 6 else "")
                + "): right for rdmakit, but some libraries expect equal nodes",
            )
        )
    return problems


def _merged(hosts: Sequence[Host], own_names: Sequence[str]) -> list[Problem]:
    """Find names that Open MPI cuts to one."""
    by_short: dict[str, list[Host]] = {}
    for host in hosts:
        if not is_address(host.name) and not is_local(host.name, own_names):
            by_short.setdefault(short_name(host.name), []).append(host)
    return [
        Problem(
            "warning",
            f"{' and '.join(host.name for host in own)}: Open MPI drops domains and takes them "
            f"for one host, {short}"
            + (", and refuses slots given twice for it" if _given_twice(own) else "")
            + "; PRTE_MCA_prte_keep_fqdn_hostnames=1 keeps them apart",
            own[1].lines[0],
        )
        for short, own in by_short.items()
        if len(own) > 1
    ]


def _given_twice(hosts: Sequence[Host]) -> bool:
    return sum(host.slots_from == "given" for host in hosts) > 1


def _alike(hosts: Sequence[Host]) -> list[Problem]:
    by_case: dict[str, list[Host]] = {}
    for host in hosts:
        by_case.setdefault(host.name.lower(), []).append(host)
    return [
        Problem(
            "warning",
            f"{' and '.join(host.name for host in own)} differ in capitals only: one host to the "
            "network, two to a launcher",
            own[1].lines[0],
        )
        for own in by_case.values()
        if len(own) > 1
    ]
