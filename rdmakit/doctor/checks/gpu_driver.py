"""The NVIDIA driver: its kind and version, and whether all GPUs are visible here."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rdmakit.doctor.context import Context
from rdmakit.doctor.facts import in_container, kernel_log, open_driver, query, release
from rdmakit.doctor.model import Check, Finding, Status

__all__ = ["CHECKS"]

_NEEDS_OPEN = re.compile(r"\b(G[HB]\d00|B[123]00|RTX 50\d0|RTX PRO \d+ Blackwell)\b", re.I)
"""Grace and Blackwell: NVIDIA's proprietary modules do not serve them."""


def _driver(context: Context) -> Iterator[Finding]:
    version = context.machine.software.get("driver", "") or query(context).driver
    kind = open_driver(context)
    if not version:
        on_bus = sum(device.kind == "gpu" for device in context.machine.pci)
        if on_bus and context.tree.listdir("/proc/sys/kernel"):
            yield DRIVER.finding(
                Status.FAIL,
                f"{on_bus} NVIDIA GPU(s) on the PCI bus, and no NVIDIA driver is loaded",
                expected="a loaded driver",
                cure="modprobe nvidia; dmesg | grep -i nvrm says why it does not load; after a "
                "kernel update: dkms autoinstall",
                urgency=5,
            )
        else:
            yield DRIVER.finding(Status.UNKNOWN, "the driver's version is not in these sources")
        return
    fussy = next((g.name for g in context.machine.gpus if _NEEDS_OPEN.search(g.name)), "")
    if fussy and kind is False:
        yield DRIVER.finding(
            Status.FAIL,
            f"{version}, proprietary kernel modules, which do not serve {fussy}",
            expected="open kernel modules",
            cure="install the open kernel modules (nvidia-open, nvidia-driver-NNN-open), reboot",
            urgency=5,
        )
        return
    words = {True: "open kernel modules", False: "proprietary kernel modules", None: ""}[kind]
    told = f"{version}, {words}" if words else version
    yield DRIVER.finding(Status.OK, told)


def _match(context: Context) -> Iterator[Finding]:
    running = context.machine.software.get("driver", "")
    told = query(context)
    problem = told.problem if "mismatch" in told.problem.lower() else ""
    problem = problem or next((n for n in context.machine.notes if "version mismatch" in n), "")
    refused = kernel_log(context).mismatch
    library = told.driver
    installed = context.read("/sys/module/nvidia/version") or ""
    module = re.search(r"Kernel Module(?: for \S+)?\s+(\d[\d.]+)", _version_file(context))
    kernel = module[1] if module else installed
    if problem or (refused and kernel and refused[-1] != kernel and not told.gpus):
        other = f"; the libraries are of {refused[-1]}" if refused else ""
        yield MATCH.finding(
            Status.FAIL,
            f"{problem or 'the kernel module refused a library'}: the kernel module is "
            f"{kernel or 'of another version'}{other}",
            expected="kernel module and libraries of one version",
            cure="reboot, or rmmod nvidia_peermem nvidia_uvm nvidia_drm nvidia_modeset nvidia && "
            "modprobe nvidia; in a container start it again with the host's libraries",
            urgency=6,
        )
    elif library and kernel and release(library) != release(kernel):
        yield MATCH.finding(
            Status.FAIL,
            f"libraries {library}, kernel module {kernel}",
            expected="one version",
            cure="reboot",
            urgency=6,
        )
    elif library or told.gpus or "NVML" in context.machine.sources:
        yield MATCH.finding(Status.OK, f"both {library or kernel or running or 'answer'}")
    else:
        yield MATCH.finding(Status.UNKNOWN, "neither NVML nor nvidia-smi -q answered here")


def _version_file(context: Context) -> str:
    return context.read("/proc/driver/nvidia/version") or ""


def _closed(context: Context) -> tuple[list[str], int]:
    """Return the device files that are not here, and how many should be; 1 where unknown."""
    if not context.live or not context.machine.software.get("driver"):
        return [], 1
    if context.tree.exists("/dev/dxg"):  # Windows' subsystem for Linux has that one instead
        return [], 1
    minors = [gpu.minor for gpu in context.machine.gpus if gpu.minor is not None]
    paths = ["/dev/nvidiactl", *(f"/dev/nvidia{minor}" for minor in minors)]
    # Outside a container the first CUDA process makes it.
    paths += ["/dev/nvidia-uvm"] if in_container(context) else []
    return [path for path in paths if not context.tree.exists(path)], len(paths)


def _visible(context: Context) -> Iterator[Finding]:
    on_bus = [d.address for d in context.machine.pci if d.kind == "gpu"]
    here = [gpu for gpu in context.machine.gpus if gpu.pci is not None]
    known = {gpu.pci for gpu in here}
    hidden = [address for address in on_bus if address not in known] if here else []
    container = in_container(context)
    closed, every = _closed(context)
    if len(closed) == every or "/dev/nvidiactl" in closed:
        yield VISIBLE.finding(
            Status.FAIL,
            f"{', '.join(closed[:6])} {'is' if len(closed) == 1 else 'are'} not here"
            + (f" ({container})" if container else ""),
            expected="the driver's device files",
            cure="docker run --gpus all (NVIDIA Container Toolkit), Apptainer --nv, Kubernetes a "
            "limit of nvidia.com/gpu"
            if container
            else "nvidia-modprobe -u -c 0, or run nvidia-smi once as root",
            urgency=6,
        )
    elif hidden or closed:
        dead = [xid.pci for xid in kernel_log(context).xids if xid.number == 79]
        yield VISIBLE.finding(
            Status.WARN,
            f"{len(here)} of {len(on_bus)} GPUs are visible: not {', '.join(hidden[:8])}"
            if hidden
            else f"{', '.join(closed[:8])} not here",
            expected=f"{max(len(on_bus), len(here))} GPUs",
            cure="reboot the node: GPU(s) fell off the bus"
            if set(dead) & set(hidden)
            else "give the job all GPUs of the node and mask them by CUDA_VISIBLE_DEVICES (Slurm: "
            "--gpus-per-node with --gpu-bind=none; docker run --gpus all); if nothing hides them: "
            "dmesg | grep -i nvrm",
            urgency=30,
        )
    else:
        total = len(context.machine.gpus)
        yield VISIBLE.finding(Status.OK, f"{total} GPU{'s' if total != 1 else ''}")


DRIVER = Check(
    "gpu.driver",
    "NVIDIA driver",
    "Without a driver there is no GPU; its version decides which CUDA it serves.",
    _driver,
    needs=("gpu",),
)

MATCH = Check(
    "gpu.version_match",
    "Driver and libraries",
    "After an update without a reboot the libraries do not fit the loaded kernel module: every "
    "new CUDA process fails.",
    _match,
    needs=("gpu",),
)

VISIBLE = Check(
    "gpu.visible",
    "Visible GPUs",
    "Ranks that see only their own GPU cannot use CUDA IPC with the others; a missing device "
    "file hides all of them.",
    _visible,
    needs=("gpu",),
)

CHECKS = (DRIVER, MATCH, VISIBLE)
