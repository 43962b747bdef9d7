"""Whether a NIC can be given GPU memory: dma-buf, nvidia_peermem, and one of the two at least.

These are conditions, no proof: that a path is used shows only in traffic.
"""

from __future__ import annotations

from collections.abc import Iterator

from rdmakit.doctor.context import Context
from rdmakit.doctor.facts import kernel_log, loaded, modules, open_driver, release, ucx_info
from rdmakit.doctor.model import Check, Finding, Status

__all__ = ["CHECKS", "gpudirect_cure", "impossible"]

_KERNEL, _DRIVER = (5, 12), (515,)
"""First Linux whose RDMA core imports dma-buf; first driver with open modules that export it."""
_CLIENTS = "/sys/kernel/mm/memory_peers"
_NAMES = ("nvidia_peermem", "nv_peer_mem")
_CURE = (
    "modprobe nvidia_peermem (and add it to /etc/modules-load.d); where it does not load, install "
    "the NVIDIA driver again after MLNX_OFED or DOCA, or use the open kernel modules on Linux 5.12 "
    "or newer for dma-buf"
)
_AGAIN = (
    "rmmod nvidia_peermem && modprobe nvidia_peermem; if it stays so, it was built without the "
    "RDMA stack that is loaded: install the NVIDIA driver again after MLNX_OFED or DOCA"
)


def impossible(context: Context) -> bool:
    """Return whether it is known that nothing here lets a NIC reach GPU memory."""
    return _dmabuf_state(context)[0] is False and _peermem_state(context)[0] is False


def gpudirect_cure(context: Context) -> str:
    """Return what gives a NIC GPU memory: the same words from whichever check asks."""
    idle = _peermem_state(context)[0] is False and any(loaded(context, n) for n in _NAMES)
    return _AGAIN if idle else _CURE


def _dmabuf_state(context: Context) -> tuple[bool | None, str]:
    """Return whether dma-buf can work by kernel and driver, and what speaks for that."""
    software = context.machine.software
    kernel, driver = release(software.get("kernel")), release(software.get("driver"))
    kind = open_driver(context)
    lacks = []
    if kernel is not None and kernel < _KERNEL:
        lacks.append(f"Linux {software['kernel']} is older than 5.12")
    if driver is not None and driver < _DRIVER:
        lacks.append(f"driver {software['driver']} is older than 515")
    if kind is False:
        lacks.append("the kernel modules are proprietary")
    if lacks:
        return False, ", ".join(lacks)
    if None in (kernel, driver, kind):
        return None, "kernel, driver or its kind is not known"
    return True, f"Linux {software['kernel']}, open kernel modules {software['driver']}"


def _peermem_state(context: Context) -> tuple[bool | None, str]:
    """Return whether nvidia_peermem serves: True, False, or None for what cannot be known."""
    clients = [n for n in context.tree.listdir(_CLIENTS) if n.startswith(("nv_mem", "nvidia"))]
    if clients:
        return True, f"registered with the RDMA core ({_CLIENTS}/{clients[0]})"
    states = {name: loaded(context, name) for name in _NAMES}
    name = next((name for name, state in states.items() if state), None)
    complaint = next(iter(kernel_log(context).peermem), "")
    if name is None:
        if None in states.values():
            return None, "whether nvidia_peermem is loaded is not known"
        return False, f"not loaded; the kernel said: {complaint}" if complaint else "not loaded"
    users = modules(context)
    if any(name in users.get(core, ()) for core in ("ib_core", "ib_uverbs", "ib_peer_mem")):
        return True, f"{name} is loaded and linked to the RDMA core"
    if not users:
        return None, f"{name} is loaded; whether it is registered with the RDMA core is not known"
    why = f"; the kernel said: {complaint}" if complaint else ""
    return False, f"{name} is loaded but not registered with the RDMA core{why}"


def _dmabuf(context: Context) -> Iterator[Finding]:
    able, why = _dmabuf_state(context)
    if able is None:
        yield DMABUF.finding(Status.UNKNOWN, why)
    elif able:
        yield DMABUF.finding(Status.OK, f"possible: {why}")
    elif (serves := _peermem_state(context)[0]) is None:
        text = f"not possible: {why}; whether nvidia_peermem takes its place is not known"
        yield DMABUF.finding(Status.UNKNOWN, text)
    elif serves:
        yield DMABUF.finding(Status.OK, f"not possible, nvidia_peermem takes its place: {why}")
    else:
        yield DMABUF.finding(
            Status.WARN,
            f"not possible: {why}",
            expected="Linux 5.12, driver 515 with open kernel modules, or nvidia_peermem",
            cure=gpudirect_cure(context),
            urgency=17,
        )


