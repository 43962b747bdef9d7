"""What a launcher would do with a hostfile and a number of ranks. Pure.

Open MPI's answers were tried with 5.0.11, hydra's with MPICH: Open MPI fills the slots of one
host after another and refuses more ranks than slots; hydra begins again at the first host.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rdmakit.errors import InvalidArgument
from rdmakit.hostfile.check import launcher_key
from rdmakit.hostfile.model import Host, Hostfile

__all__ = ["Launch", "Share", "plan_launch"]


@dataclass(frozen=True)
class Share:
    """What one host gets."""

    host: str
    names: tuple[str, ...]
    """All names in the file that are this host to the launcher."""
    slots: int | None
    slots_from: str
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Launch:
    """The outcome of ``mpirun -n``."""

    launcher: str
    ranks: int
    shares: tuple[Share, ...]
    refused: str = ""
    """Why nothing would be started; empty if something would."""
    notes: tuple[str, ...] = ()

    @property
    def oversubscribed(self) -> bool:
        """Whether a host gets more ranks than it has slots."""
        return any(s.slots is not None and len(s.ranks) > s.slots for s in self.shares)


def plan_launch(
    hostfile: Hostfile,
    ranks: int,
    *,
    launcher: str | None = None,
    map_by: str = "slot",
    cores: int | None = None,
    own_names: Sequence[str] = (),
) -> Launch:
    """Return which host gets which ranks.

    Args:
        hostfile: a file without errors.
        ranks: number of ranks asked for, 1 or more.
        launcher: openmpi, hydra or slurm; None: the one whose dialect the file is in.
        map_by: ``slot`` (fill one host, then the next), ``node`` (in turn) or ``ppr:N:node``.
        cores: cores of every host, which are its slots where Open MPI is told none.
        own_names: names of this machine.

    Raises:
        InvalidArgument: ``ranks``, ``launcher`` or ``map_by`` make no sense.
    """
    if ranks < 1:
        raise InvalidArgument(f"-n {ranks}: at least 1 rank")
    kind = launcher or _launcher_of(hostfile.dialect)
    if kind not in ("openmpi", "hydra", "slurm"):
        raise InvalidArgument(f"launcher {kind!r}; one of openmpi, hydra, slurm")
    if hostfile.errors:
        return Launch(kind, ranks, (), f"the file has errors: {hostfile.errors[0]}")
    if kind == "slurm":
        return _slurm(hostfile, ranks)
    if kind == "hydra":
        return _hydra(hostfile, ranks)
    return _open_mpi(hostfile, ranks, map_by, cores, own_names)


def _launcher_of(dialect: str) -> str:
    if dialect in ("hydra", "intelmpi", "mvapich"):
        return "hydra"
    return "slurm" if dialect == "slurm" else "openmpi"


def _open_mpi(
    hostfile: Hostfile, ranks: int, map_by: str, cores: int | None, own_names: Sequence[str]
) -> Launch:
    shares, refused = _merged(hostfile.hosts, cores, own_names)
    notes = [
        f"Open MPI takes {' and '.join(share.names)} for one host"
        for share in shares
        if len(share.names) > 1
    ]
    if refused:
        return Launch("openmpi", ranks, tuple(shares), refused, tuple(notes))
    unknown = [share.host for share in shares if share.slots is None]
    if unknown:
        return Launch(
            "openmpi",
            ranks,
            tuple(shares),
            "",
            (
                *notes,
                f"no slots are given for {', '.join(unknown)}: Open MPI takes the number of cores, "
                "which is not in the file; the first such host may get every rank. Say --cores N "
                "to see, or write slots=",
            ),
        )
    total = sum(share.slots or 0 for share in shares)
    match = re.fullmatch(r"ppr:(\d{1,6}):node", map_by, re.ASCII)
    if match is None and map_by not in ("slot", "node"):
        raise InvalidArgument(f"map-by {map_by!r}; one of slot, node, ppr:N:node")
    if ranks > total:
        refused = (
            f"not enough slots: {ranks} ranks, {total} slots; give more slots, or "
            "--map-by :oversubscribe, which puts all ranks on the first host"
        )
        return Launch("openmpi", ranks, tuple(shares), refused, tuple(notes))
    if match:
        limits, refused = _per_node(shares, int(match[1]), ranks)
        if refused:
            return Launch("openmpi", ranks, tuple(shares), refused, tuple(notes))
    else:
        limits = [share.slots or 0 for share in shares]
    given = _in_turn(limits, ranks) if map_by == "node" else _filled(limits, ranks)
    return Launch("openmpi", ranks, _with_ranks(shares, given), "", tuple(notes))


def _per_node(shares: Sequence[Share], each: int, ranks: int) -> tuple[list[int], str]:
    """Return ranks of each host for ``ppr:each:node``, and why that is refused if it is."""
    short = [share.host for share in shares if (share.slots or 0) < each]
    if short:
        return [], f"{', '.join(short)}: fewer slots than {each} ranks per node"
    if each * len(shares) < ranks:
        return [], (
            f"{each} ranks on each of {len(shares)} hosts are {each * len(shares)}, not {ranks}"
        )
    return [each] * len(shares), ""


def _merged(
    hosts: Sequence[Host], cores: int | None, own_names: Sequence[str]
) -> tuple[list[Share], str]:
    """Return hosts as Open MPI sees them, and why it refuses them if it does."""
    groups: dict[str, list[Host]] = {}
    for host in hosts:
        groups.setdefault(launcher_key(host.name, own_names), []).append(host)
    shares = []
    refused = ""
    for key, own in groups.items():
        counts = [host.slots if host.slots is not None else cores for host in own]
        given = [host for host in own if host.slots_from.startswith("given")]
        if len(own) == 1:
            slots, source = counts[0], own[0].slots_from
            if own[0].slots is None and cores is not None:
                source = "cores"
        elif given:
            slots, source = None, "given twice"
            refused = refused or (
                f"multiple definitions of the slot count for {key}: "
                + " and ".join(host.name for host in own)
            )
        else:
            slots = sum(host.slots if host.slots is not None else 1 for host in own)
            source = f"one for each of {len(own)} names"
        shares.append(Share(own[0].name, tuple(host.name for host in own), slots, source))
    return shares, refused


def _filled(limits: Sequence[int], ranks: int) -> list[list[int]]:
    given: list[list[int]] = []
    first = 0
    for limit in limits:
        count = min(limit, ranks - first)
        given.append(list(range(first, first + count)))
        first += count
    return given


def _in_turn(limits: Sequence[int], ranks: int) -> list[list[int]]:
    given: list[list[int]] = [[] for _ in limits]
    rank = 0
    while rank < ranks:
        before = rank
        for place, limit in enumerate(limits):
            if rank < ranks and len(given[place]) < limit:
                given[place].append(rank)
                rank += 1
        if rank == before:
            break
    return given


def _with_ranks(shares: Sequence[Share], given: Sequence[Sequence[int]]) -> tuple[Share, ...]:
    return tuple(
        Share(share.host, share.names, share.slots, share.slots_from, tuple(ranks))
        for share, ranks in zip(shares, given, strict=True)
    )


def _hydra(hostfile: Hostfile, ranks: int) -> Launch:
    """Hydra goes through the lines, as many ranks as each says, and begins again at the end."""
    names = {host.name: place for place, host in enumerate(hostfile.hosts)}
    given: list[list[int]] = [[] for _ in names]
    rank = 0
    while rank < ranks:
        for entry in hostfile.entries:
            for _ in range(min(entry.slots or 1, ranks - rank)):
                given[names[entry.host]].append(rank)
                rank += 1
    shares = [
        Share(
            host.name,
            (host.name,),
            host.slots if host.slots is not None else 1,
            host.slots_from if host.slots is not None else "not given: hydra counts 1",
        )
        for host in hostfile.hosts
    ]
    total = sum(share.slots or 0 for share in shares)
    notes = (
        (f"{ranks} ranks for {total} slots: hydra begins again at the first host",)
        if ranks > total
        else ()
    )
    return Launch("hydra", ranks, _with_ranks(shares, given), "", notes)


def _slurm(hostfile: Hostfile, ranks: int) -> Launch:
    """As srun -n does: as equal as can be, the first nodes one more; its default is block order."""
    hosts = hostfile.hosts
    count = len(hosts)
    if hostfile.total is not None:
        limits = [host.slots or 0 for host in hosts]
        refused = (
            f"{ranks} ranks, but the job has {hostfile.total} tasks"
            if ranks > hostfile.total
            else ""
        )
    else:
        limits = [ranks // count + (place < ranks % count) for place in range(count)]
        refused = ""
    shares = [Share(host.name, (host.name,), host.slots, host.slots_from) for host in hosts]
    given = _filled(limits, ranks) if not refused else [[] for _ in hosts]
    return Launch("slurm", ranks, _with_ranks(shares, given), refused)
