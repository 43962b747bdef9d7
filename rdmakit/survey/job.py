"""``rdmakit topo`` under a launcher: all nodes of the job."""

from __future__ import annotations

from pathlib import Path

from rdmakit.bootstrap import MpiBootstrap
from rdmakit.config import Config
from rdmakit.doctor.collecting import read_for_checks
from rdmakit.machines import Job, gather
from rdmakit.nodes import find_nodes
from rdmakit.process.phase import current
from rdmakit.process.watchdog import abort_on_exception, install

__all__ = ["look"]

_LOOK = 90.0
"""Seconds: a driver without persistence mode starts every GPU first, once for each command."""


def look(config: Config, directory: Path | None = None) -> tuple[bool, Job]:
    """Return (whether this is the first rank, the job). Collective over COMM_WORLD, blocking.

    Virtual nodes are not nodes here: it is the machines that are shown.
    """
    users = MpiBootstrap(duplicate=False)
    install(users.rank, users.size, users.host, users.abort, config)
    abort_on_exception(users.rank, users.host, users.abort)
    with current.during("topo", timeout=max(config.timeout, _LOOK)):
        bootstrap = MpiBootstrap()
        nodes = find_nodes(bootstrap, config.chosen(ranks_per_node=0)).layout.nodes
        library = str(MpiBootstrap.describe()["library"]).partition(",")[0]
        job = gather(
            bootstrap, nodes, bootstrap.host, {"MPI": library}, directory, look=read_for_checks
        )
        bootstrap.free()
    return users.rank == 0, job
