"""With checking on, ranks compare what they are about to do before any data moves."""

from __future__ import annotations

from collections.abc import Callable

from rdmakit.errors import CollectiveMismatch
from rdmakit.family import Poll
from rdmakit.process.phase import current
from rdmakit.protocols import Bootstrap
from rdmakit.waiting import Waiter

__all__ = ["LATER", "Agreement", "refusal"]

_REFUSED = " refused: "
LATER = ", not blocking"
"""Behind the text of a call that does not block: as in MPI another one than a call that does."""
_MARK = b"\0"
"""Behind the text that is compared, before what each rank tells of itself."""


class Agreement:
    """The comparison of one group's calls."""

    def __init__(
        self,
        bootstrap: Bootstrap,
        waiter: Waiter,
        label: str,
        fail: Callable[[BaseException], None],
        *,
        on: bool,
    ) -> None:
        """Make it; ``fail`` is told of a difference before it is raised."""
        self._bootstrap, self._waiter, self._label = bootstrap, waiter, label
        self._fail, self._on, self._calls = fail, on, 0

    def agree(self, mine: str) -> None:
        """See that all ranks are about to do ``mine``. Collective, blocking; nothing if off.

        Raises:
            CollectiveMismatch: on every rank; names the odd ones.
        """
        if self._on:
            self._finish(self._begin(mine), "check")

    def _finish(self, run: Poll, what: str) -> None:
        """Wait for what was begun.

        The same messages as :meth:`start`'s, so that a call that blocks on one rank is compared
        with one that does not on another, or is refused there.
        """
        before = current.enter(f"{self._label}{what}", timeout=self._waiter.timeout)
        try:
            self._waiter.until(run.advance, (), run.waits_for)
        except BaseException as exc:
            run.abandon()
            self._fail(exc)
            raise
        finally:
            current.restore(before)

    def start(self, mine: str) -> Poll | None:
        """Begin the same; it raises when it is asked. Collective, does not block; None if off."""
        return self._begin(mine + LATER) if self._on else None

    def _begin(self, mine: str) -> Poll:
        test = self._bootstrap.start_gather(self._numbered(mine))

        def compared() -> bool:
            told = test()
            if told is None:
                return False
            self._compare(told)
            return True

        return Poll(compared, f"{self._label}check")

    def exchange(self, mine: str, facts: bytes) -> list[bytes]:
        """See that all ranks do ``mine``, whether on or off, and return the facts of each.

        Collective, blocking. Raises as :meth:`agree`.
        """
        facts_of: list[list[bytes]] = []
        self._finish(self._begin_exchange(mine, facts, facts_of.append), "exchange")
        return facts_of[0]

    def start_exchange(
        self, mine: str, facts: bytes, take: Callable[[list[bytes]], object]
    ) -> Poll:
        """Begin the same; ``take`` is given the facts. Collective, does not block."""
        return self._begin_exchange(mine + LATER, facts, take)

    def _begin_exchange(
        self, mine: str, facts: bytes, take: Callable[[list[bytes]], object]
    ) -> Poll:
        test = self._bootstrap.start_gather(self._numbered(mine) + _MARK + facts)

        def told() -> bool:
            texts = test()
            if texts is None:
                return False
            take(self._facts(texts))
            return True

        return Poll(told, f"{self._label}exchange")

    def _facts(self, told: list[bytes]) -> list[bytes]:
        self._compare(told)
        return [text.partition(_MARK)[2] for text in told]

    def differ(self, text: str) -> CollectiveMismatch:
        """Return the error of facts that do not fit each other, which all ranks have seen."""
        error = CollectiveMismatch(text)
        self._fail(error)
        return error

    def _numbered(self, mine: str) -> bytes:
        self._calls += 1
        return f"call {self._calls}: {mine}".encode()

    def _compare(self, told: list[bytes]) -> None:
        calls = [text.partition(_MARK)[0].decode() for text in told]
        if len({text.partition(_REFUSED)[:2] for text in calls}) == 1:
            return  # also where all refuse, each with its own words
        usual = max(calls, key=calls.count)  # of equals the first, on every rank
        odd = "; ".join(f"rank {r}: {text}" for r, text in enumerate(calls) if text != usual)
        error = CollectiveMismatch(f"{calls.count(usual)} rank(s): {usual}; but {odd}")
        self._fail(error)
        raise error

    def refuse(self, kind: str, error: Exception) -> None:
        """Let the others know that this rank refuses its call. Collective, blocking.

        Raises:
            Exception: ``error``, where the others were about to do something else.
        """
        try:
            self.agree(refusal(kind, error))
        except CollectiveMismatch as mismatch:
            raise error from mismatch


def refusal(kind: str, error: Exception) -> str:
    """Return what a rank tells of a call that it refuses."""
    return f"{kind}{_REFUSED}{error}"
