"""Inside a node: whether a peer's window is the peer's own memory, and carries the bytes."""

from __future__ import annotations

import re

import numpy as np

from rdmakit.drivers.host import HostTree
from rdmakit.proof.evidence import WindowCheck
from rdmakit.proof.measure import pattern
from rdmakit.protocols import Window

__all__ = ["PIECES", "WindowEnd", "mapping_of"]

PIECES = 4
"""Times that the whole area is written and read."""


def mapping_of(tree: HostTree, address: int) -> str:
    """Return device, inode and offset of the shared file that is mapped at an address, or nothing.

    Two processes that get the same text see the same memory, if the file is in memory.
    """
    for line in (tree.read_text("/proc/self/maps") or "").splitlines():
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) ([0-9a-f]+) (\S+) (\d+)\s*(.*)", line)
        if found and int(found[1], 16) <= address < int(found[2], 16):
            if found[3][3] != "s" or found[6] == "0":
                return ""
            offset = address - int(found[1], 16) + int(found[4], 16)
            return f"{found[5]} inode {found[6]} offset {offset}"
    return ""


class WindowEnd:
    """One rank's end of a pair in a node: the first writes its own area, the second reads it."""

    def __init__(self, window: Window, tree: HostTree, owner: int, *, writes: bool) -> None:
        """Look at it. Local.

        Args:
            window: the node's.
            tree: the machine.
            owner: the local rank whose area it is: the first's.
            writes: whether this rank is the first.
        """
        self._area = window.area(owner)
        self._writes, self.kind = writes, window.kind
        self.nbytes = int(self._area.nbytes)
        self.mapping = mapping_of(tree, int(self._area.ctypes.data))
        self.wrong = 0

    def write(self, piece: int) -> None:
        """Fill the area, as its owner."""
        if self._writes:
            self._area[:] = pattern(self.nbytes, piece)

    def read(self, piece: int) -> None:
        """Compare it, as the other."""
        if not self._writes:
            self.wrong += int(np.count_nonzero(self._area != pattern(self.nbytes, piece)))

    @staticmethod
    def check(kind: str, first: str, second: str) -> WindowCheck:
        """Return what the mappings of both ranks say. Pure."""
        if not (first and second):
            return WindowCheck(kind=kind, same=False, note="no shared file is mapped there")
        if first != second:
            return WindowCheck(kind=kind, same=False, note=f"{first} is not {second}")
        return WindowCheck(kind=kind, same=True, note=f"both ranks map {first}")
