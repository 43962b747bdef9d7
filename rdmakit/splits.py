"""Communicators of some of a communicator's ranks, with mpi4py's manners."""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Self, cast

from rdmakit.bootstrap import MpiBootstrap, load_mpi
from rdmakit.errors import InvalidArgument
from rdmakit.group import Group
from rdmakit.process.phase import current
from rdmakit.request import integer
from rdmakit.status import UNDEFINED

__all__ = ["Splits"]


_TOLD = "<?qq"
_LARGEST = 2**63 - 1


class Splits(Group, ABC):
    """Split, duplicate, pick out ranks. What comes of it is a communicator like the first."""

    def Split(self, color: Any = 0, key: int = 0) -> Self | None:
        """Return the communicator of the ranks with equal ``color``, ordered by ``key``.

        Collective, blocking. Equal keys keep the present order. Ranks that give UNDEFINED, ours
        or mpi4py's, or None, get None. The new one has a window of its own, shares channel and
        progress thread, and runs its calls independently; it is closed with this one at the
        latest.

        Raises:
            InvalidArgument: a color that is negative, or a color or key that is no integer.
            SetupError: on every rank of the new one: no room for its window.
        """
        self._take_turn()
        try:
            nobody, color, key = _checked(color, key)
        except InvalidArgument as exc:
            self._refuse("split", exc)
            raise
        self._agreement.agree("split")
        with current.during("split", timeout=self._waiter.timeout):
            mine = struct.pack(_TOLD, nobody, color, key)
            told = [struct.unpack(_TOLD, text) for text in self._bootstrap.allgather(mine)]
        if nobody:
            return None
        return self._derive(
            [
                rank
                for _, rank in sorted(
                    (k, rank) for rank, (no, c, k) in enumerate(told) if not no and c == color
                )
            ]
        )

    def Dup(self) -> Self:
        """Return another communicator of the same ranks. Collective, blocking; see Split."""
        self._take_turn()
        self._agreement.agree("dup")
        return self._derive(range(self.size))

    def Create_group(self, ranks: Any) -> Self:
        """Return the communicator of ``ranks``, in that order. Collective in these alone, blocking.

        Args:
            ranks: ranks of this communicator, or an mpi4py Group of processes that it has.

        Raises:
            InvalidArgument: ranks that are not there or twice, or this rank is not among them.
        """
        self._take_turn()
        members = self._members(ranks)
        if self.rank not in members:
            raise InvalidArgument(f"rank {self.rank} is not among {members}, so it must not call")
        return self._derive(members)

    def Create(self, ranks: Any) -> Self | None:
        """As :meth:`Create_group`, but collective in all ranks; the others get None."""
        self._take_turn()
        try:
            members = self._members(ranks)
        except InvalidArgument as exc:
            self._refuse("create", exc)
            raise
        self._agreement.agree(f"create {members}")
        return self._derive(members) if self.rank in members else None

    def Get_group(self) -> Any:
        """Return mpi4py's Group of these ranks, which the caller frees. Local."""
        return cast(MpiBootstrap, self._bootstrap).comm.Get_group()

    def Abort(self, errorcode: int = 0) -> None:
        """End every rank of the job. Local; does not return."""
        cast(MpiBootstrap, self._bootstrap).abort(errorcode)

    def _members(self, ranks: Any) -> list[int]:
        if hasattr(ranks, "Translate_ranks"):
            mpi = load_mpi()
            group = self.Get_group()
            ranks = ranks.Translate_ranks(None, group)
            group.Free()
            if mpi.UNDEFINED in ranks:
                raise InvalidArgument("the group has processes that this communicator has not")
        try:
            given = list(ranks)
        except TypeError as exc:
            raise InvalidArgument(f"ranks: expected several or a Group, got {ranks!r}") from exc
        members = [integer("ranks", rank) for rank in given]
        if not members or len(set(members)) < len(members):
            raise InvalidArgument(f"ranks {members}: at least one, and none twice")
        bad = [rank for rank in members if not 0 <= rank < self.size]
        if bad:
            raise InvalidArgument(f"ranks {bad} are not in 0..{self.size - 1}")
        return members

    @abstractmethod
    def _derive(self, members: Sequence[int]) -> Self:
        """Make the communicator of ``members``. Collective in these, blocking."""


def _checked(color: Any, key: Any) -> tuple[bool, int, int]:
    """Return whether this rank takes no part, its color and its key. Local."""
    key = integer("key", key)
    if not -_LARGEST <= key <= _LARGEST:
        raise InvalidArgument(f"key {key}: it must fit 64 bits")
    color = UNDEFINED if color is None else integer("color", color)
    if color == UNDEFINED:
        return True, 0, key
    if not 0 <= color <= _LARGEST:
        limit = "0 or more" if color < 0 else "it must fit 64 bits"
        raise InvalidArgument(f"color {color}: {limit}, or UNDEFINED")
    return False, color, key
