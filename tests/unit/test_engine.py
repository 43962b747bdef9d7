"""The engine: its lock, its thread, what it moves; and requests that belong to several engines."""

from __future__ import annotations

import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from rdmakit.engine import Engine, Pending
from rdmakit.errors import CommunicatorClosed, TransferTimeout
from rdmakit.family import Family, Poll, Work
from rdmakit.inter.ucx import UcxChannel
from rdmakit.memory import MemoryChannel, Post
from rdmakit.request import Request
from rdmakit.status import UNDEFINED
from rdmakit.waiting import Waiter, greet_seconds


def waiter(engine: Engine, timeout: float = 5.0) -> Waiter:
    made = Waiter(0, "here", timeout, 2)
    made.rest, made.progress = engine.rest, engine.poke
    return made


class Counts:
    """Busy until it was moved so many times."""

    def __init__(self, left: int) -> None:
        self.left, self.threads, self.looked = left, set[str](), 0

    @property
    def busy(self) -> bool:
        return self.left > 0

    def advance(self) -> bool:
        self.threads.add(threading.current_thread().name)
        self.left -= 1
        return True

    def look(self) -> None:
        self.looked += 1


def until(ready: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.002)


def progress_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "rdmakit-progress"]


def test_the_thread_moves_what_is_added_and_then_sleeps() -> None:
    engine = Engine()
    assert engine._thread is None, "no thread before there is something for it"
    for left in (5, 300):
        source = Counts(left)
        with engine.held():
            engine.add(source, background=True)
        until(lambda source=source: not source.busy)  # type: ignore[misc]
        assert source.threads == {"rdmakit-progress"}
        until(lambda: engine._parked and not engine.active)
    thread = engine._thread
    engine.stop()
    assert thread is not None
    assert not thread.is_alive()
    source = Counts(3)
    with engine.held():
        engine.add(source, background=True)  # another one
    until(lambda: not source.busy)
    engine.stop()


def test_no_thread_for_what_somebody_waits_for() -> None:
    engine, source = Engine(), Counts(50)
    with engine.held():
        engine.add(source, background=False)
    assert engine._thread is None
    engine.wait(lambda: not source.busy, waiter(engine), lambda: "counting")
    assert source.threads == {threading.current_thread().name}
    assert not engine.active


def test_the_last_user_ends_the_thread() -> None:
    engine = Engine()
    engine.join()
    engine.join()
    with engine.held():
        engine.add(Counts(1), background=True)
    engine.part()
    assert engine._thread is not None
    engine.part()
    assert engine._thread is None


def test_the_lock_can_be_taken_again_and_rest_lets_others_in() -> None:
    engine = Engine()
    seen: list[str] = []

    def other() -> None:
        with engine.held():
            seen.append("other")

    with engine.held(), engine.held():
        thread = threading.Thread(target=other)
        thread.start()
        time.sleep(0.02)
        assert not seen
        end = time.monotonic() + 10
        while not seen:
            engine.rest(0.001)
            assert time.monotonic() < end
        assert engine._owner == threading.get_ident()
    thread.join(10)
    assert engine._acquire(False), "it was given back as often as it was taken"
    engine._release()


def test_an_interrupt_while_rest_takes_the_lock_back_leaves_it_to_its_holder() -> None:
    """Ctrl-C comes while the main thread waits for a lock that another holds."""
    engine = Engine()
    seen: list[object] = []

    def other() -> None:
        me = threading.get_ident()
        engine.enter()
        time.sleep(0.1)  # the main thread rests no longer, it waits
        signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.1)
        seen.append(engine._owner == me)
        try:
            engine.leave()
        except RuntimeError as exc:
            seen.append(exc)

    def rest_long() -> None:
        with engine.held(), engine.held():
            thread.start()
            try:
                for _ in range(10_000):
                    engine.rest(0.001)
            finally:
                seen.append((engine._owner, engine._depth))

    main = threading.get_ident()
    thread = threading.Thread(target=other)
    with pytest.raises(KeyboardInterrupt):
        rest_long()
    thread.join(10)
    assert seen == [True, (main, 1)]
    assert engine._acquire(False), "it was given back as often as it was taken"
    engine._release()


def test_a_thread_that_died_is_replaced() -> None:
    engine = Engine()
    dead = threading.Thread(target=lambda: None)
    dead.start()
    dead.join()
    engine._thread = dead
    source = Counts(3)
    with engine.held():
        engine.add(source, background=True)
    until(lambda: not source.busy)
    engine.stop()


def test_rest_moves_the_others() -> None:
    engine, source = Engine(), Counts(3)
    engine.active.append(source)
    for _ in range(3):
        engine.rest(0)
    assert not source.busy
    with engine.held():
        engine.active.append(Counts(1))
        engine.rest(0)
        assert not engine.active


def test_a_wait_has_a_deadline_that_begins_anew_when_something_moves() -> None:
    engine, turn = Engine(), [0]
    began = time.monotonic()

    def ready() -> bool:
        turn[0] = min(int((time.monotonic() - began) / 0.1), 6)
        return False

    with pytest.raises(TransferTimeout, match=r"nothing came after .* \(limit 0\.25 s\)"):
        engine.wait(ready, waiter(engine), lambda: "nothing came", lambda: turn[0], 0.25)
    assert time.monotonic() - began > 0.8
    engine.enter()
    engine.leave()


