"""How a rank that is stuck or ends alone is named, and the job ended with it.

MPI itself leaves the other ranks waiting for ever when one rank stops, raises or exits. One
daemon thread per process covers calls that block inside MPI; it works while the main thread is
inside a C call that has released the GIL, as mpi4py's do.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

from rdmakit.config import Config
from rdmakit.errors import TransportError
from rdmakit.process.launcher import launcher_of
from rdmakit.process.phase import Snapshot, current
from rdmakit.process.witness import Witness

__all__ = [
    "abort_on_exception",
    "end_job",
    "exit_guard",
    "install",
    "register_exit_guard",
    "speak_first",
]

Abort = Callable[[int], None]

TICK_SECONDS = 0.25
ABORT_GRACE_SECONDS = 5.0

_PR_SET_PDEATHSIG = 1
_OTHERS_SPEAK = 1.0
"""Seconds between the first rank that gives up and the end of the job."""
_FORWARDED = 0.25
"""Seconds for the launcher to read what was printed: it drops what comes with the abort."""
_BORN = (os.getpid(), os.getppid())  # as early as possible: see _die_with_launcher
_installed: _Watchdog | None = None


def install(rank: int, size: int, host: str, abort: Abort, config: Config) -> bool:
    """Start the watchdog of this process. Local, idempotent.

    From here on (1) a SIGTERM prints what the rank was doing before it ends the process with
    that signal, if SIGTERM had its default action and this is the main thread; (2) a phase past
    its deadline prints itself and the stacks of all threads, then ends the job; (3) the
    process is killed when the launcher that started it is; (4) a witness process beside the
    ranks of a host names the first that is killed, and what it was doing.

    Args:
        rank: This rank in the job.
        size: Ranks in the job.
        host: Name of this host, for the messages.
        abort: Ends every rank; called from the watchdog's thread, need not return.
        config: Nothing is installed where ``handlers`` is off.

    Returns:
        Whether this call installed it.
    """
    global _installed
    if not config.handlers or _installed is not None:
        return False
    launcher = launcher_of(os.environ)
    witness = Witness(first=launcher.local_rank == 0) if launcher.kind is not None else None
    _installed = _Watchdog(rank, size, host, abort, witness)
    if launcher.kind is not None:
        _die_with_launcher(rank, host)
    if witness is not None:
        atexit.register(_leave, os.getpid())
    return True


def speak_first(error: BaseException | None) -> None:
    """Before the job is ended for a failed transfer, let it be known who is at fault.

    The witness names ranks of this host that are silent or elsewhere; the others, whose waits
    pass their deadline at about the same time, get a moment to say whom they wait for. Without,
    the first to give up ends the job, and it may wait for a rank that is itself kept waiting.
    """
    if not isinstance(error, TransportError):
        return
    if _installed is not None and _installed.witness is not None:
        _installed.witness.stuck()
    time.sleep(_OTHERS_SPEAK)


def end_job(abort: Abort, code: int, grace: float = ABORT_GRACE_SECONDS) -> NoReturn:
    """End every rank by ``abort(code)``, and this process in any case.

    Where abort blocks (another thread may hold MPI's lock), a C thread ends this process with
    status 1 after ``grace`` seconds, and the launcher then ends the others.
    """
    if _installed is not None and _installed.witness is not None:
        _installed.witness.quiet()
    with open(os.devnull, "w") as quiet:  # noqa: PTH123
        faulthandler.dump_traceback_later(grace, exit=True, file=quiet)
        time.sleep(_FORWARDED)
        try:
            abort(code)
        finally:
            os._exit(code)


def abort_on_exception(rank: int, host: str, abort: Abort) -> None:
    """End the job when an exception leaves the main program of this rank.

    Chains ``sys.excepthook``: the traceback is printed as before, after a line that names the
    rank. Exceptions of threads are left to ``threading.excepthook``.
    """
    before = sys.excepthook
    owner = os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != owner:  # a forked child is no rank
            before(kind, error, trace)
            return
        where = current.describe(rank, host) if current.now[0] else f"rank {rank} (host {host})"
        _tell(f"{where}: {kind.__name__} ends the job")
        try:
            before(kind, error, trace)
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            speak_first(error)
        finally:
            end_job(abort, 1)

    sys.excepthook = hook


def exit_guard(
    rank: int,
    host: str,
    is_open: Callable[[], bool],
    start_barrier: Callable[[], Callable[[], bool]],
    abort: Abort,
    timeout: float,
) -> None:
    """Let this rank end only together with the others; else end the job and say so.

    MPI_Finalize would wait for ever for ranks that are still at work, and they for this one.

    Args:
        rank: This rank.
        host: Name of this host.
        is_open: Whether a communicator is still open; equal on all ranks in a right program.
        start_barrier: Starts a barrier that does not block and returns its test.
        abort: Ends every rank.
        timeout: Seconds to wait for the others.
    """
    if not is_open():
        return
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error:
        speak_first(error)
        _tell(f"rank {rank} (host {host}): ended by an exception, ending the job")
        end_job(abort, 1)
    reason = f"they did not end within {timeout:g} s"
    with current.during("exit"):
        try:
            done = start_barrier()
            deadline = time.monotonic() + timeout
            pause = 0.0
            while time.monotonic() < deadline:
                if done():
                    return
                time.sleep(pause)  # 0 yields the core
                pause = min(pause + 1e-5, 0.01)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
    _tell(
        f"rank {rank} (host {host}): left early, while other ranks still use its communicator "
        f"({reason}); ending the job. Close the communicator on every rank before one ends."
    )
    end_job(abort, 1)


def register_exit_guard(
    rank: int,
    host: str,
    is_open: Callable[[], bool],
    start_barrier: Callable[[], Callable[[], bool]],
    abort: Abort,
    timeout: float,
) -> None:
    """Run ``exit_guard`` at interpreter exit; call after mpi4py.MPI is imported.

    mpi4py finalizes MPI after all functions of ``atexit``.
    """
    owner = os.getpid()

    def guard() -> None:
        if os.getpid() == owner:  # a forked child is no rank
            exit_guard(rank, host, is_open, start_barrier, abort, timeout)

    atexit.register(guard)


class _Watchdog:
    """The thread and what it needs; one per process."""

    def __init__(
        self, rank: int, size: int, host: str, abort: Abort, witness: Witness | None
    ) -> None:
        self.rank = rank
        self.size = size
        self.host = host
        self.abort = abort
        self.witness = witness
        self.read_end, self.write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.chained = -1
        self.catches_sigterm = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        )
        if self.catches_sigterm:
            # The byte is written by the C handler, so the thread sees it even when the main
            # thread never gets back to Python. The handler in Python serves where somebody
            # (asyncio) replaces the descriptor later.
            signal.signal(signal.SIGTERM, self._on_sigterm)
            self.chained = signal.set_wakeup_fd(self.write_end, warn_on_full_buffer=False)
        if witness is not None:
            witness.tell(current.now[0], current.describe(rank, host))
        os.register_at_fork(after_in_child=self._forget)
        threading.Thread(target=self._run, name="rdmakit-watchdog", daemon=True).start()

    def _on_sigterm(self, signum: int, frame: object) -> None:
        with contextlib.suppress(BlockingIOError):  # full: the thread has enough to read
            os.write(self.write_end, bytes([signum]))

    def _forget(self) -> None:
        """Undo the signal handling in a forked child: it shares the pipe with its parent."""
        global _installed
        _installed = None
        if self.witness is not None:
            self.witness.close()
        if self.catches_sigterm and signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.set_wakeup_fd(self.chained)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self.read_end, select.POLLIN)
        suspect: Snapshot | None = None
        tick = time.monotonic() + TICK_SECONDS
        while True:
            # Signals may come more often than ticks, as from a profiler's timer.
            if poll.poll(max(tick - time.monotonic(), 0.0) * 1000):
                self._on_signals(os.read(self.read_end, 512))
            if time.monotonic() < tick:
                continue
            tick = time.monotonic() + TICK_SECONDS
            if self.witness is not None:
                self.witness.tell(current.now[0], current.describe(self.rank, self.host))
            now = current.now
            if now[4] is None or time.monotonic() < now[4]:
                suspect = None
            elif now is suspect:
                self._on_deadline()
            else:
                # One more tick: a process continued after a stop may be about to go on.
                suspect = now

    def _on_signals(self, numbers: bytes) -> None:
        if self.chained >= 0:
            try:
                os.write(self.chained, numbers)
            except OSError:
                self.chained = -1
        if signal.SIGTERM in numbers:
            _tell(f"{current.describe(self.rank, self.host)}: ended by SIGTERM")
            if self.witness is not None:
                self.witness.quiet()
            _end_by(signal.SIGTERM)

    def _on_deadline(self) -> None:
        what = current.describe(self.rank, self.host)
        stacks = _stacks()
        _tell(f"{what}: past its deadline, ending the job of {self.size} ranks", stacks)
        if self.witness is not None:
            self.witness.stuck()
        end_job(self.abort, 1)


def _leave(owner: int) -> None:
    if os.getpid() == owner and _installed is not None and _installed.witness is not None:
        _installed.witness.leave()


def _tell(line: str, more: str = "") -> None:
    """Print to stderr in one write: ranks share it, and sys.stderr's lock may be held."""
    data = f"rdmakit: {line}\n{more}".encode(errors="replace")
    try:
        while data:
            data = data[os.write(2, data) :]
    except OSError:
        pass  # nobody reads any more


def _stacks() -> str:
    """Return the stacks of all threads but this one."""
    with os.fdopen(os.memfd_create("stacks"), "w+b") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        blocks = file.read().decode(errors="replace").split("\n\n")
    return "\n".join(x.rstrip() for x in blocks if not x.startswith("Current thread")) + "\n"


def _end_by(number: signal.Signals) -> NoReturn:
    """End this process by the default action of signal ``number``, from any thread."""
    libc = ctypes.CDLL(None)  # signal.signal works in the main thread only
    libc.signal.restype = ctypes.c_void_p
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal(int(number), None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
    time.sleep(1)
    os._exit(128 + number)


def _die_with_launcher(rank: int, host: str) -> None:
    """Have the kernel kill this process when its parent ends, also when it is stuck in C."""
    parent = _BORN[1] if os.getpid() == _BORN[0] else os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        error = os.strerror(ctypes.get_errno())
        _tell(f"rank {rank} (host {host}): cannot follow the end of its launcher: {error}")
    if os.getppid() != parent:  # it ended before the kernel was asked
        _tell(f"rank {rank} (host {host}): its launcher is gone")
        _end_by(signal.SIGKILL)
