"""The rows of the broadcast over the number of ranks, on ranks that are threads."""

from __future__ import annotations

from typing import Any

import pytest

from rdmakit.bench import runner
from rdmakit.bench.broadcast import DEFAULT, rank_counts
from rdmakit.bench.measure import Group, measure
from rdmakit.bench.options import Options
from rdmakit.bench.runner import run
from rdmakit.bench.summary import summarize
from rdmakit.communicator import Communicator
from rdmakit.config import Config
from rdmakit.layout import RankLayout
from rdmakit.memory import MemoryBootstrap, MemoryChannel, MemoryWindow, run_threads
from rdmakit.plan.pieces import FLAGS
from rdmakit.report.schema import Row
from tests.unit.test_bench_parts import GIVEN, row


@pytest.mark.parametrize(
    ("size", "counts"),
    [(1, []), (2, [2]), (3, [2, 3]), (4, [2, 3, 4]), (5, [2, 3, 4, 5]), (8, [2, 3, 4, 8]),
     (9, [2, 3, 4, 8, 9]), (20, [2, 3, 4, 8, 16, 20])],
)  # fmt: skip
def test_on_how_many_ranks(size: int, counts: list[int]) -> None:
    assert rank_counts(size) == counts


def options(**given: Any) -> Options:
    return Options.of(
        **{**GIVEN, "iterations": 2, "warmup": 1, "time_budget": 30.0, **given}
    ).placed("cpu")


def test_how_many_bytes() -> None:
    assert options(end=None).one_size(DEFAULT) == 16 << 20
    assert options(end="64K").one_size(DEFAULT) == 64 << 10
    assert options(end=None, begin="32M").one_size(DEFAULT) == 32 << 20


def bench(sizes: list[int], **given: Any) -> list[Row]:
    """Run the layer on nodes of ``sizes`` ranks; return rank 0's rows, equal on all."""
    layout = RankLayout.of_sizes(sizes)
    chosen = options(**{"end": "64K", "layers": ("broadcast",), **given})

    def main(boot: MemoryBootstrap) -> list[Row]:
        node = boot.split(layout.node_of(boot.rank), boot.rank)
        window: Any = MemoryWindow.create(node, 1 << 16, FLAGS) if node.size > 1 else None
        channel = MemoryChannel.create(boot) if len(sizes) > 1 else None
        config = Config(window_bytes=1 << 16, timeout=20, check=True)
        comm = Communicator.from_parts(boot, layout, window, channel, config)
        rows: list[Row] = []
        run(comm, chosen, rows.append)
        assert not comm._children, "a part of the job was left open"
        comm.close()
        return rows

    told = run_threads(layout.size, main)
    for other in told[1:]:
        assert other == told[0], "rows are equal on all ranks"
    return told[0]


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_SETTLE", 0.0)


@pytest.mark.parametrize("sizes", [[1, 1, 1], [2, 1], [3], [1, 2, 2]])
def test_curves_come_first_and_are_right(sizes: list[int]) -> None:
    size = sum(sizes)
    rows = bench(sizes)
    curves = [(n, name) for n in range(2, size + 1) for name in ("ring", "flat")]
    beside = [(n, "auto") for n in range(2, size + 1)]  # no MPI here
    assert [(r.ranks, r.algorithm) for r in rows] == curves + beside
    for made in rows:
        assert (made.layer, made.case) == ("broadcast", f"to {made.ranks} ranks")
        assert (made.wrong, made.skipped, made.op) == (0, "", "")
    if sizes == [1, 1, 1]:
        # The root's link carries every copy; each link of the chain carries one.
        sent = {(r.ranks, r.algorithm): r.wire_GBps / r.algbw_GBps for r in rows}  # type: ignore[operator]
        assert sent[3, "flat"] == pytest.approx(2, rel=0.01)
        assert sent[3, "ring"] == pytest.approx(1, rel=0.01)
    if sizes == [3]:
        assert all(made.wire_GBps is None for made in rows)


def test_wrong_values_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Communicator.bind

    def bind(self: Communicator, *args: Any, **more: Any) -> Any:
        operation = real(self, *args, **more)
        call = operation.call

        def spoilt() -> None:
            call()
            if self.rank == 1:
                args[1][5] = -1

        operation.call = spoilt
        return operation

    monkeypatch.setattr(Communicator, "bind", bind)
    assert [r.wrong for r in bench([1, 1], algorithms=("ring",))] == [1]


def test_what_cannot_be_done_says_why() -> None:
    (only,) = bench([2], algorithms=("one-shot",))
    assert "one-shot is an all-reduce or reduce" in only.skipped
    (alone,) = bench([1])
    assert alone.skipped == "the job has one rank"


def test_the_summary_shows_the_curves() -> None:
    size = 16 << 20
    rows = [
        row("broadcast", f"to {n} ranks", size, us, algorithm=name, ranks=n)
        for name, n, us in (
            ("ring", 2, 100e3), ("flat", 2, 100e3), ("ring", 4, 105e3), ("flat", 4, 300e3),
            ("mpi", 2, 120e3),
        )
    ]  # fmt: skip
    assert summarize(rows)[0] == (
        "broadcast: 16M to 2 4 ranks in ms: ring 100.00 105.00, flat 100.00 300.00, mpi 120.00 -"
    )


def test_calls_apart_begin_together() -> None:
    """What leaves the root early is not timed as if it were done: one call in a sample."""

    def main(boot: MemoryBootstrap) -> tuple[int, int]:
        calls = []
        group = Group(boot)
        samples = measure(
            lambda: calls.append(0), group, iterations=7, warmup=1, allotment=1.0, apart=True
        )
        return samples.batch, len(samples.seconds)

    assert run_threads(2, main) == [(1, 7)] * 2
