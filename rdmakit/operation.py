"""A collective bound to its arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rdmakit.errors import InvalidArgument
from rdmakit.plan.steps import Program, Send
from rdmakit.request import Request

__all__ = ["Operation"]


@dataclass
class Operation:
    """A collective bound to its arrays, to be called any number of times (MPI's persistent form).

    Calling it is collective and blocking; ``Start`` does not block. It keeps the arrays alive.
    """

    algorithm: str
    """What it was planned as; ``mpi`` is the MPI library's own."""
    program: Program | None
    """This rank's steps; None for ``mpi``."""
    itemsize: int
    _call: Callable[[], object]
    _start: Callable[[], Request]
    _request: Request | None = None

    def __call__(self) -> None:
        """Do it once. Collective, blocking."""
        self._call()

    def Start(self) -> None:
        """Begin to do it once; Wait or Test completes it. Collective, does not block.

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
        if self._request is None:
            return True
        if not self._request.done and not self._request.Test():
            return False
        request, self._request = self._request, None
        return request.Test(status)

    def Wait(self, status: Any = None, *, timeout: float | None = None) -> bool:
        """Return when what was started is complete. Blocking; see :meth:`Request.Wait`."""
        if self._request is None:
            return True
        request, self._request = self._request, None
        return request.Wait(status, timeout=timeout)

    @property
    def call(self) -> Callable[[], object]:
        """The bare callable, for loops where a Python frame counts."""
        return self._call

    @property
    def sent_bytes(self) -> int | None:
        """Bytes this rank sends to other nodes in one call; None where MPI decides."""
        if self.program is None:
            return None
        return self.itemsize * sum(s.src.count for s in self.program.steps if isinstance(s, Send))
