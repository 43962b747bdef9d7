"""The kernels that gather and scatter arrays with gaps, compiled for the CPU: their own source.

One block of one thread does all the work, so this proves their indices and the layout of their
arguments; tests/gpu runs them on a device.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmakit.buffer import Strided
from rdmakit.errors import UnsupportedError
from rdmakit.intra.device_kernels import MAX_DIMS, MAX_RANKS
from rdmakit.intra.device_local import strided_args

_HOST = f"""
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define KERNEL extern "C" void
#define RDK_RANKS 1
#define RDK_MAX_RANKS {MAX_RANKS}
#define RDK_MAX_DIMS {MAX_DIMS}
struct Index {{ u32 x; }};
static Index blockIdx = {{0}}, threadIdx = {{0}}, gridDim = {{1}};
static const u32 THREADS = 1;
typedef UNIT Stored;
"""
_UNITS = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[int, ctypes.CDLL]:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler (g++ or clang++)")
    folder = tmp_path_factory.mktemp("kernels")
    source = (resources.files("rdmakit.intra") / "kernels" / "local.cu").read_text()
    return {unit: _compiled(compiler, folder, unit, source) for unit in _UNITS}


def _compiled(compiler: str, folder: Path, unit: int, source: str) -> ctypes.CDLL:
    text, library = folder / f"{unit}.cpp", folder / f"{unit}.so"
    text.write_text(_HOST.replace("UNIT", _UNITS[unit]) + source)
    command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(text)]
    subprocess.run(command, check=True, timeout=60)
    return ctypes.CDLL(str(library))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_view(kernels: dict[int, ctypes.CDLL], data: st.DataObject) -> None:
    draw = data.draw
    dtype = np.dtype(draw(st.sampled_from(["i1", "i2", "i4", "i8", "c16", "S3"])))
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    nbytes = int(np.prod(shape)) * dtype.itemsize
    whole = ((np.arange(nbytes) * 7) % 251 + 1).astype(np.uint8).view(dtype).reshape(shape)
    view = whole.transpose(draw(st.permutations(range(len(shape)))))
    starts = [draw(st.integers(0, 1)) if n > 1 else 0 for n in view.shape]
    steps = [draw(st.sampled_from([1, 2, -1, 3])) for _ in view.shape]
    view = view[tuple(slice(a, None, step) for a, step in zip(starts, steps, strict=True))]
    if draw(st.booleans()):
        view = np.broadcast_to(view, (2, *view.shape))
    first = draw(st.integers(0, max(view.size - 1, 0)))
    count, offset = view.size - first, draw(st.sampled_from([0, 1, 4, 8]))
    packed = np.zeros(count * dtype.itemsize + 16, np.uint8)
    layout = Strided(view.shape, view.strides, first)
    to, at = packed.ctypes.data + offset, view.__array_interface__["data"][0]
    unit, args = strided_args(to, at, layout, count, dtype.itemsize)
    args.wide = draw(st.booleans())
    _call(kernels[unit].pack, args)
    want = np.ascontiguousarray(view).ravel()[first:].tobytes()
    assert packed[offset:].tobytes() == want.ljust(packed.size - offset, b"\0")
    assert not packed[:offset].any()
    if 0 in view.strides:
        return
    whole.view(np.uint8)[...] = 0
    _call(kernels[unit].unpack, args)
    back = np.ascontiguousarray(view).ravel()
    assert back[first:].tobytes() == want
    assert not any(back[:first].tobytes())
    assert np.count_nonzero(whole.view(np.uint8)) == len(want), "others were written"


def _call(function: Any, args: ctypes.Structure) -> None:
    function.argtypes, function.restype = [type(args)], None
    function(args)


def test_runs_without_gaps_are_moved_in_large_units() -> None:
    for strided, itemsize, unit, dims in (
        (Strided((8, 16), (256, 4)), 4, 8, 2),  # half of each row
        (Strided((8, 3), (256, 4)), 4, 4, 2),
        (Strided((8, 16), (4, 256)), 4, 4, 2),
        (Strided((50,), (2,)), 1, 1, 1),
        (Strided((10, 64), (128, 1)), 1, 8, 2),
        (Strided((10, 64), (129, 1)), 1, 1, 2),
        (Strided((5, 4), (-32, 8)), 8, 8, 1 + 1),
        (Strided((7,), (24,)), 12, 4, 2),
        (Strided((7,), (32,)), 16, 8, 2),
    ):
        count = int(np.prod(strided.shape))
        got, args = strided_args(1 << 20, 1 << 21, strided, count, itemsize)
        assert (got, args.dims) == (unit, dims), strided
        assert args.count * got == count * itemsize
        assert not args.wide


def test_large_indices_and_many_dimensions() -> None:
    part = Strided((3, (1 << 31) - 1), (1 << 31, 1), first=5)
    _, args = strided_args(1 << 20, 1 << 21, part, 1000, 1)
    assert (args.wide, args.count, args.first) == (1, 1000, 5)
    many = Strided((2,) * 9, tuple(3 * 4**n for n in range(9)))
    with pytest.raises(UnsupportedError, match="9 strided dimensions; 8 are served"):
        strided_args(0, 0, many, 512, 1)
