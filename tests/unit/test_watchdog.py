"""The watchdog and the witness, in processes of their own; no MPI."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rdmakit.config import Config
from rdmakit.process import launcher, watchdog

HEAD = """
import ctypes, os, signal, sys, threading, time
from rdmakit.config import Config
from rdmakit.process import watchdog
from rdmakit.process.phase import current
def abort(code):
    os.write(1, b"abort %d;" % code)
def stuck():  # inside C, and no signal makes it return
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    os.write(1, b"ready;")
    libc.pthread_mutex_lock(mutex)
def install():
    return watchdog.install(1, 4, "n1", abort, Config())
"""
ROOT = str(Path(__file__).resolve().parents[2])


def start(body: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    clean = {k: v for k, v in os.environ.items() if not launcher.LAUNCHER_VARIABLES.match(k)}
    return subprocess.Popen(
        [sys.executable, "-c", HEAD + body],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean | {"PYTHONPATH": ROOT} | (env or {}),
    )


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
    return process.returncode, out, err


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    got = ""
    while text not in got:
        letter = process.stdout.read(1)
        if not letter:
            pytest.fail(f"no {text!r} in {got!r}: {end(process)}")
        got += letter


def test_sigterm_while_stuck_in_c() -> None:
    process = start("install()\ncurrent.enter('barrier', (2,), 64)\nstuck()\n")
    wait_for(process, "ready;")
    process.terminate()
    rc, _, err = end(process)
    assert rc == -signal.SIGTERM
    assert err.startswith("rdmakit: rank 1 (host n1): in barrier 64, waiting for rank 2 for ")
    assert err.count("\n") == 1


def test_sigterm_where_asyncio_took_the_descriptor() -> None:
    process = start(
        "install()\nsignal.set_wakeup_fd(-1)\nos.write(1, b'ready;')\nwhile True: time.sleep(1)\n"
    )
    wait_for(process, "ready;")
    process.terminate()
    rc, _, err = end(process)
    assert rc == -signal.SIGTERM
    assert "ended by SIGTERM" in err


def test_sigterm_of_the_user_stays() -> None:
    process = start(
        "signal.signal(signal.SIGTERM, lambda *a: sys.exit(5))\ninstall()\n"
        "os.write(1, b'ready;')\nwhile True: time.sleep(1)\n"
    )
    wait_for(process, "ready;")
    process.terminate()
    assert end(process) == (5, "", "")


def test_wakeup_descriptor_is_chained() -> None:
    rc, out, err = end(
        start(
            "import socket\nmine, yours = socket.socketpair()\nyours.setblocking(False)\n"
            "signal.set_wakeup_fd(yours.fileno())\ninstall()\n"
            "signal.signal(signal.SIGUSR1, lambda *a: None)\n"
            "os.kill(os.getpid(), signal.SIGUSR1)\n"
            "assert mine.recv(1) == bytes([signal.SIGUSR1])\n"
        )
    )
    assert (rc, out, err) == (0, "", "")


def test_a_forked_child_is_no_rank() -> None:
    rc, out, err = end(
        start(
            "install()\nwatchdog.abort_on_exception(1, 'n1', abort)\n"
            "watchdog.register_exit_guard(1, 'n1', lambda: os.write(1, b'guard;') < 0, None,"
            " abort, 1)\n"
            "child = os.fork()\n"
            "if child == 0: time.sleep(30)\n"
            "time.sleep(0.2); os.kill(child, signal.SIGTERM)\n"
            "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM\n"
            "child = os.fork()\n"
            "if child == 0: raise ValueError\n"
            "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1\n"
            "time.sleep(0.6); os.write(1, b'parent lives;')\n",
            {"PYTHONWARNINGS": "ignore"},
        )
    )
    assert (rc, out) == (0, "parent lives;guard;")
    assert "rdmakit:" not in err


def test_deadline() -> None:
    began = time.monotonic()
    rc, out, err = end(start("install()\ncurrent.enter('barrier', (0, 2), 0, 0.5)\nstuck()\n"))
    assert time.monotonic() - began < 10
    assert (rc, out) == (1, "ready;abort 1;")
    first, *stacks = err.splitlines()
    assert first.startswith("rdmakit: rank 1 (host n1): in barrier, waiting for ranks 0, 2 for ")
    assert "past its deadline" in first
    assert any("in stuck" in line for line in stacks), err


def test_deadline_and_word_between_signals_that_never_stop() -> None:
    """As of a profiler's timer: each wakes the watchdog, whose own time comes all the same."""
    body = (
        "signal.signal(signal.SIGALRM, lambda *_: None)\ninstall()\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)\n"
        "current.enter('barrier', (0,), 0, 0.5)\nstuck()\n"
    )
    rc, out, err = end(start(body))
    assert (rc, out) == (1, "ready;abort 1;")
    assert "past its deadline" in err


