"""What a machine is made of: GPUs, NICs and their ports, PCIe bridges, NUMA nodes.

A field is None where the source does not say; nothing here is a guess. Values that a person may
compare with another tool's output are kept as that tool printed them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import cached_property

from rdmakit.topology.words import Path, Relation, generation, pcie_gbytes, relation_of

__all__ = [
    "Acs",
    "Gid",
    "Gpu",
    "Machine",
    "Matrix",
    "MigDevice",
    "Nic",
    "NumaNode",
    "PciControl",
    "PciDevice",
    "PcieLink",
    "Port",
    "natural",
    "normal_address",
]


def natural(name: str) -> tuple[object, ...]:
    """Return a sort key by which ``mlx5_2`` comes before ``mlx5_10``."""
    parts = re.split(r"(\d+)", name, flags=re.ASCII)
    return tuple(int(part) if i % 2 else part for i, part in enumerate(parts))


def normal_address(text: str | None) -> str | None:
    """Return a PCI address as sysfs writes it (``0000:19:00.0``), None where it is none.

    NVML writes eight digits of domain and capitals (``00000000:1A:00.0``), lspci no domain.
    """
    match = re.fullmatch(
        r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", (text or "").strip().lower()
    )
    if match is None:
        return None
    return f"{int(match[1] or '0', 16):04x}:{match[2]}:{match[3]}.{match[4]}"


@dataclass(frozen=True)
class PcieLink:
    """A device's PCIe link: lane rate in GT/s and lanes, now and at most."""

    speed: float | None = None
    width: int | None = None
    max_speed: float | None = None
    max_width: int | None = None

    @property
    def generation(self) -> int | None:
        """PCIe generation of the link now."""
        return generation(self.speed)

    @property
    def max_generation(self) -> int | None:
        """PCIe generation that the device can do."""
        return generation(self.max_speed)

    @property
    def max_gbytes(self) -> float | None:
        """GB/s each way that the device's link can carry at most."""
        return pcie_gbytes(self.max_speed or self.speed, self.max_width or self.width)

    def describe(self) -> str:
        """Return ``Gen1 x16 now, Gen4 x16 at most``, with what is known."""
        now = _gen(self.generation, self.width)
        most = _gen(self.max_generation, self.max_width)
        if not most or now == most:
            return now
        return f"{now} now, {most} at most" if now else f"{most} at most"


def _gen(gen: int | None, width: int | None) -> str:
    return " ".join(
        [*([f"Gen{gen}"] if gen is not None else []), *([f"x{width}"] if width else [])]
    )


@dataclass(frozen=True)
class Acs:
    """Access control of a bridge. Redirect sends traffic between peers up to the CPU."""

    request_redirect: bool
    completion_redirect: bool
    upstream_forward: bool
    source_validation: bool = False

    @property
    def redirects(self) -> bool:
        """Whether traffic between two devices below it is sent up to the root."""
        return self.request_redirect or self.completion_redirect or self.upstream_forward


@dataclass(frozen=True)
class PciControl:
    """What a device may do on PCIe, by its Device Control register."""

    relaxed_ordering: bool | None = None
    """Whether it may mark its writes as free to pass others."""
    max_read: int | None = None
    """Bytes that it may ask for in one read request."""


@dataclass(frozen=True)
class PciDevice:
    """A PCI device or bridge."""

    address: str
    parent: str = ""
    """Address of the bridge above, or name of the host bridge (``pci0000:16``)."""
    kind: str = "other"
    """gpu, nic, bridge, nvswitch or other."""
    name: str = ""
    numa: int | None = None
    link: PcieLink = PcieLink()
    acs: Acs | None = None
    """None: not readable (needs root) or the bridge has none."""
    acs_known: bool = False
    """Whether None above means that there is none."""
    control: PciControl | None = None
    """None: not readable (needs root)."""


@dataclass(frozen=True)
class MigDevice:
    """A part of a GPU in MIG mode."""

    profile: str
    uuid: str


@dataclass(frozen=True)
class Gpu:
    """A physical GPU. ``index`` is nvidia-smi's, which is by PCI address."""

    index: int
    name: str = ""
    uuid: str = ""
    pci: str | None = None
    minor: int | None = None
    numa: int | None = None
    cpus: tuple[int, ...] | None = None
    cpu_affinity: str | None = None
    """As nvidia-smi printed it; None for an empty cell or no column."""
    numa_affinity: str | None = None
    gpu_numa_id: str | None = None
    """NUMA node that is this GPU's memory (Grace); it has no CPUs."""
    link: PcieLink = PcieLink()
    nvlinks: int | None = None
    """Active NVLinks; None: not known."""
    nvlink_version: int | None = None
    mig_mode: bool | None = None
    mig: tuple[MigDevice, ...] = ()

    @property
    def label(self) -> str:
        """``GPU0``."""
        return f"GPU{self.index}"


@dataclass(frozen=True)
class Gid:
    """An entry of a port's GID table."""

    index: int
    gid: str
    kind: str | None = None
    """``IB``, ``RoCE v1``, ``RoCE v2``."""
    netdev: str | None = None


