"""The machine against the values that are expected of its type."""

from __future__ import annotations

from collections.abc import Iterator

from rdmakit.doctor.context import Context
from rdmakit.doctor.facts import compute_ports, open_driver, release
from rdmakit.doctor.model import Check, Finding, Status
from rdmakit.doctor.profile import Profile, choose_profile
from rdmakit.topology.model import PcieLink

__all__ = ["CHECKS"]


def _profile(context: Context) -> Profile:
    if context.profile.name:
        return context.profile
    return choose_profile(context.machine, context.read("/sys/class/dmi/id/product_name") or "")


def _result(check: Check, profile: Profile, bad: list[Finding], told: list[str]) -> list[Finding]:
    if not profile.name:
        text = "no profile is for this type of machine (--profile FILE gives one)"
        return [check.finding(Status.SKIPPED, text)]
    if bad:
        return bad
    if not told:
        text = f"{profile.name}: nothing of what it expects is in these sources"
        return [check.finding(Status.SKIPPED, text)]
    return [check.finding(Status.OK, f"{profile.name}: {', '.join(told)}")]


def _links(
    check: Check, title: str, link: PcieLink, generation: int | None, lanes: int | None
) -> Finding | None:
    """Return what a link lacks. Its generation by what it can do: an idle GPU lowers it."""
    best, width = link.max_generation or link.generation, link.width or link.max_width
    lacks = []
    if generation is not None and best is not None and best < generation:
        lacks.append(f"Gen{best}")
    if lanes is not None and width is not None and width < lanes:
        lacks.append(f"x{width}")
    if not lacks:
        return None
    return check.finding(
        Status.WARN,
        f"PCIe {' '.join(lacks)}",
        subject=title,
        expected=" ".join(
            [*([f"Gen{generation}"] if generation else []), *([f"x{lanes}"] if lanes else [])]
        ),
        cure="lspci -vvv -s ADDRESS (LnkCap, LnkSta): reseat the card, check riser and BIOS",
        urgency=34,
    )


def _gpus(context: Context) -> Iterator[Finding]:
    profile = _profile(context)
    want, gpus = profile.expect, context.machine.gpus
    bad: list[Finding] = []
    told = [f"{len(gpus)} GPUs"] if want.gpus is not None else []
    if want.gpus is not None and len(gpus) < want.gpus:
        on_bus = sum(device.kind == "gpu" for device in context.machine.pci)
        lost = 0 < on_bus < want.gpus
        bad.append(
            GPUS.finding(
                Status.FAIL if lost else Status.WARN,
                f"{len(gpus)} GPUs" + (f", {on_bus} on the PCI bus" if on_bus else ""),
                expected=f"{want.gpus} ({profile.name})",
                cure="dmesg | grep -i -e nvrm -e pcie; power the node off and on; then have the "
                "GPU looked at"
                if lost
                else "give the job all GPUs of the node (Slurm --gpus-per-node, docker --gpus all)",
                urgency=14 if lost else 44,
            )
        )
    for gpu in gpus:
        if want.nvlinks is not None and gpu.nvlinks is not None and not gpu.mig_mode:
            told.append(f"{gpu.label} {gpu.nvlinks} NVLinks")
            if gpu.nvlinks < want.nvlinks:
                bad.append(
                    GPUS.finding(
                        Status.FAIL if gpu.nvlinks == 0 else Status.WARN,
                        f"{gpu.nvlinks} NVLinks are active",
                        subject=gpu.label,
                        expected=f"{want.nvlinks} ({profile.name})",
                        cure=f"nvidia-smi nvlink -s -i {gpu.index}; systemctl restart "
                        "nvidia-fabricmanager; reset the GPUs or reboot",
                        urgency=26,
                    )
                )
        finding = _links(GPUS, gpu.label, gpu.link, want.gpu_pcie, want.gpu_lanes)
        bad += [finding] if finding is not None else []
    yield from _result(GPUS, profile, bad, told[:1])


