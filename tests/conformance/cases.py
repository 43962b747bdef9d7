"""What the cases of windows and of channels share."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from rdmakit.protocols import Bytes

LIMIT = 30.0
SIZES = (0, 1, 13, 4097, 8191, 65_537, 1 << 20)


def pattern(nbytes: int, *seed: int) -> Bytes:
    """Return bytes that differ for each seed and, within 251, for each element."""
    start = 17
    for number in seed:
        start = (start * 31 + number * 7 + 3) % 251
    return ((np.arange(nbytes, dtype=np.int64) * 3 + start) % 251).astype(np.uint8)


def wait_for(ready: Callable[[], bool], what: str, limit: float = LIMIT) -> None:
    end = time.monotonic() + limit
    while not ready():
        assert time.monotonic() < end, f"{what}: not within {limit} s"
        time.sleep(0)
