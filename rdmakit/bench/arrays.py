"""The two arrays of a measured collective, where a user would have them: host, CuPy, registered.

The one timed body (:mod:`rdmakit.bench.collective`) works on any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rdmakit.bench import gpu_values, values
from rdmakit.bench.session import Session
from rdmakit.buffer import as_buffer
from rdmakit.collectives import Collectives
from rdmakit.errors import CudaError, UnsupportedError

__all__ = ["Arrays", "HostArrays", "PoolArrays", "RegisteredArrays"]


class Arrays(Protocol):
    """``send`` and ``recv`` of one row. Made without talking; begun and closed by all ranks."""

    send: Any
    recv: Any

    def begin(self) -> None:
        """Make them ready. Collective in the group, blocking.

        Raises:
            UnsupportedError: they cannot be what they should; on every rank of a node.
            SetupError: the same.
        """
        ...

    def fill(self, periods: Sequence[npt.NDArray[Any]], *, result: bool = False) -> None:
        """Give ``send``, or ``recv``, an input. Local.

        Args:
            periods: of as many equal parts, one behind the other: what each repeats.
            result: whether it is given to ``recv``.
        """
        ...

    def spoil(self) -> None:
        """Give ``recv`` what no result is. Local."""
        ...

    def count_wrong(self, first: int, count: int, period: npt.NDArray[Any], start: int = 0) -> int:
        """Return how many of ``count`` elements of ``recv`` differ from ``period`` repeated.

        Local; after the call was waited for.

        Args:
            first: the first of them.
            count: how many.
            period: one period of what is expected.
            start: index in it of the first.
        """
        ...

    def waited(self, call: Callable[[], object]) -> Callable[[], object]:
        """Return ``call`` so that it returns when the result is there."""
        ...

    def keep(self, part: Any) -> Any:
        """Return ``part``, which is closed with the arrays."""
        ...

    def close(self) -> None:
        """Release them. Collective in the job, blocking: nobody uses them any more."""
        ...


class HostArrays:
    """NumPy arrays whose pages exist."""

    def __init__(self, session: Session, group: Collectives, counts: Sequence[int]) -> None:
        self.send, self.recv = (session.array(count) for count in counts)

    def begin(self) -> None:
        """Nothing to do."""

    def fill(self, periods: Sequence[npt.NDArray[Any]], *, result: bool = False) -> None:
        """Write it."""
        array = self.recv if result else self.send
        for part, period in zip(np.split(array, len(periods)), periods, strict=True):
            values.repeat(part, period)

    def spoil(self) -> None:
        """Overwrite the result."""
        self.recv.view(np.uint8).fill(values.SPOILED)

    def count_wrong(self, first: int, count: int, period: npt.NDArray[Any], start: int = 0) -> int:
        """Compare them where they are."""
        return values.count_wrong(self.recv[first : first + count], period, start)

    def waited(self, call: Callable[[], object]) -> Callable[[], object]:
        """Calls on host arrays are blocking."""
        return call

    def keep(self, part: Any) -> Any:
        """Host rows keep nothing else."""
        return part

    def close(self) -> None:
        """Memory goes with its last user."""


class PoolArrays:
    """CuPy arrays of CuPy's memory pool, as users have them: peers do not address them."""

    def __init__(self, session: Session, group: Collectives, counts: Sequence[int]) -> None:
        """Raises MemoryError or CudaError where the GPU has no room."""
        self._session, self._group, self._counts = session, group, tuple(counts)
        self._doors = session.gpu.doors
        self._kept: list[Any] = []
        self.send, self.recv = self._make()
        self._at = [as_buffer(a, "array").address for a in (self.send, self.recv)]

    def _make(self) -> tuple[Any, Any]:
        send, recv = (self._doors.tools.zeros(n, self._session.dtype) for n in self._counts)
        return send, recv

    def begin(self) -> None:
        """Nothing to do."""

    def fill(self, periods: Sequence[npt.NDArray[Any]], *, result: bool = False) -> None:
        """Copy it there."""
        each = self._counts[result] // len(periods) * self._session.dtype.itemsize
        for index, period in enumerate(periods):
            at = self._at[result] + index * each
            gpu_values.fill(self._doors.cuda, at, each, period)

    def spoil(self) -> None:
        """Overwrite the result."""
        nbytes = self._counts[1] * self._session.dtype.itemsize
        gpu_values.fill(self._doors.cuda, self._at[1], nbytes, gpu_values.SPOILED)

    def count_wrong(self, first: int, count: int, period: npt.NDArray[Any], start: int = 0) -> int:
        """Copy them to the host by the piece, and compare."""
        address = self._at[1] + first * self._session.dtype.itemsize
        return gpu_values.count_wrong(self._doors.cuda, address, count, period, start)

    def waited(self, call: Callable[[], object]) -> Callable[[], object]:
        """Wait for the GPU after it, polling."""
        return self._session.waited(call)

    def keep(self, part: Any) -> Any:
        """Note what is closed with them."""
        self._kept.append(part)
        return part

    def close(self) -> None:
        """Give the memory back to the device: the next row may need it."""
        self._session.group.barrier()
        for part in reversed(self._kept):
            part.close()
        self._kept = []
        del self.send, self.recv
        self._doors.tools.trim()


class RegisteredArrays(PoolArrays):
    """Arrays that the node's ranks address without a copy."""

    def __init__(self, session: Session, group: Collectives, counts: Sequence[int]) -> None:
        """Raises CudaError where the GPU has no room."""
        self._memory: list[Any] = []
        self._entries: list[Any] = []
        super().__init__(session, group, counts)

    def _make(self) -> tuple[Any, Any]:
        dtype = self._session.dtype
        try:
            for count in self._counts:
                self._memory.append(self._doors.cuda.DeviceMemory(count * dtype.itemsize))
        except CudaError:
            for memory in self._memory:
                memory.close()
            raise
        send, recv = (m.array(n, dtype) for m, n in zip(self._memory, self._counts, strict=True))
        return send, recv

    def begin(self) -> None:
        """Register both."""
        for array in (self.send, self.recv):
            self._entries.append(self._group.register(array))
        if None in self._entries:
            raise UnsupportedError("GPU memory cannot be mapped between these ranks: see the notes")

    def close(self) -> None:
        """Unregister, then free when all ranks have."""
        for entry in self._entries:
            if entry is not None:
                self._group.unregister(entry)
        super().close()
        for memory in self._memory:
            memory.close()
