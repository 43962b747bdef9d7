"""Element types, reduction operations and memory kinds, and which go together.

:data:`TABLE` is the one place that says what is reduced: on the host, by the GPU kernels and in
the tests. Moves (all-gather, broadcast) ask less: see :func:`why_not_moved`.
"""

from __future__ import annotations

import enum
import importlib
import sys
from functools import cache
from typing import TYPE_CHECKING, Any, Union

import numpy as np

from rdmakit.errors import InvalidArgument, UnsupportedError

if TYPE_CHECKING:
    from mpi4py.MPI import Op as MpiOp

__all__ = [
    "AVG",
    "BAND",
    "BOR",
    "BXOR",
    "EXACT_SUM",
    "HALVES",
    "ITEMSIZES",
    "LAND",
    "LOR",
    "LXOR",
    "MAX",
    "MIN",
    "PROD",
    "SUM",
    "TABLE",
    "MemoryKind",
    "Op",
    "ReduceOp",
    "check_reduction",
    "dtype_of",
    "kind_of",
    "op_of",
    "why_not_moved",
]


class MemoryKind(enum.Enum):
    """Where an array lives."""

    HOST = "host"
    """Ordinary CPU memory."""
    DEVICE = "device"
    """GPU memory."""


class ReduceOp(enum.Enum):
    """A reduction; all of them are commutative and applied element by element.

    Names are MPI's, and NCCL's for AVG. What each does is NumPy's: integers wrap, MIN and MAX of a
    NaN are NaN, SUM of bool is a logical or and PROD of it an and.
    """

    __hash__ = object.__hash__  # members are singletons; Enum hashes their names in Python

    SUM = "sum"
    PROD = "prod"
    MIN = "min"
    MAX = "max"
    AVG = "avg"
    """The sum, divided once at the end by the number of ranks."""
    EXACT_SUM = "exact_sum"
    """SUM of half precision that is rounded once, at the end: float32 on the way, for twice the
    bytes between nodes. SUM rounds each node's partial result and each message."""
    LAND = "land"
    """1 where no rank has 0, else 0. Of one rank alone it is the input, as in MPI; so LOR, LXOR."""
    LOR = "lor"
    """1 where some rank has not 0, else 0."""
    LXOR = "lxor"
    """1 where an odd number of ranks has not 0, else 0."""
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"


SUM, PROD, MIN, MAX = ReduceOp.SUM, ReduceOp.PROD, ReduceOp.MIN, ReduceOp.MAX
AVG, EXACT_SUM = ReduceOp.AVG, ReduceOp.EXACT_SUM
LAND, LOR, LXOR = ReduceOp.LAND, ReduceOp.LOR, ReduceOp.LXOR
BAND, BOR, BXOR = ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR

ITEMSIZES = {
    "bool": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint8": 1, "uint16": 2, "uint32": 4,
    "uint64": 8, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8,
    "complex128": 16,
}  # fmt: skip
"""Element types that are reduced, by NumPy's and ml_dtypes' names, with their bytes."""
HALVES = ("float16", "bfloat16")
"""Types that are accumulated in float32."""


def kind_of(name: str) -> str:
    """Return ``bool``, ``integer``, ``float`` or ``complex`` for one of ITEMSIZES."""
    if "int" in name:
        return "integer"
    return next(kind for kind in ("bool", "complex", "float") if kind in name)


_LOGICAL, _BITWISE = (LAND, LOR, LXOR), (BAND, BOR, BXOR)
_REASONS = (
    (("bool",), (AVG,), "a mean of truth values is none: reduce them as integers"),
    (("integer",), (AVG,), "the quotient is no integer: take SUM and divide it as you wish"),
    (("float", "complex"), _LOGICAL, "logical operations are of bool and integers, as in MPI"),
    (("float", "complex"), _BITWISE, "bitwise operations are of bool and integers, as in MPI"),
    (("complex",), (MIN, MAX), "complex numbers have no order"),
)


def _reason(name: str, op: ReduceOp) -> str:
    if op is EXACT_SUM:
        halves = " and ".join(HALVES)
        return "" if name in HALVES else f"it is of {halves}, which SUM rounds on the way: take SUM"
    kind = kind_of(name)
    return next((text for kinds, ops, text in _REASONS if kind in kinds and op in ops), "")


TABLE = {(name, op): _reason(name, op) for name in ITEMSIZES for op in ReduceOp}
"""Why a type is not reduced by an operation; an empty text where it is."""


