"""What became of a message, and ranks, tags and counts that are none."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from rdmakit.errors import InvalidArgument
from rdmakit.mailbox import ANY

__all__ = ["ANY_SOURCE", "ANY_TAG", "PROC_NULL", "UNDEFINED", "Special", "Status", "fill"]

UNDEFINED = -32766
"""No index, no count, no color. The value of both MPI families."""


class Special:
    """A rank or tag that is none. MPI's own numbers for them differ between libraries."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"rdmakit.{self.name}"

    def means(self, value: object) -> bool:
        """Return whether ``value`` is this, or mpi4py's number for it."""
        if value is self:
            return True
        mpi = sys.modules.get("mpi4py.MPI") if isinstance(value, int) and value < 0 else None
        return mpi is not None and value == getattr(mpi, self.name)


ANY_SOURCE = Special("ANY_SOURCE")
"""Of a receive: whoever sends. mpi4py's serves as well."""
ANY_TAG = Special("ANY_TAG")
"""Of a receive: whatever tag. mpi4py's serves as well."""
PROC_NULL = Special("PROC_NULL")
"""The rank that is not there: messages to and from it are nothing. mpi4py's serves as well."""


class Status:
    """What became of a receive; filled by the calls it is given to. mpi4py's serves as well.

    Attributes:
        source: rank that sent the message; PROC_NULL if none did.
        tag: its tag.
        nbytes: its length.
        cancelled: whether the receive was taken back.
    """

    def __init__(self) -> None:
        self.source: int | Special = ANY_SOURCE
        self.tag: int | Special = ANY_TAG
        self.nbytes, self.cancelled = 0, False

    def Get_source(self) -> int | Special:
        """Return who sent it."""
        return self.source

    def Get_tag(self) -> int | Special:
        """Return its tag."""
        return self.tag

    def Get_count(self, datatype: object = "u1") -> int:
        """Return its length in elements of ``datatype``: a NumPy or an mpi4py type.

        UNDEFINED where it is not a whole number of them.
        """
        size = getattr(datatype, "Get_size", None)
        itemsize = int(size()) if size is not None else np.dtype(datatype).itemsize  # type: ignore[call-overload]
        if not itemsize:
            return 0
        return UNDEFINED if self.nbytes % itemsize else self.nbytes // itemsize

    @property
    def count(self) -> int:
        """Its length in bytes."""
        return self.nbytes

    def Is_cancelled(self) -> bool:
        """Return whether the receive was taken back."""
        return self.cancelled

    def __repr__(self) -> str:
        return f"Status(source={self.source}, tag={self.tag}, nbytes={self.nbytes})"


def fill(status: Any, source: object, tag: object, nbytes: int, cancelled: bool = False) -> None:
    """Tell ``status``, ours or mpi4py's, what became of a message."""
    if status is None:
        return
    if isinstance(status, Status):
        status.source = source if isinstance(source, Special) or source != ANY else ANY_SOURCE  # type: ignore[assignment]
        status.tag = tag if isinstance(tag, Special) or tag != ANY else ANY_TAG  # type: ignore[assignment]
        status.nbytes, status.cancelled = nbytes, cancelled
        return
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not isinstance(status, mpi.Status):
        raise InvalidArgument(f"status: expected a Status, got {type(status).__name__}")
    status.Set_source(_number(mpi, source, ANY_SOURCE))
    status.Set_tag(_number(mpi, tag, ANY_TAG))
    status.Set_elements(mpi.BYTE, nbytes)
    status.Set_cancelled(cancelled)


def _number(mpi: Any, value: object, any_: Special) -> Any:
    if isinstance(value, Special):
        return getattr(mpi, value.name)
    return getattr(mpi, any_.name) if value == ANY else value
