"""Ranks that make children before rdmakit has loaded MPI: forked.py MODE."""

from __future__ import annotations

import multiprocessing
import os
import sys

import numpy as np

import rdmakit

RANK = next(os.environ[name] for name in ("PMIX_RANK", "PMI_RANK") if name in os.environ)


def child() -> None:
    """Try to be a rank."""
    try:
        rdmakit.Communicator()
    except rdmakit.SetupError as exc:
        os.write(1, f"[{RANK}] child: {exc}\n".encode())


def fork() -> None:
    pid = os.fork()
    if pid == 0:
        child()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def main(mode: str) -> None:
    if mode == "before_rdmakit_loads_it":
        from mpi4py import MPI

        assert MPI.Is_initialized()
    if mode == "spawned":
        process = multiprocessing.get_context("spawn").Process(target=child)
        process.start()
        process.join(30)
        assert process.exitcode == 0
    else:
        fork()
    with rdmakit.Communicator() as comm:
        x = np.full(1000, 1.0 + comm.rank)
        comm.Allreduce(rdmakit.IN_PLACE, x, algorithm="hierarchical")
        assert (x == comm.size * (comm.size + 1) / 2).all()
    os.write(1, f"[{RANK}] end\n".encode())


if __name__ == "__main__":
    main(sys.argv[1])
