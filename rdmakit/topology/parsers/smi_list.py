"""``nvidia-smi -L``: GPUs and the MIG devices in them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rdmakit.topology.model import MigDevice
from rdmakit.topology.text import lines_of

__all__ = ["ListedGpu", "SmiList", "parse_list"]


@dataclass(frozen=True)
class ListedGpu:
    """A physical GPU of the list."""

    index: int
    name: str
    uuid: str
    mig: tuple[MigDevice, ...] = ()


@dataclass(frozen=True)
class SmiList:
    """What ``nvidia-smi -L`` names."""

    gpus: tuple[ListedGpu, ...] = ()

    @property
    def mig_devices(self) -> int:
        """Number of MIG devices on all GPUs."""
        return sum(len(gpu.mig) for gpu in self.gpus)

    @property
    def cuda_devices(self) -> int | None:
        """Devices that one process can use: a single MIG device hides all others.

        None without MIG: all GPUs of the list.
        """
        return 1 if self.mig_devices else None


def parse_list(text: str) -> SmiList:
    """Return the GPUs that the text lists; empty for another text. Never raises."""
    gpus: list[tuple[int, str, str, list[MigDevice]]] = []
    for line in lines_of(text):
        match = re.match(r"\s*GPU (\d{1,4}):\s*(.*?)\s*\(UUID:\s*(GPU-[\w-]+)\s*\)", line, re.ASCII)
        if match:
            gpus.append((int(match[1]), match[2], match[3], []))
            continue
        match = re.match(
            r"\s*MIG\s+(\S+)\s+Device\s+\d+:\s*\(UUID:\s*(MIG-[\w/-]+)\s*\)", line, re.ASCII
        )
        if match and gpus:
            gpus[-1][3].append(MigDevice(match[1], match[2]))
    return SmiList(tuple(ListedGpu(i, name, uuid, tuple(mig)) for i, name, uuid, mig in gpus))
