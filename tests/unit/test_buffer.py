"""What arrays become, with host memory that shows a GPU array's interface."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from rdmakit.arguments import IN_PLACE, resolve
from rdmakit.buffer import as_buffer
from rdmakit.datatypes import MemoryKind
from rdmakit.errors import InvalidArgument, RdmaKitError, UnsupportedError
from rdmakit.plan.shape import Kind


class Fake:
    """A NumPy array that shows itself as GPU memory."""

    def __init__(self, array: np.ndarray[Any, Any], **facts: Any) -> None:
        self.array = array
        self.__cuda_array_interface__ = {
            "shape": array.shape, "typestr": array.dtype.str, "version": 3,
            "data": (array.ctypes.data, not array.flags.writeable), "strides": array.strides,
        } | facts  # fmt: skip


def test_views_and_orders() -> None:
    whole = np.zeros((4, 6), np.float32)
    for array in (whole, whole.T, np.asfortranarray(whole), whole[1:3], whole[2:3, 1:5],
                  whole.ravel()[5:9], np.zeros((3, 0, 2)), whole[:1, :1]):  # fmt: skip
        buffer = as_buffer(Fake(array), "x", writable=True)
        assert (buffer.address, buffer.count, buffer.dtype) == (
            array.ctypes.data, array.size, array.dtype)  # fmt: skip
        assert buffer.kind is MemoryKind.DEVICE
        assert buffer.nbytes == array.nbytes
    assert as_buffer(Fake(whole, strides=None), "x").count == 24
    assert as_buffer(Fake(whole, stream=7), "x").stream == 7
    assert as_buffer(Fake(np.zeros(0), data=(0, False)), "x").address == 0


def _frozen() -> np.ndarray[Any, Any]:
    array = np.zeros(3)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("array", "kind", "text"),
    [
        (Fake(np.zeros((4, 4))[:, :2]), UnsupportedError, "not contiguous.*cupy.ascontiguousarray"),
        (Fake(np.zeros(4)[::-1]), UnsupportedError, "not contiguous"),
        (Fake(np.zeros(8)[::2]), UnsupportedError, "not contiguous"),
        (Fake(np.zeros(4), data=(0, False)), InvalidArgument, "null pointer with 4 elements"),
        (Fake(np.zeros(4), data=(None, False)), InvalidArgument, "null pointer"),
        (Fake(_frozen()), InvalidArgument, "read-only"),
        (Fake(np.zeros(4), mask=Fake(np.zeros(4))), UnsupportedError, "mask"),
    ],
)
def test_refused_by_name(array: Fake, kind: type[RdmaKitError], text: str) -> None:
    with pytest.raises(kind, match=f"recvbuf .*{text}"):
        as_buffer(array, "recvbuf", writable=True)


def test_both_sides_must_be_the_same_memory() -> None:
    x = np.zeros(4)
    for send, recv in ((Fake(x), x.copy()), (x.copy(), Fake(x))):
        with pytest.raises(InvalidArgument, match="GPU memory"):
            resolve(Kind.ALLREDUCE, send, recv, 0, 2, writes=True)


def test_in_place_keeps_what_the_array_is() -> None:
    x = Fake(np.zeros(8), stream=9)
    send, recv = resolve(Kind.ALLGATHER, IN_PLACE, x, 1, 2, writes=True)
    assert (send.address - recv.address, send.count) == (32, 4)
    assert (send.kind, send.stream) == (MemoryKind.DEVICE, 9)


def test_types_that_are_moved_on_a_gpu() -> None:
    """What is reduced depends on the operation too: see test_datatypes.py."""
    for dtype in (np.complex64, ">f4", np.uint64, "M8[s]", "V6"):
        x = Fake(np.zeros(4, dtype))
        assert resolve(Kind.BROADCAST, x, x, 0, 2, writes=True)[1].dtype == np.dtype(dtype)
    x = Fake(np.zeros(4, object))
    with pytest.raises(UnsupportedError, match="references to objects"):
        resolve(Kind.BROADCAST, x, x, 0, 2, writes=True)


def test_host_arrays_load_nothing_of_cuda() -> None:
    code = (
        "import sys, numpy; from rdmakit.arguments import resolve; from rdmakit import Kind;"
        "x = numpy.zeros(4); resolve(Kind.ALLREDUCE, x, x, 0, 2, writes=True);"
        "assert 'cupy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
