"""What the examples share: the array module, one line of result, the exit status."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from rdmakit import Communicator


def run(what: str, main: Callable[[Communicator, Any], tuple[bool, str]]) -> None:
    """Call ``main`` on all ranks, print its text on rank 0, and exit with 1 if it is wrong.

    Args:
        what: the program's docstring, for --help.
        main: takes the communicator and the array module, numpy or with --gpu cupy; says whether
            its result is right on this rank, and a line of text.
    """
    parser = argparse.ArgumentParser(
        description=what, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", action="store_true", help="CuPy arrays instead of NumPy's")
    gpu = parser.parse_args().gpu
    if gpu and importlib.util.find_spec("cupy") is None:
        parser.error("--gpu: CuPy is not installed here (pip install '.[cuda12]' or '.[cuda13]')")
    with Communicator() as comm:
        xp: Any = np
        if gpu:
            xp = importlib.import_module("cupy")
            number = comm.hosts[: comm.rank].count(comm.host)  # among the host's ranks
            xp.cuda.Device(number % xp.cuda.runtime.getDeviceCount()).use()
        right, text = main(comm, xp)
        wrong = np.array([not right], np.int64)
        comm.Allreduce(wrong, wrong)
        if comm.rank == 0:
            where = "CuPy" if gpu else "NumPy"
            verdict = f"wrong on {wrong[0]} rank(s)" if wrong[0] else "right"
            print(f"{comm.layout.describe()} ranks, {where}: {text}: {verdict}", flush=True)
    sys.exit(1 if wrong[0] else 0)


def shares(n: int, ranks: int) -> list[int]:
    """Return where the share of each rank begins, and the end: n things, as even as can be."""
    return [n * rank // ranks for rank in range(ranks + 1)]