@cache
def _problem(dtype: np.dtype[Any]) -> str:
    """Return why the type is not reduced at all. A type's name costs NumPy microseconds."""
    if dtype.hasobject:
        return "its elements are references to objects"
    if dtype.names is not None:
        return "it is a record: reduce its fields one by one"
    if dtype.kind in "SU":
        return "strings are no numbers"
    if dtype.kind in "Mm":
        return "dates and time spans are not reduced: pass a view as int64"
    if dtype.char in "gG":
        return "extended precision differs from machine to machine: convert it to float64"
    if not dtype.isnative:
        return "its bytes are in foreign order: convert it with astype(dtype.newbyteorder('='))"
    if dtype.name not in ITEMSIZES:
        return f"there is no arithmetic for it; one of {', '.join(ITEMSIZES)}"
    return ""


def dtype_of(value: object) -> np.dtype[Any]:
    """Return the dtype that ``value`` names, if it is reduced. bfloat16 needs ml_dtypes.

    Raises:
        UnsupportedError: the type exists but is not reduced; the text says why.
        InvalidArgument: no such type.
    """
    if isinstance(value, str) and value == "bfloat16":
        try:
            value = importlib.import_module("ml_dtypes").bfloat16
        except ImportError as exc:
            raise UnsupportedError("bfloat16 on the host needs the package ml_dtypes") from exc
    try:
        dtype: np.dtype[Any] = np.dtype(value)  # type: ignore[call-overload]
    except TypeError as exc:
        raise InvalidArgument(f"unknown dtype {value!r}; one of {', '.join(ITEMSIZES)}") from exc
    problem = _problem(dtype)
    if problem:
        raise UnsupportedError(f"dtype {dtype} is not reduced: {problem}")
    return dtype


@cache
def _why_not(dtype: np.dtype[Any], op: ReduceOp) -> str:
    problem = _problem(dtype)
    if problem:
        return f"dtype {dtype} is not reduced: {problem}"
    reason = TABLE[dtype.name, op]
    return f"{op.name} of {dtype.name} is not served: {reason}" if reason else ""


def check_reduction(dtype: np.dtype[Any], op: ReduceOp) -> None:
    """See that arrays of ``dtype`` are reduced by ``op``.

    Raises:
        UnsupportedError: they are not; the text says why.
    """
    reason = _why_not(dtype, op)
    if reason:
        raise UnsupportedError(reason)


@cache
def why_not_moved(dtype: np.dtype[Any]) -> str:
    """Return why arrays of ``dtype`` cannot be moved; nothing if they can.

    Elements are moved as bytes, which come out as they went in: also records, fixed strings, dates,
    extended precision and foreign byte orders. Not so elements that are references.
    """
    if dtype.hasobject:
        return f"elements of type {dtype} are not plain bytes: they are references to objects"
    if not dtype.itemsize:
        return f"elements of type {dtype} are not plain bytes: they have none"
    return ""


_ABSENT = {
    "MINLOC": "pairs of value and place are not reduced: take MIN, then compare",
    "MAXLOC": "pairs of value and place are not reduced: take MAX, then compare",
    "REPLACE": "it is no reduction but an access mode of MPI's windows",
    "NO_OP": "it is no reduction but an access mode of MPI's windows",
}


Op = Union[ReduceOp, str, "MpiOp"]
"""What :func:`op_of` takes."""


def op_of(value: object) -> ReduceOp:
    """Return the reduction that ``value`` is or names.

    Args:
        value: a :class:`ReduceOp`, its name in any case, or one of mpi4py's (``MPI.SUM``).

    Raises:
        UnsupportedError: an operation of MPI's, or of a user's, that is not served.
        InvalidArgument: no operation.
    """
    if isinstance(value, ReduceOp):
        return value
    mpi = sys.modules.get("mpi4py.MPI")  # never loaded for this: it would start MPI
    if mpi is not None and isinstance(value, mpi.Op):
        return _of_mpi(mpi, value)
    name = value.upper() if isinstance(value, str) else ""
    if name in ReduceOp.__members__:
        return ReduceOp[name]
    if name in _ABSENT:
        raise UnsupportedError(f"op {name}: {_ABSENT[name]}")
    names = ", ".join(op.value for op in ReduceOp)
    raise InvalidArgument(f"unknown op {value!r}; one of {names}")


def _of_mpi(mpi: Any, value: Any) -> ReduceOp:
    for op in ReduceOp:
        if op not in (AVG, EXACT_SUM) and value == getattr(mpi, op.name):
            return op
    for name, reason in _ABSENT.items():
        if value == getattr(mpi, name):
            raise UnsupportedError(f"MPI.{name}: {reason}")
    if value == mpi.OP_NULL:
        raise InvalidArgument("op is MPI.OP_NULL")
    names = ", ".join(op.name for op in ReduceOp)
    raise UnsupportedError(f"a user's own MPI operation cannot be used here; one of {names}")
