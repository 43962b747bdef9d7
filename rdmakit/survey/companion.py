"""A process beside a rank, out of the launcher's reach, that speaks when the rank no longer can.

A rank can hang in MPI_Init for ever (an interface that leads nowhere), and a launcher answers the
death of one rank by killing all others: then what the nodes had found would be lost. So the
first rank of each host starts this program before MPI, and rank 0 tells it all that it hears.
It tells of MPI_Init that does not end, or that ends the rank, and prints what was reported so far
where rank 0 ends without a word.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator

import msgspec

from rdmakit.doctor.messages import NodeReport, Order
from rdmakit.doctor.model import Finding, Status
from rdmakit.doctor.nodes import INTERFACES, Said
from rdmakit.doctor.rank_view import process_place
from rdmakit.doctor.supervise import NODE_CHECK, Limits, supervise
from rdmakit.survey.doctor_options import DoctorOptions, show

__all__ = ["Begin", "Companion", "limited_init", "main"]

_PING = 1.0


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag="begin"):
    """The first word."""

    options: DoctorOptions
    limits: Limits
    checks: list[str]
    """Identifiers of those that run."""
    seconds: dict[str, float]
    command: list[str]
    """Starts a worker."""
    whys: dict[str, str]
    rank: int
    size: int
    watched: bool
    """Whether a person watches: when it prints, its ancestors are gone."""


class Initialized(msgspec.Struct, frozen=True, tag="initialized"):
    """MPI_Init has ended."""


class Nodes(msgspec.Struct, frozen=True, tag="nodes"):
    """The nodes, before their checks."""

    nodes: list[NodeReport]


class NodeSaid(msgspec.Struct, frozen=True, tag="node"):
    """What one of them says."""

    node: int
    said: Said


class Job(msgspec.Struct, frozen=True, tag="job"):
    """What is about the job as a whole. From here on rank 0 may be silent."""

    findings: list[Finding]


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Rank 0 is there."""


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The rank speaks for itself."""


_Message = Begin | Initialized | Nodes | NodeSaid | Job | Ping | Done


@contextlib.contextmanager
def limited_init(limits: Limits) -> Iterator[None]:
    """Hold while MPI_Init runs: this process ends with status 1 where that does not return.

    By a thread in C, as the interpreter's lock is held meanwhile; some seconds after the limit,
    when the companion has spoken.
    """
    with open(os.devnull, "w") as quiet:  # noqa: PTH123
        faulthandler.dump_traceback_later(limits.init + limits.own + 2.0, exit=True, file=quiet)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


class Companion:
    """A rank's line to its companion. Only the maker waits, for a second at most, in ``done``."""

    COMMAND = (sys.executable, "-m", "rdmakit.survey.companion")

    def __init__(self, begin: Begin) -> None:
        """Start it. Before MPI is loaded: the process is forked."""
        read, self._write = os.pipe2(os.O_CLOEXEC)
        self._process = subprocess.Popen(self.COMMAND, stdin=read, start_new_session=True)
        os.close(read)
        os.set_blocking(self._write, False)
        self._pending = b""
        self._pinged = 0.0
        self.tell(begin)

    def ping(self) -> None:
        """Give a sign of life, not too often."""
        if time.monotonic() - self._pinged > _PING:
            self._pinged = time.monotonic()
            self.tell(Ping())

    def tell(self, message: _Message) -> None:
        """Say something; does not wait."""
        self._pending += msgspec.json.encode(message) + b"\n"
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self._pending:
                self._pending = self._pending[os.write(self._write, self._pending) :]

    def done(self) -> None:
        """Say that it is not needed any more, and see it end."""
        self.tell(Done())
        os.close(self._write)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self._process.returncode = 0  # where it is late, the end of this process is its end too