def test_no_deadline_no_end() -> None:
    body = (
        "install()\nbefore = current.enter('a', (), 0, 0.3)\ntime.sleep(0.1)\n"
        "current.restore(before)\ncurrent.enter('b')\ntime.sleep(1)\n"
    )
    assert end(start(body)) == (0, "", "")


@pytest.mark.parametrize("abort", ["stuck()", "raise RuntimeError", "os._exit(1)"])
def test_end_job_ends_also_where_abort_does_not(abort: str) -> None:
    body = f"def bad(code): {abort}\nwatchdog.end_job(bad, 1, grace=0.3)\n"
    assert end(start(body))[0] == 1


def test_exception_ends_the_job() -> None:
    body = (
        "sys.excepthook = lambda *a: os.write(2, b'mine\\n')\n"
        "watchdog.abort_on_exception(1, 'n1', abort)\ncurrent.enter('plan')\n"
        "print('kept', end=';')\nraise ValueError('bad')\n"
    )
    rc, out, err = end(start(body))
    assert (rc, out) == (1, "kept;abort 1;")
    assert err == "rdmakit: rank 1 (host n1): in plan for 0.0 s: ValueError ends the job\nmine\n"


def test_off_and_twice() -> None:
    body = (
        "assert not watchdog.install(1, 4, 'n1', abort, Config(handlers=False))\n"
        "assert threading.active_count() == 1\n"
        "assert install() and not install()\nassert threading.active_count() == 2\n"
    )
    assert end(start(body)) == (0, "", "")


