"""Mail between ranks over the channel of their job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from rdmakit.inter.tags import KIND_MASK, USER_BITS, USER_TAGS, TagKind, form_of, formed, pack
from rdmakit.protocols import Arrived, Bytes, DeviceChannel, Form, Request, TaggedChannel

__all__ = ["ChannelMail"]


class ChannelMail:
    """See :class:`rdmakit.protocols.Mail`. Local to make."""

    tags = USER_TAGS
    numbers = 1 << 16

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
        self.direct = hasattr(channel, "wrap_device")

    def send(self, peer: int, data: Bytes, tag: int, form: Form = Form.WHOLE) -> Request:
        """Start sending."""
        channel = self._channel
        if form:
            tag = formed(tag, form, USER_TAGS, self.numbers)
        return channel.send(self._job[peer], channel.wrap(data), self._tag | tag)

    def send_device(self, peer: int, address: int, nbytes: int, number: int) -> Request:
        """Start sending GPU memory."""
        channel = cast(DeviceChannel, self._channel)
        tag = self._tag | formed(number, Form.PIECE, USER_TAGS, self.numbers)
        return channel.send(self._job[peer], channel.wrap_device(address, nbytes), tag)

    def arrived(self) -> Arrived | None:
        """Take the next message that has come."""
        found = self._channel.arrived(self._tag, KIND_MASK)
        if found is None:
            return None
        found.source = self._ranks[found.source]
        found.tag, found.form = form_of(found.tag % USER_BITS, USER_TAGS, self.numbers)
        return found

    def abandon(self, requests: Sequence[Request], keep: Sequence[object]) -> None:
        """As the channel's."""
        self._channel.abandon(requests, keep)
