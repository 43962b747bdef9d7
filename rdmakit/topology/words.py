"""nvidia-smi's words for how far two devices are apart, in order, and what links carry.

The words are those of ``nvidia-smi topo -m``; SOC is what drivers before 2017 called SYS.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

__all__ = [
    "LEGEND",
    "TECHNIQUES",
    "Path",
    "Relation",
    "generation",
    "nvlink_gbytes",
    "pcie_gbytes",
    "relation_of",
]


class Path(enum.IntEnum):
    """Kinds of path, nearest first, so that ``<`` means nearer."""

    SELF = 0
    NV = 1
    PIX = 2
    PXB = 3
    PHB = 4
    NODE = 5
    SYS = 6


LEGEND = {
    Path.SELF: "X: the device itself",
    Path.NV: "NV#: # NVLinks bonded between two GPUs; no PCIe",
    Path.PIX: "PIX: one PCIe switch (or one card)",
    Path.PXB: "PXB: several PCIe switches, without the CPU",
    Path.PHB: "PHB: up to a PCIe host bridge of the CPU and down again",
    Path.NODE: "NODE: between host bridges of one NUMA node",
    Path.SYS: "SYS: over the link between sockets or NUMA nodes (UPI, Infinity Fabric)",
}

TECHNIQUES = (
    "GPUDirect shared memory: GPU and NIC use one pinned host buffer; every byte goes through "
    "host memory once each way, on any machine",
    "GPUDirect P2P: GPUs of one host address each other's memory over PCIe (CUDA IPC between "
    "processes); best at PIX and PXB, slower at PHB, often off or slow at NODE and SYS",
    "NVLink: the same addressing over the GPUs' own links (NV#), without PCIe or the CPU",
    "GPUDirect RDMA: the NIC reads and writes GPU memory itself; full rate at PIX and PXB, "
    "less at PHB and NODE, about half or none at SYS",
)


@dataclass(frozen=True)
class Relation:
    """How two devices are connected."""

    path: Path
    nvlinks: int = 0
    """Bonded NVLinks; 0 unless ``path`` is NV."""

    def __str__(self) -> str:
        if self.path is Path.SELF:
            return "X"
        return f"NV{self.nvlinks}" if self.path is Path.NV else self.path.name


def relation_of(word: str | None) -> Relation | None:
    """Return the meaning of a matrix cell (``PIX``, ``NV12``, ``SOC``), None if it has none."""
    word = (word or "").strip().upper()
    if word == "X":
        return Relation(Path.SELF)
    if match := re.fullmatch(r"NV(\d{1,3})", word, re.ASCII):
        count = int(match[1])
        return Relation(Path.NV, count) if count else None
    if word == "SOC":
        return Relation(Path.SYS)
    if word in ("PIX", "PXB", "PHB", "NODE", "SYS"):
        return Relation(Path[word])
    return None


_GENERATIONS = ((2.5, 1), (5.0, 2), (8.0, 3), (16.0, 4), (32.0, 5), (64.0, 6), (128.0, 7))


def generation(speed: float | None) -> int | None:
    """Return the PCIe generation of a lane rate in GT/s, None where it is not one."""
    return next((gen for rate, gen in _GENERATIONS if speed is not None and rate == speed), None)


def pcie_gbytes(speed: float | None, width: int | None) -> float | None:
    """Return GB/s (1e9 bytes) each way of ``width`` lanes at ``speed`` GT/s.

    After line coding (8b/10b up to 5 GT/s, 128b/130b up to 32, flits of 242 of 256 above), before
    packet headers, which take another 5 to 15 %.
    """
    if not speed or not width or generation(speed) is None:
        return None
    coding = 0.8 if speed <= 5 else 128 / 130 if speed <= 32 else 242 / 256
    return speed * coding * width / 8


_NVLINK_GBYTES = {1: 20.0, 2: 25.0, 3: 25.0, 4: 25.0, 5: 50.0}


def nvlink_gbytes(version: int | None) -> float | None:
    """Return GB/s each way of one NVLink by its generation (NVIDIA's data sheets).

    1: P100; 2: V100; 3: A100; 4: H100, H200; 5: B200.
    """
    return _NVLINK_GBYTES.get(version or 0)
