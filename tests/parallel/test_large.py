"""Arrays of more than 2^31 elements, where a count or an offset of 32 bits would show."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi import FAMILIES, python_of, run_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.quiet]

PROGRAM = Path(__file__).parent / "programs" / "large.py"
NEEDED = 14 << 30
"""Bytes: two arrays of 2 GiB, what a transport buffers of them, and room for what else runs."""


def available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0


@pytest.mark.parametrize("family", FAMILIES)
def test_messages_broadcast_and_all_reduce(family: str) -> None:
    """Of int8 and bool on two ranks, through shared memory and between nodes."""
    python = python_of(family)
    if (free := available()) < NEEDED:
        pytest.skip(f"{free / 2**30:.1f} GiB of memory are free, and this needs {NEEDED >> 30}")
    result = run_ranks(2, PROGRAM, timeout=280, python=python)
    assert result.rc == 0, result.out
    assert result.out.count("end\n") == 2, result.out
    assert result.out.count("] ok 1x2 ") == result.out.count("] ok 2x1 ") == 6, result.out
    assert not result.left
