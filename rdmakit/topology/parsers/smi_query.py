"""``nvidia-smi -q``: state of the GPUs, as sections of names and values."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from rdmakit.topology.model import normal_address
from rdmakit.topology.text import lines_of

__all__ = ["SmiGpu", "SmiQuery", "parse_query"]

_UNKNOWN = ("", "n/a", "[n/a]", "unknown error", "requested functionality has been deprecated")


@dataclass(frozen=True)
class SmiGpu:
    """A GPU. Names of sections and values changed over the years, so they are asked by pattern."""

    pci: str | None
    values: dict[str, str] = field(default_factory=dict)
    """Values by path: ``BAR1 Memory Usage/Total``."""

    def value(self, pattern: str) -> str | None:
        """Return the first value whose whole path fits; None where it is absent or N/A."""
        return next((value for _, value in self.all(pattern)), None)

    def all(self, pattern: str) -> Iterator[tuple[str, str]]:
        """Yield (path, value) of all that fit and say something."""
        for path, value in self.values.items():
            if re.fullmatch(pattern, path, re.IGNORECASE) and value.lower() not in _UNKNOWN:
                yield path, value

    def mebibytes(self, pattern: str) -> int | None:
        """Return a size in MiB."""
        match = re.fullmatch(r"(\d{1,9}) MiB", self.value(pattern) or "", re.ASCII)
        return int(match[1]) if match else None

    def counts(self, pattern: str) -> dict[str, int]:
        """Return the numbers above zero that fit, by the last part of their path."""
        found: dict[str, int] = {}
        for path, value in self.all(pattern):
            if value.isascii() and value.isdigit() and int(value):
                name = path.rpartition("/")[2]
                found[name] = found.get(name, 0) + int(value)
        return found


@dataclass(frozen=True)
class SmiQuery:
    """What the text tells."""

    driver: str = ""
    cuda: str = ""
    gpus: tuple[SmiGpu, ...] = ()
    problem: str = ""
    """What nvidia-smi said instead: ``Driver/library version mismatch``."""

    @cached_property
    def by_pci(self) -> dict[str, SmiGpu]:
        """GPUs by PCI address."""
        return {gpu.pci: gpu for gpu in self.gpus if gpu.pci is not None}


_PROBLEM = re.compile(
    r"(?:Failed to initialize NVML: .*|NVIDIA-SMI has failed .*|No devices were found|"
    r"Unable to determine the device handle for .*)"
)


def parse_query(text: str) -> SmiQuery:
    """Return what ``nvidia-smi -q`` printed; empty for another text. Never raises."""
    driver, cuda, problem = "", "", ""
    gpus: list[SmiGpu] = []
    stack: list[tuple[int, str]] = []
    for line in lines_of(text):
        if match := re.match(r"GPU ([0-9A-Fa-f:.]{7,20})\s*$", line):
            gpus.append(SmiGpu(normal_address(match[1])))
            stack = []
        elif match := _PROBLEM.match(line.strip()):
            problem = problem or match[0].strip()
        elif match := re.match(r"(Driver|CUDA) Version\s*:\s*(\S+)", line):
            driver, cuda = (match[2], cuda) if match[1] == "Driver" else (driver, match[2])
        elif gpus and line.startswith(" ") and line.strip():
            _read(line, gpus[-1].values, stack)
    return SmiQuery(driver, cuda, tuple(gpus), problem)


def _read(line: str, values: dict[str, str], stack: list[tuple[int, str]]) -> None:
    """Take a line of a GPU; ``stack``: the sections that it lies in, by indentation."""
    depth = len(line) - len(line.lstrip())
    name, colon, value = line.strip().partition(" : ")
    while stack and stack[-1][0] >= depth:
        stack.pop()
    stack.append((depth, name.strip().rstrip(":").strip()))
    if colon:
        # Of processes and MIG devices, which repeat, the first counts.
        values.setdefault("/".join(part for _, part in stack), value.strip())
