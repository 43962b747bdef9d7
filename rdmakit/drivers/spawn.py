"""A Python child of ours that is talked to in lines of JSON, each with a deadline."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rdmakit.errors import SetupError

__all__ = ["MARK", "PythonChild"]

MARK = "@rdmakit "
"""Begins a line that is meant for the parent; libraries print where they like."""
_ROOM = 4 << 20
"""Bytes of output that are kept."""


class PythonChild:
    """``python -m MODULE``, made by posix_spawn, since MPI, UCX and CUDA may be live here.

    Its standard error is its standard output, so that a traceback is among what it said.
    """

    def __init__(
        self, module: str, args: Sequence[str] = (), env: Mapping[str, str] | None = None
    ) -> None:
        """Start it. Local.

        Raises:
            SetupError: it cannot be started.
        """
        if not sys.executable:
            raise SetupError("no interpreter to start a child with: sys.executable is empty")
        self._said = b""
        self._heard = 0
        try:
            # close_fds=False and a full path are what lets subprocess use posix_spawn.
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *args],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=None if env is None else dict(env),
                close_fds=False,
            )
        except OSError as exc:
            raise SetupError(f"{sys.executable} -m {module}: {exc}") from exc

    @property
    def said(self) -> str:
        """All that it printed so far."""
        return self._said.decode(errors="replace")

    def tell(self, message: object) -> None:
        """Send a line. Local.

        Raises:
            SetupError: it has ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(message) + b"\n")
            self._process.stdin.flush()
        except OSError as exc:
            raise SetupError(f"the child has ended: {self._last()}") from exc

    def hear(self, seconds: float) -> Any:
        """Return its next line for the parent. Blocking.

        Raises:
            SetupError: it has ended, or said nothing for ``seconds``.
        """
        end = time.monotonic() + seconds
        while (line := self._line()) is None:
            left = end - time.monotonic()
            if left <= 0:
                raise SetupError(f"the child said nothing for {seconds:g} s: {self._last()}")
            if not self._read(left):
                raise SetupError(f"the child has ended: {self._last()}")
        try:
            return msgspec.json.decode(line)
        except msgspec.DecodeError as exc:
            raise SetupError(f"the child said {line[:200]!r}: {exc}") from exc

    def end(self, seconds: float) -> None:
        """Let it end by closing its input; kill it after ``seconds``. Blocking, idempotent."""
        process = self._process
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and self._read(left):
            pass
        try:
            process.wait(max(0.0, end - time.monotonic()) + 0.05)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                os.kill(process.pid, signal.SIGKILL)
            process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def _read(self, seconds: float) -> bool:
        """Take what it printed; return False at the end of its output."""
        stream = self._process.stdout
        if stream is None or stream.closed:
            return False
        ready, _, _ = select.select([stream], [], [], seconds)
        if not ready:
            return True
        data = os.read(stream.fileno(), 1 << 16)
        if len(self._said) < _ROOM:
            self._said += data
        return bool(data)

    def _line(self) -> bytes | None:
        while (end := self._said.find(b"\n", self._heard)) >= 0:
            line, self._heard = self._said[self._heard : end], end + 1
            if line.startswith(MARK.encode()):
                return line[len(MARK) :]
        return None

    def _last(self) -> str:
        lines = [line for line in self.said.splitlines() if line.strip()]
        return " / ".join(lines[-2:])[-400:] or "without a word"
