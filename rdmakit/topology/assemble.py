"""One machine out of what NVML, sysfs and other tools' texts say of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rdmakit.topology.cpulist import parse_cpus
from rdmakit.topology.facts import NvmlFacts, NvmlGpu, SysfsFacts
from rdmakit.topology.model import (
    Gpu,
    Machine,
    Matrix,
    Nic,
    PciDevice,
    PcieLink,
    Port,
    natural,
)
from rdmakit.topology.parsers.smi_affinity import Affinity
from rdmakit.topology.parsers.smi_matrix import SmiMatrix
from rdmakit.topology.texts import Texts, merge_nics
from rdmakit.topology.tree import PciTree
from rdmakit.topology.words import Path, Relation

__all__ = ["assemble"]

_SPEEDS = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0, 7: 128.0}


def assemble(
    sysfs: SysfsFacts | None = None,
    nvml: NvmlFacts | None = None,
    texts: Texts | None = None,
    software: Mapping[str, str] | None = None,
) -> Machine:
    """Return the machine. NVML knows GPUs best, sysfs the tree and NICs, texts fill the rest."""
    sysfs = sysfs or SysfsFacts()
    nvml = nvml or NvmlFacts()
    texts = texts or Texts()
    notes = [*sysfs.notes, *texts.problems]
    pci = sysfs.pci or texts.lspci.devices
    gpus = _gpus(sysfs, nvml, texts, pci, notes)
    nics = _nics(sysfs, texts, notes)
    tree = PciTree(pci, len([node for node in sysfs.numa_nodes if node.cpus]))
    gpus = tuple(
        replace(g, numa=tree.numa(g.pci)) if g.numa is None and g.pci and sysfs.pci else g
        for g in gpus
    )
    matrix = _matrix(gpus, nics, tree, nvml, texts.matrix)
    if not matrix.nvlink_known and len(gpus) > 1:
        notes.append(
            "NVLink is not known from these sources: between GPUs their PCIe relation is shown"
        )
    if sysfs.virtual and sysfs.pci and texts.matrix is None and (len(gpus) > 1 or nics):
        notes.append(
            "this is a virtual machine: its PCI tree is the hypervisor's, so PIX to SYS may not "
            "be the real distances"
        )
    told = dict(sysfs.software)
    told |= {"driver": nvml.driver} if nvml.driver else {}
    told |= {"CUDA of the driver": nvml.cuda} if nvml.cuda else {}
    told |= {"UCX": texts.ucx.version} if texts.ucx.version else {}
    return Machine(
        (software or {}).get("host") or sysfs.host,
        gpus,
        nics,
        matrix,
        sysfs.numa_nodes,
        sysfs.siblings,
        sysfs.available,
        pci,
        _p2p(gpus, nvml, texts.p2p),
        {**told, **{k: v for k, v in (software or {}).items() if k != "host"}},
        sysfs.virtual,
        _sources(sysfs, nvml, texts),
        tuple(dict.fromkeys(notes)),
    )


def _sources(sysfs: SysfsFacts, nvml: NvmlFacts, texts: Texts) -> tuple[str, ...]:
    found = ["NVML"] if nvml.gpus else []
    found += ["sysfs"] if sysfs != SysfsFacts() else []
    kinds = {kind for own in texts.kinds.values() for kind in own}
    titles = {
        "matrix": "nvidia-smi topo",
        "list": "nvidia-smi -L",
        "ports": "ibstat, ibstatus, ibv_devinfo or rdma link",
        "gids": "show_gids",
        "lspci": "lspci",
        "ucx": "ucx_info",
        "log": "a UCX log",
        "query": "nvidia-smi -q",
        "kernel": "dmesg",
        "modules": "lsmod",
    }
    return (*found, *(title for kind, title in titles.items() if kind in kinds))


def _gpus(
    sysfs: SysfsFacts,
    nvml: NvmlFacts,
    texts: Texts,
    pci: Sequence[PciDevice],
    notes: list[str],
) -> tuple[Gpu, ...]:
    by_pci = {gpu.pci: gpu for gpu in sysfs.gpus}
    if nvml.gpus:
        gpus = [_with_nvml(gpu, by_pci.get(gpu.pci)) for gpu in nvml.gpus]
        hidden = len(sysfs.gpus) - len(gpus)
        if hidden > 0:
            notes.append(
                f"{hidden} of {len(sysfs.gpus)} GPUs are on the PCI bus but not visible here "
                "(container, job's device limits, or another driver)"
            )
    elif sysfs.gpus:
        gpus = list(sysfs.gpus)
    else:
        gpus = _text_gpus(texts, pci)
    by_label = texts.matrix.affinity if texts.matrix is not None else {}
    listed = {gpu.index: gpu for gpu in texts.listed.gpus}
    found = []
    for gpu in gpus:
        told, named = by_label.get(gpu.label, Affinity()), listed.get(gpu.index)
        numa = int(told.numa) if told.numa and told.numa.isdigit() else None
        found.append(
            replace(
                gpu,
                name=gpu.name or (named.name if named else ""),
                uuid=gpu.uuid or (named.uuid if named else ""),
                mig=gpu.mig or (named.mig if named else ()),
                mig_mode=True if named and named.mig else gpu.mig_mode,
                cpu_affinity=told.cpu,
                numa_affinity=told.numa,
                gpu_numa_id=told.gpu_numa or gpu.gpu_numa_id,
                cpus=gpu.cpus or parse_cpus(told.cpu),
                numa=gpu.numa if gpu.numa is not None else numa,
            )
        )
    return tuple(found)


def _text_gpus(texts: Texts, pci: Sequence[PciDevice]) -> list[Gpu]:
    """Return GPUs that only texts tell of; nvidia-smi numbers them by PCI address."""
    numbers = {gpu.index for gpu in texts.listed.gpus}
    for matrix in (texts.matrix, texts.p2p):
        numbers |= {int(label[3:]) for label in (matrix.gpus if matrix is not None else ())}
    seen = sorted((d for d in pci if d.kind == "gpu"), key=lambda d: d.address)
    if not numbers:
        numbers = set(range(len(seen)))
    gpus = [Gpu(index) for index in sorted(numbers)]
    if len(seen) == len(gpus):
        gpus = [
            replace(gpu, pci=d.address, numa=d.numa, link=d.link)
            for gpu, d in zip(gpus, seen, strict=True)
        ]
    return gpus


def _with_nvml(gpu: NvmlGpu, known: Gpu | None) -> Gpu:
    known = known or Gpu(gpu.index)
    link = PcieLink(
        _SPEEDS.get(gpu.generation or 0) or known.link.speed,
        gpu.width or known.link.width,
        _SPEEDS.get(gpu.max_generation or 0) or known.link.max_speed,
        gpu.max_width or known.link.max_width,
    )
    numa = gpu.numa[0] if gpu.numa and len(gpu.numa) == 1 else None
    return replace(
        known,
        index=gpu.index,
        name=gpu.name or known.name,
        uuid=gpu.uuid or known.uuid,
        pci=gpu.pci or known.pci,
        minor=gpu.minor if gpu.minor is not None else known.minor,
        numa=known.numa if known.numa is not None else numa,
        cpus=gpu.cpus or known.cpus,
        gpu_numa_id=str(gpu.own_numa) if gpu.own_numa is not None else None,
        link=link,
        nvlinks=len(gpu.nvlinks),
        nvlink_version=gpu.nvlink_version,
        mig_mode=gpu.mig_mode,
        mig=gpu.mig,
    )


def _nics(sysfs: SysfsFacts, texts: Texts, notes: list[str]) -> tuple[Nic, ...]:
    named = merge_nics(sysfs.nics, texts.ports.nics)
    ucx = [Nic(d.name, d.name) for d in texts.ucx.domains if d.component == "ib" and d.name]
    tables = texts.gids.tables
    listed = [
        Nic(name, name, ports=(Port(number, gids=gids),)) for (name, number), gids in tables.items()
    ]
    named = merge_nics(named, tuple(listed))
    if not named:
        named = tuple(ucx)
    dead = set(texts.ucx.dead_devices)
    if dead:
        notes.append(f"UCX finds no usable port of {', '.join(sorted(dead))}")
    if texts.matrix is None:
        return tuple(sorted(named, key=lambda nic: natural(nic.label)))
    by_name = {nic.name: nic for nic in named}
    found: list[Nic] = []
    for label in texts.matrix.nics:
        name = texts.matrix.nic_names.get(label)
        known = by_name.pop(name, None) if name is not None else None
        found.append(replace(known, label=label) if known is not None else Nic(label, name))
    if by_name:
        left = sorted((nic for nic in by_name.values()), key=lambda nic: natural(nic.label))
        names = ", ".join(nic.label for nic in left)
        unnamed = any(nic.name is None for nic in found)
        notes.append(
            f"{names}: not in the matrix"
            + (", whose NICs have no names: which is which cannot be known" if unnamed else "")
        )
        found += left
    return tuple(found)


def _matrix(
    gpus: Sequence[Gpu],
    nics: Sequence[Nic],
    tree: PciTree,
    nvml: NvmlFacts,
    text: SmiMatrix | None,
) -> Matrix:
    """Return the relations: as printed where a text has them, else from NVML and the tree."""
    names = tuple([gpu.label for gpu in gpus] + [nic.label for nic in nics])
    places = [gpu.pci for gpu in gpus] + [nic.pci for nic in nics]
    links = _nvlinks(nvml)
    by_index = {gpu.index: place for place, gpu in enumerate(nvml.gpus)}

    def cell(i: int, j: int) -> str | None:
        printed = text.matrix.cell(names[i], names[j]) if text is not None else None
        if printed is not None:
            return printed
        if i == j:
            return "X"
        if i < len(gpus) and j < len(gpus):
            a, b = (by_index.get(gpus[x].index) for x in (i, j))
            if a is not None and b is not None:
                if links[a][b]:
                    return str(Relation(Path.NV, links[a][b]))
                if nvml.ancestors and nvml.ancestors[a][b]:
                    return nvml.ancestors[a][b]
        a_pci, b_pci = places[i], places[j]
        if a_pci is None or b_pci is None:
            return None
        found = tree.relation(a_pci, b_pci)
        if found is None:
            return None
        # Two RDMA devices of one PCI function are on one card.
        return "PIX" if found.path is Path.SELF else str(found)

    whole = range(len(names))
    return Matrix(
        names,
        tuple(tuple(cell(i, j) for j in whole) for i in whole),
        nvlink_known=(
            text.matrix.nvlink_known if text is not None else bool(nvml.gpus) or len(gpus) < 2
        ),
    )


def _nvlinks(nvml: NvmlFacts) -> list[list[int]]:
    """Return the bonded NVLinks between GPUs, by their place in NVML's list.

    Links that end at the other GPU count directly; through switches a pair has as many as the
    GPU with fewer. Where other ends are hidden, NVML's peer status says whether NVLink joins
    the pair.
    """
    count = [[0] * len(nvml.gpus) for _ in nvml.gpus]
    for i, a in enumerate(nvml.gpus):
        for j, b in enumerate(nvml.gpus):
            if i == j:
                continue
            direct = sum(link.remote is not None and link.remote == b.pci for link in a.nvlinks)
            by_switch = min(sum(link.kind == "switch" for link in gpu.nvlinks) for gpu in (a, b))
            count[i][j] = direct or by_switch
            joined = nvml.p2p_nvlink[i][j] if nvml.p2p_nvlink else None
            hidden = all(any(link.kind is None for link in gpu.nvlinks) for gpu in (a, b))
            if not count[i][j] and joined and hidden:
                count[i][j] = min(len(a.nvlinks), len(b.nvlinks))
    return count


def _p2p(gpus: Sequence[Gpu], nvml: NvmlFacts, text: SmiMatrix | None) -> Matrix:
    if text is not None:
        return text.matrix
    if not nvml.p2p:
        return Matrix()
    names = tuple(gpu.label for gpu in gpus)
    return Matrix(names, nvml.p2p, nvlink_known=False)
