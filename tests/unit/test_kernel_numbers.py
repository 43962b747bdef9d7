"""The arithmetic of the GPU kernels, compiled for this CPU: the same bits as the host's reductions.

numbers.cuh is plain C++ on top of a few functions of the GPU (base.cuh), which are replaced here.
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

from rdmakit.datatypes import AVG, ITEMSIZES, TABLE, ReduceOp, dtype_of
from rdmakit.intra.device_kernels import lowered
from rdmakit.reduction import reducer
from tests.arithmetic import bits, same

BASE = """
#define __device__
#define __forceinline__ inline
#include <cmath>
#include <cstring>
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
static float as_float(u32 x) { float y; memcpy(&y, &x, 4); return y; }
static u32 as_bits(float x) { u32 y; memcpy(&y, &x, 4); return y; }
static float from_bfloat(u16 x) { return as_float((u32)x << 16); }
static u16 to_bfloat(float x) {
  if (x != x) return 0x7fff;
  const u32 y = as_bits(x);
  return (u16)((y + 0x7fff + (y >> 16 & 1)) >> 16);
}
static float from_half(u16 x) {
  const int sign = x >> 15, exponent = x >> 10 & 31, part = x & 1023;
  float y = exponent == 31 ? (part ? NAN : INFINITY)
            : exponent ? ldexpf(1024 + part, exponent - 25) : ldexpf(part, -24);
  return sign ? -y : y;
}
static u16 to_half(float x) {
  const u16 sign = as_bits(x) >> 31 << 15;
  const float y = fabsf(x);
  if (x != x) return 0x7fff;
  if (y >= 65520.0f) return sign | 0x7c00;
  if (y == 0) return sign;
  int exponent;
  frexpf(y, &exponent);  // y is in [0.5, 1) * 2^exponent
  if (exponent < -13) exponent = -13;
  const float grid = ldexpf(1, exponent - 11);
  const u32 units = (u32)nearbyintf(y / grid);  // up to 2048: carries into the exponent by itself
  return sign | (u16)(units + ((exponent + 13) << 10));
}
static float times(float a, float b) { return a * b; }
static double times(double a, double b) { return a * b; }
static float plus(float a, float b) { return a + b; }
static double plus(double a, double b) { return a + b; }
static float divide(float a, u32 n) { return a / (float)n; }
static double divide(double a, u32 n) { return a / (double)n; }
"""
CALL = """
template <class T> struct Element { static const u32 N = 1; typename T::Stored e[1]; };
template <class T, class Op, u32 N>
static void reduce(const char* const* in, char* to, u64 count) {
  typedef Element<T> P;
  for (u64 i = 0; i < count; ++i) {
    P from[N], out;
    for (u32 k = 0; k < N; ++k) memcpy(&from[k], in[k] + i * sizeof(P), sizeof(P));
    fold<T, Op>(from, out);
    memcpy(to + i * sizeof(P), &out, sizeof(P));
  }
}
"""
PAIRS = [pair for pair, reason in TABLE.items() if not reason]
SOURCES = (2, 3, 5)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler (c++, g++, clang++)")
    numbers = resources.files("rdmakit.intra") / "kernels" / "numbers.cuh"
    entries = "".join(
        f'extern "C" void {type_}_{op}_{n}(const char* const* in, char* to, u64 count) '
        f"{{ reduce<{type_}, {op}, {n}>(in, to, count); }}\n"
        for type_, op, _ in dict.fromkeys(lowered(*pair) for pair in PAIRS)
        for n in SOURCES
    )
    where: Path = tmp_path_factory.mktemp("numbers")
    (where / "numbers.cpp").write_text(BASE + numbers.read_text() + CALL + entries)
    options = ["-std=c++17", "-O1", "-ffp-contract=off", "-w", "-fPIC", "-shared", "-o"]
    command = [compiler, *options, str(where / "numbers.so"), str(where / "numbers.cpp")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert not done.returncode, done.stderr
    return ctypes.CDLL(str(where / "numbers.so"))


@pytest.mark.parametrize("name", ITEMSIZES)
def test_the_same_bits_as_on_the_host(kernels: ctypes.CDLL, name: str) -> None:
    dtype, rng = dtype_of(name), np.random.default_rng(7)
    for op in (op for op in ReduceOp if not TABLE[name, op]):
        for n in SOURCES:
            type_, kernel, unit = lowered(name, op)
            srcs = [bits(dtype, 5000, rng) for _ in range(n)]
            got, want = np.zeros_like(srcs[0]), np.zeros_like(srcs[0])
            pointers = (ctypes.c_void_p * n)(*(x.ctypes.data for x in srcs))
            count = ctypes.c_uint64(got.nbytes // unit)
            getattr(kernels, f"{type_}_{kernel}_{n}")(
                pointers, ctypes.c_void_p(got.ctypes.data), count
            )
            reducer(dtype, op, n if op is AVG else 0)(want, srcs)
            compare(got, want, op)


def compare(got: Any, want: Any, op: ReduceOp) -> None:
    """Compare bits; of MIN and MAX the sign of a zero may be that of either source."""
    if op in (ReduceOp.MIN, ReduceOp.MAX) and got.dtype.kind not in "biu":
        zero = got.astype(float) == 0
        assert (zero == (want.astype(float) == 0)).all()
        got[zero], want[zero] = 0, 0
    same(got, want)
