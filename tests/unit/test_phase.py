"""The phase record."""

from __future__ import annotations

from threading import Event, Thread
from time import monotonic

import pytest

from rdmakit.process.phase import Phase, current


def test_describe() -> None:
    phase = Phase()
    assert phase.describe(3, "n1") == "rank 3 (host n1): outside of any call"
    before = phase.enter("allreduce/hierarchical", (2,), 1 << 20)
    name, peers, nbytes, start, _ = phase.now
    phase.restore((name, peers, nbytes, start - 4.2, None))
    expected = "rank 3 (host n1): in allreduce/hierarchical 1M, waiting for rank 2 for 4.2 s"
    assert phase.describe(3, "n1") == expected
    phase.restore(before)
    assert phase.describe(3, "n1") == "rank 3 (host n1): outside of any call"


def test_many_peers_are_cut() -> None:
    phase = Phase()
    phase.enter("barrier", tuple(range(64)))
    assert "waiting for ranks 0, 1, 2, 3, 4, 5, 6, 7 and 56 more for 0.0 s" in phase.describe(
        0, "h"
    )


def test_nesting_keeps_the_outer_deadline() -> None:
    phase = Phase()
    with phase.during("outer", timeout=5.0):
        outer = phase.now
        assert outer[4] is not None
        assert outer[4] - monotonic() == pytest.approx(5.0, abs=1.0)
        with phase.during("inner"):
            assert phase.now[4] is None
        assert phase.now is outer
    assert phase.now[0] == ""


def test_threads_have_records_of_their_own() -> None:
    """One thread's calls that begin and end around another's leave no deadline behind."""
    phase = Phase()
    entered, left, seen = Event(), Event(), []

    def other() -> None:
        before = phase.enter("wait for a message")
        seen.append(phase.watched)
        entered.set()
        left.wait(10)
        phase.restore(before)

    outside = phase.enter("allreduce/mpi", timeout=60.0)
    thread = Thread(target=other)
    thread.start()
    assert entered.wait(10)
    assert phase.watched
    assert phase.now[0] == "allreduce/mpi", "the one whose deadline is looked at"
    phase.restore(outside)
    assert not phase.watched
    assert phase.now[0] == "wait for a message"
    left.set()
    thread.join()
    assert seen == [False]
    assert (phase.now[0], phase.now[4]) == ("", None)


def test_one_per_process() -> None:
    assert isinstance(current, Phase)
    with pytest.raises(AttributeError):
        current.other = 1  # type: ignore[attr-defined]
