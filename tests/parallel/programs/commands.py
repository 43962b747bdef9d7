"""Runs several rdmakit commands one after the other in the same ranks: commands.py JSON.

JSON has a list of commands, each a list of words. Each rank says how each ended; the exit status
is the largest.
"""

from __future__ import annotations

import json
import os
import sys

from rdmakit.cli import main
from rdmakit.process.launcher import launcher_of

worst = 0
for words in json.loads(sys.argv[1]):
    try:
        main(words)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(bool(end.code))
        line = f"[{launcher_of(os.environ).rank}] ended {status}: {' '.join(words)}\n"
        os.write(1, line.encode())  # one write: one line
        worst = max(worst, status)
sys.exit(worst)
