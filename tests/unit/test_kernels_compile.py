"""Every kernel variant compiles for Ampere, Hopper and Blackwell by NVRTC; needs no GPU."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import metadata

import pytest

from rdmakit.datatypes import ReduceOp
from rdmakit.intra.device_kernels import (
    MAX_RANKS,
    REDUCED_DTYPES,
    Variant,
    WindowLayout,
    every_variant,
    local_variant,
    move_variant,
    pack_variant,
    reduce_variant,
)

ARCHITECTURES = (80, 90, 100)
LAYOUT = WindowLayout(264)


@cache
def nvrtc() -> ctypes.CDLL:
    """Load the library of the nvidia-cuda-nvrtc package; the kernels include no headers."""
    for name in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        try:
            files = metadata.files(name) or []
        except metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name.startswith("libnvrtc.so"):
                return ctypes.CDLL(str(file.locate()))
    pytest.skip("nvidia-cuda-nvrtc is not installed (dependency group test)")


def compiled(variant: Variant, architecture: int) -> str:
    """Return the compiler's complaint, or nothing."""
    lib, program = nvrtc(), ctypes.c_void_p()
    source, name = variant.source.encode(), variant.name.encode()
    assert not lib.nvrtcCreateProgram(ctypes.byref(program), source, name, 0, None, None)
    options = [o.encode() for o in (*variant.options, f"-arch=sm_{architecture}")]
    given = (ctypes.c_char_p * len(options))(*options)
    code = lib.nvrtcCompileProgram(program, len(options), given)
    size = ctypes.c_size_t()
    text = ""
    if code:
        assert not lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        assert not lib.nvrtcGetProgramLog(program, log)
        text = f"{variant.name} for sm_{architecture}: {log.value.decode()}"
    else:
        assert not lib.nvrtcGetCUBINSize(program, ctypes.byref(size))
        cubin = ctypes.create_string_buffer(size.value)
        assert not lib.nvrtcGetCUBIN(program, cubin)
        missing = [k for k in variant.kernels if k.encode() not in cubin.raw]
        text = f"{variant.name}: no {missing}" if missing else ""
    lib.nvrtcDestroyProgram(ctypes.byref(program))
    return text


def compile_all(variants: list[Variant], architecture: int) -> None:
    nvrtc()
    with ThreadPoolExecutor(4) as pool:  # ctypes lets go of the interpreter while it compiles
        complaints = list(pool.map(lambda v: compiled(v, architecture), variants))
    assert not any(complaints), "\n".join(filter(None, complaints))


@pytest.mark.parametrize("dtype", REDUCED_DTYPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_reductions(architecture: int, dtype: str) -> None:
    variants = []
    for op in ReduceOp:
        variants += [reduce_variant(dtype, op, 1, 4, LAYOUT), local_variant(dtype, op, 4)]
    compile_all(variants, architecture)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_moves(architecture: int) -> None:
    units = (1, 2, 4, 8)
    variants = [move_variant(unit, 1, 4, LAYOUT) for unit in units]
    compile_all(variants + [pack_variant(unit) for unit in units], architecture)


@pytest.mark.parametrize("ranks", [2, 3, 5, 7, 8, MAX_RANKS])
def test_numbers_of_ranks(ranks: int) -> None:
    variants = [move_variant(4, ranks - 1, ranks, LAYOUT)]
    for dtype in ("float32", "bfloat16"):
        variants.append(reduce_variant(dtype, ReduceOp.SUM, ranks - 1, ranks, LAYOUT))
        variants.append(local_variant(dtype, ReduceOp.SUM, ranks))
    compile_all(variants, 90)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_each_kernel_alone(dtype: str) -> None:
    variant = reduce_variant(dtype, ReduceOp.MAX, 0, 2, LAYOUT)
    compile_all([variant.only(kernel) for kernel in variant.kernels], 90)


def test_the_tests_above_miss_no_variant() -> None:
    reduced = sum(2 for _ in REDUCED_DTYPES for _ in ReduceOp)
    assert len(list(every_variant(4, 1, LAYOUT))) == reduced + 8
