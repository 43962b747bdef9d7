"""Element types, reduction operations and memory kinds, and which go together."""

from __future__ import annotations

import enum

import numpy as np

from rdmakit.errors import InvalidArgument, UnsupportedError

__all__ = ["DTYPES", "MAX", "MIN", "PROD", "SUM", "MemoryKind", "ReduceOp", "dtype_of", "op_of"]


class MemoryKind(enum.Enum):
    """Where an array lives."""

    HOST = "host"
    """Ordinary CPU memory."""
    DEVICE = "device"
    """GPU memory."""


class ReduceOp(enum.Enum):
    """A reduction; all of them are commutative and applied element by element."""

    SUM = "sum"
    PROD = "prod"
    MAX = "max"
    MIN = "min"


SUM, PROD, MAX, MIN = ReduceOp.SUM, ReduceOp.PROD, ReduceOp.MAX, ReduceOp.MIN

DTYPES: dict[str, np.dtype[np.generic]] = {
    name: np.dtype(name) for name in ("float16", "float32", "float64", "int32", "int64")
}
"""Element types that reductions accept, by name."""


def dtype_of(value: object) -> np.dtype[np.generic]:
    """Return the supported dtype named by ``value``.

    Raises:
        UnsupportedError: the type exists but reductions do not accept it.
        InvalidArgument: no such type.
    """
    try:
        dtype = np.dtype(value)  # type: ignore[call-overload]
    except TypeError as exc:
        raise InvalidArgument(f"unknown dtype {value!r}; one of {', '.join(DTYPES)}") from exc
    if dtype.name not in DTYPES or not dtype.isnative:
        raise UnsupportedError(f"dtype {dtype} is not supported; one of {', '.join(DTYPES)}")
    return DTYPES[dtype.name]


def op_of(value: object) -> ReduceOp:
    """Return the reduction named by ``value`` (a :class:`ReduceOp` or its name in any case).

    Raises:
        InvalidArgument: no such operation.
    """
    if isinstance(value, ReduceOp):
        return value
    try:
        return ReduceOp(str(value).lower())
    except ValueError as exc:
        names = ", ".join(op.value for op in ReduceOp)
        raise InvalidArgument(f"unknown op {value!r}; one of {names}") from exc
