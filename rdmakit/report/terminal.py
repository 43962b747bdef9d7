"""Whether a person watches: under a launcher our own output says nothing about that.

Open MPI gives rank 0 a pseudo-terminal whatever its own output is, hydra a pipe.
"""

from __future__ import annotations

import os
import sys

from rdmakit.drivers.host import HostTree

__all__ = ["on_terminal"]

_LAUNCHERS = ("mpirun", "mpiexec", "prterun", "orterun", "srun", "hydra")
_MOST_ANCESTORS = 8


def on_terminal(tree: HostTree | None = None) -> bool:
    """Return whether the launcher's standard output, or ours without one, is a terminal."""
    tree = tree or HostTree()
    found, pid = False, os.getppid()
    for _ in range(_MOST_ANCESTORS):
        stat = tree.read_text(f"/proc/{pid}/stat")
        if stat is None or pid <= 1:
            break
        name, _, rest = stat.partition("(")[2].rpartition(")")
        if any(word in name for word in _LAUNCHERS):
            found = True
            terminal = tree.resolve(f"/proc/{pid}/fd/1").startswith(("/dev/pts/", "/dev/tty"))
        pid = int(rest.split()[1])
    return terminal if found else sys.stdout.isatty()
