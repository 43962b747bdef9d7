"""Runs the conformance cases between processes: conformance.py IMPLEMENTATION..."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rdmakit.bootstrap import MpiBootstrap
from rdmakit.inter.mpi import MpiChannel
from rdmakit.inter.ucx import UcxChannel
from rdmakit.intra.posix_shm import PosixWindow
from tests.conformance.channel_cases import CHANNEL_CASES
from tests.conformance.window_cases import WINDOW_CASES


def makers(boot: MpiBootstrap) -> dict[str, tuple[tuple[Any, ...], Callable[..., Any]]]:
    def window(named: bool) -> Callable[[int, int], Any]:
        return lambda nbytes, flags: PosixWindow.create(boot, nbytes, flags, named=named)

    return {
        "shm": (WINDOW_CASES, window(False)),
        "shm-named": (WINDOW_CASES, window(True)),
        "mpi": (CHANNEL_CASES, lambda: MpiChannel.create(boot)),
        "ucx": (CHANNEL_CASES, lambda: UcxChannel.create(boot, "auto", virtual=False)),
        "ucx-virtual": (CHANNEL_CASES, lambda: UcxChannel.create(boot, "auto", virtual=True)),
    }


def main() -> None:
    boot = MpiBootstrap()
    for name in sys.argv[1:]:
        cases, make = makers(boot)[name]
        for case in cases:
            boot.barrier()
            start = time.monotonic()
            try:
                case(boot, make)
            except BaseException:
                print(f"FAILED {name} {case.__name__} rank {boot.rank}", flush=True)
                traceback.print_exc()
                sys.stderr.flush()
                time.sleep(1)  # the others may have something to say
                boot.abort(1)
            boot.barrier()
            if boot.rank == 0:
                print(f"ok {name} {case.__name__} {time.monotonic() - start:.2f} s", flush=True)
    boot.barrier()
    left = list(Path("/dev/shm").glob(f"rdmakit-*-{os.getpid()}-*"))
    assert not left, left
    print(f"end {boot.rank}", flush=True)


main()
