"""GPU memory through pinned slots (order, reuse, any sizes), and its values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmakit.bench import gpu_values, staged, values
from rdmakit.bench.staged import In, Out, SharedSlots
from rdmakit.memory import MemoryBootstrap, MemoryWindow, run_threads
from tests.unit.fake_bench import BenchDoor

Sizes = list[int]
SIZES = st.lists(st.integers(1, 20 * 64), min_size=1, max_size=6)


@pytest.fixture(autouse=True)
def _pieces_of_64_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged, "PIECE", 64)


def transfer(sizes: Sizes, carriers: Callable[[MemoryBootstrap, BenchDoor], Any]) -> None:
    """Send transfers of ``sizes`` bytes both ways at once, twice, between two ranks."""

    def main(boot: MemoryBootstrap) -> None:
        door, peer = BenchDoor(f"GPU-{boot.rank}"), 1 - boot.rank
        carrier = carriers(boot, door)
        out, into = Out(door, carrier, 0), In(door, carrier, 1)
        for turn in range(2):

            def data(rank: int, index: int, turn: int = turn) -> np.ndarray[Any, Any]:
                rng = np.random.default_rng((rank, index, turn))
                return rng.integers(0, 256, sizes[index], np.uint8)

            memory = [(door.DeviceMemory(n), door.DeviceMemory(n, zero=True)) for n in sizes]
            requests = []
            for index, (of, to) in enumerate(memory):
                mine = data(boot.rank, index)
                door.copy_now(of.address, mine.ctypes.data, sizes[index])
                requests.append(out.add(of.address, sizes[index], tag=index))
                requests.append(into.add(to.address, sizes[index], tag=index))
            polls = 0
            while not all([request.done() for request in requests]):
                polls += 1
                assert polls < 200_000, "no end"
            door.drain()
            for index, (of, to) in enumerate(memory):
                got = to.bytes[: sizes[index]]
                np.testing.assert_array_equal(got, data(peer, index))
                of.close()
                to.close()
        boot.barrier()
        for part in (out, into, carrier):
            getattr(part, "close", lambda: None)()

    run_threads(2, main)


@settings(max_examples=25, deadline=None)
@given(sizes=SIZES)
def test_by_memory_that_both_address(sizes: Sizes) -> None:
    def carriers(boot: MemoryBootstrap, door: BenchDoor) -> SharedSlots:
        window = MemoryWindow.create(boot, staged.PIECE * staged.SLOTS, 4)
        addresses = [int(window.area(rank).ctypes.data) for rank in range(2)]
        return SharedSlots(window, addresses, 1 - boot.rank)

    transfer(sizes, carriers)


def test_a_slot_is_not_filled_before_it_is_free() -> None:
    """A peer that takes nothing lets no more than all slots be filled."""

    class Held:
        given = 0

        def out_slot(self, number: int) -> int:
            return int(slots[number % staged.SLOTS].ctypes.data)

        def may_fill(self, number: int) -> bool:
            return number < staged.SLOTS

        def give(self, number: int, nbytes: int, tag: int) -> None:
            assert number == self.given, "in order"
            self.given += 1

    slots = np.zeros((staged.SLOTS, 64), np.uint8)
    door, carrier = BenchDoor("GPU-0"), Held()
    out: Any = Out(door, carrier, 0)  # type: ignore[arg-type]
    source = np.zeros(64 * 20, np.uint8)
    request = out.add(int(source.ctypes.data), source.nbytes, 0)
    for _ in range(50):
        assert not request.done()
    assert carrier.given == staged.SLOTS


@settings(max_examples=50, deadline=None)
@given(
    count=st.integers(1, 9000),
    start=st.integers(0, 600),
    dtype=st.sampled_from(["float16", "float32", "int64"]),
    bad=st.integers(0, 8999),
)
def test_values_in_gpu_memory_by_the_piece(count: int, start: int, dtype: str, bad: int) -> None:
    """As the same values in one host array; an element that differs is found wherever it is."""
    door, kind = BenchDoor("GPU-0"), np.dtype(dtype)
    period = values.block(3, kind)
    memory = door.DeviceMemory(count * kind.itemsize)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_values, "_PIECE", 1000)
        gpu_values.fill(door, memory.address, memory.nbytes, np.roll(period, -start))
        want = np.empty(count, kind)
        values.fill(want, 3, start=start)
        got = memory.bytes[: memory.nbytes].view(kind)
        np.testing.assert_array_equal(got, want)
        assert gpu_values.count_wrong(door, memory.address, count, period, start) == 0
        got[bad % count] += 1
        assert gpu_values.count_wrong(door, memory.address, count, period, start) == 1
    memory.close()