class _Listener:
    """The other side."""

    def __init__(self) -> None:
        self.begin: Begin | None = None
        self.nodes: list[NodeReport] = []
        self.job: list[Finding] = []
        self.deadline = float("inf")
        self.initialized = False
        self.watched: dict[int, int] = {}
        """Ranks of this host by the descriptor that tells of their end."""
        self.first_dead: int | None = None
        self.half = b""
        # The end has an entry of its own: unread words must not lend it their place in the order.
        self.end = os.dup(0)
        os.set_blocking(0, False)
        self.poll = select.epoll()
        self.poll.register(0, select.EPOLLIN)
        self.poll.register(self.end, 0)

    def run(self) -> None:
        """Listen until the rank has spoken, or cannot."""
        while True:
            wait = self.deadline - time.monotonic()
            # One at a time: their order tells who was first.
            events = self.poll.poll(None if wait == float("inf") else max(0.0, wait), 1)
            if not events:
                self._late()
                return
            number = events[0][0]
            if number in self.watched:
                self._dead(number)
            elif self._read():
                return
            elif number == self.end:
                self._ended()
                return

    def _read(self) -> bool:
        """Take over what has come and return whether the last word is among it."""
        data = b""
        with contextlib.suppress(BlockingIOError):
            while part := os.read(0, 1 << 16):
                data += part
        *lines, self.half = (self.half + data).split(b"\n")
        return any([self._hear(msgspec.json.decode(line, type=_Message)) for line in lines])

    def _hear(self, message: _Message) -> bool:
        """Take over a message and return whether it is the last."""
        if isinstance(message, Begin):
            self.begin = message
            self.deadline = time.monotonic() + message.limits.init
        elif isinstance(message, Initialized):
            self.initialized = True
        elif isinstance(message, Nodes):
            self.nodes = message.nodes
            self._watch()
        elif isinstance(message, NodeSaid):
            node = self.nodes[message.node]
            node.hear(message.said.word)
            node.complete = node.complete or message.said.complete
        elif isinstance(message, Job):
            self.job = message.findings
        assert self.begin is not None
        if isinstance(message, Job):
            self.deadline = float("inf")  # the watchdog looks after what ranks do together
        elif self.initialized and self.deadline != float("inf"):
            self.deadline = time.monotonic() + self.begin.limits.silence
        return isinstance(message, Done) or (self.initialized and self.begin.rank != 0)

    def _watch(self) -> None:
        """Have the kernel tell which rank ends first, where all of them are on this host.

        Of ranks on several hosts the first that ends here may have been ended by the launcher.
        """
        place = process_place()
        views = [view for node in self.nodes for view in node.views]
        if not place or any(view.facts.get("processes") != place for view in views):
            return
        for view in views:
            with contextlib.suppress(OSError):
                if view.rank == 0:
                    continue  # the end of its words tells
                number = os.pidfd_open(view.pid)
                self.poll.register(number, select.EPOLLIN)
                self.watched[number] = view.rank

    def _dead(self, number: int) -> None:
        rank = self.watched.pop(number)
        self.poll.unregister(number)
        os.close(number)
        if self.first_dead is None:
            self.first_dead = rank

    def _ended(self) -> None:
        """Rank 0 ended without a word."""
        if self.first_dead is None and self.watched:
            self.first_dead = 0
        if not self.initialized and self.begin is not None:
            self._no_init(
                "ended in MPI_Init, without a word to rdmakit; what MPI says of it stands beside "
                "this, and what is wrong on this host follows"
            )
        elif self.nodes:
            self._partial("ended with the job before it reported", "died before it reported")

    def _late(self) -> None:
        assert self.begin is not None
        if not self.initialized:
            self._no_init(
                f"MPI_Init has not ended within {self.begin.limits.init:g} s: the ranks do not "
                "reach each other, or the launcher's daemon does not answer. Interfaces here: "
                f"{', '.join(_interfaces()) or 'none'}. Cure: {INTERFACES}; a firewall between the "
                "nodes must let all TCP ports pass."
            )
        elif self.nodes:
            silence = self.begin.limits.silence
            self.nodes[0].complete = False
            self.first_dead = 0
            self._partial(
                "no whole report: rank 0, which collects, does not answer",
                f"no report within {silence:g} s: rank 0 gives no sign of life",
            )

    def _partial(self, other: str, culprit: str) -> None:
        """Print what there is; the nodes without a whole report are told of."""
        assert self.begin is not None
        for node in self.nodes:
            guilty = self.first_dead in node.ranks
            if node.complete and not guilty:
                continue
            told = node.complete
            node.complete = False
            doing = f"; last heard in {node.doing}" if node.doing else ""
            text = f"node {node.host}: {culprit if guilty else other}{doing}"
            text = text.replace("died before it", "died after it") if told else text
            subject = f"rank {self.first_dead if guilty else node.ranks[0]}"
            node.findings.append(
                Finding(
                    check=NODE_CHECK,
                    status=Status.FAIL if guilty or self.first_dead is None else Status.UNKNOWN,
                    found=text,
                    subject=subject,
                    why="A launcher ends all ranks when one dies.",
                    cure="look there first: dmesg (memory ran out? a device fell off?), the "
                    "scheduler's log, ulimit -a",
                    urgency=1,
                )
            )
        begin = self.begin
        about = f"{begin.size} ranks on {len(self.nodes)} node(s), as far as they reported"
        show(begin.options, self.nodes, self.job, begin.whys, about, begin.watched)

    def _no_init(self, text: str) -> None:
        """Tell that MPI does not come up, and what is wrong on this host."""
        begin = self.begin
        assert begin is not None
        host = socket.gethostname()
        _write(f"rdmakit: rank {begin.rank} (host {host}): {text}\n")
        report = NodeReport(host=host)
        limits = Limits(look=begin.limits.own, node=begin.limits.own)
        order = Order(checks=begin.checks, profile=begin.options.profile)
        supervise(order, begin.seconds, report, limits=limits, command=begin.command)
        for finding in report.findings:
            if finding.status in (Status.FAIL, Status.WARN):
                line = f"rdmakit: {host}: {finding.status.value}: {finding.check}: {finding.found}"
                _write(f"{line}; cure: {finding.cure}\n")


def _write(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace"))


def _interfaces() -> list[str]:
    """Return the network interfaces that have an IPv4 address: ``eth0 10.0.0.1``."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(asked, 0x8915, struct.pack("256s", name.encode()))
                found.append(f"{name} {socket.inet_ntoa(answer[20:24])}")
    return found


def main() -> None:
    """Be the companion of the process that writes to the standard input."""
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the job; its end is seen
        signal.signal(number, signal.SIG_IGN)
    _Listener().run()


if __name__ == "__main__":
    main()
