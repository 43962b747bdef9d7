"""Kernel modules: ``lsmod`` and ``/proc/modules``."""

from __future__ import annotations

import re

from rdmakit.topology.text import lines_of

__all__ = ["parse_modules"]


def parse_modules(text: str) -> dict[str, tuple[str, ...]]:
    """Return who uses each loaded module, by its name; empty for another text. Never raises."""
    found: dict[str, tuple[str, ...]] = {}
    for line in lines_of(text):
        match = re.match(r"([\w-]+)\s+\d{3,9}\s+\d{1,6}(?:\s+([\w,-]+))?(?:\s|$)", line, re.ASCII)
        if match:
            users = [name for name in (match[2] or "").split(",") if name not in ("", "-")]
            found[match[1].replace("-", "_")] = tuple(name.replace("-", "_") for name in users)
    return found
