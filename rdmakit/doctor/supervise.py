"""Runs the checks of a node in a child process, and ends what does not answer.

A driver call or a command on a sick machine may never return, and a crash inside a library would
take the whole program along: so a check that hangs is killed, one that crashes is told of, and a
new child goes on with those that are left.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from rdmakit.doctor.messages import NodeReport, Order, Word
from rdmakit.doctor.model import Finding, Status
from rdmakit.doctor.worker import LOOK, WORKER
from rdmakit.drivers.child import Child

__all__ = ["NODE_CHECK", "NODE_CURE", "Limits", "supervise"]

NODE_CHECK = "doctor.node"
"""Identifier of findings about a node that could not be checked."""
NODE_CURE = (
    "look at that node before you start jobs on it: can it be reached (ssh), what do its "
    "processes wait for (ps -eo pid,stat,wchan:32,args), what does dmesg say"
)
"""What to do about a node that does not answer."""
_FEW_FILES = 256
"""Open files below which Python with its libraries may not start."""
_FILES = "ulimit -n 65536 where the job starts (LimitNOFILE of the launcher's daemon)"
_TICK = 0.1
_END_SECONDS = 5.0
"""Seconds that a child may take to end after its last word."""


@dataclass(frozen=True)
class Limits:
    """Seconds; each wait has one."""

    look: float = 90.0
    """For looking at the machine: drivers without persistence mode start every GPU first."""
    node: float = 300.0
    """For all checks of a node."""
    silence: float = 20.0
    """Without a sign of life, after which a node or rank is given up."""
    init: float = 60.0
    """For MPI_Init."""
    own: float = 20.0
    """For what a node finds wrong of itself where MPI_Init does not end."""


def supervise(
    order: Order,
    seconds: Mapping[str, float],
    report: NodeReport,
    *,
    limits: Limits = Limits(),
    command: Sequence[str] = WORKER,
    heard: Callable[[Word], None] = lambda word: None,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Run the checks of ``order`` in children and fill ``report``. Local, blocking.

    Returns when all have answered or were ended, at the latest after ``limits.node`` seconds and
    what ending a child takes.

    Args:
        order: which checks, on what.
        seconds: how long each check may take, by its identifier.
        report: filled as words come.
        limits: deadlines.
        command: starts a worker; the number of this process is added.
        heard: called with each word, also with those made here for a check that was ended.
        meanwhile: called ten times a second.
    """
    _Supervisor(order, seconds, report, limits, command, heard, meanwhile).run()


class _Supervisor:
    def __init__(
        self,
        order: Order,
        seconds: Mapping[str, float],
        report: NodeReport,
        limits: Limits,
        command: Sequence[str],
        heard: Callable[[Word], None],
        meanwhile: Callable[[], None],
    ) -> None:
        self.order, self.seconds, self.report = order, seconds, report
        self.limits, self.command = limits, [*command, str(os.getpid())]
        self.heard, self.meanwhile = heard, meanwhile
        self.left = list(order.checks)
        self.end = time.monotonic() + limits.node

    def run(self) -> None:
        looked = True
        while self.left and looked and time.monotonic() < self.end:
            looked = self._child()
        for name in list(self.left):
            why = (
                f"not run: the checks of this node together took longer than {self.limits.node:g} s"
                if looked
                else "not run: the machine could not be looked at"
            )
            self._end_check(name, why)
        self.report.complete = True

    def _child(self) -> bool:
        """Run what is left in one child, and return whether it came to the first check."""
        order = msgspec.structs.replace(self.order, checks=self.left)
        try:
            child = Child(self.command, msgspec.json.encode(order))
        except OSError as exc:
            self._no_look(f"{self.command[0]} cannot be started: {exc.strerror or exc}")
            return False
        doing, since, looked = LOOK, time.monotonic(), False
        try:
            while not child.finished:
                for line in child.lines(_TICK):
                    word = msgspec.json.decode(line, type=Word)
                    looked = looked or word.check == LOOK
                    if word.check or word.doing:
                        doing, since = word.doing, time.monotonic()
                    self._hear(word)
                self.meanwhile()
                if time.monotonic() > min(since + self._seconds(doing), self.end):
                    self._hung(child, doing, looked)
                    return looked
        finally:
            child.kill()
        if self.left:
            self._died(child, doing, looked)
        return looked

    def _seconds(self, doing: str) -> float:
        if doing == LOOK:
            return self.limits.look
        return self.seconds[doing] if doing else _END_SECONDS

    def _hear(self, word: Word) -> None:
        if word.check in self.left:
            self.left.remove(word.check)
        self.report.hear(word)
        self.report.complete = not self.left
        self.heard(word)

    def _hung(self, child: Child, doing: str, looked: bool) -> None:
        limit = self._seconds(doing)
        if time.monotonic() > self.end:
            limit = self.limits.node
        seen = child.doing()
        child.kill()
        end = "was ended" if child.status is not None else "cannot be ended, even by SIGKILL"
        text = f"gave no answer within {limit:g} s, {end}; last seen {seen}"
        if not looked:
            self._no_look(f"looking at the machine {text}")
        elif doing:
            self._end_check(doing, text)

    def _died(self, child: Child, doing: str, looked: bool) -> None:
        status = child.status or 0
        how = f"exit status {status}"
        if status < 0:
            try:
                how = signal.Signals(-status).name
            except ValueError:
                how = f"signal {-status}"
        last = f": {child.last_words}" if child.last_words else ""
        if not looked:
            self._no_look(f"the process that looks at the machine ended by {how}{last}")
        else:
            # It says when a check begins, so what it ended in is known; else the next one.
            self._end_check(doing or self.left[0], f"its process ended by {how} in it{last}")

    def _end_check(self, name: str, text: str) -> None:
        finding = Finding(check=name, status=Status.UNKNOWN, found=text)
        self._hear(Word(check=name, findings=[finding]))

    def _no_look(self, text: str) -> None:
        """Tell that nothing could be checked: no job runs well where not even that works."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        few = _FILES if 0 <= soft < _FEW_FILES else ""
        finding = Finding(
            check=NODE_CHECK,
            status=Status.FAIL,
            found=f"nothing could be checked here: {text}" + (few and f"; ulimit -n is {soft}"),
            why="Checks need to know the machine's devices first.",
            expected=f"{_FEW_FILES} open files or more" if few else "",
            cure=few or NODE_CURE,
            urgency=1,
        )
        self._hear(Word(check=NODE_CHECK, findings=[finding]))