def test_a_pending_ends_once() -> None:
    pending = Pending(lambda: "late text", [1, 2])
    assert pending.label == "late text"
    pending.end(ValueError("first"))
    pending.end()
    assert pending.done
    assert isinstance(pending.error, ValueError)
    assert pending.keep is None


def test_works_run_in_order_and_fail_together() -> None:
    family = Family()
    family.engine.threaded = False
    told: list[str] = []
    gates = {"a": False, "b": False}

    def work(name: str) -> Request:
        def begin() -> Poll:
            told.append(name)
            return Poll(lambda: gates[name], name)

        request = Request(family, waiter(family.engine, 0.2), name, None)
        family.submit(Work(request, lambda: None, begin))
        return request

    a, b = work("a"), work("b")
    assert told == ["a"]
    assert not b.Test()
    gates["a"] = True
    assert a.Test()
    assert told == ["a", "b"]
    c = work("a")
    gates["a"] = False
    with pytest.raises(TransferTimeout, match="b: waiting for the other ranks"):
        b.Wait()
    with pytest.raises(CommunicatorClosed, match="unusable: TransferTimeout"):
        c.Wait()
    assert not family.busy


def test_arrays_of_a_call_that_was_given_up_stay() -> None:
    """Somebody may write to them later; to those of a call that has not begun nobody does."""
    family = Family()
    family.engine.threaded = False
    began, behind, spare = (np.zeros(4) for _ in range(3))
    alive = [weakref.ref(array) for array in (began, behind, spare)]
    requests = [Request(family, waiter(family.engine, 0.1), "", (x,)) for x in (began, behind)]
    family.submit(
        Work(requests[0], lambda: Poll(lambda: False, "never"), partial(np.copyto, spare, 1))
    )
    family.submit(Work(requests[1], lambda: Poll(lambda: False, "never")))
    with pytest.raises(TransferTimeout, match="never"):
        requests[0].Wait()
    del began, behind, spare, requests
    gc.collect()
    assert [ref() is not None for ref in alive] == [True, False, True]


class Holding(MemoryChannel):
    """A channel that never gets rid of its bytes."""

    def __init__(self) -> None:
        super().__init__(0, Post())
        self.problem: Exception | None = None

    def flush(self) -> bool:
        if self.problem is not None:
            raise self.problem
        return False


def flushing(channel: Holding) -> Family:
    """Return a family that is a source only because of what the channel holds."""
    family = Family(channel=channel)
    family.engine.threaded = False
    with family.engine.held():
        family.stir(background=True)
    family.engine.poke()
    assert family.engine.active == [family]
    return family


def test_a_closed_family_is_no_source_any_more() -> None:
    channel = Holding()
    family = flushing(channel)
    family.leave()
    assert not family.engine.active
    assert not family.busy
    channel.problem = AttributeError("it has no worker any more")
    family.engine.poke()


def test_a_flush_that_fails_ends_its_family_and_not_the_engine() -> None:
    channel = Holding()
    family = flushing(channel)
    channel.problem = ValueError("no flush")
    family.engine.poke()
    assert family.failure == "ValueError: no flush"
    assert not family.engine.active


def test_a_closed_ucx_channel_holds_nothing() -> None:
    channel = UcxChannel.__new__(UcxChannel)
    channel._tcp, channel._broken, channel._flushing, channel._worker = True, False, 0, None
    assert channel.flush()


class Crawls:
    """A run that takes its time and moves all of it."""

    moved = True

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def advance(self) -> bool:
        return time.monotonic() > self.end

    def waits_for(self) -> str:
        return "crawling"

    def abandon(self) -> None:
        pass


@pytest.mark.parametrize("wait", [Request.Waitany, Request.Waitsome])
def test_what_moves_ahead_gives_those_behind_it_more_time(wait: Callable[..., Any]) -> None:
    family = Family()
    family.engine.threaded = False
    ahead, behind = (Request(family, waiter(family.engine), name, None) for name in "ab")
    family.submit(Work(ahead, lambda: Crawls(0.8)))
    family.submit(Work(behind, lambda: Poll(lambda: True, "b")))
    assert wait([behind], timeout=0.2) in (0, [0])
    assert ahead.done


def test_waits_for_requests_of_several_engines() -> None:
    families = [Family(), Family()]
    gates = [False, False]
    requests = []
    for index, family in enumerate(families):
        family.engine.threaded = False
        request = Request(family, waiter(family.engine), f"{index}", None)
        poll = Poll(lambda index=index: gates[index], f"{index}")  # type: ignore[misc]
        family.submit(Work(request, lambda poll=poll: poll))  # type: ignore[misc]
        requests.append(request)
    gates[1] = True
    assert Request.Waitany(requests) == 1
    assert not Request.Testall(requests)
    gates[0] = True
    assert Request.Waitall(requests)
    assert Request.Waitany(requests) == UNDEFINED


@pytest.mark.parametrize(("timeout", "want"), [(6, 2), (30, 10), (60, 10), (120, 20), (600, 100)])
def test_first_word_has_a_share_of_a_waits_time(timeout: float, want: float) -> None:
    assert greet_seconds(timeout) == want
