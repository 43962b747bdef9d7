"""What a communicator is made of, and how it is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from rdmakit.bootstrap import MpiBootstrap
from rdmakit.collectives import Collectives
from rdmakit.config import Config
from rdmakit.errors import SetupError
from rdmakit.family import Family
from rdmakit.inter.mail import ChannelMail
from rdmakit.inter.mpi import MpiChannel, MpiMail
from rdmakit.layout import RankLayout
from rdmakit.nics import choose_nics
from rdmakit.nodes import Nodes
from rdmakit.protocols import Bootstrap, Channel, Mail, TaggedChannel, Window
from rdmakit.startup import make_channel, raise_together
from rdmakit.waiting import Waiter, spins_for

__all__ = [
    "Parts",
    "channel_of",
    "controls_of",
    "node_of",
    "rail_of",
    "routes",
    "waiter_of",
    "window_of",
]


@dataclass
class Parts:
    """What one communicator is made of; the three groups are itself, its node, its rail."""

    bootstraps: tuple[Bootstrap, Bootstrap, Bootstrap]
    layout: RankLayout
    window: Window | None
    channel: Channel | None
    channel_ranks: tuple[int, ...]
    """Number on the channel of each rank."""
    number: int
    """Keeps its messages apart on the channel."""
    hosts: tuple[str, ...]


def controls_of(bootstrap: Any, layout: RankLayout) -> tuple[Any, Any, Any]:
    """Return the control planes of all, of this rank's node and of its rail. Collective."""
    rank = bootstrap.rank
    return (
        bootstrap,
        bootstrap.split(layout.node_of(rank), rank),
        bootstrap.split(layout.local_rank(rank), rank),
    )


def window_of(
    make: Callable[[Bootstrap], Window], controls: tuple[Bootstrap, Bootstrap, Bootstrap]
) -> Window | None:
    """Make the window of this rank's node, if it has peers there. Collective, blocking."""
    window: Window | None = None
    problem = ""
    if controls[1].size > 1:
        try:
            window = make(controls[1])
        except SetupError as exc:
            problem = str(exc)
    raise_together(controls[0], problem, SetupError)
    return window


def channel_of(
    bootstrap: MpiBootstrap,
    config: Config,
    nodes: Nodes,
    partners: Sequence[int],
    waiter: Waiter,
) -> tuple[Channel, list[str]]:
    """Make the channel between nodes; return it and notes. Collective, blocking."""
    virtual = nodes.virtual
    devices, notes = choose_nics(bootstrap, config, bootstrap.host, nodes.machines, virtual=virtual)
    channel, note = make_channel(
        bootstrap, config, partners, waiter, virtual=virtual, devices=devices
    )
    return channel, [text for text in (*notes, note) if text]


def node_of(parts: Parts, waiter: Waiter, config: Config, family: Family) -> Collectives:
    """Return the collectives of this rank's node alone. Local."""
    layout, control = parts.layout, parts.bootstraps[1]
    members = layout.nodes[layout.node_of(parts.bootstraps[0].rank)]
    return Collectives(
        RankLayout.of_sizes([control.size]),
        control,
        parts.window,
        None,
        waiter,
        config,
        job_ranks=tuple(parts.channel_ranks[rank] for rank in members),
        named=tuple(members),
        mpi=getattr(control, "comm", None),
        label="node ",
        family=family,
    )


def rail_of(parts: Parts, waiter: Waiter, config: Config, family: Family) -> Collectives:
    """Return the collectives of the ranks with this one's local rank. Local."""
    layout, control = parts.layout, parts.bootstraps[2]
    members = layout.rails[layout.local_rank(parts.bootstraps[0].rank)]
    return Collectives(
        RankLayout.of_sizes([1] * control.size),
        control,
        None,
        parts.channel,
        waiter,
        config,
        identity=parts.number + 1,
        job_ranks=tuple(parts.channel_ranks[rank] for rank in members),
        named=tuple(members),
        mpi=getattr(control, "comm", None),
        label="rail ",
        family=family,
    )


def waiter_of(rank: int, host: str, config: Config, on_node: int, hosts: Sequence[str]) -> Waiter:
    """Return the waits of a communicator whose ranks are on ``hosts``. Local."""
    spins = spins_for(max(on_node, hosts.count(hosts[rank])))
    return Waiter(rank, host, config.timeout, spins)


def routes(parts: Parts, rank: int, other: Channel | None) -> tuple[list[Mail], int]:
    """Return what carries messages to each rank: MPI in the node, the channel between nodes.

    Args:
        parts: the communicator's.
        rank: this rank.
        other: carries them where there is neither (ranks that are threads).

    Returns:
        For each rank its way; and how many tags all of them have, the same on all ranks.
    """
    bootstrap, layout, channel = parts.bootstraps[0], parts.layout, parts.channel
    if not isinstance(bootstrap, MpiBootstrap):
        carries = cast(TaggedChannel, channel or other)
        mail = ChannelMail(carries, parts.number, parts.channel_ranks)
        return [mail] * layout.size, mail.tags
    local = MpiMail(bootstrap.comm)
    if channel is None or isinstance(channel, MpiChannel):
        return [local] * layout.size, local.tags
    between = ChannelMail(cast(TaggedChannel, channel), parts.number, parts.channel_ranks)
    here = layout.node_of(rank)
    ways: list[Mail] = [local if layout.node_of(r) == here else between for r in range(layout.size)]
    return ways, min(local.tags, between.tags)
