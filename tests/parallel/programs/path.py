"""Prints what prove_path says; the arguments are keywords as NAME=JSON."""

import json
import os
import sys
from types import SimpleNamespace

import msgspec

from rdmakit import Communicator
from rdmakit.config import Config
from rdmakit.drivers import spawn
from rdmakit.proof import describe, prove_path

if os.environ.get("RDMAKIT_PROOF_TEST") == "broken":
    spawn.sys = SimpleNamespace(executable="/bin/false")  # children end at once
words = dict(word.split("=", 1) for word in sys.argv[1:])
given = {name: json.loads(value) for name, value in words.items()}
with Communicator(config=Config.from_env()) as comm:
    report = prove_path(comm, **given)
    told = msgspec.json.encode(report)
    assert comm.bootstrap.allgather(told) == [told] * comm.size, "not equal on all ranks"
    if comm.rank == 0:
        print("\n".join(describe(report)))
        print("report", told.decode(), flush=True)
