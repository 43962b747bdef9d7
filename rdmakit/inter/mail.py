"""Mail between ranks over the channel of their job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rdmakit.inter.tags import KIND_MASK, USER_TAGS, TagKind, pack
from rdmakit.protocols import Arrived, Bytes, Request, TaggedChannel

__all__ = ["ChannelMail"]


class ChannelMail:
    """See :class:`rdmakit.protocols.Mail`. Local to make."""

    tags = USER_TAGS

    def __init__(self, channel: TaggedChannel, communicator: int, job: Sequence[int]) -> None:
        """Describe it.

        Args:
            channel: of the whole job.
            communicator: number that keeps its messages apart.
            job: rank in the job of each rank of the communicator.
        """
        self._channel, self._job = channel, job
        self._ranks = {there: here for here, there in enumerate(job)}
        self._tag = pack(communicator, TagKind.POINT_TO_POINT, 0)

    def send(self, peer: int, data: Bytes, tag: int) -> Request:
        """Start sending."""
        channel = self._channel
        return channel.send(self._job[peer], channel.wrap(data), self._tag | tag)

    def arrived(self) -> Arrived | None:
        """Take the next message that has come."""
        found = self._channel.arrived(self._tag, KIND_MASK)
        if found is None:
            return None
        return replace(found, source=self._ranks[found.source], tag=found.tag % USER_TAGS)

    def abandon(self, requests: Sequence[Request], keep: Sequence[object]) -> None:
        """As the channel's."""
        self._channel.abandon(requests, keep)
