"""Sets of CPUs as the kernel and nvidia-smi write them: ``0-19,40-59``."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Sequence

__all__ = ["MOST_CPUS", "format_cpus", "parse_cpus", "parse_mask", "runs", "share_cpus"]

MOST_CPUS = 8192
"""CPU numbers from here on are not believed: Linux is built for at most so many."""


def parse_cpus(text: str | None) -> tuple[int, ...] | None:
    """Return the CPUs in ``text``, sorted; None where it is not a list of CPUs. Never raises."""
    cpus: set[int] = set()
    for part in (text or "").strip().split(","):
        match = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5})(?::(\d{1,5}))?)?\s*", part, re.ASCII)
        if match is None:
            return None
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last >= MOST_CPUS:
            return None
        cpus.update(range(first, last + 1, max(1, int(match[3] or 1))))
    return tuple(sorted(cpus))


def parse_mask(text: str | None) -> tuple[int, ...] | None:
    """Return the CPUs of a kernel mask (``ffff,00000000``: words of 32 bits, highest first)."""
    words = (text or "").strip().split(",")
    if not all(re.fullmatch(r"(0x)?[0-9a-fA-F]{1,8}", word) for word in words):
        return None
    if len(words) * 32 > MOST_CPUS:
        return None
    value = 0
    for word in words:
        value = value << 32 | int(word, 16)
    return tuple(cpu for cpu in range(value.bit_length()) if value >> cpu & 1)


def runs(cpus: Collection[int]) -> list[tuple[int, int]]:
    """Return the unbroken runs (first, last) of ``cpus``, in order."""
    found: list[tuple[int, int]] = []
    for cpu in sorted(cpus):
        if found and found[-1][1] == cpu - 1:
            found[-1] = (found[-1][0], cpu)
        else:
            found.append((cpu, cpu))
    return found


def format_cpus(cpus: Collection[int]) -> str:
    """Return ``cpus`` in the kernel's form: ``0-3,8``."""
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs(cpus))


def share_cpus(
    cpus: Collection[int], parts: int, siblings: Sequence[Collection[int]] = ()
) -> list[tuple[int, ...]]:
    """Divide ``cpus`` among ``parts`` ranks without overlap; hardware threads stay together.

    Args:
        cpus: what there is to divide.
        parts: how many ranks, 1 or more.
        siblings: hardware threads of each core. Where they are not known and ``cpus`` is two
            runs of one length (``0-15,32-47``: how Linux numbers two threads a core), equal
            places of the runs are taken for one core.

    Returns:
        One set for each rank. With more ranks than cores, cores are divided into threads; with
        more ranks than threads, ranks share in turn: the only case of overlap.
    """
    cores = _cores(set(cpus), siblings)
    if not cores:
        return [()] * parts
    if len(cores) < parts:
        singles: list[tuple[int, ...]] = [(cpu,) for core in cores for cpu in core]
        if len(singles) < parts:
            return [singles[part % len(singles)] for part in range(parts)]
        cores = singles
    bounds = [part * len(cores) // parts for part in range(parts + 1)]
    return [
        tuple(sorted(cpu for core in cores[a:b] for cpu in core))
        for a, b in itertools.pairwise(bounds)
    ]


def _cores(cpus: set[int], siblings: Sequence[Collection[int]]) -> list[tuple[int, ...]]:
    cores = {tuple(sorted(cpus & set(core))) for core in siblings} - {()}
    known = {cpu for core in cores for cpu in core}
    found = runs(cpus)
    if not cores and len(found) == 2 and len({b - a for a, b in found}) == 1:
        (a, b), (c, _) = found
        return [(a + i, c + i) for i in range(b - a + 1)]
    return sorted(cores | {(cpu,) for cpu in cpus - known})
