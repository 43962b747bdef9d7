"""Becomes a program under compute-sanitizer: sanitized.py SANITIZER TOOL PROGRAM MODE..."""

from __future__ import annotations

import os
import sys

sanitizer, tool, *program = sys.argv[1:]
options = ["--tool", tool, "--error-exitcode", "86", "--print-limit", "20"]
os.execv(sanitizer, [sanitizer, *options, sys.executable, *program])
