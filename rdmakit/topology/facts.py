"""Facts of a machine by source, before they become one :class:`Machine`."""

from __future__ import annotations

from dataclasses import dataclass, field

from rdmakit.topology.model import Gpu, MigDevice, Nic, NumaNode, PciDevice

__all__ = ["NvLink", "NvmlFacts", "NvmlGpu", "SysfsFacts"]


@dataclass(frozen=True)
class NvLink:
    """An active NVLink of a GPU."""

    kind: str | None = None
    """What is at its other end: gpu, switch or other; None: hidden (virtual machines do that)."""
    remote: str | None = None
    """PCI address of the other end."""


@dataclass(frozen=True)
class NvmlGpu:
    """A GPU as NVML describes it; None where NVML refused to say."""

    index: int
    name: str = ""
    uuid: str = ""
    pci: str | None = None
    minor: int | None = None
    cpus: tuple[int, ...] | None = None
    numa: tuple[int, ...] | None = None
    """NUMA nodes near it."""
    own_numa: int | None = None
    """NUMA node that is its memory."""
    generation: int | None = None
    width: int | None = None
    max_generation: int | None = None
    max_width: int | None = None
    nvlinks: tuple[NvLink, ...] = ()
    nvlink_version: int | None = None
    mig_mode: bool | None = None
    mig: tuple[MigDevice, ...] = ()


@dataclass(frozen=True)
class NvmlFacts:
    """What NVML says of all GPUs that this process may see."""

    driver: str = ""
    cuda: str = ""
    """Newest CUDA that the driver serves."""
    gpus: tuple[NvmlGpu, ...] = ()
    ancestors: tuple[tuple[str | None, ...], ...] = ()
    """PIX to SYS between GPUs, by index."""
    p2p: tuple[tuple[str | None, ...], ...] = ()
    """OK or why not, reading and writing a peer's memory."""
    p2p_nvlink: tuple[tuple[bool | None, ...], ...] = ()
    """Whether peers reach each other over NVLink."""
    problem: str = ""
    """Why there is nothing."""


@dataclass(frozen=True)
class SysfsFacts:
    """What /sys and /proc say."""

    host: str = ""
    gpus: tuple[Gpu, ...] = ()
    nics: tuple[Nic, ...] = ()
    pci: tuple[PciDevice, ...] = ()
    numa_nodes: tuple[NumaNode, ...] = ()
    siblings: tuple[tuple[int, ...], ...] = ()
    software: dict[str, str] = field(default_factory=dict)
    virtual: bool | None = None
    notes: tuple[str, ...] = ()
