"""NCCL through CuPy, for comparison only: the door to it. Importing this module loads nothing."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType
from typing import Any

import numpy as np

from rdmakit.datatypes import ReduceOp
from rdmakit.errors import SetupError, UnsupportedError
from rdmakit.plan.shape import Kind

__all__ = ["DTYPES", "OPERATIONS", "NcclGroup", "unique_id", "version", "why_not"]

DTYPES = ("int8", "uint8", "int32", "int64", "float16", "float32", "float64")
"""Types that NCCL reduces and CuPy's binding names."""
OPERATIONS = ("SUM", "PROD", "MAX", "MIN")
"""Operations that CuPy's binding names."""
_ID_BYTES = 128


def _module() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy warns where the library is missing; we say so
        return importlib.import_module("cupy.cuda.nccl")


def why_not() -> str:
    """Return why NCCL cannot be used here, or nothing. Local; loads the library."""
    try:
        module = _module()
    except ImportError as exc:
        return f"CuPy has no NCCL: {exc}"
    if not module.available:
        return "NCCL is not installed (pip install nvidia-nccl-cu12 or nvidia-nccl-cu13)"
    return ""


def version() -> str:
    """Return NCCL's release, as ``2.28.9``. Local."""
    number = int(_module().get_version())
    # Until 2.8 a release was 1000 * major + 100 * minor + patch.
    unit = 10000 if number >= 10000 else 1000
    return f"{number // unit}.{number % unit // 100}.{number % 100}"


def unique_id() -> bytes:
    """Return what the ranks of a new group must share; asked for on one of them. Local.

    Raises:
        SetupError: NCCL finds no interface to meet on.
    """
    try:
        return bytes(value % 256 for value in _module().get_unique_id())
    except RuntimeError as exc:
        raise SetupError(f"NCCL: {exc}") from exc


class NcclGroup:
    """NCCL's collectives of some ranks, each with a GPU of its own."""

    def __init__(self, size: int, identity: bytes, rank: int) -> None:
        """Join it with the current device. Collective, blocking: returns when all have joined.

        Raises:
            SetupError: NCCL refuses.
        """
        if len(identity) != _ID_BYTES:
            raise SetupError(f"NCCL: identity of {len(identity)} bytes, expected {_ID_BYTES}")
        self._size = size
        # CuPy 14 takes bytes; before it, the C chars.
        chars = tuple(value - 256 if value > 127 else value for value in identity)
        major = int(importlib.import_module("cupy").__version__.partition(".")[0])
        try:
            self._comm: Any = _module().NcclCommunicator(
                size, identity if major >= 14 else chars, rank
            )
        except RuntimeError as exc:
            raise SetupError(f"NCCL cannot join its ranks: {exc}") from exc

    def run(
        self,
        kind: Kind,
        send: int,
        recv: int,
        count: int,
        dtype: np.dtype[Any],
        op: ReduceOp,
        stream: int,
        root: int = 0,
    ) -> None:
        """Do a collective on GPU memory. Collective, stream-ordered.

        Args:
            kind: all-reduce, reduce-scatter, all-gather, broadcast or all-to-all.
            send: address of the input.
            recv: address of the output.
            count: elements of a reduction's result here, of an all-gather's input, of a broadcast,
                or of one block of an all-to-all.
            dtype: type of the elements, one of ``DTYPES``.
            op: the reduction.
            stream: a CUstream.
            root: of a broadcast.

        Raises:
            UnsupportedError: a kind or type that this door does not serve.
        """
        nccl = _module()
        if dtype.name not in DTYPES:
            raise UnsupportedError(f"NCCL through CuPy has no {dtype.name}")
        if op.name not in OPERATIONS:
            raise UnsupportedError(f"NCCL through CuPy has no {op.name}")
        kind_of = getattr(nccl, f"NCCL_{dtype.name.upper()}")
        how = getattr(nccl, f"NCCL_{op.name}")
        if kind is Kind.ALLREDUCE:
            self._comm.allReduce(send, recv, count, kind_of, how, stream)
        elif kind is Kind.REDUCE_SCATTER:
            self._comm.reduceScatter(send, recv, count, kind_of, how, stream)
        elif kind is Kind.ALLGATHER:
            self._comm.allGather(send, recv, count, kind_of, stream)
        elif kind is Kind.BROADCAST:
            self._comm.broadcast(send, recv, count, kind_of, root, stream)
        elif kind is Kind.ALLTOALL:
            self._exchange(send, recv, count * dtype.itemsize, stream)
        else:
            raise UnsupportedError(f"NCCL {kind.value} is not measured")

    def _exchange(self, send: int, recv: int, nbytes: int, stream: int) -> None:
        """Send a block to each rank and receive one from each, grouped, as NCCL advises."""
        nccl = _module()
        nccl.groupStart()
        try:
            for peer in range(self._size):
                self._comm.send(send + peer * nbytes, nbytes, nccl.NCCL_UINT8, peer, stream)
                self._comm.recv(recv + peer * nbytes, nbytes, nccl.NCCL_UINT8, peer, stream)
        finally:
            nccl.groupEnd()

    def close(self) -> None:
        """Leave the group. Collective in NCCL's sense, blocking, idempotent."""
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.destroy()
