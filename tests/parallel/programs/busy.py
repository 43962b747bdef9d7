"""A library program in the middle of its work: busy.py FOLDER FAULT RANK.

Every rank writes its pid into FOLDER once big all-reduces are under way; FAULT happens to RANK
(raise, exit; anything else is done to it from outside).
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np

from rdmakit import Communicator

folder, fault, faulty = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
with Communicator() as comm:
    x = np.full(1 << 20, 1.0 + comm.rank, np.float32)
    y = np.empty_like(x)
    total = comm.size * (comm.size + 1) / 2
    start = time.monotonic()
    turn = 0
    while time.monotonic() - start < 60:
        comm.Allreduce(x, y)
        assert (y == total).all()
        turn += 1
        if turn == 3:
            (folder / f"new{comm.rank}").write_text(str(os.getpid()))
            (folder / f"new{comm.rank}").rename(folder / f"pid{comm.rank}")
        if turn == 40 and comm.rank == faulty:
            if fault == "raise":
                raise ValueError("made to fail")
            if fault == "exit":
                sys.exit(3)
