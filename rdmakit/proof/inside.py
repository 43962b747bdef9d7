"""Inside a node: whether a peer's window is the peer's own memory, and carries the bytes.

Host memory: the node's own window, whose shared file both ranks map. GPU memory: a window of the
pair alone, made and tried as the node's are; its identity is random data that each side reads
where the other wrote it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from rdmakit.drivers.host import HostTree
from rdmakit.intra.cuda_ipc import exchange_facts, share_window
from rdmakit.proof.evidence import WindowCheck
from rdmakit.proof.measure import pattern
from rdmakit.protocols import Bootstrap, Window

__all__ = ["PIECES", "DeviceWindowEnd", "SharedMemory", "WindowEnd", "device_window", "mapping_of"]

PIECES = 4
"""Times that the whole area is written and read."""
_DEVICE_BYTES = 4 << 20
"""Of a window on a GPU: far more than a port counts by itself."""


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

    def close(self) -> None:
        """Leave it: the window is the communicator's."""

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


class DeviceWindowEnd:
    """The same for GPU memory. Made and closed by both ranks of the pair together, blocking."""

    kind = "cuda-ipc"

    def __init__(
        self,
        pair: Bootstrap,
        door: Any,
        make: Callable[[Bootstrap, Any], SharedMemory],
    ) -> None:
        """Make a window of the pair and try it both ways.

        Args:
            pair: control plane of the two ranks; the first writes its own memory.
            door: to CUDA.
            make: returns memory that both map; see :func:`device_window`.

        Raises:
            SetupError: on both ranks: the one cannot map the other's memory; says why.
        """
        self._pair, self._door = pair, door
        self._shared = make(pair, door)
        self.nbytes, self.wrong = self._shared.nbytes, 0
        self.mapping = "GPU memory of the first, in which each reads what the other wrote"

    def write(self, piece: int) -> None:
        """Fill the first rank's memory, as its owner. Blocking."""
        if self._pair.rank == 0:
            data = pattern(self.nbytes, piece)
            self._door.copy_now(self._shared.addresses[0], data.ctypes.data, self.nbytes)

    def read(self, piece: int) -> None:
        """Compare it through the mapping, as the other. Blocking."""
        if self._pair.rank == 1:
            data = np.zeros(self.nbytes, np.uint8)
            self._door.copy_now(data.ctypes.data, self._shared.addresses[0], self.nbytes)
            self.wrong += int(np.count_nonzero(data != pattern(self.nbytes, piece)))

    def close(self) -> None:
        """Unmap on both, then free. Collective in the pair, blocking."""
        self._shared.close(self._pair)
        self._pair.free()


class SharedMemory(Protocol):
    """See :class:`rdmakit.intra.cuda_ipc.Shared`."""

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where each rank's piece is in this process."""
        ...

    @property
    def nbytes(self) -> int:
        """Size of each piece."""
        ...

    def close(self, bootstrap: Bootstrap) -> None:
        """Unmap everywhere, then let go. Collective, blocking."""
        ...


def device_window(pair: Bootstrap, door: Any) -> SharedMemory:
    """Return GPU memory of two ranks that both map, tried with random data. Collective, blocking.

    Raises:
        SetupError: on both ranks; names the reason and the cure.
    """
    device = door.current_device()
    door.activate(device)
    return share_window(pair, exchange_facts(pair, device), _DEVICE_BYTES)
