"""The 64 bits of a message tag: communicator, source, kind, sequence, message.

UCX matches messages for the whole worker, so the source must be in the tag. Sequence numbers
come round again after 1024 collectives of one communicator; since a rank starts a collective
only after it finished the one before, messages of two that far apart never meet.

Messages between two ranks alone have the user's tag in the place of sequence and message.
"""

from __future__ import annotations

import enum

from rdmakit.errors import InvalidArgument, UnsupportedError
from rdmakit.protocols import Bootstrap, Form

__all__ = [
    "COMMUNICATORS",
    "KIND_MASK",
    "MESSAGES",
    "NUMBERED",
    "SEQUENCES",
    "SOURCES",
    "USER_BITS",
    "USER_TAGS",
    "Numbers",
    "TagKind",
    "form_of",
    "formed",
    "pack",
    "source_of",
    "unpack",
    "with_source",
]

_MESSAGE, _SEQUENCE, _KIND, _SOURCE, _COMMUNICATOR = 22, 10, 2, 20, 10
MESSAGES = 1 << _MESSAGE
SEQUENCES = 1 << _SEQUENCE
SOURCES = 1 << _SOURCE
COMMUNICATORS = 1 << _COMMUNICATOR
USER_BITS = 1 << (_SEQUENCE + _MESSAGE)
"""What fits the place of a user's tag."""
USER_TAGS = 1 << 28
"""Tags of messages between two ranks; what is above them says that a message is in pieces."""
_KINDS = (1 << _KIND) - 1
KIND_MASK = (COMMUNICATORS - 1 << (_SOURCE + _KIND) | _KINDS) << (_SEQUENCE + _MESSAGE)
"""The bits of communicator and kind."""


class TagKind(enum.IntEnum):
    """What a message belongs to."""

    COLLECTIVE = 0
    POINT_TO_POINT = 1
    BENCH = 2


def pack(communicator: int, kind: TagKind, sequence: int, message: int = 0) -> int:
    """Return a tag without its source; ``sequence`` wraps, the others must fit.

    Raises:
        InvalidArgument: a field does not fit its bits.
    """
    for name, value, limit in (
        ("communicator", communicator, COMMUNICATORS),
        ("message", message, MESSAGES),
    ):
        if not 0 <= value < limit:
            raise InvalidArgument(f"tag field {name}={value} is not in 0..{limit - 1}")
    head = communicator << (_SOURCE + _KIND) | kind
    return (head << _SEQUENCE | sequence % SEQUENCES) << _MESSAGE | message


def with_source(tag: int, source: int) -> int:
    """Return ``tag`` as sent by job rank ``source``.

    Raises:
        InvalidArgument: more ranks than the field counts.
    """
    if not 0 <= source < SOURCES:
        raise InvalidArgument(f"tag field source={source} is not in 0..{SOURCES - 1}")
    return tag | source << (_KIND + _SEQUENCE + _MESSAGE)


def source_of(tag: int) -> int:
    """Return the job rank that sent ``tag``."""
    return tag >> (_KIND + _SEQUENCE + _MESSAGE) & SOURCES - 1


def unpack(tag: int) -> tuple[int, int, TagKind, int, int]:
    """Return (communicator, source, kind, sequence, message) of a tag."""
    message = tag % MESSAGES
    tag >>= _MESSAGE
    sequence = tag % SEQUENCES
    tag >>= _SEQUENCE
    kind = TagKind(tag % (1 << _KIND))
    tag >>= _KIND
    return tag >> _SOURCE, tag % SOURCES, kind, sequence, message


_NUMBERED = (Form.PIECE, Form.LENT, Form.TAKEN)
NUMBERED = len(_NUMBERED)
"""Forms that have a message's number in the place of the tag."""


def formed(tag: int, form: Form, tags: int, numbers: int) -> int:
    """Return what stands in the place of the user's tag.

    Users' tags are below ``tags``, then comes that of all heads, then ``numbers`` of each form that
    has the number of a message.
    """
    if not form:
        return tag
    return tags if form is Form.HEAD else tags + 1 + _NUMBERED.index(form) * numbers + tag


def form_of(value: int, tags: int, numbers: int) -> tuple[int, Form]:
    """Undo :func:`formed`."""
    if value < tags:
        return value, Form.WHOLE
    if value == tags:
        return 0, Form.HEAD
    form, number = divmod(value - tags - 1, numbers)
    return number, _NUMBERED[form]


class Numbers:
    """Which numbers of communicators are in use on this rank of a job.

    Each communicator has two, an even one and, for its rail, the next. The first is taken, and
    the last is the channel's own. Numbers are used again as late as can be.
    """

    _PAIRS = COMMUNICATORS // 2 - 1
    _BYTES = COMMUNICATORS // 16

    def __init__(self) -> None:
        self._taken, self._last = 1, 0

    def agree(self, bootstrap: Bootstrap) -> int:
        """Take a number that is free on all ranks of ``bootstrap``. Collective, blocking.

        Raises:
            UnsupportedError: on every rank: there is none.
        """
        mine = self._taken.to_bytes(self._BYTES, "little") + self._last.to_bytes(2, "little")
        taken, last = 0, 0
        for told in bootstrap.allgather(mine):
            taken |= int.from_bytes(told[: self._BYTES], "little")
            last = max(last, int.from_bytes(told[self._BYTES :], "little"))
        for step in range(self._PAIRS):
            pair = (last + 1 + step) % self._PAIRS
            if not taken >> pair & 1:
                self._taken |= 1 << pair
                self._last = pair
                return 2 * pair
        raise UnsupportedError(
            f"all {self._PAIRS} communicators that can share a channel are in use: close some"
        )

    def give_back(self, number: int) -> None:
        """Let a number be used again. Local; after the communicator was closed."""
        self._taken &= ~(1 << number // 2)
