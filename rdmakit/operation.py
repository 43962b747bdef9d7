"""Calls bound to their arrays, to be done any number of times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rdmakit.errors import InvalidArgument
from rdmakit.plan.steps import Planned
from rdmakit.request import Request, Waited

__all__ = ["Operation", "Persistent"]


class Persistent(Waited):
    """A call bound to its arrays, which it keeps alive (MPI's persistent request)."""

    def __init__(self, start: Callable[[], Request]) -> None:
        """Made by ``bind``, ``Send_init`` and ``Recv_init``."""
        self._start = start
        self._request: Request | None = None

    def Start(self) -> None:
        """Begin to do it once; Wait or Test completes it. Does not block.

        Raises:
            InvalidArgument: it was started before and not waited for.
        """
        if self._request is not None:
            raise InvalidArgument("this operation was started already: Wait for it first")
        self._request = self._start()

    def Test(self, status: Any = None) -> bool:
        """Move things along, and return whether what was started is complete. Local.

        True where nothing was started. Raises what went wrong.
        """
        request = self._request
        if request is None:
            return True
        if not request.done:
            request.poke()
            if not request.done:
                return False
        return self.Wait(status)

    def Wait(self, status: Any = None, *, timeout: float | None = None) -> bool:
        """Return when what was started is complete. Blocking; see :meth:`Request.Wait`."""
        if self._request is None:
            return True
        request, self._request = self._request, None
        return request.Wait(status, timeout=timeout)


def _only_called() -> Request:
    raise InvalidArgument("this operation can only be called: it has no form that does not block")


class Operation(Persistent):
    """A collective bound to its arrays, to be called any number of times.

    Calling it is collective and blocking; ``Start`` does not block.

    Attributes:
        algorithm: what it was planned as; ``mpi`` is the MPI library's own.
        planned: this rank's steps, one program after the other; none for ``mpi`` and on a GPU.
        wire_dtype: type of these, where it is known and another than the arrays'.
        call: the bare callable, for loops where a Python frame counts.
        packed: whether an array has gaps (strides), so that each call gathers and scatters.
    """

    def __init__(
        self,
        algorithm: str,
        planned: Sequence[Planned],
        call: Callable[[], object],
        start: Callable[[], Request] = _only_called,
        *,
        packed: bool = False,
        wire_dtype: str = "",
    ) -> None:
        """Made by ``bind``."""
        super().__init__(start)
        self.packed, self.wire_dtype = packed, wire_dtype
        self.algorithm, self.planned, self.call = algorithm, planned, call

    def __call__(self) -> None:
        """Do it once. Collective, blocking."""
        self.call()

    @property
    def sent_bytes(self) -> int | None:
        """Bytes this rank sends to other nodes in one call; None where MPI decides."""
        if not self.planned:
            return None
        return sum(planned.sent_bytes for planned in self.planned)