def test_rank_dies_with_its_launcher() -> None:
    inner = HEAD + "install()\nos.write(1, b'%d;' % os.getpid())\nstuck()\n"
    env = {"OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "1"}
    process = start(
        f"import subprocess\nsubprocess.run([sys.executable, '-c', {inner!r}])\n", env=env
    )
    wait_for(process, "ready;")
    process.kill()
    out, _ = process.communicate(timeout=10)  # ends when the rank has closed its stdout
    assert out == ""


WITNESSED = (
    "current.enter('barrier', (2,), 0)\ncurrent.restore(('loop', (), 0, time.monotonic(), None))\n"
    "install()\nos.write(1, b'ready;')\n"
)


def hydra(rank: int) -> dict[str, str]:
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return dict(zip(names, map(str, (rank, 3, rank, 3)), strict=True))


def test_witness_names_the_first_that_was_killed() -> None:
    first = start(WITNESSED + "time.sleep(30)\n", hydra(0))
    wait_for(first, "ready;")
    second = start(
        WITNESSED.replace("install()", "watchdog.install(7, 8, 'n2', abort, Config())")
        + "time.sleep(30)\n",
        hydra(1),
    )
    wait_for(second, "ready;")
    second.kill()
    time.sleep(0.1)
    first.kill()
    second.communicate(timeout=10)
    _, _, err = end(first)  # the witness writes where the rank that started it would
    assert err.startswith("rdmakit: rank 7 (host n2): in loop for "), err
    assert err.endswith("killed, or ended by force\n")
    assert err.count("\n") == 1


def test_witness_names_who_is_elsewhere_at_a_deadline() -> None:
    first = start(WITNESSED + "time.sleep(30)\n", hydra(0))
    wait_for(first, "ready;")
    waiting = "install()\ncurrent.enter('barrier', (0,), 0, 0.5)\ntime.sleep(30)\n"
    rc, out, err = end(start(waiting, hydra(1)))
    assert (rc, out) == (1, "abort 1;")
    assert "rank 1 (host n1): in barrier" in err
    first.kill()
    _, _, err = end(first)
    assert err.startswith("rdmakit: rank 1 (host n1): in loop for "), err
    assert err.count("\n") == 1


def test_witness_names_a_dying_rank_whose_line_is_still_open() -> None:
    """As that of a rank with a GPU: its connections end long before the last of its files."""
    first = start(WITNESSED + "time.sleep(30)\n", hydra(0))
    wait_for(first, "ready;")
    lend = (
        "import subprocess\nquiet = subprocess.DEVNULL\n"
        "line = watchdog._installed.witness._socket.fileno()\n"
        "subprocess.Popen(['sleep', '4'], pass_fds=[line], stdout=quiet, stderr=quiet)\n"
    )
    install, ready = WITNESSED.split("os.write", 1)
    dying = start(f"{install}{lend}os.write{ready}time.sleep(30)\n", hydra(1))
    wait_for(dying, "ready;")
    dying.kill()
    while Path(f"/proc/{dying.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    waiting = "install()\ncurrent.enter('barrier', (0,), 0, 0.3)\ntime.sleep(30)\n"
    rc, out, _ = end(start(waiting, hydra(2)))
    assert (rc, out) == (1, "abort 1;")
    end(dying)
    first.kill()
    _, _, err = end(first)
    assert err.startswith("rdmakit: rank 1 (host n1): in loop for "), err
    assert err.endswith("killed, or ended by force\n"), err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("ending", "rc"), [("", 0), ("sys.exit(3)", 3), ("watchdog.end_job(os._exit, 4)", 4)]
)
def test_witness_is_silent_at_an_orderly_end(ending: str, rc: int) -> None:
    assert end(start(WITNESSED + ending, hydra(0))) == (rc, "ready;", "")


class Ended(Exception):
    pass


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def ended(abort: Callable[[int], None], code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(watchdog, "end_job", ended)
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    monkeypatch.setattr(sys, "last_exc", None, raising=False)

    def run(start_barrier: Callable[[], Callable[[], bool]], is_open: bool = True) -> None:
        watchdog.exit_guard(2, "n1", lambda: is_open, start_barrier, lambda code: None, 0.2)

    return run


def test_exit_guard_closed(guard: Callable[..., None]) -> None:
    guard(lambda: pytest.fail("no barrier"), is_open=False)


def test_exit_guard_all_arrive(guard: Callable[..., None]) -> None:
    answers = iter([False, False, True])
    guard(lambda: lambda: next(answers))


def test_exit_guard_alone(guard: Callable[..., None], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Ended):
        guard(lambda: lambda: False)
    assert "rank 2 (host n1): left early" in capfd.readouterr().err


def test_exit_guard_barrier_fails(
    guard: Callable[..., None], capfd: pytest.CaptureFixture[str]
) -> None:
    def broken() -> Callable[[], bool]:
        raise OSError("peer is gone")

    with pytest.raises(Ended):
        guard(broken)
    assert "OSError: peer is gone" in capfd.readouterr().err


def test_exit_guard_after_an_exception(
    guard: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    with pytest.raises(Ended):
        guard(lambda: pytest.fail("no barrier"))


def test_install_needs_handlers() -> None:
    assert not watchdog.install(0, 1, "h", lambda code: None, Config(handlers=False))
