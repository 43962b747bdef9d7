"""Memory that the ranks of a node have registered together: each by its address and number."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from rdmakit.intra.cuda_ipc import Shared

__all__ = ["Registration", "Registry"]


class Registration:
    """Memory that all ranks of a node have registered together. Closed by its node.

    Attributes:
        index: equal on all ranks; never used twice in a node.
        address: this rank's memory.
        end: the first address after it.
    """

    def __init__(self, index: int, address: int, shared: Shared) -> None:
        self.index, self.address, self.shared = index, address, shared
        self.end = address + shared.nbytes

    def peers(self, address: int) -> list[int]:
        """Return where every rank's memory for ``address`` of this rank's is mapped here."""
        offset = address - self.address
        return [base + offset for base in self.shared.addresses]


class Registry:
    """The registrations of one node on this rank. Local.

    What it holds is replaced, never changed: a thread that moves messages looks into it while
    another registers.

    Attributes:
        newest: index of the last one that was made; they only rise.
    """

    def __init__(self) -> None:
        self._entries: tuple[Registration, ...] = ()
        self.newest = 0

    def __iter__(self) -> Iterator[Registration]:
        """By address."""
        return iter(self._entries)

    def add(self, address: int, shared: Shared) -> Registration:
        """Return the next one; all ranks make theirs in the same order."""
        entry = Registration(self.newest + 1, address, shared)
        self._entries = tuple(sorted((*self._entries, entry), key=_address))
        self.newest = entry.index  # last: what is counted is there
        return entry

    def remove(self, entry: Registration) -> None:
        """Forget it."""
        self._entries = tuple(e for e in self._entries if e is not entry)

    def clear(self) -> None:
        """Forget all."""
        self._entries = ()

    def find(self, address: int, nbytes: int) -> Registration | None:
        """Return the one that holds the whole range of this rank's memory, or None."""
        entries = self._entries
        at = bisect_right(entries, address, key=_address)
        while at:  # they may overlap: the nearest start need not reach far enough
            at -= 1
            if address + nbytes <= entries[at].end:
                return entries[at]
        return None

    def mapped(self, index: int, rank: int, offset: int, nbytes: int) -> int | None:
        """Return where a peer's part of one is mapped here, or None.

        Args:
            index: of the registration.
            rank: the peer, in this node.
            offset: bytes from its beginning.
            nbytes: how many are meant.
        """
        for entry in self._entries:
            if entry.index == index and 0 <= offset <= offset + nbytes <= entry.shared.nbytes:
                return entry.shared.addresses[rank] + offset
        return None


def _address(entry: Registration) -> int:
    return entry.address
