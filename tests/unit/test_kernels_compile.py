"""Every kernel variant compiles for Hopper, and a cover of them for Ampere and Blackwell, by NVRTC.

Needs no GPU.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import metadata

import pytest

from rdmakit.datatypes import TABLE, ReduceOp
from rdmakit.intra.device_kernels import (
    MAX_RANKS,
    Variant,
    WindowLayout,
    every_variant,
    local_variant,
    lowered,
    move_variant,
    pack_variant,
    reduce_variant,
)

ARCHITECTURES = (80, 90, 100)
LAYOUT = WindowLayout(264)
PUSH = WindowLayout(264, push=True)


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


PAIRS = {lowered(*pair): pair for pair, reason in TABLE.items() if not reason}
"""What is compiled, by an example of what it serves."""
COVER = [
    ("bool", ReduceOp.LXOR), ("int8", ReduceOp.MIN), ("int16", ReduceOp.MAX),
    ("int32", ReduceOp.MIN), ("int64", ReduceOp.MAX), ("uint8", ReduceOp.SUM),
    ("uint16", ReduceOp.LAND), ("uint32", ReduceOp.BAND), ("uint64", ReduceOp.BXOR),
    ("float16", ReduceOp.AVG), ("bfloat16", ReduceOp.SUM), ("float32", ReduceOp.PROD),
    ("float64", ReduceOp.AVG), ("int32", ReduceOp.BOR), ("uint64", ReduceOp.LOR),
    ("complex64", ReduceOp.PROD), ("complex128", ReduceOp.PROD),
]  # fmt: skip
"""Every type that is compiled and every operation."""


@pytest.mark.parametrize("dtype", sorted({dtype for dtype, _ in PAIRS.values()}))
def test_reductions(dtype: str) -> None:
    """All kernels of all pairs, for Hopper."""
    pairs = [pair for pair in PAIRS.values() if pair[0] == dtype]
    variants = [reduce_variant(*pair, 1, 4, LAYOUT) for pair in pairs]
    compile_all(variants + [local_variant(*pair, 4) for pair in pairs], 90)


@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a != 90])
def test_arithmetic_of_other_architectures(architecture: int) -> None:
    """Of all pairs, in the smallest kernel."""
    compile_all([local_variant(*pair, 4) for pair in PAIRS.values()], architecture)


@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a != 90])
def test_kernels_of_other_architectures(architecture: int, part: int) -> None:
    """All kernels of each type and of each operation."""
    compile_all([reduce_variant(*pair, 1, 4, LAYOUT) for pair in COVER[part::3]], architecture)


def test_the_cover_has_every_type_and_operation() -> None:
    names = {lowered(*pair)[:2] for pair in COVER}
    assert {name for name, _ in names} == {name for name, _, _ in PAIRS}
    assert {op for _, op in names} == {op for _, op, _ in PAIRS}


def test_what_the_table_lacks_has_no_kernel() -> None:
    for pair, reason in TABLE.items():
        if reason:
            with pytest.raises(KeyError):
                lowered(*pair)
        else:
            assert lowered(*pair) in PAIRS


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_moves(architecture: int) -> None:
    units = (1, 2, 4, 8)
    variants = [move_variant(unit, 1, 4, LAYOUT) for unit in units]
    compile_all(variants + [pack_variant(unit) for unit in units], architecture)


@pytest.mark.parametrize("ranks", [2, 3, 5, 7, 8, MAX_RANKS])
def test_numbers_of_ranks(ranks: int) -> None:
    variants = [move_variant(4, ranks - 1, ranks, LAYOUT)]
    for dtype in ("float32", "bfloat16"):
        for layout in (LAYOUT, PUSH):
            variants.append(reduce_variant(dtype, ReduceOp.SUM, ranks - 1, ranks, layout))
        variants.append(local_variant(dtype, ReduceOp.SUM, ranks))
    compile_all(variants, 90)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_each_kernel_alone(dtype: str) -> None:
    for layout in (LAYOUT, PUSH):
        variant = reduce_variant(dtype, ReduceOp.MAX, 0, 2, layout)
        compile_all([variant.only(kernel) for kernel in variant.kernels], 90)


def test_the_tests_above_miss_no_variant() -> None:
    assert len(list(every_variant(4, 1, LAYOUT))) == 2 * len(PAIRS) + 8
