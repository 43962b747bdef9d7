"""Which types have which operations, and what is refused by name."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from rdmakit.datatypes import (
    AVG,
    EXACT_SUM,
    HALVES,
    ITEMSIZES,
    MAX,
    SUM,
    TABLE,
    ReduceOp,
    check_reduction,
    dtype_of,
    kind_of,
    op_of,
    why_not_moved,
)
from rdmakit.errors import InvalidArgument, UnsupportedError


def test_the_table_in_full() -> None:
    served = {kind: set() for kind in ("bool", "integer", "float", "complex")}
    for name in ITEMSIZES:
        assert bool(TABLE[name, EXACT_SUM]) != (name in HALVES)
        mine = {op.name for op in ReduceOp if not TABLE[name, op] and op is not EXACT_SUM}
        assert served[kind_of(name)] in (set(), mine), "types of a kind have the same"
        served[kind_of(name)] = mine
    assert len(TABLE) == 15 * 12
    every = set(ReduceOp.__members__) - {"EXACT_SUM"}
    assert served["bool"] == served["integer"] == every - {"AVG"}
    assert served["float"] == {"SUM", "PROD", "MIN", "MAX", "AVG"}
    assert served["complex"] == {"SUM", "PROD", "AVG"}


def test_item_sizes() -> None:
    for name, nbytes in ITEMSIZES.items():
        assert dtype_of(name).itemsize == nbytes
        assert dtype_of(name).name == name
        assert dtype_of(dtype_of(name)) == dtype_of(name)
    assert dtype_of(int) == np.dtype("int64")
    assert dtype_of("q") == np.dtype("int64")
    assert dtype_of(np.float32) == np.dtype("f4")


@pytest.mark.parametrize(
    ("dtype", "says"),
    [
        (object, "references"),
        (np.dtypes.StringDType(), "references"),
        ("S3", "strings"),
        ("U3", "strings"),
        ("M8[s]", "pass a view as int64"),
        ("m8", "pass a view as int64"),
        (np.longdouble, "convert it to float64"),
        (np.clongdouble, "convert it to float64"),
        (">i4", "foreign order"),
        ("i4,f8", "its fields one by one"),
        ("V4", "no arithmetic"),
    ],
)
def test_types_that_are_not_reduced_are_refused_with_the_reason(dtype: Any, says: str) -> None:
    with pytest.raises(UnsupportedError, match=f"is not reduced: .*{says}"):
        dtype_of(dtype)
    with pytest.raises(UnsupportedError, match=says):
        check_reduction(np.dtype(dtype), SUM)
    references = np.dtype(dtype).hasobject
    assert bool(why_not_moved(np.dtype(dtype))) == references


def test_no_types() -> None:
    with pytest.raises(InvalidArgument, match="unknown dtype 'float99'; one of bool, int8"):
        dtype_of("float99")
    assert "they have none" in why_not_moved(np.dtype("V0"))
    assert "references" in why_not_moved(np.dtype([("a", "i4"), ("b", object)]))


def test_bfloat16_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(UnsupportedError, match="ml_dtypes"):
        dtype_of("bfloat16")


def test_names_of_operations() -> None:
    for op in ReduceOp:
        assert op_of(op) is op_of(op.value) is op_of(op.name) is op
    for wrong in ("xor", "", None, 1, np.add, "SUM "):
        with pytest.raises(InvalidArgument, match="unknown op"):
            op_of(wrong)
    for name in ("MINLOC", "maxloc", "replace", "NO_OP"):
        with pytest.raises(UnsupportedError, match=f"op {name.upper()}: "):
            op_of(name)


def test_operations_of_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in: the real ones start MPI, and are tested under mpirun."""

    class Op:
        __hash__ = None  # type: ignore[assignment]  # as mpi4py's

        def __init__(self, number: int) -> None:
            self.number = number

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Op) and self.number == other.number

    mpi: Any = ModuleType("mpi4py.MPI")
    mpi.Op = Op
    names = [op.name for op in ReduceOp if op not in (AVG, EXACT_SUM)]
    for number, name in enumerate((*names, "MINLOC", "MAXLOC", "REPLACE", "NO_OP", "OP_NULL")):
        setattr(mpi, name, Op(number))
    with pytest.raises(InvalidArgument):
        op_of(mpi.SUM)  # not loaded: it can be nothing of MPI's
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    for name in names:
        assert op_of(getattr(mpi, name)) is ReduceOp[name]
    assert op_of(Op(mpi.MAX.number)) is MAX
    for name in ("MINLOC", "MAXLOC", "REPLACE", "NO_OP"):
        with pytest.raises(UnsupportedError, match=f"MPI.{name}: "):
            op_of(getattr(mpi, name))
    with pytest.raises(InvalidArgument, match="OP_NULL"):
        op_of(mpi.OP_NULL)
    with pytest.raises(UnsupportedError, match="a user's own MPI operation"):
        op_of(Op(99))