def _rails(context: Context) -> Iterator[Finding]:
    profile = _profile(context)
    want, ports = profile.expect, list(compute_ports(context))
    bad: list[Finding] = []
    told = []
    if want.rails is not None and context.machine.nics:
        told.append(f"{len(ports)} rails")
        if len(ports) < want.rails:
            bad.append(
                RAILS.finding(
                    Status.FAIL,
                    f"{len(ports)} ports of the compute fabric",
                    expected=f"{want.rails} ({profile.name})",
                    cure="lspci | grep -i -e mellanox -e infiniband shows whether the cards are "
                    "there; mlxconfig -d DEVICE q LINK_TYPE_P1 shows what their ports are set to",
                    urgency=25,
                )
            )
    for own, nic, port in ports:
        rate = port.speed_gbps if port is not None and port.active else None
        if want.rate_gbps is not None and rate:
            told.append(f"{rate:g} Gb/s")
            if rate < want.rate_gbps:
                bad.append(
                    RAILS.finding(
                        Status.FAIL if rate <= want.rate_gbps / 2 else Status.WARN,
                        f"{rate:g} Gb/s",
                        subject=own.title,
                        expected=f"{want.rate_gbps:g} Gb/s ({profile.name})",
                        cure=f"mlxlink -d {nic.name or nic.label} -m shows cable and lanes; look "
                        "at the switch port's speed",
                        urgency=25,
                    )
                )
        finding = _links(RAILS, own.title, nic.link, want.nic_pcie, want.nic_lanes)
        bad += [finding] if finding is not None else []
    yield from _result(RAILS, profile, bad, list(dict.fromkeys(told)))


def _software(context: Context) -> Iterator[Finding]:
    profile = _profile(context)
    want, software = profile.expect, context.machine.software
    bad: list[Finding] = []
    told = []
    for name, least, cure in (
        ("driver", want.driver_least, "install a newer NVIDIA driver and reboot"),
        ("kernel", want.kernel_least, "install a newer kernel and reboot"),
    ):
        has, needs = release(software.get(name)), release(least)
        if has is None or needs is None:
            continue
        told.append(f"{name} {software[name]}")
        if has < needs:
            bad.append(
                SOFTWARE.finding(
                    Status.FAIL,
                    f"{name} {software[name]}",
                    expected=f"{least} or newer ({profile.name})",
                    cure=cure,
                    urgency=36,
                )
            )
    kind = open_driver(context)
    if want.open_modules is not None and kind is not None and kind != want.open_modules:
        bad.append(
            SOFTWARE.finding(
                Status.FAIL,
                f"{'open' if kind else 'proprietary'} NVIDIA kernel modules",
                expected=f"{'open' if want.open_modules else 'proprietary'} ({profile.name})",
                cure="install the other kind of kernel modules (nvidia-open) and reboot",
                urgency=36,
            )
        )
    nodes = [node for node in context.machine.numa_nodes if node.cpus]
    if want.numa_nodes is not None and nodes:
        told.append(f"{len(nodes)} NUMA nodes")
        if len(nodes) != want.numa_nodes:
            bad.append(
                SOFTWARE.finding(
                    Status.WARN,
                    f"{len(nodes)} NUMA nodes with CPUs",
                    expected=f"{want.numa_nodes} ({profile.name})",
                    cure="BIOS: NUMA nodes per socket (NPS, Sub-NUMA clustering), as the maker "
                    "delivers it",
                    urgency=72,
                )
            )
    yield from _result(SOFTWARE, profile, bad, told)


GPUS = Check(
    "profile.gpus",
    "GPUs against the type of machine",
    "A GPU that is missing, or one that lost links, is seen only by who knows how many there "
    "should be.",
    _gpus,
    needs=("gpu",),
)
RAILS = Check(
    "profile.rails",
    "Compute ports against the type of machine",
    "Where all rails run at half rate none differs from its equals.",
    _rails,
    needs=("rdma",),
)
SOFTWARE = Check(
    "profile.software",
    "Driver, kernel and BIOS against the type of machine",
    "Older drivers do not know the GPU; another NUMA setting moves ranks away from their NICs.",
    _software,
)

CHECKS = (GPUS, RAILS, SOFTWARE)
