"""Whether this process was forked since ``import rdmakit``, and with MPI in it.

Imported with the package, so that a fork is seen whatever was loaded by then.
"""

from __future__ import annotations

import os
import sys

__all__ = ["forked", "forked_with_mpi"]

_forked = _with_mpi = False


def forked() -> bool:
    """Return whether this process is the fork of one that had imported rdmakit. Local."""
    return _forked


def forked_with_mpi() -> bool:
    """Return whether that one had loaded MPI, which is of no use here. Local."""
    return _with_mpi


def _after_fork() -> None:
    global _forked, _with_mpi
    _forked = True
    _with_mpi = _with_mpi or "mpi4py.MPI" in sys.modules


os.register_at_fork(after_in_child=_after_fork)
