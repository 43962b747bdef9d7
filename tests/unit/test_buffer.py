"""What arrays become, with host memory that shows a GPU array's interface; and CuPy's own."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rdmakit.arguments import IN_PLACE, fortran, resolve
from rdmakit.buffer import Strided, as_buffer, strided_at
from rdmakit.datatypes import MemoryKind
from rdmakit.errors import InvalidArgument, RdmaKitError, UnsupportedError
from rdmakit.plan.shape import Kind

odd_strides = np.lib.stride_tricks.as_strided


class Fake:
    """A NumPy array that shows itself as GPU memory."""

    def __init__(self, array: np.ndarray[Any, Any], **facts: Any) -> None:
        self.array = array
        self.__cuda_array_interface__ = {
            "shape": array.shape, "typestr": array.dtype.str, "version": 3,
            "data": (array.ctypes.data, not array.flags.writeable), "strides": array.strides,
        } | facts  # fmt: skip


def of_cupy(array: np.ndarray[Any, Any]) -> Any:
    """Return a CuPy array on the same (host) memory: nothing looks at what is there."""
    cupy = pytest.importorskip("cupy")
    memory = cupy.cuda.UnownedMemory(array.ctypes.data, max(array.nbytes, 1), array, 0)
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    return cupy.ndarray(array.shape, array.dtype, pointer, array.strides)


WRAPS = [lambda x: x, Fake, of_cupy]
EACH = pytest.mark.parametrize("wrap", WRAPS, ids=["numpy", "interface", "cupy"])


@EACH
def test_contiguous_views_and_orders(wrap: Any) -> None:
    whole = np.zeros((4, 6), np.float32)
    for array, order in (
        (whole, "C"), (whole.T, "F"), (np.asfortranarray(whole), "F"), (whole[1:3], "C"),
        (whole[2:3, 1:5], ""), (whole.ravel()[5:9], ""), (np.zeros((3, 0, 2)), ""),
        (whole[:1, :1], ""), (np.array(5.0), ""), (whole[:, :1], "strided"),
        (whole[1:, ::2], "strided"),
        (whole[::-1], "strided"), (whole[::-1, ::-1].T, "strided"), (whole[:0, ::2], ""),
    ):  # fmt: skip
        buffer = as_buffer(wrap(array), "x", writable=True)
        assert (buffer.address, buffer.count, buffer.dtype, buffer.order) == (
            array.ctypes.data, array.size, array.dtype, order)  # fmt: skip
        assert buffer.kind is (MemoryKind.HOST if wrap is WRAPS[0] else MemoryKind.DEVICE)
        assert buffer.nbytes == array.nbytes
        if order in ("F", "strided"):
            assert buffer.strided == Strided(array.shape, array.strides)
        else:
            assert buffer.strided is None


@EACH
def test_lengths_of_one_have_no_stride(wrap: Any) -> None:
    # REPORTS 16
    for array in (
        odd_strides(np.zeros(2), (1,), (16,)),
        odd_strides(np.zeros(6), (2, 1, 3), (24, 7777, 8)),
        odd_strides(np.zeros(1), (5, 0), (8, 800)),
        np.empty((0,), complex).real,
    ):
        assert as_buffer(wrap(array), "x", writable=True).strided is None


@EACH
def test_extent_holds_every_element_and_no_more(wrap: Any) -> None:
    whole = np.zeros((5, 6, 7), np.int16)
    for array in (whole, whole[::-2], whole[:, ::-1, 1::3], whole.T[2:4, ::-1], whole[1, :, -1]):
        buffer = as_buffer(wrap(array), "x")
        at = [
            array.ctypes.data + sum(i * s for i, s in zip(index, array.strides, strict=True))
            for index in np.ndindex(array.shape)
        ]
        assert buffer.extent == (min(at), max(at) + 2)
    a, b = as_buffer(wrap(whole[::-2]), "a"), as_buffer(wrap(whole[1:2]), "b")
    assert a.overlaps(b)
    assert not as_buffer(wrap(whole[:2, ::-1]), "a").overlaps(as_buffer(wrap(whole[2:]), "b"))


def test_forms_of_the_interface() -> None:
    """Versions, strides that are absent, None or given, and the four ways to name a stream."""
    whole = np.zeros((4, 6), np.float32)
    bare = {k: v for k, v in Fake(whole).__cuda_array_interface__.items() if k != "strides"}
    for facts in (bare, bare | {"strides": None}, bare | {"version": 2}, bare | {"version": 1}):
        buffer = as_buffer(SimpleNamespace(__cuda_array_interface__=facts), "x")
        assert (buffer.count, buffer.order, buffer.stream) == (24, "C", 0)
    for stream, want in ((None, 0), (1, 1), (2, 2), (0x7F00_0000_1234, 0x7F00_0000_1234), (0, 1)):
        assert as_buffer(Fake(whole, stream=stream), "x").stream == want
    assert as_buffer(Fake(whole[2:, 1:3]), "x").address == whole.ctypes.data + 2 * 24 + 4
    view = as_buffer(Fake(whole[1:][1:][:, 3:]), "x")  # REPORTS 4: a view of a view
    assert view.address == whole.ctypes.data + 2 * 24 + 12
    assert as_buffer(Fake(np.zeros(0), data=(0, False)), "x").address == 0
    assert as_buffer(Fake(np.zeros(0), data=(None, False)), "x").address == 0
    assert as_buffer(Fake(np.array(3.5)), "x").count == 1
    assert as_buffer(Fake(whole, shape=[4, 6], strides=[24, 4]), "x").order == "C"


def test_the_type_that_a_typestr_cannot_name() -> None:
    bfloat16 = np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    array = Fake(np.zeros(8, np.uint16), typestr="<V2")
    assert as_buffer(array, "x").dtype == np.dtype("V2")
    array.dtype = bfloat16  # type: ignore[attr-defined]
    assert as_buffer(array, "x").dtype == bfloat16
    resolve(Kind.ALLREDUCE, array, array, 0, 2, writes=True)


def test_dlpack_without_a_gpu_array_is_asked_for_its_buffer() -> None:
    class OnHost:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

    with pytest.raises(InvalidArgument, match="expected a NumPy array, a GPU array or a buffer"):
        as_buffer(OnHost(), "x")


def _frozen() -> np.ndarray[Any, Any]:
    array = np.zeros(3)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("array", "kind", "text"),
    [
        (Fake(odd_strides(np.zeros(1), (4,), (0,))), InvalidArgument, "several elements in one"),
        (Fake(odd_strides(np.zeros(9), (3, 3), (8, 8))), InvalidArgument, "several elements in"),
        (Fake(np.zeros(4), strides=(0,)), InvalidArgument, "several elements .*pass a copy"),
        (Fake(np.zeros(4), data=(0, False)), InvalidArgument, "null pointer with 4 elements"),
        (Fake(np.zeros(4), data=(None, False)), InvalidArgument, "null pointer"),
        (Fake(_frozen()), InvalidArgument, "read-only"),
        (_frozen(), InvalidArgument, "read-only"),
        (b"abc", InvalidArgument, "read-only"),
        (np.broadcast_to(np.zeros(3), (2, 3)), InvalidArgument, "read-only"),
        (Fake(np.zeros(4), mask=Fake(np.zeros(4))), UnsupportedError, "mask"),
        (np.ma.zeros(4), UnsupportedError, "mask"),
    ],
)
def test_refused_by_name(array: object, kind: type[RdmaKitError], text: str) -> None:
    with pytest.raises(kind, match=f"recvbuf .*{text}"):
        as_buffer(array, "recvbuf", writable=True)
    if "mask" not in text and "null" not in text:
        assert as_buffer(array, "sendbuf").count == np.prod(
            getattr(array, "__cuda_array_interface__", {"shape": np.shape(array) or 3})["shape"]
        ), "as input it is good"


def test_a_null_pointer_of_cupy_is_named() -> None:
    cupy = pytest.importorskip("cupy")
    pointer = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(0, 16, None, 0), 0)
    with pytest.raises(InvalidArgument, match="x is a null pointer with 4 elements"):
        as_buffer(cupy.ndarray((4,), "float32", pointer), "x")
    with pytest.raises(InvalidArgument, match=r"expected an array, got .* of CuPy"):
        as_buffer(cupy.cuda.Stream.null, "x")


def test_both_sides_must_be_the_same_memory() -> None:
    # REPORTS 14: a GPU pointer is never taken for host memory
    x = np.zeros(4)
    for send, recv in ((Fake(x), x.copy()), (x.copy(), Fake(x))):
        with pytest.raises(InvalidArgument, match="GPU memory"):
            resolve(Kind.ALLREDUCE, send, recv, 0, 2, writes=True)


def test_in_place_keeps_what_the_array_is() -> None:
    x = Fake(np.zeros(8), stream=9)
    send, recv = resolve(Kind.ALLGATHER, IN_PLACE, x, 1, 2, writes=True)
    assert (send.address - recv.address, send.count) == (32, 4)
    assert (send.kind, send.stream) == (MemoryKind.DEVICE, 9)
    x = Fake(np.zeros((8, 2))[:, 1], stream=9)
    send, recv = resolve(Kind.ALLGATHER, IN_PLACE, x, 1, 2, writes=True)
    assert (send.address, send.count, send.stream) == (recv.address, 4, 9)
    assert send.strided == Strided((8,), (16,), first=4)
    assert recv.strided == Strided((8,), (16,))


def test_only_what_must_be_gathered_is() -> None:
    c, f = np.zeros((4, 6)), np.zeros((4, 6), order="F")
    flat, gaps = np.zeros(24), np.zeros((4, 12))[:, ::2]
    for send, recv, gathered, in_fortran in (
        (c, c.copy(), (False, False), False), (f, f.copy(order="K"), (False, False), True),
        (flat, f, (False, False), True), (f, flat, (False, False), True),
        (c, flat, (False, False), False), (flat, flat.copy(), (False, False), False),
        (c, f, (False, True), False), (f, c, (True, False), False),
        (gaps, f, (True, True), False), (gaps, c, (True, False), False),
        (flat, gaps, (False, True), False),
    ):  # fmt: skip
        of, to = resolve(Kind.ALLREDUCE, Fake(send), Fake(recv), 0, 2, writes=True)
        assert (of.strided is not None, to.strided is not None) == gathered
        assert fortran(of, to) == in_fortran


def test_memory_of_a_gpu_is_not_touched_to_find_overlaps() -> None:
    place = 0x10_0000  # nothing is mapped there
    first, second = (
        Fake(np.zeros((4, 4))[:, ::2], data=(place + shift, False)) for shift in (0, 8)
    )
    resolve(Kind.ALLREDUCE, first, second, 0, 2, writes=True)  # between each other
    with pytest.raises(InvalidArgument, match="overlap"):
        resolve(Kind.ALLREDUCE, first, Fake(np.zeros((4, 4))[:, ::2], data=(place + 16, False)),
                0, 2, writes=True)  # fmt: skip
    assert strided_at(place, Strided((3,), (-8,)), np.dtype("f8"), touched=False).shape == (3,)


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
        "x = numpy.zeros((4, 4))[:, ::2]; resolve(Kind.ALLREDUCE, x, x, 0, 2, writes=True);"
        "assert 'cupy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
