"""What every Window must do, as cases that run in threads and in processes.

A case is called on all ranks with their control plane and a function that makes the thing under
test; it raises AssertionError. tests/parallel/programs/conformance.py runs the same cases under
mpirun.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rdmakit.errors import InvalidArgument
from rdmakit.protocols import Bootstrap, Window
from tests.conformance.cases import SIZES, pattern, wait_for

MakeWindow = Callable[[int, int], Window]


def window_describes_itself(boot: Bootstrap, make: MakeWindow) -> None:
    window = make(4097, 12)
    assert (window.rank, window.size) == (boot.rank, boot.size)
    assert (window.nbytes, window.flags, window.base) == (4097, 12, 0)
    assert window.kind in ("shm", "memory")
    boot.barrier()
    window.close()


def window_sizes(boot: Bootstrap, make: MakeWindow) -> None:
    for nbytes in SIZES:
        window = make(nbytes, 1)
        areas = [window.area(owner) for owner in range(boot.size)]
        for area in areas:
            assert (area.nbytes, area.dtype) == (nbytes, np.uint8)
            assert not area.any(), "fresh memory is zero"
        boot.barrier()
        areas[boot.rank][:] = pattern(nbytes, boot.rank)
        boot.barrier()
        for owner, area in enumerate(areas):
            np.testing.assert_array_equal(area, pattern(nbytes, owner))
        boot.barrier()
        del areas, area
        window.close()


def window_every_rank_writes_every_area(boot: Bootstrap, make: MakeWindow) -> None:
    part = 1001
    window = make(part * boot.size, 1)
    mine = slice(boot.rank * part, (boot.rank + 1) * part)
    for owner in range(boot.size):
        window.area(owner)[mine] = pattern(part, boot.rank, owner)
    boot.barrier()
    for owner in range(boot.size):
        for writer in range(boot.size):
            seen = window.area(owner)[writer * part : (writer + 1) * part]
            np.testing.assert_array_equal(seen, pattern(part, writer, owner))
    boot.barrier()
    window.close()


def window_counters(boot: Bootstrap, make: MakeWindow) -> None:
    flags = 12
    window = make(64, flags)
    every = [(owner, flag) for owner in range(boot.size) for flag in range(flags)]
    for owner, flag in every:
        assert window.reached(owner, flag, 0)
        assert not window.reached(owner, flag, 1)
    boot.barrier()
    for flag in range(0, flags, 2):  # neighbours stay as they are
        window.post(flag, 10 * boot.rank + flag + 1)
    boot.barrier()
    for owner, flag in every:
        value = 10 * owner + flag + 1 if flag % 2 == 0 else 0
        assert window.reached(owner, flag, value)
        assert window.reached(owner, flag, value - 1)
        assert not window.reached(owner, flag, value + 1)
    boot.barrier()
    big = 1 << 40
    window.post(flags - 1, big)
    window.post(flags - 1, big)
    boot.barrier()
    for owner in range(boot.size):
        assert window.reached(owner, flags - 1, big)
        assert not window.reached(owner, flags - 1, big + 1)
        assert not window.area(owner).any(), "counters are not in the areas"
    boot.barrier()
    window.close()


def window_post_publishes_the_data(boot: Bootstrap, make: MakeWindow) -> None:
    nbytes, rounds = 3000, 150
    window = make(nbytes, 2)
    mine, before = window.area(boot.rank), (boot.rank - 1) % boot.size
    for turn in range(1, rounds + 1):
        wait_for(
            lambda turn=turn: window.reached((boot.rank + 1) % boot.size, 1, turn - 1), "reader"
        )
        mine[:] = pattern(nbytes, boot.rank, turn)
        window.post(0, turn)
        wait_for(lambda turn=turn: window.reached(before, 0, turn), "writer")
        np.testing.assert_array_equal(window.area(before), pattern(nbytes, before, turn))
        window.post(1, turn)
    boot.barrier()
    window.close()


def window_two_are_apart(boot: Bootstrap, make: MakeWindow) -> None:
    first, second = make(5000, 3), make(5000, 3)
    first.area(boot.rank)[:] = pattern(5000, boot.rank)
    first.post(1, 7)
    boot.barrier()
    for owner in range(boot.size):
        assert not second.area(owner).any()
        assert not second.reached(owner, 1, 1)
    boot.barrier()
    first.close()
    second.area(boot.rank)[:] = 9
    boot.barrier()
    assert all((second.area(owner) == 9).all() for owner in range(boot.size))
    boot.barrier()
    second.close()


def window_close_is_idempotent(boot: Bootstrap, make: MakeWindow) -> None:
    window = make(100, 1)
    held = window.area((boot.rank + 1) % boot.size)
    boot.barrier()
    window.close()
    window.close()
    held[:] = 1  # a view that somebody kept is no crash
    boot.barrier()


WINDOW_CASES = (
    window_describes_itself,
    window_sizes,
    window_every_rank_writes_every_area,
    window_counters,
    window_post_publishes_the_data,
    window_two_are_apart,
    window_close_is_idempotent,
)


def too_many_counters(make: MakeWindow) -> None:
    """Refused by a window that has no room for them. Local: every rank passes the same number."""
    try:
        make(100, 100_000)
    except InvalidArgument:
        return
    raise AssertionError("100000 counters were taken")
