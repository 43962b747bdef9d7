"""A process beside the ranks of a host that still speaks when all of them were killed.

A launcher answers the death of one rank by killing the others: MPICH's at once, by SIGKILL, and
its own message may name a rank that it killed itself. What the dead rank was doing none of them
can know. So the first rank of a host starts this file as a small program outside of the
launcher's reach; every rank tells it a few times a second what it is doing, and the witness
prints the last word of the first one that is gone. When a rank's wait passes its deadline the
witness adds who is doing something else, or nothing at all.

Run as a program it must import the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

__all__ = ["Witness"]

_DOING, _STUCK, _LEAVE, _QUIET = b"D", b"S", b"L", b"Q"
# Several times what passes between two words of a rank that is well on a busy machine.
_SILENT_SECONDS = 1.5


class Witness:
    """A rank's line to the witness of its host. No method blocks or raises.

    Ranks with the same parent process (the launcher's daemon) share one.
    """

    def __init__(self, first: bool) -> None:
        """Connect, or with ``first`` (one rank per host) start the witness."""
        self._socket: socket.socket | None = None
        self._left = False
        self._attempts = 40
        parent = os.getppid()
        with contextlib.suppress(OSError):  # another job's parent may have had this number
            born = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
            self._name = f"\0rdmakit-witness-{os.getuid()}-{parent}-{born}"
            if first:
                self._start()
            self._connect()

    def tell(self, name: str, text: str) -> None:
        """Say what this rank is doing: the name of the phase, and the sentence to print."""
        if self._left:  # the watchdog ticks on while MPI finalizes
            return
        if self._socket is None and self._attempts > 0:
            self._attempts -= 1  # the first rank may be late
            self._connect()
        self._send(_DOING + f"{name}\0{text}".encode())

    def stuck(self) -> None:
        """Say that this rank's wait has passed its deadline, and have the culprits printed."""
        self._send(_STUCK)
        if self._socket is not None:
            time.sleep(0.1)  # the launcher stops listening once the job is being ended

    def leave(self) -> None:
        """Say that this rank ends as it should."""
        self._attempts = 0
        self._left = True
        self._send(_LEAVE)

    def quiet(self) -> None:
        """Say that the job is being ended and the reason was printed."""
        self._attempts = 0
        self._send(_QUIET)

    def close(self) -> None:
        """Drop the line without a word, as a forked child must: it is not the rank."""
        self._attempts = 0
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _start(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(self._name)
            listener.listen(1024)
            # Popen and not posix_spawn: it closes all other files, among them the launcher's
            # connection to this rank, by whose end the launcher sees that the rank died.
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__],
                stdin=listener.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
            process.returncode = 0  # it outlives this rank on purpose: no ResourceWarning

    def _connect(self) -> None:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            line.connect(self._name)
            self._socket = line
        except OSError:
            line.close()

    def _send(self, message: bytes) -> None:
        if self._socket is not None:
            with contextlib.suppress(BlockingIOError):
                try:
                    self._socket.send(message[:4096], socket.MSG_NOSIGNAL)
                except (ConnectionError, OSError) as error:
                    if isinstance(error, BlockingIOError):
                        raise
                    self.close()


_DYING_MS = 60
"""Milliseconds; less than :meth:`Witness.stuck` lets pass."""


class _Line:
    """One rank, as the witness sees it."""

    def __init__(self, line: socket.socket, pid: int) -> None:
        self.socket = line
        self.pid = pid
        self.name = ""
        self.text = ""
        self.heard = time.monotonic()

    def messages(self) -> Iterator[bytes]:
        """Yield what has arrived, keeping the last word."""
        with contextlib.suppress(OSError):  # nothing more to read
            while message := self.socket.recv(4096):
                self.heard = time.monotonic()
                if message[:1] == _DOING:
                    self.name, _, self.text = message[1:].decode(errors="replace").partition("\0")
                elif message[:1] == _LEAVE:
                    self.text = ""
                yield message[:1]

    def silence(self) -> str:
        silent = time.monotonic() - self.heard
        return f"no sign of life for {silent:.1f} s" if silent > _SILENT_SECONDS else ""


def _serve(listener: socket.socket) -> None:
    """Listen until every rank is gone; print the last word of the first that ends unannounced."""
    poll = select.epoll()
    poll.register(listener, select.EPOLLIN)
    lines: dict[int, _Line] = {}
    ends: dict[int, _Line] = {}
    quiet = False

    def read(line: _Line) -> None:
        nonlocal quiet
        for message in line.messages():
            if message == _STUCK and not quiet:
                _print_culprits(line, lines.values())
            quiet = quiet or message in (_STUCK, _QUIET)

    while True:
        # epoll hands out events in their order, however late we look; one at a time, as a later
        # one may be the effect of this one.
        for number, _ in poll.poll(maxevents=1):
            if number == listener.fileno():
                peer, _ = listener.accept()
                pid, user = _process(peer)
                if user == os.getuid():
                    peer.setblocking(False)
                    # The end has an entry of its own: unread words must not lend it their place.
                    end = peer.dup().detach()
                    lines[peer.fileno()] = ends[end] = _Line(peer, pid)
                    poll.register(peer, select.EPOLLIN)
                    poll.register(end, 0)
            elif number in lines:
                read(lines[number])
            else:
                line = ends.pop(number)
                read(line)
                if line.text and not quiet:
                    quiet = True
                    _print(line, *filter(None, [line.silence()]), "killed, or ended by force")
                del lines[line.socket.fileno()]
                for descriptor in (number, line.socket.detach()):
                    poll.unregister(descriptor)
                    os.close(descriptor)
                if not lines:
                    return


def _print_culprits(stuck: _Line, lines: Iterable[_Line]) -> None:
    """Print who has ended; else who is not where ``stuck`` waits, or says nothing any more."""
    others = [line for line in lines if line is not stuck and line.text]
    gone = _ended(others)
    for line in gone:
        _print(line, *filter(None, [line.silence()]), "killed, or ended by force")
    for line in () if gone else others:
        if line.silence() or line.name != stuck.name:
            _print(line, *filter(None, [line.silence()]))


def _ended(lines: Sequence[_Line]) -> list[_Line]:
    """Return those whose rank has ended without leaving; gives the kernel a moment.

    It closes a dead process's files one by one, so a peer may learn of it by its connection before
    its line to here is closed: much earlier where a GPU's driver has a context to take down. Of
    such a process the kernel says that it is exiting.
    """
    poll = select.poll()
    by_number = {line.socket.fileno(): line for line in lines}
    for number in by_number:
        poll.register(number, 0)  # a hang-up is told unasked
    found = [by_number[number] for number, _ in poll.poll(_DYING_MS)]
    found += [line for line in lines if line not in found and _exiting(line.pid)]
    for line in found:
        for _ in line.messages():  # its last word may be that it leaves
            pass
    return [line for line in found if line.text]


def _print(line: _Line, *what: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"rdmakit: {': '.join((line.text, *what))}\n".encode())


def _process(line: socket.socket) -> tuple[int, int]:
    """Return number and user of the process at the other end."""
    size = struct.calcsize("3i")
    credentials = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, user, _ = struct.unpack("3i", credentials)
    return pid, user


_PF_EXITING = 0x4  # include/linux/sched.h; proc_pid_stat(5): flags is the ninth field


def _exiting(pid: int) -> bool:
    """Return whether the kernel is ending process ``pid``; False where it cannot be seen."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return bool(int(fields[6]) & _PF_EXITING)


if __name__ == "__main__":
    _serve(socket.socket(fileno=0))