@dataclass(frozen=True)
class Port:
    """A port of an RDMA device. ``state``, ``phys`` and ``rate_gbps`` are as printed."""

    number: int
    state: str | None = None
    phys: str | None = None
    rate_gbps: float | None = None
    """Gb/s. On a port that is down it is a placeholder."""
    link_layer: str | None = None
    """InfiniBand, Ethernet or iWARP."""
    lid: int | None = None
    sm_lid: int | None = None
    active_mtu: int | None = None
    max_mtu: int | None = None
    width: str | None = None
    netdev: str | None = None
    netdev_mtu: int | None = None
    default_gid: str | None = None
    gids: tuple[Gid, ...] = ()

    @property
    def active(self) -> bool | None:
        """Whether the logical state is Active; None where the source does not say."""
        return None if self.state is None else "ACTIVE" in self.state.upper().split("_")

    @property
    def link_up(self) -> bool | None:
        """Whether the physical link is up; None where the source does not say."""
        if self.phys is None or self.phys.upper() == "NOP":
            return None
        return self.phys.upper().replace("_", "").replace(" ", "") == "LINKUP"

    @property
    def speed_gbps(self) -> float | None:
        """Gb/s of a port that is up, else None."""
        return None if self.active is False or self.link_up is False else self.rate_gbps


@dataclass(frozen=True)
class Nic:
    """An RDMA device."""

    label: str
    """What the matrix calls it: ``NIC0`` or ``mlx5_0``."""
    name: str | None = None
    """RDMA device name; None where the text does not tell it."""
    pci: str | None = None
    numa: int | None = None
    model: str | None = None
    """CA type or PCI id: equal for equal cards."""
    firmware: str | None = None
    board: str | None = None
    guid: str | None = None
    image_guid: str | None = None
    """GUID of the card: equal for its ports."""
    virtual_of: str | None = None
    """PCI address of the physical function that this is a virtual function of."""
    bond: str | None = None
    """Bond that its net device belongs to."""
    default_route: bool = False
    """Whether its net device carries the default route."""
    link: PcieLink = PcieLink()
    ports: tuple[Port, ...] = ()


@dataclass(frozen=True)
class NumaNode:
    """A NUMA node. One without CPUs is some device's memory."""

    index: int
    cpus: tuple[int, ...] = ()


@dataclass(frozen=True)
class Matrix:
    """Relations between devices, cell by cell as printed or computed."""

    names: tuple[str, ...] = ()
    cells: tuple[tuple[str | None, ...], ...] = ()
    """``cells[row][column]`` in the order of ``names``."""
    nvlink_known: bool = True
    """False for ``topo -mp``, which hides NVLink."""

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.names)}

    def cell(self, a: str, b: str) -> str | None:
        """Return the relation of two devices as printed, from either of their rows."""
        if a not in self._places or b not in self._places:
            return None
        i, j = self._places[a], self._places[b]
        return self.cells[i][j] or self.cells[j][i]

    def relation(self, a: str, b: str) -> Relation | None:
        """Return the meaning of ``cell``; None for an X between two devices."""
        relation = relation_of(self.cell(a, b))
        return (
            None if relation is not None and (relation.path is Path.SELF) != (a == b) else relation
        )

    def nvlinks(self, a: str, b: str) -> int | None:
        """Return bonded NVLinks between two GPUs; None where that cannot be known."""
        relation = self.relation(a, b)
        if relation is None or not self.nvlink_known:
            return None
        return relation.nvlinks


@dataclass(frozen=True)
class Machine:
    """One host."""

    host: str = ""
    gpus: tuple[Gpu, ...] = ()
    nics: tuple[Nic, ...] = ()
    matrix: Matrix = Matrix()
    numa_nodes: tuple[NumaNode, ...] = ()
    siblings: tuple[tuple[int, ...], ...] = ()
    """Hardware threads of each core."""
    available: tuple[int, ...] | None = None
    """CPUs that the container or the job scheduler leaves to us; None: all."""
    pci: tuple[PciDevice, ...] = ()
    """GPUs, NICs and the bridges above them."""
    p2p: Matrix = Matrix()
    """``nvidia-smi topo -p2p``: OK, GNS, CNS and so on."""
    software: dict[str, str] = field(default_factory=dict)
    virtual: bool | None = None
    """Whether it is a virtual machine, whose PCI tree may be the hypervisor's invention."""
    sources: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """What is incomplete, contradictory or not to be believed."""

    def gpu(self, label: str) -> Gpu | None:
        """Return the GPU called ``label``, by ``GPU0``, UUID or PCI address."""
        return next((g for g in self.gpus if label in (g.label, g.uuid, g.pci)), None)

    def nic(self, label: str) -> Nic | None:
        """Return the NIC called ``label``, by label, name or PCI address."""
        return next((n for n in self.nics if label in (n.label, n.name, n.pci)), None)

    def relation(self, a: str, b: str) -> Relation | None:
        """Return how two devices (labels) are connected; None: not known."""
        return self.matrix.relation(a, b)

    def nearest_nics(self, gpu: str) -> tuple[Path | None, tuple[str, ...]]:
        """Return the best relation of a GPU to any NIC, and the labels of all NICs that share it.

        SYS is a relation like the others: it means that no NIC is near.
        """
        found: dict[Path, list[str]] = {}
        for nic in self.nics:
            relation = self.relation(gpu, nic.label)
            if relation is not None:
                found.setdefault(relation.path, []).append(nic.label)
        if not found:
            return None, ()
        best = min(found)
        return best, tuple(found[best])

    def noted(self, *notes: str) -> Machine:
        """Return this with more notes."""
        return replace(self, notes=(*self.notes, *notes)) if notes else self
