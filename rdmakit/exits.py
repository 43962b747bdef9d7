"""What happens to communicators when the process ends or is forked.

At exit, in this order: ranks of communicators that were not closed together wait for each other
(MPI_Finalize would too); the progress thread ends; what is left open is released; then mpi4py's
own handler calls MPI_Finalize.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable
from typing import Protocol

from rdmakit.bootstrap import FORKED, MpiBootstrap, load_mpi
from rdmakit.engine import Engine, process_engine
from rdmakit.process.watchdog import register_exit_guard

__all__ = ["closed", "opened"]


class Open(Protocol):
    """A communicator, as far as its end goes."""

    def release(self) -> None:
        """Let go of everything. Local."""
        ...

    def forbid(self, reason: str) -> None:
        """Make it unusable. Local."""
        ...


_open: weakref.WeakSet[Open] = weakref.WeakSet()
_unfinished: dict[int, MpiBootstrap] = {}
"""Control planes of communicators that were not closed together, by their own identity (a
communicator's may come again): left open, or closed after an error. Their ranks wait for each
other at exit, since MPI_Finalize would too."""
_handled = False


def opened(comm: Open, bootstrap: MpiBootstrap, timeout: float) -> None:
    """Take care of ``comm`` at exit. Local."""
    global _handled
    _open.add(comm)
    _unfinished[id(bootstrap)] = bootstrap
    if not _handled:
        _handled = True
        _handle(bootstrap, timeout)


def closed(comm: Open, bootstrap: object, *, together: bool) -> None:
    """Note that ``comm`` is released; ``together``: on all of its ranks. Local."""
    _open.discard(comm)
    if together:
        _unfinished.pop(id(bootstrap), None)


def _handle(bootstrap: MpiBootstrap, timeout: float) -> None:
    owner, engine = os.getpid(), process_engine()

    def release() -> None:
        if os.getpid() == owner:
            engine.stop()
            for left in list(_open):
                left.release()

    def forbid() -> None:
        for left in list(_open):
            left.forbid(FORKED)

    os.register_at_fork(after_in_child=forbid)
    # Run in reverse order: the guard first, then the release, then mpi4py's MPI_Finalize.
    atexit.register(release)
    register_exit_guard(
        bootstrap.rank,
        bootstrap.host,
        lambda: bool(_unfinished),
        lambda: _start_barrier(engine),
        load_mpi().COMM_WORLD.Abort,  # a communicator's own may be freed by then
        timeout,
    )


def _start_barrier(engine: Engine) -> Callable[[], bool]:
    with engine.held():
        tests = [left.start_barrier() for left in _unfinished.values()]

    def test() -> bool:
        with engine.held():
            engine.step()
            return all([done() for done in tests])

    return test
