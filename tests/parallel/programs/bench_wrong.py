"""Runs ``rdmakit bench`` with a reduction that is wrong on rank 1, or one that fails there."""

import os
import sys

from rdmakit import reduction
from rdmakit.cli import main
from rdmakit.process.launcher import launcher_of

right = reduction.reducer
how = sys.argv.pop(1)


def crooked(dtype, op, divide_by=0):
    reduce = right(dtype, op, divide_by)

    def wrong(dst, srcs):
        reduce(dst, srcs)
        if launcher_of(os.environ).rank == 1 and len(dst):
            if how == "raise":
                raise ZeroDivisionError("a planted error")
            if how == "exit":
                sys.exit(3)
            dst[0] += 1

    return wrong


reduction.reducer = crooked
main()
