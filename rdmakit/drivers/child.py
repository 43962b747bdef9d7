"""A child process that is spoken to in lines, and can be ended with all that it started.

Made by posix_spawn, not fork: MPI, UCX and CUDA may be live in this process. The child is given
none of this process's files but its own three, among them no connection to the launcher, by
whose end the launcher sees that a rank died.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["Child"]

_KEPT = 1 << 16
"""Bytes of standard error that are kept."""
_REAP = 1.0
"""Seconds for the kernel to end a killed process; one that waits for a device may never end."""
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)')


class Child:
    """A running program. No method blocks longer than it says; none raises for its end.

    Args:
        argv: full path of the program, and its arguments.
        given: written to its standard input, which is closed then.
        environ: its environment; None: this process's.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self, argv: Sequence[str], given: bytes = b"", environ: Mapping[str, str] | None = None
    ) -> None:
        ours, theirs = _pipes()
        actions = [(os.POSIX_SPAWN_DUP2, own, number) for number, own in enumerate(theirs)]
        inherited = _inherited()
        # posix_spawn refuses to close what is above a limit (ulimit -n) that was lowered since.
        beyond = [number for number in inherited if number >= _open_most()]
        actions += [(os.POSIX_SPAWN_CLOSE, n) for n in inherited if n not in beyond]  # type: ignore[misc]
        try:
            for number in beyond:
                os.set_inheritable(number, False)
            self.pid = os.posix_spawn(
                argv[0],
                list(argv),
                os.environ if environ is None else environ,
                file_actions=actions,
                setpgroup=0,
                setsigmask=(),
                setsigdef=(signal.SIGINT, signal.SIGPIPE, signal.SIGTERM, signal.SIGHUP),
            )
        except OSError:
            for number in ours:
                os.close(number)
            raise
        finally:
            for number in theirs:
                os.close(number)
            for number in beyond:
                os.set_inheritable(number, True)
        for number in ours:
            os.set_blocking(number, False)
        self._in, self._out, self._err = ours
        self._open = set(ours)
        self._given = given
        self._half = b""
        self._said = b""
        self._reaped = False
        self.status: int | None = None
        """Exit status, negative for a signal; None while it runs or cannot be reaped."""
        self._send()

    def lines(self, seconds: float) -> list[bytes]:
        """Return whole lines of its output, waiting for the first ``seconds`` at most."""
        self._send()
        poll = select.poll()
        for number in self._open:
            poll.register(number, select.POLLOUT if number == self._in else select.POLLIN)
        if not self._open:
            time.sleep(seconds)
        for number, _ in poll.poll(seconds * 1000) if self._open else ():
            if number == self._in:
                self._send()
            elif data := self._read(number):
                if number == self._err:
                    self._said = (self._said + data)[-_KEPT:]
                else:
                    self._half += data
        *whole, self._half = self._half.split(b"\n")
        return whole

    @property
    def finished(self) -> bool:
        """Whether it has ended and all that it wrote was read; :meth:`kill` reaps it then."""
        return self._out not in self._open and self._ended()

    def _ended(self) -> bool:
        """Note its status where it has ended, and leave its number to it: no other may get it."""
        if self.status is None:
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            with contextlib.suppress(ChildProcessError):
                told = os.waitid(os.P_PID, self.pid, options)
                if told is not None:
                    code = told.si_status
                    self.status = code if told.si_code == os.CLD_EXITED else -code
        return self.status is not None

    @property
    def last_words(self) -> str:
        """Return the last line that it wrote to its standard error."""
        lines = self._said.decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""

    def doing(self) -> str:
        """Return what it does now, as far as that can be seen: a command, a line, a kernel state.

        Blocking for 0.3 s at most. A Python program tells its line if it has given SIGUSR1 to
        faulthandler; with any other this must not be called.
        """
        command = _command_below(self.pid)
        if command:
            return f"running {command}"
        before = len(self._said)
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGUSR1)
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            self.lines(0.05)
            frame = _FRAME.search(self._said[before:].decode(errors="replace"))
            if frame is not None:
                place = Path(frame["file"])
                return f"at {place.parent.name}/{place.name}:{frame['line']} in {frame['name']}"
        return _state(self.pid)

    def kill(self) -> None:
        """End it and what it started, and reap it. Blocking for a second at most."""
        if self._reaped:
            return
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        end = time.monotonic() + _REAP
        while not self._ended() and time.monotonic() < end:
            time.sleep(0.01)
        if self.status is not None:
            self._reaped = True
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, os.WNOHANG)
        for number in list(self._open):
            self._close(number)

    def _send(self) -> None:
        if self._in not in self._open:
            return
        try:
            self._given = self._given[os.write(self._in, self._given) :] if self._given else b""
        except BlockingIOError:
            return
        except OSError:  # it has closed its input: it wants no more
            self._given = b""
        if not self._given:
            self._close(self._in)

    def _read(self, number: int) -> bytes:
        try:
            data = os.read(number, 1 << 16)
        except BlockingIOError:
            return b""
        if not data:
            self._close(number)
        return data

    def _close(self, number: int) -> None:
        self._open.discard(number)
        os.close(number)


def _pipes() -> tuple[list[int], list[int]]:
    """Return this side's and the child's ends of pipes for its input, output and errors.

    Raises:
        OSError: there may be no more open files.
    """
    ours: list[int] = []
    theirs: list[int] = []
    for number in range(3):
        try:
            read, write = os.pipe2(os.O_CLOEXEC)
        except OSError:
            for made in (*ours, *theirs):
                os.close(made)
            raise
        ours.append(write if number == 0 else read)
        theirs.append(read if number == 0 else write)
    return ours, theirs


def _open_most() -> int:
    """Return the number that open files must be below by now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def _inherited() -> list[int]:
    """Return the open files, but the first three, that a new program would be given."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        number = int(entry.name)
        with contextlib.suppress(OSError):
            if number > 2 and os.get_inheritable(number):
                found.append(number)
    return found


def _command_below(pid: int) -> str:
    """Return the command line of the youngest process that ``pid`` has started, or nothing."""
    newest, text = 0, ""
    todo = [pid]
    while todo:
        with contextlib.suppress(OSError, ValueError):
            for task in Path(f"/proc/{todo.pop()}/task").iterdir():
                for child in map(int, (task / "children").read_text().split()):
                    todo.append(child)
                    words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
                    if child > newest and words[0]:
                        newest = child
                        text = b" ".join(words).decode(errors="replace").strip()[:120]
    return text


def _state(pid: int) -> str:
    """Return where in the kernel a process is."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        place = ""
        with contextlib.suppress(OSError):
            place = Path(f"/proc/{pid}/wchan").read_text().strip("0\n ")
    except OSError:
        return "nothing that can be seen"
    return f"in the kernel{f', {place}' if place else ''} (state {letter})"
