"""The parts of the benchmark that need no ranks."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest

from rdmakit.bench import values
from rdmakit.bench.budget import Budget, planned
from rdmakit.bench.measure import Group, measure
from rdmakit.bench.options import Options
from rdmakit.bench.statistics import bus_factor, rate, times_of
from rdmakit.bench.summary import summarize
from rdmakit.config import Config, format_size, parse_size
from rdmakit.datatypes import AVG, HALVES, ITEMSIZES, PROD, TABLE, ReduceOp, dtype_of
from rdmakit.errors import InvalidArgument, UnsupportedError
from rdmakit.memory import run_threads
from rdmakit.report.files import ResultFile
from rdmakit.report.schema import Result, Row, Times

ALL = [pair for pair, reason in TABLE.items() if not reason]
GIVEN = {
    "begin": "8",
    "end": "64M",
    "factor": 2,
    "iterations": 20,
    "warmup": 5,
    "check": 1,
    "op": "sum",
    "dtype": "float32",
    "layers": (),
    "algorithms": (),
    "time_budget": 36.0,
    "output": None,
    "quiet": False,
}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8", 8),
        ("64K", 65536),
        ("64k", 65536),
        ("64KB", 65536),
        ("64KiB", 65536),
        ("1.5M", 3 << 19),
        ("1G", 1 << 30),
        (" 2m ", 2 << 20),
        ("0", 0),
        ("1T", 1 << 40),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize("text", ["8Q", "", "M", "-1", "1.3", "1e6", "8 8", "0x10", "nan"])
def test_not_sizes(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_size(text)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"begin": "8Q"}, "-b: '8Q'"),
        ({"begin": "1M", "end": "8"}, "above -e"),
        ({"begin": "2"}, "-b 2: at least 4"),
        ({"factor": 1}, "-f 1"),
        ({"iterations": 0}, "-n 0"),
        ({"warmup": -1}, "-w -1"),
        ({"op": "xor"}, "unknown op"),
        ({"dtype": "float99"}, "unknown dtype"),
        ({"layers": ("nvlink",)}, "--layer 'nvlink'"),
        ({"algorithms": ("magic",)}, "--algorithm 'magic'"),
        ({"time_budget": 0.0}, "--time-budget"),
        ({"output": "x.txt"}, "name ends in"),
    ],
)
def test_bad_options_name_the_option(change: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says.replace("(", "\\(")):
        Options.of(**{**GIVEN, **change})  # type: ignore[arg-type]


def test_types_and_operations_that_are_not_served_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"longdouble|float128"):
        Options.of(**{**GIVEN, "dtype": "longdouble"})  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="MIN of complex64 is not served"):
        Options.of(**{**GIVEN, "dtype": "complex64", "op": "min"})  # type: ignore[arg-type]
    options = Options.of(**{**GIVEN, "dtype": "bfloat16", "op": "AVG"})  # type: ignore[arg-type]
    assert (options.dtype, options.op, options.sizes()[0]) == ("bfloat16", "avg", 8)


def test_sizes_are_whole_elements() -> None:
    options = Options.of(**{**GIVEN, "begin": "9", "end": "80", "dtype": "float64"})  # type: ignore[arg-type]
    assert options.sizes() == [8, 16, 32, 72]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("RDMAKIT_TIMEOUT", "soon"),
        ("RDMAKIT_TIMEOUT", "0"),
        ("RDMAKIT_UCX", "best"),
        ("RDMAKIT_CHECK", "maybe"),
        ("RDMAKIT_RANKS_PER_NODE", "-1"),
        ("RDMAKIT_WINDOW", "1K"),
    ],
)
def test_bad_settings_name_the_variable(name: str, text: str) -> None:
    with pytest.raises(InvalidArgument, match=name):
        Config.from_env({name: text})


def test_settings_follow_the_first_rank_unless_chosen() -> None:
    first = Config.from_env({"RDMAKIT_TIMEOUT": "9", "RDMAKIT_CHECK": "1"})
    other = Config.from_env({"RDMAKIT_WINDOW": "1M", "RDMAKIT_NODE_ID": "x"})
    got = other.following(first.shared())
    assert (got.timeout, got.check, got.window_bytes, got.node_id) == (9.0, True, 1 << 20, "x")


@pytest.mark.parametrize(("name", "op"), ALL, ids=lambda x: getattr(x, "value", x))
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
def test_expected_values_are_exact_and_a_wrong_one_is_found(name, op, ranks) -> None:
    """In exact arithmetic, on whole numbers; integers modulo their width."""
    count, dtype = 3001, dtype_of(name)
    arrays = []
    for rank in range(ranks):
        array = np.empty(count, dtype)
        values.fill(array, rank, op)
        arrays.append(array)
    total = exact(np.array(arrays), op).astype(dtype)
    if op is not AVG or ranks in (1, 2, 8, 64):
        assert (total == exact(np.array(arrays), op)).all() or dtype.kind in "iu", "not exact"
    period = values.expected(ranks, dtype, op)
    assert values.count_wrong(total, period) == 0
    bad = total.view(np.uint8).copy()
    bad[1234 * dtype.itemsize :][: dtype.itemsize] ^= 0x55
    assert values.count_wrong(bad.view(dtype), period) == 1
    part = np.empty(100, dtype)
    values.fill(part, 2, op, start=777)
    assert (part == np.resize(values.block(2, dtype, op), 877)[777:]).all()


@pytest.mark.parametrize("name", ITEMSIZES)
@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_blocks_of_an_all_to_all_differ_for_each_pair(name, ranks) -> None:
    """Also where one is begun anywhere in another, as a block in the wrong place would be."""
    dtype = dtype_of(name)
    found = {}
    for source in range(ranks):
        for target in range(ranks):
            block = values.sent(source, target, ranks, dtype)
            assert block.dtype == dtype
            assert found.setdefault(block.tobytes(), (source, target)) == (source, target)
            if dtype.kind not in "bc":
                assert len(np.unique(block)) == len(block), "elements differ from each other"
    whole = np.resize(values.sent(1, 0, ranks, dtype), 1000)
    assert values.count_wrong(whole, values.sent(1, 0, ranks, dtype)) == 0
    assert values.count_wrong(whole, values.sent(0, 1, ranks, dtype)) > 250
    part = np.empty(900, dtype)
    values.repeat(part, whole[:251], start=5)
    assert (part == whole[5:905]).all()


def exact(rows: np.ndarray, op: ReduceOp) -> np.ndarray:
    """Reduce over axis 0 in a type that holds every sum."""
    if op in (ReduceOp.LAND, ReduceOp.LOR, ReduceOp.LXOR):
        true = rows != 0
        table = {
            ReduceOp.LAND: true.all(0), ReduceOp.LOR: true.any(0), ReduceOp.LXOR: true.sum(0) % 2
        }  # fmt: skip
        return table[op] if len(rows) > 1 else rows[0]
    if rows.dtype.kind in "biu":
        return getattr(np, UFUNCS[op]).reduce(rows, axis=0, dtype=rows.dtype)
    wide = rows.astype(complex if rows.dtype.kind == "c" else float)
    total = getattr(np, UFUNCS[op]).reduce(wide, axis=0)
    return (total.view(float) / len(rows)).view(wide.dtype) if op is AVG else total


UFUNCS = {
    ReduceOp.SUM: "add", ReduceOp.AVG: "add", ReduceOp.EXACT_SUM: "add",
    ReduceOp.PROD: "multiply", ReduceOp.MIN: "minimum",
    ReduceOp.MAX: "maximum", ReduceOp.BAND: "bitwise_and", ReduceOp.BOR: "bitwise_or",
    ReduceOp.BXOR: "bitwise_xor",
}  # fmt: skip


@pytest.mark.parametrize(("name", "op"), ALL, ids=lambda x: getattr(x, "value", x))
def test_inputs_tell_ranks_and_elements_apart(name, op) -> None:
    dtype = dtype_of(name)
    blocks = [values.block(rank, dtype, op) for rank in range(8)]
    different = len({b.tobytes() for b in blocks})
    assert different == (
        1 if name in HALVES and op is AVG else 5 if op is PROD and name != "bool" else 8
    )
    result = values.expected(8, dtype, op)
    assert len(set(result.tolist())) > 1, "one number everywhere"
    if not (name in HALVES and op is AVG):
        missing = values.expected(7, dtype, op)
        assert (missing != result).any(), "a rank that is left out would not be seen"


def test_statistics() -> None:
    times = times_of([3e-6, 1e-6, 2e-6])
    assert (times.min, times.median, times.max) == (1.0, 2.0, 3.0)
    assert rate(1e6, 1000.0) == 1.0
    assert bus_factor("allreduce", 4) == 1.5
    assert bus_factor("allgather", 4) == bus_factor("alltoall", 4) == 0.75
    assert bus_factor("broadcast", 4) == 1.0
    assert bus_factor("allreduce", 1) == 1.0
    assert bus_factor("pair one-way", 2) == 1.0


def test_budget_keeps_every_third_size_when_time_is_short() -> None:
    now = [0.0]
    sizes = [1 << i for i in range(9)]
    rows = planned(sizes) * 2
    assert [row.nbytes for row in rows[:9] if row.kept] == [4, 32, 256]
    budget = Budget(7.0, rows, clock=lambda: now[0])
    made = []
    for row in rows:
        budget.begin()
        if budget.worth():
            made.append(row.nbytes)
            now[0] += 1.0
            budget.end(made=True)
        else:
            budget.end(made=False)
    assert now[0] <= 7.0
    assert {4, 32, 256} <= set(made[-3:])


def test_small_rows_do_not_foretell_slow_large_ones() -> None:
    """What a row of 1 KiB takes is mostly what every row takes: 4 MiB is tried all the same."""
    now = [0.0]
    budget = Budget(2.8, planned([1 << 10, 64 << 10, 4 << 20]) * 5, clock=lambda: now[0])
    budget.begin()
    now[0] += 0.1
    budget.end(made=True)
    assert budget.estimate(64 << 10) == 0.1
    assert budget.estimate(4 << 20) == pytest.approx(0.1 + 63 * 0.007)
    # From sizes whose bytes count, time grows with them.
    budget.end(made=False)
    assert budget.worth()
    budget.begin()
    now[0] += 0.5
    budget.end(made=True)
    assert budget.estimate(64 << 20) == pytest.approx(8.0)


def test_what_is_set_up_once_is_no_part_of_a_row() -> None:
    now = [0.0]
    budget = Budget(100.0, planned([8, 16]), clock=lambda: now[0])
    budget.begin()
    with budget.setting_up():
        now[0] += 50.0
    now[0] += 1.0
    budget.end(made=True)
    assert budget.estimate(8) == 1.0
    assert budget.left() == 49.0


def test_measure_agrees_between_ranks() -> None:
    def main(bootstrap):
        calls = []
        group = Group(bootstrap)
        samples = measure(lambda: calls.append(0), group, iterations=7, warmup=3, allotment=1.0)
        return samples, len(calls)

    (a, calls_a), (b, calls_b) = run_threads(2, main)
    assert a == b
    assert calls_a == calls_b
    assert len(a.seconds) == 7
    assert a.batch > 1, "a call of nanoseconds is timed several at once"


def row(layer: str, case: str, nbytes: int, median: float, **more: object) -> Row:
    fields = {"algorithm": "", "ranks": 2, "nodes": 2, "ranks_per_node": "2x2", **more}
    return Row(
        layer=layer,
        case=case,
        nbytes=nbytes,
        count=nbytes // 4,
        dtype="float32",
        wire_dtype="float32",
        iterations=20,
        wrong=0,
        time_us=Times(median, median, median, median, median),
        algbw_GBps=nbytes / median / 1e3,
        busbw_GBps=nbytes / median / 1e3,
        **fields,  # type: ignore[arg-type]
    )


def test_summary_names_the_limit() -> None:
    size = 1 << 20
    rows = [
        row("memory", "copy", size, 100.0),
        row("memory", "add", size, 100.0),
        row("intra", "reduce_scatter", size, 150.0),
        row("intra", "allgather", size, 150.0),
        row("intra", "allreduce", size, 400.0, algorithm="auto"),
        row("inter", "pair latency", 8, 5.0, transport="tcp/eth0"),
        row("inter", "rail allreduce", size // 2, 900.0, algorithm="hierarchical"),
        row("allreduce", "allreduce", size, 1000.0, algorithm="hierarchical", ranks=4),
        row("allreduce", "allreduce", size, 1500.0, algorithm="mpi", ranks=4),
    ]
    text = "\n".join(summarize(rows))
    assert "50 % of what copies and adds allow" in text  # (1.5 copies + 0.5 adds) of 400 us
    assert "the limit is inter (rail phase)" in text
    assert "at 90 % of the slower" in text
    assert "MPI's time / ours: 1.50 at 1M" in text
    assert "0 wrong in 9 checked rows" in text
    assert summarize([]) == ["values: 0 wrong in 0 checked rows"]


def test_every_field_of_a_row_is_documented() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    table = readme.partition("| field of a row |")[2].partition("\n\n")[0]
    fields = {
        name
        for line in table.splitlines()[2:]
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    assert fields == {field.name for field in msgspec.structs.fields(Row)}


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".csv"])
def test_result_files(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"out{suffix}"
    rows = [row("memory", "copy", 8, 1.0), row("intra", "allreduce", 8, 2.0, note='a, "b"')]
    ResultFile(path).update(Result(environment={"x": 1}, rows=rows), final=True)
    assert list(tmp_path.iterdir()) == [path]
    text = path.read_text()
    if suffix == ".json":
        data = json.loads(text)
        assert data["schema"] == "rdmakit.bench/1"
        back = msgspec.convert(data["rows"], list[Row])
        assert back == rows
    elif suffix == ".jsonl":
        lines = [json.loads(line) for line in text.splitlines()]
        assert lines[0]["environment"] == {"x": 1}
        assert msgspec.convert(lines[1:], list[Row]) == rows
    else:
        back = list(csv.DictReader(text.splitlines()))
        assert [r["case"] for r in back] == ["copy", "allreduce"]
        assert float(back[1]["time_us_median"]) == 2.0
        assert back[1]["note"] == 'a, "b"'
