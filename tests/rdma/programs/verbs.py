"""verbs.py PATH [ucxx]: values over both machines; each rank writes PATH.RANK.json.

With ``ucxx`` its UCX, the libucx wheel's, is loaded before MPI's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

if sys.argv[2:] == ["ucxx"]:
    import ucxx  # noqa: F401

import numpy as np

from rdmakit import SUM, Communicator, Kind
from rdmakit.datatypes import ReduceOp
from rdmakit.drivers import ucx_loading
from tests.conformance.values import check

PORT = Path("/sys/class/infiniband/rxe0/ports/1/hw_counters")
BULK = 1 << 20
CALLS = 2
TYPES = (
    ("int8", SUM), ("uint64", ReduceOp.MAX), ("float16", SUM), ("bfloat16", SUM), ("float32", SUM),
    ("float64", ReduceOp.PROD), ("complex64", SUM), ("bool", ReduceOp.LXOR),
)  # fmt: skip


def packets() -> int:
    return int((PORT / "sent_pkts").read_text())


def bulk(comm: Communicator) -> dict[str, int]:
    """All-reduce 1 MiB: with two ranks on two nodes each sends all of it once."""
    x = np.arange(BULK // 4, dtype=np.float32) % 1000 + comm.rank * 3
    y = np.empty_like(x)
    run = comm.bind(Kind.ALLREDUCE, x, y, algorithm="hierarchical")
    run()
    comm.Barrier()
    before = packets()
    comm.Barrier()
    for _ in range(CALLS):
        run()
    comm.Barrier()
    after = packets()
    wanted = 2 * (np.arange(BULK // 4) % 1000) + 3
    wrong = int((y != wanted).sum())
    return {"packets": after - before, "sent_bytes": CALLS * BULK, "wrong": wrong}


def main() -> None:
    with Communicator() as comm:
        for dtype, op in TYPES:
            check(comm, Kind.ALLREDUCE, 5001, dtype, op, algorithm="hierarchical")
        check(comm, Kind.ALLREDUCE, 7, "float32", SUM, algorithm="ring", in_place=True)
        moved = bulk(comm)
        assert comm.channel is not None
        library = ucx_loading.loaded()
        result = {
            "nodes": comm.layout.describe(),
            "host": comm.host,
            "channel": comm.channel.name,
            "transports": [list(lane) for lane in comm.channel.transports(1 - comm.rank)],
            "notes": list(comm.notes),
            "source": library.source,
            "version": library.version,
            "libraries": library.libraries,
            "modules": [list(module) for module in library.modules],
            **moved,
        }
        Path(f"{sys.argv[1]}.{comm.rank}.json").write_text(json.dumps(result))


main()
