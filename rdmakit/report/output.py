"""Standard output that may be lost: a full disk, a reader that went away."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO, TypeVar, cast

from rdmakit.errors import OutputError

__all__ = ["guarded_stdout"]

_T = TypeVar("_T")


class _Guarded:
    """A stream whose failures are told apart from all other errors of the operating system.

    Once it failed it fails always: click writes nothing, to try a stream, and drops what it gets.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._failed: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._tried(lambda: self._stream.write(text))

    def flush(self) -> None:
        self._tried(self._stream.flush)

    def _tried(self, call: Callable[[], _T]) -> _T:
        if self._failed is None:
            try:
                return call()
            except OSError as exc:
                self._failed = exc
                self._let_go()
        raise OutputError(
            f"standard output cannot be written: {self._failed.strerror or self._failed}",
            reader_left=isinstance(self._failed, BrokenPipeError),
        ) from self._failed

    def _let_go(self) -> None:
        """Send what is still buffered nowhere: Python would try again at exit, and complain."""
        with contextlib.suppress(OSError, ValueError):  # no file behind it: nothing is tried
            number = self._stream.fileno()
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, number)
            os.close(nowhere)


@contextlib.contextmanager
def guarded_stdout() -> Iterator[None]:
    """Make a failure to write ``sys.stdout`` an :class:`OutputError`. Local.

    What is buffered is flushed at the end, so that no failure is left to Python's exit.
    """
    before = sys.stdout
    sys.stdout = cast(TextIO, _Guarded(before))
    try:
        yield
        sys.stdout.flush()
    except BaseException:
        with contextlib.suppress(OutputError):  # there is an error to be told already
            sys.stdout.flush()
        raise
    finally:
        sys.stdout = before
