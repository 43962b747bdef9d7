"""Reductions on host memory against NumPy's, for every type and operation."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmakit.buffer import as_buffer
from rdmakit.datatypes import (
    AVG,
    EXACT_SUM,
    HALVES,
    ITEMSIZES,
    MAX,
    MIN,
    SUM,
    TABLE,
    ReduceOp,
    dtype_of,
)
from rdmakit.errors import RdmaKitError
from rdmakit.layout import RankLayout
from rdmakit.plan.shape import Kind
from rdmakit.reduction import average, frame, on_the_way, reducer
from tests.arithmetic import bits, same, wanted

SERVED = [pair for pair, reason in TABLE.items() if not reason]


@pytest.mark.parametrize(("name", "op"), SERVED, ids=lambda x: getattr(x, "value", x))
def test_every_pair(name: str, op: ReduceOp) -> None:
    """Two to seven sources, short and longer than a block, into a new array and into a source."""
    dtype, rng = dtype_of(name), np.random.default_rng(len(name))
    for n, count in ((2, 1), (2, 40_001), (3, 1000), (7, 20_003), (4, 0)):
        data = [bits(dtype, count, rng) for _ in range(n)]
        for divide_by in (0, n) if op is AVG else (0,):
            want = wanted(data, op, divide_by)
            for into in (None, 0, n - 1, n // 2):
                srcs = [x.copy() for x in data]
                dst = np.empty(count, dtype) if into is None else srcs[into]
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    reducer(dtype, op, divide_by)(dst, srcs)
                same(dst, want)
                for index, src in enumerate(srcs):
                    if index != into:
                        same(src, data[index])


@settings(max_examples=200, deadline=None)
@given(
    pair=st.sampled_from(SERVED),
    n=st.integers(2, 6),
    count=st.integers(0, 300),
    offset=st.integers(0, 5),
    into=st.integers(-1, 5),
    seed=st.integers(0, 1 << 30),
)
def test_any_offset(
    pair: tuple[str, ReduceOp], n: int, count: int, offset: int, into: int, seed: int
) -> None:
    """Memory that is not aligned to 16 bytes, and any source as the result."""
    dtype, op = dtype_of(pair[0]), pair[1]
    rng = np.random.default_rng(seed)
    data = [bits(dtype, count, rng) for _ in range(n)]
    srcs = []
    for index, x in enumerate(data):
        memory = np.zeros(count + 16, dtype)
        at = (offset + index) % 7
        memory[at : at + count] = x
        srcs.append(memory[at : at + count])
    dst = np.zeros(count, dtype) if into < 0 else srcs[into % n]
    reducer(dtype, op)(dst, srcs)
    same(dst, wanted(data, op))


def test_the_operations_of_numpy() -> None:
    """SUM of bool is a logical or; logical operations give 0 and 1; integers wrap."""
    cases: list[tuple[str, ReduceOp, list[Any], Any]] = [
        ("bool", ReduceOp.SUM, [True, True], True), ("bool", ReduceOp.PROD, [True, False], False),
        ("bool", ReduceOp.MAX, [False, True], True), ("bool", ReduceOp.MIN, [False, True], False),
        ("bool", ReduceOp.LXOR, [True, True, True], True),
        ("bool", ReduceOp.BXOR, [True, True], False),
        ("int8", ReduceOp.LAND, [-128, 5], 1), ("uint64", ReduceOp.LXOR, [7, 9], 0),
        ("int16", ReduceOp.LOR, [0, 0], 0), ("int8", ReduceOp.SUM, [127, 1], -128),
        ("uint8", ReduceOp.PROD, [16, 16], 0), ("int64", ReduceOp.PROD, [1 << 62, 2], -(1 << 63)),
        ("uint32", ReduceOp.SUM, [0xFFFFFFFF, 2], 1), ("int32", ReduceOp.BAND, [-1, 6], 6),
        ("uint16", ReduceOp.BOR, [0xF000, 0x000F], 0xF00F),
        ("complex64", ReduceOp.PROD, [1j, 1j], -1), ("complex128", ReduceOp.SUM, [1, 2j], 1 + 2j),
    ]  # fmt: skip
    for name, op, values, want in cases:
        srcs = [np.array([value] * 3).astype(name) for value in values]
        dst = np.empty(3, name)
        reducer(np.dtype(name), op)(dst, srcs)
        assert (dst == np.array(want).astype(name)).all(), (name, op, dst)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_a_nan_anywhere_is_kept(name: str) -> None:
    dtype = dtype_of(name)
    for op in (MIN, MAX):
        for where in range(3):
            srcs = [np.full(5, 1 + r).astype(dtype) for r in range(3)]
            srcs[where][2] = np.nan
            dst = np.zeros(5, dtype)
            reducer(dtype, op)(dst, srcs)
            assert list(np.isnan(dst.astype(float))) == [False, False, True, False, False]


def test_halves_are_rounded_once() -> None:
    srcs = [np.array([x], np.float16) for x in (2048, 1, 1, 1, 1, 1, 1, 1)]
    dst = np.zeros(1, np.float16)
    reducer(np.dtype("f2"), SUM)(dst, srcs)
    assert dst == 2056  # 2055, and not 2048
    srcs = [np.full(2, 60000, np.float16)] * 2
    reducer(np.dtype("f2"), AVG, 2)(two := np.zeros(2, np.float16), srcs)
    assert (two == 60000).all()


def test_complex_parts_are_divided_as_floats() -> None:
    """A complex division would multiply by a rounded 1/3."""
    for dtype in (np.complex64, np.complex128):
        x = (np.arange(1000) + 1j * np.arange(1000)[::-1]).astype(dtype)
        want = x.view(x.real.dtype) / x.real.dtype.type(3)
        average(x, 3)
        assert x.tobytes() == want.tobytes()


def test_a_mean_is_never_divided_half_way() -> None:
    reduce = reducer(np.dtype("f4"), AVG, 3)
    x = np.ones(4, np.float32)
    with pytest.raises(RdmaKitError, match="mean of 3 ranks was to be divided after 2"):
        reduce(x.copy(), [x, x])


# -- what stands around a plan -----------------------------------------------------------------


def framed(x: Any, y: Any, op: ReduceOp, sizes: list[int], **more: Any) -> Any:
    algorithm = more.pop("algorithm", "hierarchical")
    layout = RankLayout.of_sizes(sizes)
    send, recv = as_buffer(x, "x"), as_buffer(y, "y")
    kind = more.pop("kind", Kind.ALLREDUCE)
    return frame(kind, algorithm, layout, send, recv, op)


def test_frames() -> None:
    half, single = np.ones(6, np.float16), np.ones(6, np.float32)
    for sizes, op, wide, inner in (
        ([2, 1], SUM, False, SUM),
        ([2, 1], MAX, False, MAX),
        ([2, 1], EXACT_SUM, True, SUM),
        ([2, 1], AVG, True, SUM),
        ([3], AVG, False, AVG),  # in the Reduce step
        ([3], EXACT_SUM, False, EXACT_SUM),
        ([1], AVG, False, AVG),
    ):
        f = framed(half, half, op, sizes)
        assert (f.dtype == np.float32) == wide == (f.prepare is not None)
        assert (f.finish is not None) == wide
        assert f.op is inner
        assert f.held == (24 if wide else 0)
    assert framed(half, half, AVG, [3], algorithm="ring").dtype == np.float32
    assert framed(half, half, AVG, [3], algorithm="mpi").dtype == np.float32
    f = framed(single, single, AVG, [1, 1])
    assert (f.op, f.prepare, f.held) == (SUM, None, 0)
    f.finish()
    assert (single == 0.5).all()
    f = framed(single, single, SUM, [1, 1], kind=Kind.BROADCAST)
    with pytest.raises(RdmaKitError, match="moves data"):
        f.reduce(single, [single, single])


def test_a_widened_frame_writes_only_the_output() -> None:
    x, y = np.arange(6, dtype=np.float16), np.zeros(2, np.float16)
    f = framed(x, y, AVG, [1, 1, 1], kind=Kind.REDUCE_SCATTER)
    from rdmakit.buffer import array_at

    f.prepare()
    work = array_at(f.send.address, f.send.count, f.send.dtype)
    assert (work == x).all()
    total = array_at(f.recv.address, f.recv.count, f.recv.dtype)
    total[:] = [1, 65504 * 3]
    f.finish()
    assert list(y) == [np.float16(1 / 3), 65504]
    assert (x == np.arange(6)).all()


@pytest.mark.parametrize("name", ITEMSIZES)
def test_what_is_between_the_ranks(name: str) -> None:
    dtype = dtype_of(name)
    for op in ReduceOp:
        kind, inner = on_the_way(dtype, op)
        assert inner is (SUM if op in (AVG, EXACT_SUM) else op)
        wide = name in HALVES and op in (AVG, EXACT_SUM)
        assert kind == (np.float32 if wide else dtype)
