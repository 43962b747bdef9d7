"""What a call that does not block returns, and all of MPI's ways to wait for it."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from rdmakit.errors import InvalidArgument, TransferTimeout, TransportError, UnsupportedError
from rdmakit.family import Family
from rdmakit.mailbox import Transfer
from rdmakit.process.phase import current
from rdmakit.status import UNDEFINED, Special, Status, fill
from rdmakit.waiting import Waiter

__all__ = [
    "Request",
    "Waited",
    "check_timeout",
    "integer",
]

_SLOWEST = 10_000_000
"""Bytes per second that a message makes at least; its deadline is later by so much."""


class Waited:
    """What Waitall takes: requests, and calls bound to their arrays that were started."""


class Request(Transfer, Waited):
    """A collective or a message under way. One that nobody waits for keeps its arrays alive.

    ``done`` tells whether it is complete and moves nothing; an error is raised by Wait and Test.
    """

    def __init__(
        self,
        family: Family,
        waiter: Waiter,
        label: str | Callable[[], str],
        keep: object,
        *,
        kind: Literal["collective", "send", "receive"] = "collective",
        nbytes: int = 0,
    ) -> None:
        """Made by the calls of a communicator."""
        super().__init__(label, keep)
        self._family, self._waiter, self._kind = family, waiter, kind
        self._slack = nbytes // _SLOWEST
        self._null = False
        self.null_source: Special | None = None
        """PROC_NULL where that was the other side."""

    def Test(self, status: Any = None) -> bool:
        """Move things along, and return whether it is complete. Local, does not block.

        Raises:
            Exception: what went wrong with it.
        """
        if not self.done:
            self.poke()
            if not self.done:
                return False
        self._finish(status)
        return True

    def poke(self) -> None:
        """Move things along. Local, does not block."""
        self._family.engine.poke()

    def Wait(self, status: Any = None, *, timeout: float | None = None) -> Literal[True]:
        """Return when it is complete. Blocking.

        Args:
            status: filled for a receive.
            timeout: seconds without progress after which it is given up; default: the
                configuration's, and 1 s more for each 10 MB of a message.

        Raises:
            TransferTimeout: given up; the communicator is unusable.
            Exception: what else went wrong with it.
        """
        if timeout is not None:
            check_timeout(timeout)
        if not self.done:
            self._wait(timeout)
        self._finish(status)
        return True

    def _wait(self, timeout: float | None) -> None:
        family = self._family
        limit = timeout or self._waiter.timeout + self._slack
        before = current.enter(self.label)
        try:
            family.engine.wait(lambda: self.done, self._waiter, self._describe, self._moved, limit)
        except TransportError as exc:
            family.fail(exc)
            raise
        finally:
            current.restore(before)

    def _moved(self) -> object:
        """Return what differs once it, or the collective that it is behind, has moved."""
        return _moves_of(self._family) if self._kind == "collective" else self.moves

    def _describe(self) -> str:
        if self._kind != "collective":
            return f"{self.label}: waiting"
        return self._family.waits_for()

    def _finish(self, status: Any) -> None:
        if status is not None and not self._null:
            source: object = self.null_source if self.null_source is not None else self.source
            fill(status, source, self.tag, self.nbytes, self.cancelled)
        self._null = True
        if self.error is not None:
            raise self.error

    def Cancel(self) -> None:
        """Take a receive back, if it has no message yet; Wait tells. Local.

        Raises:
            UnsupportedError: not a receive; what was sent cannot be taken back.
        """
        if self._kind != "receive":
            raise UnsupportedError(f"{self.label}: only receives can be cancelled")
        family = self._family
        with family.engine.held():
            if not self.done and family.mailbox is not None:
                family.mailbox.cancel(self)

    def Free(self) -> None:
        """Not be interested any more: it becomes complete by itself. Local."""
        self._null = True

    # -- several ------------------------------------------------------------------------------

    @staticmethod
    def Waitall(
        requests: Sequence[Request],
        statuses: list[Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> Literal[True]:
        """Wait for all. Blocking; raises the first error once all are complete."""
        requests = _checked(requests, Waited)
        first: BaseException | None = None
        for index, request in enumerate(requests):
            try:
                request.Wait(_status(statuses, index), timeout=timeout)
            except Exception as exc:
                first = first or exc
        if first is not None:
            raise first
        return True

    @staticmethod
    def Testall(requests: Sequence[Request], statuses: list[Any] | None = None) -> bool:
        """Move things along, and return whether all are complete. Raises the first error."""
        requests = _checked(requests)
        _poke(requests)
        if not all(request.done for request in requests):
            return False
        return Request.Waitall(requests, statuses)

    @staticmethod
    def Waitany(
        requests: Sequence[Request], status: Any = None, *, timeout: float | None = None
    ) -> int:
        """Wait for one and return its index; UNDEFINED where all were waited for before."""
        requests = _checked(requests)
        left = [index for index, request in enumerate(requests) if not request._null]
        if not left:
            return UNDEFINED
        _wait_for_one([requests[index] for index in left], timeout)
        index = next(index for index in left if requests[index].done)
        requests[index]._finish(status)
        return index

    @staticmethod
    def Testany(requests: Sequence[Request], status: Any = None) -> tuple[int, bool]:
        """Move things along; return (index, True) of a complete one, or (UNDEFINED, False).

        (UNDEFINED, True) where all were waited for before.
        """
        requests = _checked(requests)
        left = [index for index, request in enumerate(requests) if not request._null]
        if not left:
            return UNDEFINED, True
        _poke(requests)
        for index in left:
            if requests[index].done:
                requests[index]._finish(status)
                return index, True
        return UNDEFINED, False

    @staticmethod
    def Waitsome(
        requests: Sequence[Request],
        statuses: list[Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> list[int] | None:
        """Wait for at least one; return the indices of all complete ones, or None as Waitany."""
        requests = _checked(requests)
        left = [request for request in requests if not request._null]
        if not left:
            return None
        _wait_for_one(left, timeout)
        return _some(requests, statuses)

    @staticmethod
    def Testsome(
        requests: Sequence[Request], statuses: list[Any] | None = None
    ) -> list[int] | None:
        """As Waitsome, without waiting: the list may be empty."""
        requests = _checked(requests)
        if all(request._null for request in requests):
            return None
        _poke(requests)
        return _some(requests, statuses)


def integer(name: str, value: Any) -> int:
    """Return ``value`` as an integer: Python's, NumPy's, or what has ``__index__``. Local.

    Raises:
        InvalidArgument: it is none, such as a float or None; ``name`` says which argument.
    """
    if isinstance(value, Special):
        raise InvalidArgument(f"{name}: {value} cannot stand here")
    try:
        return operator.index(value)
    except TypeError as exc:
        raise InvalidArgument(
            f"{name}: expected an integer, got {type(value).__name__} {value!r}"
        ) from exc


def check_timeout(timeout: float | None) -> None:
    """Refuse what is no time.

    Raises:
        InvalidArgument: no number, or not more than 0.
    """
    if timeout is None:
        return
    if not isinstance(timeout, numbers.Real):
        raise InvalidArgument(
            f"timeout: expected seconds, a number, got {type(timeout).__name__} {timeout!r}"
        )
    if not timeout > 0:
        raise InvalidArgument(f"timeout {timeout}: seconds, more than 0")


def _moves_of(family: Family) -> object:
    work = family.works[0] if family.works else None
    return work and (work, work.pending.moves)


def _checked(requests: Iterable[Any], kind: type | None = None) -> list[Any]:
    given = list(requests)
    for index, request in enumerate(given):
        if not isinstance(request, kind or Request):
            what = type(request)
            raise InvalidArgument(
                f"requests[{index}]: expected a request of rdmakit, got {what.__module__}."
                f"{what.__qualname__}; each kind is waited for by its own library"
            )
    return given


def _poke(requests: Sequence[Request]) -> None:
    for engine in {request._family.engine for request in requests if not request.done}:
        engine.poke()


def _some(requests: Sequence[Request], statuses: list[Any] | None) -> list[int]:
    found = [i for i, request in enumerate(requests) if request.done and not request._null]
    for place, index in enumerate(found):
        requests[index]._finish(_status(statuses, place))
    return found


def _status(statuses: list[Any] | None, index: int) -> Any:
    if statuses is None:
        return None
    while len(statuses) <= index:
        statuses.append(Status())
    return statuses[index]


def _wait_for_one(requests: Sequence[Request], timeout: float | None) -> None:
    """Wait until one is complete; at the deadline all are given up."""
    check_timeout(timeout)
    if any(request.done for request in requests):
        return
    first, others = requests[0], requests[1:]

    def ready() -> bool:
        for engine in {r._family.engine for r in others} - {first._family.engine}:
            engine.poke()
        return any(request.done for request in requests)

    def moves() -> object:
        return [request._moved() for request in requests]

    def describe() -> str:
        return f"waiting for one of {len(requests)} requests, the first: {first._describe()}"

    limit = timeout
    if limit is None:
        limit = first._waiter.timeout + max(request._slack for request in requests)
    before = current.enter("wait for one of several")
    try:
        first._family.engine.wait(ready, first._waiter, describe, moves, limit)
    except TransferTimeout as exc:
        for request in requests:
            request._family.fail(exc)
        raise
    except TransportError as exc:
        first._family.fail(exc)
        raise
    finally:
        current.restore(before)
