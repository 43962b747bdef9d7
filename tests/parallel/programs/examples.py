"""Runs examples in turn in the same ranks, each as Python runs a program: examples.py NAME..."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[3] / "benchmarks" / "examples"

sys.path[0] = str(EXAMPLES)
names, wrong = sys.argv[1:], False
for name in names:
    path = EXAMPLES / f"{name}.py"
    sys.argv = [str(path)]
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        wrong |= bool(end.code)
sys.exit(wrong)
