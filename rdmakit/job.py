"""What a communicator shares with those that were split from it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

from rdmakit.device_side import Gpu
from rdmakit.engine import Engine
from rdmakit.family import Family
from rdmakit.inter.tags import Numbers
from rdmakit.protocols import Bootstrap, Channel, Window

__all__ = ["Job"]


@dataclass
class Job:
    """Made with the first communicator, and of the same ranks."""

    engine: Engine
    """Moves what is under way."""
    channel: Channel | None
    """Between all of the job's ranks, or at least those of different nodes."""
    make_window: Callable[[Bootstrap], Window]
    """Makes the window of a node's ranks. Collective in these."""
    hosts: tuple[str, ...] = ()
    """Host of each rank."""
    virtual: bool = False
    """Whether nodes are parts of one host."""
    notes: tuple[str, ...] = ()
    """What a person should know."""
    why_staged: str = "messages of this communicator take host memory only"
    """Why the channel takes no GPU memory; empty where it does."""
    gpu: Gpu | None = None
    """A fake, in tests."""
    numbers: Numbers = field(default_factory=Numbers)
    families: list[Family] = field(default_factory=list)
    """Those that use the channel."""

    def __post_init__(self) -> None:
        self._poll = _poll_of(self.channel) if self.channel is not None else None
        self.engine.join(self._poll)

    def close(self) -> None:
        """Close the channel, if nobody did. Local; after the last of its communicators."""
        channel, self.channel = self.channel, None
        self.engine.part(self._poll)
        self._poll = None
        if channel is not None:
            channel.close()


def _poll_of(channel: Channel) -> Callable[[], None]:
    """Return what moves a channel, without keeping alive one that nobody holds any more."""
    held = weakref.ref(channel)

    def poll() -> None:
        there = held()
        if there is not None:
            there.progress()

    return poll
