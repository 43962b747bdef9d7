"""Waits of several threads through one waiter."""

from __future__ import annotations

import contextlib
import threading
import time
from functools import partial

import pytest

from rdmakit.errors import TransferTimeout
from rdmakit.waiting import Waiter


def test_a_wait_keeps_its_own_limit_beside_another_threads() -> None:
    """Neither its limit nor its clock is another's, whose waits begin again and again."""
    waiter = Waiter(1, "n1", 60.0, 2)
    over, told = threading.Event(), []

    def short_waits() -> None:
        while not over.is_set():
            with contextlib.suppress(TransferTimeout):  # of its own, on a busy machine
                turns = iter((False,) * 200 + (True,))
                waiter.until(partial(next, turns), (), lambda: "soon", 0.001)

    thread = threading.Thread(target=short_waits)
    thread.start()
    end = time.monotonic() + 0.3
    try:
        waiter.until(lambda: time.monotonic() > end, (), lambda: "a long one", 50.0)
        with pytest.raises(TransferTimeout, match=r"rank 1 \(host n1\): nobody .*limit 0.2 s"):
            waiter.until(lambda: False, (), lambda: "nobody", 0.2)
    except TransferTimeout as exc:
        told.append(str(exc))
    finally:
        over.set()
        thread.join()
    assert not told


def test_a_timeout_that_is_set_holds_for_this_thread() -> None:
    waiter = Waiter(0, "n0", 60.0, 2)
    waiter.timeout = 5.0
    seen: list[float] = []
    thread = threading.Thread(target=lambda: seen.append(waiter.timeout))
    thread.start()
    thread.join()
    assert (waiter.timeout, seen) == (5.0, [60.0])
