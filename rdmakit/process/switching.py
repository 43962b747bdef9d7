"""How soon a thread that computes in Python lets another run, while messages are under way.

A loop of pure Python keeps the interpreter for the switch interval, 5 ms by default, each time that
another thread wants it. The progress thread gives it away in most calls of UCX and MPI, so a
transfer of some tens of calls would take some hundred milliseconds beside such a loop. While
anything is under way the interval is therefore short; it is the process's, so it is given back.
"""

from __future__ import annotations

import sys
import threading

__all__ = ["Hurry"]

SECONDS = 5e-4
"""Measured beside a loop of pure Python, two hosts, all-reduce of 256 KiB, 1 and 16 MiB, medians of
13 rounds in ms: at 5 ms 26, 24, 279; at 1 ms 11, 17, 153; at 0.5 ms 11, 11, 145; at 0.2 ms 8, 12,
210."""

_lock = threading.Lock()
_hurried = 0
_usual = 0.0


class Hurry:
    """One thread's wish for a short switch interval. The interval is short while anybody has it."""

    def __init__(self) -> None:
        self._wished = False

    def begin(self) -> None:
        """Wish it; nothing where it is wished already. Local."""
        global _hurried, _usual
        if self._wished:
            return
        self._wished = True
        with _lock:
            _hurried += 1
            if _hurried == 1:
                _usual = sys.getswitchinterval()
                if _usual > SECONDS:
                    sys.setswitchinterval(SECONDS)

    def end(self) -> None:
        """Wish it no more. The interval becomes what it was, unless somebody has set another."""
        global _hurried
        if not self._wished:
            return
        self._wished = False
        with _lock:
            _hurried -= 1
            if not _hurried and abs(sys.getswitchinterval() - SECONDS) < SECONDS / 100:
                sys.setswitchinterval(_usual)


def forked() -> None:
    """In a forked child, whose only thread wishes nothing: give the interval back. Local."""
    global _hurried, _lock
    _lock = threading.Lock()
    if _hurried:
        _hurried = 0
        sys.setswitchinterval(_usual)