def _peermem(context: Context) -> Iterator[Finding]:
    serves, why = _peermem_state(context)
    is_loaded = any(loaded(context, name) for name in _NAMES)
    legacy = loaded(context, "nv_peer_mem") and not loaded(context, "nvidia_peermem")
    driver = release(context.machine.software.get("driver"))
    if serves is None:
        yield PEERMEM.finding(Status.UNKNOWN, why)
    elif is_loaded and not serves:
        yield PEERMEM.finding(
            Status.WARN,
            why,
            expected=f"an entry in {_CLIENTS}",
            cure=gpudirect_cure(context),
            urgency=16,
        )
    elif legacy and driver is not None and driver >= (470,):
        yield PEERMEM.finding(
            Status.WARN,
            f"{why}: the old nv_peer_mem, beside a driver that brings nvidia_peermem",
            expected="nvidia_peermem",
            cure="rmmod nv_peer_mem; apt remove nvidia-peer-memory-dkms; modprobe nvidia_peermem",
            urgency=60,
        )
    elif serves or _dmabuf_state(context)[0]:
        yield PEERMEM.finding(Status.OK, why if serves else f"{why}; dma-buf can take its place")
    else:
        yield PEERMEM.finding(
            Status.WARN,
            why,
            expected="loaded, or dma-buf possible",
            cure=gpudirect_cure(context),
            urgency=16,
        )


def _without_nic(context: Context) -> str:
    """Return what there is, and what can be proven of it and what cannot."""
    if not context.machine.gpus:
        return "neither an NVIDIA GPU nor an RDMA device is visible here"
    card = any(device.kind == "nic" for device in context.machine.pci)
    return (
        f"{len(context.machine.gpus)} NVIDIA GPU(s), but no RDMA device (InfiniBand, RoCE): no "
        "GPUDirect RDMA, and nothing of it can be proven on this node; between nodes GPU memory "
        "goes through host memory over TCP, which --path proves, as CUDA IPC between ranks of "
        "this node" + ("; rdma.devices tells of a card without its device" if card else "")
    )


def _gpudirect(context: Context) -> Iterator[Finding]:
    told = ucx_info(context)
    offered = told.gpudirect_rdma if told.has("cuda_copy") else None
    if not context.machine.nics:
        yield GPUDIRECT.finding(Status.SKIPPED, _without_nic(context))
        return
    if not context.machine.gpus and offered is None:
        yield GPUDIRECT.finding(Status.SKIPPED, "no NVIDIA GPU is visible here")
        return
    names = [gpu.name for gpu in context.machine.gpus]
    if names and all("GeForce" in name for name in names):
        yield GPUDIRECT.finding(
            Status.UNKNOWN, f"{names[0]}: NVIDIA offers GPUDirect RDMA on professional GPUs alone"
        )
        return
    able, why = _dmabuf_state(context)
    serves, peermem = _peermem_state(context)
    reasons = f"dma-buf: {why}; nvidia_peermem: {peermem}"
    if offered is False and told.domains:
        yield GPUDIRECT.finding(
            Status.FAIL,
            f"{told.verdict.removeprefix('FAIL for GPUDirect RDMA: ')}. {reasons}",
            expected="'cuda' among the memory types of UCX's ib memory domains",
            cure=gpudirect_cure(context),
            urgency=15,
        )
    elif able is False and serves is False:
        yield GPUDIRECT.finding(
            Status.FAIL,
            f"impossible: {reasons}",
            expected="dma-buf or nvidia_peermem",
            cure=gpudirect_cure(context),
            urgency=15,
        )
    elif able or serves or offered:
        ways = [name for name, state in (("dma-buf", able), ("nvidia_peermem", serves)) if state]
        ways += ["UCX offers to register GPU memory"] if offered else []
        yield GPUDIRECT.finding(
            Status.OK, f"possible ({', '.join(ways)}); that it is used is for rdmakit doctor --path"
        )
    else:
        yield GPUDIRECT.finding(Status.UNKNOWN, reasons)


GPUDIRECT = Check(
    "gpu.gpudirect",
    "GPUDirect RDMA possible",
    "Without nvidia_peermem or dma-buf every byte between nodes goes through host memory: 5 to "
    "20 times slower, without a word.",
    _gpudirect,
)

PEERMEM = Check(
    "gpu.peermem",
    "nvidia_peermem",
    "The module must not only be loaded but be registered with the RDMA core; built for another "
    "RDMA stack it is not, and nothing says so.",
    _peermem,
    needs=("gpu", "rdma"),
)

DMABUF = Check(
    "gpu.dmabuf",
    "dma-buf",
    "The way of newer kernels to give a NIC GPU memory, without another module.",
    _dmabuf,
    needs=("gpu", "rdma"),
)

CHECKS = (GPUDIRECT, PEERMEM, DMABUF)
