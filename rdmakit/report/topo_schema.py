"""What ``rdmakit topo --json`` writes: schema ``rdmakit.topo/1``.

A field is null where the sources do not tell. Relations, affinities, states and rates are as
the sources print them.
"""

from __future__ import annotations

import msgspec

from rdmakit.topology.acs import PathCheck
from rdmakit.topology.cpulist import format_cpus
from rdmakit.topology.fabric import FabricPort
from rdmakit.topology.model import (
    Gpu,
    Machine,
    MigDevice,
    Nic,
    PciDevice,
    PcieLink,
    Port,
)
from rdmakit.topology.netdevices import NetDevices
from rdmakit.topology.parsers.gids import choose_gid
from rdmakit.topology.parsers.ucx_log import LogFinding
from rdmakit.topology.placement import RankPlace
from rdmakit.topology.survey import Survey, SurveyNode
from rdmakit.topology.texts import Texts

__all__ = ["SCHEMA", "NodeResult", "TopoResult", "topo_result"]

SCHEMA = "rdmakit.topo/1"


class Nearest(msgspec.Struct, frozen=True):
    """NICs that share the best relation to a GPU; SYS means that none is near."""

    relation: str | None
    nics: list[str]
    """RDMA names, or the matrix's labels where the text has no names."""


class GidChoice(msgspec.Struct, frozen=True):
    """Which GID index RoCE traffic of a port should use."""

    index: int | None
    why: str


