"""Element types and operations through whole collectives, ranks being threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rdmakit.communicator import Communicator
from rdmakit.config import Config
from rdmakit.datatypes import (
    AVG,
    BAND,
    EXACT_SUM,
    ITEMSIZES,
    LOR,
    MAX,
    MIN,
    PROD,
    SUM,
    TABLE,
    ReduceOp,
    dtype_of,
)
from rdmakit.errors import CollectiveMismatch, UnsupportedError
from rdmakit.plan.planner import ALGORITHMS, program, reduces_at_once
from rdmakit.plan.select import limits_for
from rdmakit.plan.shape import Call, Kind
from rdmakit.plan.steps import Reduce
from tests.conformance.test_collectives import SHAPES, with_comm
from tests.conformance.values import ALL, check

REDUCES = (Kind.ALLREDUCE, Kind.REDUCE_SCATTER)
ONE_SHOT = (Kind.ALLREDUCE, Kind.REDUCE)
HALF = ("float16", "bfloat16")


@pytest.mark.parametrize("kind", REDUCES)
@pytest.mark.parametrize("sizes", [[3], [2, 1]], ids=str)
def test_every_type_with_every_operation(sizes: list[int], kind: Kind) -> None:
    def body(comm: Communicator) -> None:
        for dtype, op in ALL:
            for algorithm in ("hierarchical", "ring"):
                check(comm, kind, 131, dtype, op, algorithm=algorithm)

    with_comm(sizes, body)


def test_what_the_table_lacks_is_refused_with_its_reason() -> None:
    def body(comm: Communicator) -> None:
        for (dtype, op), reason in TABLE.items():
            x = np.zeros(4, dtype_of(dtype))
            if not reason:
                comm.Allreduce(x, x, op)
                continue
            with pytest.raises(
                UnsupportedError, match=f"{op.name} of {dtype} is not served: "
            ) as e:
                comm.Allreduce(x, x, op)
            assert str(e.value).endswith(reason)

    with_comm([2], body)


@pytest.mark.parametrize("name", ["S5", "U3", ">f8", "M8[s]", "m8[ns]", "g", "G", "i4,f4", "V3"])
def test_types_that_are_moved_but_not_reduced(name: str) -> None:
    dtype = np.dtype(name)

    def body(comm: Communicator) -> None:
        raw = (np.arange(60 * dtype.itemsize) % 2).astype(np.uint8)
        x = raw.view(dtype) if comm.rank == 1 else np.zeros(60, dtype)
        comm.Bcast(x, 1)
        assert x.tobytes() == raw.tobytes()
        gathered = np.zeros(180, dtype)
        comm.Allgather(x, gathered)
        assert gathered.tobytes() == raw.tobytes() * 3
        with pytest.raises(UnsupportedError, match="is not reduced: "):
            comm.Allreduce(x, x)

    with_comm([2, 1], body)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "int4"])
def test_other_types_of_ml_dtypes_are_moved_but_not_reduced(name: str) -> None:
    import ml_dtypes

    dtype = np.dtype(getattr(ml_dtypes, name))

    def body(comm: Communicator) -> None:
        x = np.arange(7).astype(dtype) if comm.rank == 0 else np.zeros(7, dtype)
        comm.Bcast(x)
        assert x.tobytes() == np.arange(7).astype(dtype).tobytes()
        with pytest.raises(UnsupportedError, match=f"{name} is not reduced: there is no arith"):
            comm.Allreduce(x, x)

    with_comm([2], body)


# -- integers, infinities, NaN, zeros ----------------------------------------------------------


@pytest.mark.parametrize("sizes", [[2], [1, 1], [2, 1]], ids=str)
def test_integers_wrap_as_in_numpy(sizes: list[int]) -> None:
    def body(comm: Communicator) -> None:
        for name in ITEMSIZES:
            dtype = np.dtype(name) if name != "bfloat16" else None
            if dtype is None or dtype.kind not in "iu":
                continue
            info = np.iinfo(dtype)
            for value in (info.max, info.min, info.max // 2 + 1):
                x = np.full(10, value, dtype)
                for op, ufunc in ((SUM, np.add), (PROD, np.multiply)):
                    y = np.zeros_like(x)
                    comm.Allreduce(x, y, op, algorithm="hierarchical")
                    want = ufunc.reduce(np.stack([x] * comm.size), axis=0, dtype=dtype)
                    assert (y == want).all(), (name, op)

    with_comm(sizes, body)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("sizes", [[2], [2, 2], [1, 1, 1]], ids=str)
def test_nan_and_infinity(sizes: list[int], dtype: str) -> None:
    """As NumPy: MAX and MIN of a NaN are NaN; and no warning from inside a collective."""
    inf, nan = np.inf, np.nan
    kind = dtype_of(dtype)

    def body(comm: Communicator) -> None:
        n = comm.size
        mine = np.array([nan, 1.0, inf, -inf, nan, 3.0, inf]).astype(kind)
        if comm.rank:
            mine = np.array([1.0, nan, 1.0, inf, nan, comm.rank, inf]).astype(kind)
        for algorithm in (*comm.algorithms(Kind.ALLREDUCE), "auto"):
            for op, want in (
                (MAX, [nan, nan, inf, inf, nan, max(3.0, n - 1), inf]),
                (MIN, [nan, nan, 1.0, -inf, nan, 1.0, inf]),
                (SUM, [nan, nan, inf, nan, nan, 3 + sum(range(n)), inf]),
                (AVG, [nan, nan, inf, nan, nan, np.float32(3 + sum(range(n))) / n, inf]),
            ):
                recv = np.zeros_like(mine)
                comm.Allreduce(mine, recv, op, algorithm=algorithm)
                np.testing.assert_allclose(
                    recv.astype(float), np.array(want).astype(kind).astype(float), rtol=1e-7,
                    err_msg=f"{op} {algorithm}",
                )  # fmt: skip
        big = np.full(50, 3e38 if dtype == "bfloat16" else np.finfo(dtype).max).astype(kind)
        for op in (SUM, PROD):
            recv = np.zeros_like(big)
            comm.Allreduce(big, recv, op, algorithm="hierarchical")
            assert np.isposinf(recv.astype(float)).all()

    with_comm(sizes, body)


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_signed_zeros_and_nan_are_the_same_on_all_ranks(sizes: list[int]) -> None:
    def body(comm: Communicator) -> list[Any]:
        rng = np.random.default_rng(comm.rank)
        out = []
        for dtype, ops in (
            ("float32", (SUM, PROD, MIN, MAX, AVG)),
            ("float64", (MIN, MAX)),
            ("float16", (MIN, MAX, AVG)),
            ("complex64", (PROD, SUM)),
        ):
            x = rng.choice([0.0, -0.0, 1.5, -1.5, np.inf, np.nan], 999).astype(dtype)
            for op in ops:
                for algorithm in comm.algorithms(Kind.ALLREDUCE):
                    y = x.copy() if comm.rank % 2 else np.zeros_like(x)
                    comm.Allreduce(y if comm.rank % 2 else x, y, op, algorithm=algorithm)
                    nan = np.isnan(y)
                    y[nan] = np.nan  # its payload is not promised
                    out.append((dtype, op, algorithm, y.tobytes()))
        return out

    results = with_comm(sizes, body)
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("sizes", [[3], [2, 1], [1, 1, 1]], ids=str)
def test_complex_products_are_the_same_on_all_ranks(sizes: list[int]) -> None:
    """In place or not, aligned or not: no rank fuses a multiply with an add."""

    def body(comm: Communicator) -> list[bytes]:
        out = []
        for dtype in ("complex64", "complex128"):
            x = np.random.default_rng(comm.rank).normal(size=2 * 1301).view(complex).astype(dtype)
            for algorithm in comm.algorithms(Kind.ALLREDUCE):
                memory = np.zeros(1301 + comm.rank, dtype)
                y = memory[comm.rank :]
                if comm.rank % 2:
                    y[:] = x
                comm.Allreduce(y if comm.rank % 2 else x, y, PROD, algorithm=algorithm)
                out.append(y.tobytes())
        return out

    results = with_comm(sizes, body)
    assert all(result == results[0] for result in results)
    inputs = [np.random.default_rng(r).normal(size=2 * 1301).view(complex) for r in range(3)]
    got = np.frombuffer(results[0][-1], complex)
    np.testing.assert_allclose(got, np.prod(inputs, axis=0), rtol=1e-13)


# -- half precision ----------------------------------------------------------------------------


def test_float16_is_summed_in_float32_inside_a_node() -> None:
    """2048 + 1 is 2048 in float16, however often; 2048 + 7 rounds to 2056 once, at the end."""

    def body(comm: Communicator) -> None:
        for count in (1, 9, 5000):
            for algorithm in comm.algorithms(Kind.ALLREDUCE):
                if algorithm == "ring":
                    continue  # rounds at every hop
                x = np.full(count, 2048 if comm.rank == 0 else 1, np.float16)
                comm.Allreduce(x, x, algorithm=algorithm)
                assert (x == 2056).all(), (algorithm, x[0])

    with_comm([8], body)


def test_float16_beyond_its_range_on_the_way_is_right_at_the_end() -> None:
    def body(comm: Communicator) -> None:
        x = np.full(100, [60000, 60000, -60000, -49984][comm.rank], np.float16)
        comm.Allreduce(x, x, algorithm="hierarchical")
        assert (x == np.float16(10016)).all()

    with_comm([4], body)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("sizes", [[8], [4, 4], [1] * 8, [3, 1, 4]], ids=str)
def test_a_mean_of_half_precision_does_not_overflow(sizes: list[int], dtype: str) -> None:
    """The sum of eight times 16384 is no float16, but the mean is."""

    def body(comm: Communicator) -> None:
        for algorithm in (*comm.algorithms(Kind.ALLREDUCE), "auto"):
            x = np.full(300, 16384).astype(dtype_of(dtype))
            comm.Allreduce(x, x, AVG, algorithm=algorithm)
            assert (x.astype(float) == 16384).all(), algorithm
        big = 60000.0 if dtype == "float16" else 3e38
        x = np.full(8 * 5, big).astype(dtype_of(dtype))
        part = np.zeros(5, x.dtype)
        comm.Reduce_scatter_block(x, part, "avg")
        # float32 holds the sum of eight float16, but not that of eight such bfloat16.
        assert (part == x[:5]).all() if dtype == "float16" else np.isinf(part.astype(float)).all()

    with_comm(sizes, body)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("count", [5000, 50_004], ids=["whole", "in two halves"])
@pytest.mark.parametrize("sizes", [[4], [2, 2], [1] * 4, [3, 1]], ids=str)
def test_exact_rounds_once(sizes: list[int], count: int, dtype: str) -> None:
    """The same bits as a sum in float32 in any order that fits it, rounded once, everywhere."""
    kind, block = dtype_of(dtype), count // 4
    # Integers below 2**13: sums of four are exact in float32, and round in both halves.
    inputs = [np.random.default_rng(r).integers(-8192, 8192, count) for r in range(4)]
    inputs = [x.astype(kind).astype(np.int64) for x in inputs]
    want = np.sum(inputs, axis=0).astype(np.float32).astype(kind)

    def body(comm: Communicator) -> int:
        differs = 0
        mine = inputs[comm.rank].astype(kind)
        small = {"one-shot"} if count > 10_000 else set()  # must fit the window at once
        for algorithm in sorted({*comm.algorithms(Kind.ALLREDUCE), "auto"} - small):
            y = np.zeros_like(mine)
            comm.Allreduce(mine, y, EXACT_SUM, algorithm=algorithm)
            assert (y == want).all(), algorithm
            z = mine.copy()
            comm.Allreduce(z, z, EXACT_SUM, algorithm=algorithm)
            assert (z == want).all(), algorithm
            comm.Allreduce(mine, y, algorithm=algorithm)
            differs += int((y != want).sum())
        gaps = np.zeros((count, 2), kind)
        comm.Iallreduce(mine, gaps[:, 1], EXACT_SUM).Wait()
        assert (gaps[:, 1] == want).all()
        assert not gaps[:, 0].any()
        own = slice(block * comm.rank, block * (comm.rank + 1))
        part = np.zeros(block, kind)
        comm.Reduce_scatter_block(mine, part, EXACT_SUM)
        assert (part == want[own]).all()
        inside = mine.copy()
        comm.Reduce_scatter_block(inside, inside[own], EXACT_SUM, algorithm="ring")
        assert (inside[own] == part).all()
        return differs

    assert all(n > 0 for n in with_comm(sizes, body)), "SUM is no weaker: the test shows nothing"


@pytest.mark.parametrize("op", [EXACT_SUM, AVG])
@pytest.mark.parametrize("sizes", [[1, 1], [2, 2], [3, 1], [1, 1, 2]], ids=str)
def test_exact_sends_three_quarters_of_a_sum_in_float32(sizes: list[int], op: ReduceOp) -> None:
    """Out in float32, back rounded: 3(N-1)/N of the bytes leave each node, even an uneven one."""
    nodes, count = len(sizes), 600_000

    def body(comm: Communicator) -> int:
        x = np.ones(count, np.float16)
        step = comm.bind(Kind.ALLREDUCE, x, x, op)
        assert step.wire_dtype == "float32 float16"
        for turn in (1, 2):  # again, with the same memory
            x[:] = turn
            step()
            assert (x == (turn if op is AVG else turn * comm.size)).all()
        return step.sent_bytes or 0

    sent, first = with_comm(sizes, body), 0
    for size in sizes:
        of_node = sum(sent[first : first + size])
        assert of_node == pytest.approx(3 * (nodes - 1) / nodes * 2 * count, rel=1e-4)
        first += size


def test_exact_holds_its_memory_only_while_it_is_small() -> None:
    def body(comm: Communicator) -> None:
        small, large = np.zeros(100, np.float16), np.zeros(600_000, np.float16)
        for x in (small, large):
            comm.Reduce(x, x, EXACT_SUM, algorithm="hierarchical")
        assert len(comm._bound) == 1

    with_comm([1, 1], body, Config(timeout=20))


def test_exact_is_compared_between_ranks() -> None:
    def body(comm: Communicator) -> str:
        x = np.zeros(4, np.float16)
        with pytest.raises(CollectiveMismatch) as caught:
            comm.Allreduce(x, x, EXACT_SUM if comm.rank == 1 else SUM)
        return str(caught.value)

    texts = with_comm([1, 2], body, Config(check=True, timeout=10))
    assert len(set(texts)) == 1
    assert "but rank 1: " in texts[0]
    assert "op=exact_sum" in texts[0]


# -- means -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_a_mean_is_a_sum_divided_once(sizes: list[int]) -> None:
    """Bit by bit what SUM gives by the same algorithm, divided."""

    def body(comm: Communicator) -> list[bytes]:
        out = []
        for dtype in ("float32", "float64", "complex64", "complex128"):
            x = np.random.default_rng(comm.rank).normal(size=2 * 4001).astype(dtype)
            for kind in REDUCES:
                for algorithm in comm.algorithms(kind):
                    if algorithm == "one-shot":
                        continue
                    call: Callable[..., None] = comm.Allreduce
                    send, count = x, x.size
                    if kind is Kind.REDUCE_SCATTER:
                        call, count = comm.Reduce_scatter_block, x.size // comm.size
                        send = x[: count * comm.size]
                    total, mean = np.zeros(count, dtype), np.zeros(count, dtype)
                    call(send, total, SUM, algorithm=algorithm)
                    call(send, mean, AVG, algorithm=algorithm)
                    parts = total.view(total.real.dtype)
                    want = parts / parts.dtype.type(comm.size)
                    assert mean.tobytes() == want.tobytes(), (dtype, kind, algorithm)
                    if kind is Kind.ALLREDUCE:
                        out.append(mean.tobytes())
        return out

    results = with_comm(sizes, body)
    assert all(result == results[0] for result in results)


def test_plans_that_reduce_at_once_take_all_inputs_in_each_step() -> None:
    """What divides a mean inside a Reduce step relies on it."""
    from rdmakit.layout import RankLayout

    seen = set()
    for sizes in (*SHAPES, [8], [2, 3]):
        layout = RankLayout.of_sizes(sizes)
        for kind in Kind:
            for algorithm in ALGORITHMS:
                if not reduces_at_once(algorithm, kind, layout) or layout.size == 1:
                    continue
                for count in (1, 2, 100, 20_000):
                    if algorithm == "one-shot" and (count > 5000 or kind not in ONE_SHOT):
                        continue
                    call = Call(kind, layout, count, limits_for(4, 1 << 16))
                    for rank in range(layout.size):
                        for step in program(algorithm, call, rank).steps:
                            if isinstance(step, Reduce):
                                seen.add((kind, algorithm))
                                assert len(step.srcs) == layout.size
    assert len(seen) == 5


# -- operations by other names -----------------------------------------------------------------


def test_operations_by_name() -> None:
    def body(comm: Communicator) -> None:
        for name, want in (("sum", 3), ("MAX", 2), ("Prod", 2), ("bor", 3), ("LOR", 1)):
            x = np.full(3, comm.rank + 1, np.int32)
            comm.Allreduce(x, x, name)
            assert (x == want).all()
        x = np.full(3, 5, np.int8)
        for op in (BAND, LOR, ReduceOp.LXOR):
            y = np.zeros_like(x)
            comm.rail.Allreduce(x, y, op)  # alone: the input as it is
            assert (y == 5).all()

    with_comm([2], body)
