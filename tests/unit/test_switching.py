"""The switch interval: short while anything is under way, and given back."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator

import pytest

from rdmakit.engine import Engine
from rdmakit.process import switching
from rdmakit.process.switching import SECONDS, Hurry


@pytest.fixture(autouse=True)
def _given_back() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.004)
    yield
    sys.setswitchinterval(before)


def interval() -> float:
    return pytest.approx(sys.getswitchinterval(), rel=0.02)  # type: ignore[no-any-return]


def test_it_is_short_while_anybody_wishes_it() -> None:
    first, second = Hurry(), Hurry()
    first.begin()
    first.begin()
    second.begin()
    assert interval() == SECONDS
    first.end()
    first.end()
    assert interval() == SECONDS
    second.end()
    assert interval() == 0.004


def test_a_shorter_one_of_the_users_stays() -> None:
    sys.setswitchinterval(1e-4)
    hurry = Hurry()
    hurry.begin()
    assert interval() == 1e-4
    hurry.end()
    assert interval() == 1e-4


def test_one_that_the_user_sets_meanwhile_stays() -> None:
    hurry = Hurry()
    hurry.begin()
    sys.setswitchinterval(0.002)
    hurry.end()
    assert interval() == 0.002


def test_a_forked_child_has_the_usual_one() -> None:
    hurry = Hurry()
    hurry.begin()
    pid = os.fork()
    if pid == 0:
        switching.forked()
        os._exit(0 if abs(sys.getswitchinterval() - 0.004) < 1e-4 else 1)
    assert os.waitpid(pid, 0)[1] == 0
    hurry.end()
    assert interval() == 0.004


class Source:
    """Under way until it is told."""

    busy = True

    def advance(self) -> bool:
        return False

    def look(self) -> None:
        """Nobody to look at."""


def until(wanted: float) -> bool:
    end = time.monotonic() + 20
    while interval() != wanted and time.monotonic() < end:
        time.sleep(0.01)
    return bool(interval() == wanted)


def test_the_progress_thread_wishes_it_while_something_is_under_way() -> None:
    engine, source = Engine(), Source()
    engine.join()
    assert interval() == 0.004
    with engine.held():
        engine.add(source, background=True)
    assert until(SECONDS), "not while it is under way"
    source.busy = False
    assert until(0.004), "not given back when it is complete"
    source.busy = True
    with engine.held():
        engine.add(source, background=True)
    assert until(SECONDS), "not at the second time"
    engine.part()
    assert until(0.004), "not given back when the thread has ended"