class GpuResult(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU. Affinities are as nvidia-smi prints them, ``cpus`` as they are understood."""

    label: str
    index: int
    name: str | None
    uuid: str | None
    pci: str | None
    minor: int | None
    numa: int | None
    cpus: str | None
    cpu_affinity: str | None
    numa_affinity: str | None
    gpu_numa_id: str | None
    pcie: PcieLink
    pcie_generation: int | None
    pcie_max_generation: int | None
    nvlinks: int | None
    mig_mode: bool | None
    mig: list[MigDevice]


class NumaResult(msgspec.Struct, frozen=True):
    """A NUMA node; without CPUs it is a device's memory."""

    index: int
    cpus: str


class PortResult(msgspec.Struct, frozen=True, kw_only=True):
    """A port with what is concluded of it."""

    nic: str
    device: str | None
    port: int | None
    state: str | None
    phys: str | None
    rate_gbps: float | None
    """As printed; a placeholder on a port that is down."""
    speed_gbps: float | None
    """Null unless the port is up."""
    link_layer: str | None
    active_mtu: int | None
    max_mtu: int | None
    netdev: str | None
    netdev_mtu: int | None
    lid: int | None
    sm_lid: int | None
    healthy: bool | None
    degraded: bool
    why: str | None
    role: str
    reason: str
    gid: GidChoice | None


class UcxResult(msgspec.Struct, frozen=True, kw_only=True):
    """What ``ucx_info`` showed."""

    version: str | None
    built_with_cuda: bool | None
    built_with_gdrcopy: bool | None
    built_with_verbs: bool | None
    transports: list[str] | None
    net_devices: list[str]
    dead_devices: list[str]
    rails: int | None
    cuda_ipc: bool | None
    gdr_copy: bool | None
    rc_mlx5: bool | None
    gpudirect_rdma: bool | None
    dmabuf: bool | None
    verdict: str


class NodeResult(msgspec.Struct, frozen=True, kw_only=True):
    """One node."""

    host: str
    sources: list[str]
    gpus: list[GpuResult]
    nics: list[Nic]
    nic_names: dict[str, str]
    """RDMA device by label; a NIC without a known name is absent."""
    relations: dict[str, dict[str, str | None]]
    nvlinks: dict[str, dict[str, int | None]]
    """Bonded NVLinks between GPUs; 0: none, null: cannot be known."""
    p2p: dict[str, dict[str, str | None]]
    nearest_nics: dict[str, Nearest]
    ports: list[PortResult]
    verdict: str
    """On the compute fabric's ports."""
    paths: list[PathCheck]
    numa_nodes: list[NumaResult]
    pci: list[PciDevice]
    software: dict[str, str]
    virtual_machine: bool | None
    ucx: UcxResult | None
    ucx_log: list[LogFinding]
    texts: dict[str, list[str]]
    """What was found in each text."""
    notes: list[str]
    unread: list[str]
    """Lines that were not understood."""


class RankResult(msgspec.Struct, frozen=True, kw_only=True):
    """The proposed place of a rank."""

    rank: int
    host: str
    local_rank: int
    gpu: str | None
    device: str | None
    nics: list[str]
    ucx_net_devices: str | None
    relation: str | None
    cores: str
    why: dict[str, str]
    warnings: list[str]


class DifferenceResult(msgspec.Struct, frozen=True):
    """A fact that is not equal on all nodes."""

    what: str
    usual: str
    odd: dict[str, str]
    """Other values by host."""


class TopoResult(msgspec.Struct, frozen=True, kw_only=True):
    """The whole."""

    schema: str = SCHEMA
    nodes: list[NodeResult]
    alike: list[list[str]]
    ranks: list[RankResult]
    differences: list[DifferenceResult]
    notes: list[str]


def topo_result(survey: Survey, net_devices: dict[int, NetDevices] | None = None) -> TopoResult:
    """Return what is written.

    Args:
        survey: the conclusions.
        net_devices: what each rank's UCX_NET_DEVICES should be, by rank.
    """
    names = survey.names
    return TopoResult(
        nodes=[_node(node, name) for node, name in zip(survey.nodes, names, strict=True)],
        alike=[[names[node] for node in group] for group in survey.alike],
        ranks=[
            _rank(place, names[place.node], (net_devices or {}).get(place.rank))
            for place in survey.placement.ranks
        ],
        differences=[
            DifferenceResult(
                d.what,
                d.usual,
                {names[node]: value for value, nodes in d.odd for node in nodes},
            )
            for d in survey.differences
        ],
        notes=list(survey.placement.notes),
    )


def _node(node: SurveyNode, name: str) -> NodeResult:
    machine = node.machine
    labels = [gpu.label for gpu in machine.gpus]
    real = {nic.label: nic.name or nic.label for nic in machine.nics}
    nearest = {}
    for label in labels:
        path, nics = machine.nearest_nics(label)
        nearest[label] = Nearest(path.name if path else None, [real[nic] for nic in nics])
    texts = node.texts
    return NodeResult(
        host=name,
        sources=list(machine.sources),
        gpus=[_gpu(gpu) for gpu in machine.gpus],
        nics=list(machine.nics),
        nic_names={nic.label: nic.name for nic in machine.nics if nic.name},
        relations={
            a: {b: machine.matrix.cell(a, b) for b in machine.matrix.names}
            for a in machine.matrix.names
        },
        nvlinks={a: {b: machine.matrix.nvlinks(a, b) for b in labels if b != a} for a in labels},
        p2p={a: {b: machine.p2p.cell(a, b) for b in machine.p2p.names} for a in machine.p2p.names},
        nearest_nics=nearest,
        ports=[_port(machine, port) for port in node.fabric.ports],
        verdict=node.fabric.verdict,
        paths=list(node.paths),
        numa_nodes=[NumaResult(numa.index, format_cpus(numa.cpus)) for numa in machine.numa_nodes],
        pci=list(machine.pci),
        software=machine.software,
        virtual_machine=machine.virtual,
        ucx=_ucx(texts),
        ucx_log=list(texts.log),
        texts={name: list(kinds) for name, kinds in texts.kinds.items()},
        notes=[*machine.notes, *node.remarks],
        unread=list(texts.unread),
    )


def _gpu(gpu: Gpu) -> GpuResult:
    return GpuResult(
        label=gpu.label,
        index=gpu.index,
        name=gpu.name or None,
        uuid=gpu.uuid or None,
        pci=gpu.pci,
        minor=gpu.minor,
        numa=gpu.numa,
        cpus=format_cpus(gpu.cpus) if gpu.cpus is not None else None,
        cpu_affinity=gpu.cpu_affinity,
        numa_affinity=gpu.numa_affinity,
        gpu_numa_id=gpu.gpu_numa_id,
        pcie=gpu.link,
        pcie_generation=gpu.link.generation,
        pcie_max_generation=gpu.link.max_generation,
        nvlinks=gpu.nvlinks,
        mig_mode=gpu.mig_mode,
        mig=list(gpu.mig),
    )


def _port(machine: Machine, found: FabricPort) -> PortResult:
    nic = machine.nic(found.nic)
    port = next((p for p in nic.ports if p.number == found.port), None) if nic else None
    told = port or Port(0)
    gid = None
    if port is not None and port.gids:
        gid = GidChoice(*choose_gid(port))
    return PortResult(
        nic=found.nic,
        device=found.device,
        port=found.port,
        state=told.state,
        phys=told.phys,
        rate_gbps=told.rate_gbps,
        speed_gbps=told.speed_gbps if told.active is not None else None,
        link_layer=told.link_layer,
        active_mtu=told.active_mtu,
        max_mtu=told.max_mtu,
        netdev=told.netdev,
        netdev_mtu=told.netdev_mtu,
        lid=told.lid,
        sm_lid=told.sm_lid,
        healthy=found.health.healthy,
        degraded=found.health.degraded,
        why=found.health.why or None,
        role=found.role,
        reason=found.reason,
        gid=gid,
    )


def _ucx(texts: Texts) -> UcxResult | None:
    ucx = texts.ucx
    if not any("ucx" in kinds for kinds in texts.kinds.values()):
        return None
    transports = ucx.transports
    return UcxResult(
        version=ucx.version,
        built_with_cuda=ucx.built_with_cuda,
        built_with_gdrcopy=ucx.built_with_gdrcopy,
        built_with_verbs=ucx.built_with_verbs,
        transports=None if transports is None else list(transports),
        net_devices=list(ucx.net_devices),
        dead_devices=list(ucx.dead_devices),
        rails=ucx.rails,
        cuda_ipc=ucx.has("cuda_ipc"),
        gdr_copy=ucx.has("gdr_copy"),
        rc_mlx5=ucx.has("rc_mlx5"),
        gpudirect_rdma=ucx.gpudirect_rdma,
        dmabuf=ucx.dmabuf,
        verdict=ucx.verdict,
    )


def _rank(place: RankPlace, host: str, devices: NetDevices | None) -> RankResult:
    return RankResult(
        rank=place.rank,
        host=host,
        local_rank=place.local_rank,
        gpu=place.gpu,
        device=place.device,
        nics=list(place.nics),
        ucx_net_devices=",".join(place.net_devices) if place.net_devices else None,
        relation=place.path.name if place.path is not None else None,
        cores=format_cpus(place.cores),
        why={"gpu": place.gpu_reason, "nics": place.nic_reason, "cores": place.core_reason},
        warnings=list(devices.warnings) if devices is not None else [],
    )
