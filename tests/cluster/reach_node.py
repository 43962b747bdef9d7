"""One node of a job that tries its ways to the others; files stand for the control plane.

Usage: reach_node.py FOLDER RANK SIZE. Prints the findings as JSON. With ``mpi`` for a folder ranks
are those of mpirun, and a star stands for the control plane: MPI's own collectives need every way.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import msgspec

from rdmakit.bootstrap import load_mpi
from rdmakit.doctor.compare import compare_nodes
from rdmakit.doctor.context import Context, settings
from rdmakit.doctor.node_facts import NodeFacts, node_facts
from rdmakit.doctor.reach import endpoints_of, reach
from rdmakit.doctor.star import StarBootstrap
from rdmakit.drivers.host import CommandResult, HostTree
from rdmakit.protocols import Bootstrap
from rdmakit.topology.model import Machine
from rdmakit.topology.texts import Texts

LIMIT = 60.0


class FileBootstrap:
    """Ranks that see one folder."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self.folder, self.rank, self.size = folder, rank, size
        self._round = 0

    def allgather(self, data: bytes) -> list[bytes]:
        self._round += 1
        name = f"{self._round}.{self.rank}"
        (self.folder / f"{name}.part").write_bytes(data)
        (self.folder / f"{name}.part").rename(self.folder / name)
        wanted = [self.folder / f"{self._round}.{rank}" for rank in range(self.size)]
        end = time.monotonic() + LIMIT
        while not all(path.exists() for path in wanted):
            if time.monotonic() > end:
                raise TimeoutError(f"round {self._round}: not all ranks came")
            time.sleep(0.02)
        return [path.read_bytes() for path in wanted]

    def barrier(self) -> None:
        self.allgather(b"")

    def abort(self, code: int) -> None:
        os._exit(code)


def no_command(argv: object, timeout: float) -> CommandResult:
    """Start nothing: only the network is looked at here."""
    return CommandResult((), None, "", "", "not started")


def main() -> None:
    folder, rank, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    bootstrap: Bootstrap
    if str(folder) == "mpi":
        bootstrap = StarBootstrap(load_mpi().COMM_WORLD)
    else:
        bootstrap = FileBootstrap(folder, rank, size)
    environ = {"UCX_TCP_BRIDGE_ENABLE": "y", **settings()}
    context = Context(
        HostTree(), Machine(), Texts(), environ, live=True, job_size=size, runner=no_command
    )
    facts = node_facts(context)
    told = bootstrap.allgather(msgspec.json.encode(facts))
    nodes = [msgspec.json.decode(text, type=NodeFacts) for text in told]
    findings = reach(
        bootstrap,
        facts.host,
        endpoints_of(facts),
        boot_id=facts.boot_id,
        seconds=2.0,
    )
    findings += compare_nodes(nodes)
    print(msgspec.json.encode(findings).decode())


if __name__ == "__main__":
    main()
