"""A collective bound to its arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rdmakit.plan.steps import Program, Send

__all__ = ["Operation"]


@dataclass
class Operation:
    """A collective bound to its arrays, to be called any number of times (MPI's persistent form).

    Calling it is collective and blocking. It keeps the arrays alive.
    """

    algorithm: str
    """What it was planned as; ``mpi`` is the MPI library's own."""
    program: Program | None
    """This rank's steps; None for ``mpi``."""
    itemsize: int
    """Bytes of an element between the ranks."""
    _call: Callable[[], object]
    wire_dtype: str = ""
    """Type of the elements between the ranks, where it is known and another than the arrays'."""

    def __call__(self) -> None:
        """Do it once. Collective, blocking."""
        self._call()

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
