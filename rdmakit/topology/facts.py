"""Facts of a machine by source, before they become one :class:`Machine`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rdmakit.topology.model import Gpu, MigDevice, Nic, NumaNode, PciDevice

__all__ = ["NvLink", "NvmlFacts", "NvmlGpu", "SysfsFacts", "merge_nvml"]


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
    available: tuple[int, ...] | None = None
    software: dict[str, str] = field(default_factory=dict)
    virtual: bool | None = None
    notes: tuple[str, ...] = ()


def merge_nvml(views: Sequence[NvmlFacts]) -> NvmlFacts:
    """Return the GPUs that the ranks of one node see together, numbered by PCI address.

    A scheduler that gives each task its own GPU lets no rank see them all. What NVML says
    of pairs is dropped: the PCI tree and the NVLinks' other ends tell it too.
    """
    whole = max(views, key=lambda view: len(view.gpus), default=NvmlFacts())
    every = {gpu.uuid: gpu for view in views for gpu in view.gpus}
    if len(every) <= len(whole.gpus):
        return whole
    gpus = sorted(every.values(), key=lambda gpu: (gpu.pci or "", gpu.uuid))
    return replace(
        whole,
        gpus=tuple(replace(gpu, index=index) for index, gpu in enumerate(gpus)),
        ancestors=(),
        p2p=(),
        p2p_nvlink=(),
    )
