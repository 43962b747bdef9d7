"""The process in which the checks of a node run: it may hang or crash, and nobody else does.

``python -m rdmakit.doctor.worker`` reads an :class:`Order` from its standard input and writes a
:class:`Word` as each check begins and ends, one a line. See ``supervise`` for who listens.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from rdmakit.discovery.collect import read_machines
from rdmakit.discovery.machine import find_out
from rdmakit.doctor import profile
from rdmakit.doctor.context import Context, settings
from rdmakit.doctor.messages import Order, Word
from rdmakit.doctor.model import Check, Finding, Status
from rdmakit.doctor.run import run_check
from rdmakit.drivers.host import HostTree, Runner, run

__all__ = ["FACTS", "LOOK", "WORKER", "make_context", "serve"]

WORKER = (sys.executable, "-m", "rdmakit.doctor.worker")
"""Command that starts it."""
LOOK = "look"
"""Said while the machine is looked at, before the first check."""

FACTS = "doctor.facts"
"""Stands among the checks for what the node tells the others of itself."""

_PR_SET_PDEATHSIG = 1


def make_context(order: Order, tree: HostTree | None = None, runner: Runner = run) -> Context:
    """Look at the machine, or read the directory that describes it. Local, blocking.

    Raises:
        InvalidArgument: the directory or the profile cannot be read.
    """
    more: dict[str, object] = {"ranks": tuple(order.ranks), "job_size": order.job_size}
    if order.profile:
        more["profile"] = profile.load_profile(Path(order.profile))
    if order.source:
        (found,) = read_machines(Path(order.source))
        return Context(
            HostTree(found.root or os.devnull),
            found.machine,
            found.texts,
            found.environ,
            live=False,
            outputs=found.outputs,
            **more,  # type: ignore[arg-type]
        )
    tree = tree or HostTree()
    found = find_out(tree, runner)
    return Context(
        tree,
        found.machine,
        found.texts,
        settings(),
        live=True,
        runner=runner,
        **more,  # type: ignore[arg-type]
    )


def serve(
    checks: Sequence[Check],
    facts: Callable[[Context], object] | None = None,
    tree: HostTree | None = None,
    runner: Runner = run,
    parent: int = 0,
) -> None:
    """Read the order, run the checks that it names, and say what comes of each.

    Args:
        checks: all that there are.
        facts: returns what the node tells the others, as msgspec encodes it; runs where the order
            has :data:`FACTS` among its checks.
        tree: files of this machine.
        runner: what starts commands.
        parent: process to end with; 0: none.
    """
    _prepare(parent)
    # What a check or a library prints must not stand between the words.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)

    def say(word: Word) -> None:
        out.write(msgspec.json.encode(word) + b"\n")
        out.flush()

    say(Word(doing=LOOK))
    context = make_context(order, tree, runner)
    say(Word(check=LOOK, machine=context.machine, environ=dict(context.environ)))
    by_id = {check.id: check for check in checks}
    for name in order.checks:
        say(Word(doing=name))
        if name != FACTS:
            say(Word(check=name, findings=run_check(by_id[name], context)))
        elif facts is not None:
            say(_told(facts, context))


def _told(facts: Callable[[Context], object], context: Context) -> Word:
    try:
        return Word(check=FACTS, facts=msgspec.to_builtins(facts(context)))
    except Exception as exc:
        text = f"it cannot be compared with others: {type(exc).__name__}: {exc}"
        finding = Finding(check=FACTS, status=Status.UNKNOWN, found=text)
        return Word(check=FACTS, findings=[finding])


def _prepare(parent: int) -> None:
    """Tell the stacks when asked (SIGUSR1), and end with the parent."""
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    if parent:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            sys.exit(1)


if __name__ == "__main__":
    from rdmakit.doctor.catalog import CHECKS
    from rdmakit.doctor.node_facts import node_facts

    serve(CHECKS, node_facts, parent=int(sys.argv[1]) if len(sys.argv) > 1 else 0)
