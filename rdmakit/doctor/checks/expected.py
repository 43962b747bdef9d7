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


class _Against:
    """What one check finds against the profile: what is bad, and what was looked at."""

    def __init__(self, check: Check, context: Context) -> None:
        self._check, self._profile = check, _profile(context)
        self.want = self._profile.expect
        self._bad: list[Finding] = []
        self._told: list[str] = []

    def told(self, text: str) -> None:
        """Note that something was looked at."""
        self._told.append(text)

    def bad(
        self, status: Status, found: str, expected: str, cure: str, urgency: int, subject: str = ""
    ) -> None:
        """Note what is not as expected."""
        self._bad.append(
            self._check.finding(
                status,
                found,
                subject=subject,
                expected=f"{expected} ({self._profile.name})",
                cure=cure,
                urgency=urgency,
            )
        )

    def link(self, title: str, link: PcieLink, generation: int | None, lanes: int | None) -> None:
        """Look at a PCIe link. Its generation by what it can do: an idle GPU lowers it."""
        best, width = link.max_generation or link.generation, link.width or link.max_width
        lacks = []
        if generation is not None and best is not None and best < generation:
            lacks.append(f"Gen{best}")
        if lanes is not None and width is not None and width < lanes:
            lacks.append(f"x{width}")
        if lacks:
            expected = [f"Gen{generation}"] if generation else []
            expected += [f"x{lanes}"] if lanes else []
            self.bad(
                Status.WARN,
                f"PCIe {' '.join(lacks)}",
                " ".join(expected),
                "lspci -vvv -s ADDRESS (LnkCap, LnkSta): reseat the card, check riser and BIOS",
                34,
                title,
            )

    def findings(self) -> list[Finding]:
        """Return what is bad, or one finding that says what was good or why nothing was seen."""
        name = self._profile.name
        if not name:
            text = "no profile is for this type of machine (--profile FILE gives one)"
            return [self._check.finding(Status.SKIPPED, text)]
        if self._bad:
            return self._bad
        if not self._told:
            text = f"{name}: nothing of what it expects is in these sources"
            return [self._check.finding(Status.SKIPPED, text)]
        told = ", ".join(dict.fromkeys(self._told))
        return [self._check.finding(Status.OK, f"{name}: {told}")]


def _gpus(context: Context) -> Iterator[Finding]:
    against = _Against(GPUS, context)
    want, gpus = against.want, context.machine.gpus
    if want.gpus is not None:
        against.told(f"{len(gpus)} GPUs")
        if len(gpus) < want.gpus:
            _missing_gpus(context, against, want.gpus)
    for gpu in gpus:
        if want.nvlinks is not None and gpu.nvlinks is not None and not gpu.mig_mode:
            against.told(f"{gpu.nvlinks} NVLinks")
            if gpu.nvlinks < want.nvlinks:
                against.bad(
                    Status.FAIL if gpu.nvlinks == 0 else Status.WARN,
                    f"{gpu.nvlinks} NVLinks are active",
                    f"{want.nvlinks}",
                    f"nvidia-smi nvlink -s -i {gpu.index}; systemctl restart "
                    "nvidia-fabricmanager; reset the GPUs or reboot",
                    26,
                    gpu.label,
                )
        against.link(gpu.label, gpu.link, want.gpu_pcie, want.gpu_lanes)
    yield from against.findings()


def _missing_gpus(context: Context, against: _Against, wanted: int) -> None:
    on_bus = sum(device.kind == "gpu" for device in context.machine.pci)
    found = f"{len(context.machine.gpus)} GPUs" + (f", {on_bus} on the PCI bus" if on_bus else "")
    if 0 < on_bus < wanted:
        against.bad(
            Status.FAIL,
            found,
            f"{wanted}",
            "dmesg | grep -i -e nvrm -e pcie; power the node off and on; then have the GPU "
            "looked at",
            14,
        )
    else:
        against.bad(
            Status.WARN,
            found,
            f"{wanted}",
            "give the job all GPUs of the node (Slurm --gpus-per-node, docker --gpus all)",
            44,
        )


def _rails(context: Context) -> Iterator[Finding]:
    against = _Against(RAILS, context)
    want, ports = against.want, list(compute_ports(context))
    if want.rails is not None and context.machine.nics:
        against.told(f"{len(ports)} rails")
        if len(ports) < want.rails:
            against.bad(
                Status.FAIL,
                f"{len(ports)} ports of the compute fabric",
                f"{want.rails}",
                "lspci | grep -i -e mellanox -e infiniband shows whether the cards are there; "
                "mlxconfig -d DEVICE q LINK_TYPE_P1 shows what their ports are set to",
                25,
            )
    for own, nic, port in ports:
        rate = port.speed_gbps if port is not None and port.active else None
        if want.rate_gbps is not None and rate:
            against.told(f"{rate:g} Gb/s")
            if rate < want.rate_gbps:
                against.bad(
                    Status.FAIL if rate <= want.rate_gbps / 2 else Status.WARN,
                    f"{rate:g} Gb/s",
                    f"{want.rate_gbps:g} Gb/s",
                    f"mlxlink -d {nic.name or nic.label} -m shows cable and lanes; look at the "
                    "switch port's speed",
                    25,
                    own.title,
                )
        against.link(own.title, nic.link, want.nic_pcie, want.nic_lanes)
    yield from against.findings()


def _software(context: Context) -> Iterator[Finding]:
    against = _Against(SOFTWARE, context)
    want, software = against.want, context.machine.software
    for name, least, cure in (
        ("driver", want.driver_least, "install a newer NVIDIA driver and reboot"),
        ("kernel", want.kernel_least, "install a newer kernel and reboot"),
    ):
        has, needs = release(software.get(name)), release(least)
        if has is None or needs is None:
            continue
        against.told(f"{name} {software[name]}")
        if has < needs:
            against.bad(Status.FAIL, f"{name} {software[name]}", f"{least} or newer", cure, 36)
    kind = open_driver(context)
    if want.open_modules is not None and kind is not None and kind != want.open_modules:
        against.bad(
            Status.FAIL,
            f"{'open' if kind else 'proprietary'} NVIDIA kernel modules",
            "open" if want.open_modules else "proprietary",
            "install the other kind of kernel modules (nvidia-open) and reboot",
            36,
        )
    nodes = [node for node in context.machine.numa_nodes if node.cpus]
    if want.numa_nodes is not None and nodes:
        against.told(f"{len(nodes)} NUMA nodes")
        if len(nodes) != want.numa_nodes:
            against.bad(
                Status.WARN,
                f"{len(nodes)} NUMA nodes with CPUs",
                f"{want.numa_nodes}",
                "BIOS: NUMA nodes per socket (NPS, Sub-NUMA clustering), as the maker delivers it",
                72,
            )
    yield from against.findings()


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
