"""Devices, memory, IPC handles and events of CUDA: with the modules beside it the door to the GPU.

Importing it does nothing. All calls are local. Nothing here waits for the device, except copies
named ``*_now``; whoever must wait polls :meth:`Event.done` together with its other sources of
progress.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
from ctypes import byref, c_char, c_int, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rdmakit.drivers import cuda_driver as driver
from rdmakit.drivers.cuda_driver import call, is_capturing
from rdmakit.errors import CudaError, UnsupportedError

__all__ = [
    "DeviceFacts",
    "DeviceMemory",
    "Event",
    "IpcHandle",
    "PinnedMemory",
    "PointerFacts",
    "activate",
    "available",
    "close_handle",
    "copy_async",
    "copy_now",
    "current_device",
    "current_stream",
    "device_facts",
    "export_handle",
    "flush_nic_writes",
    "free",
    "is_capturing",
    "open_handle",
    "pointer_facts",
    "wait_event",
    "why_not",
]


def why_not() -> str:
    """Return why CuPy and a GPU cannot be used here, or nothing. Makes no context."""
    try:
        driver.library()
    except OSError as exc:
        return f"no NVIDIA driver: {exc}"
    try:
        call("cuInit", 0)
        count = c_int()
        call("cuDeviceGetCount", byref(count))
    except CudaError as exc:
        return f"the NVIDIA driver finds no usable device: {exc}"
    if not count.value:
        return "no GPU is visible (CUDA_VISIBLE_DEVICES?)"
    try:
        importlib.import_module("cupy")
    except ImportError as exc:
        return f"CuPy cannot be imported: {exc}; install rdmakit[cuda12] or rdmakit[cuda13]"
    return ""


def available() -> bool:
    """Return whether CuPy and a GPU can be used here. See :func:`why_not`."""
    return not why_not()


@dataclass(frozen=True)
class DeviceFacts:
    """One device, as the driver tells it."""

    ordinal: int
    """Number in this process; another process may see the device under another."""
    uuid: str
    """``GPU-...`` or, for a MIG instance, ``MIG-...``: the device's identity."""
    pci: str
    """PCI address, as ``nvidia-smi`` and /sys write it."""
    name: str
    capability: tuple[int, int]
    sms: int
    """SMs this process may use (under MPS a share of them, where one is set)."""
    l2_bytes: int
    memory_bytes: int
    dma_buf: bool
    gpudirect_rdma: bool
    gpudirect_ordering: int
    """Who sees a NIC's writes without a flush: 0 nobody, 100 the owner, 200 all devices."""
    gpudirect_flush: int
    """Bit 0: cuFlushGPUDirectRDMAWrites serves; bit 1: stream memory operations do."""
    ipc_events: bool
    mps: bool
    """Whether contexts on this device are shared through MPS."""
    mig: bool
    """A MIG instance: no P2P and no IPC to other instances."""
    exclusive: bool
    """Compute mode allows one process only (or none)."""


def device_facts(ordinal: int) -> DeviceFacts:
    """Return the facts of device ``ordinal``. Makes no context."""
    call("cuInit", 0)
    device = c_int()
    call("cuDeviceGet", byref(device), ordinal)
    number = device.value
    name, pci = (c_char * 256)(), (c_char * 32)()
    call("cuDeviceGetName", name, len(name), number)
    call("cuDeviceGetPCIBusId", pci, len(pci), number)
    uuid = driver.Uuid()
    call("cuDeviceGetUuid_v2", byref(uuid), number)
    total = c_size_t()
    call("cuDeviceTotalMem_v2", byref(total), number)

    def attribute(which: int) -> int:
        return driver.device_attribute(number, which)

    text = name.value.decode()
    mig = " MIG " in text
    digits = bytes(uuid).hex()
    parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
    return DeviceFacts(
        ordinal=ordinal,
        uuid=("MIG-" if mig else "GPU-") + "-".join(parts),
        pci=pci.value.decode().lower(),
        name=text,
        capability=(attribute(75), attribute(76)),
        sms=attribute(16),
        l2_bytes=attribute(38),
        memory_bytes=total.value,
        dma_buf=bool(attribute(124)),
        gpudirect_rdma=bool(attribute(116)),
        gpudirect_ordering=attribute(118),
        gpudirect_flush=attribute(117),
        ipc_events=bool(attribute(125)),
        mps=bool(attribute(133)),
        mig=mig,
        exclusive=attribute(20) != 0,
    )


def current_device() -> int:
    """Return the ordinal of CuPy's current device."""
    cupy = importlib.import_module("cupy")
    return int(cupy.cuda.Device().id)


def current_stream() -> Any:
    """Return CuPy's current stream; its ``ptr`` is the CUstream."""
    return importlib.import_module("cupy").cuda.get_current_stream()


def activate(ordinal: int) -> None:
    """Make ``ordinal`` CuPy's current device and its primary context this thread's."""
    cupy = importlib.import_module("cupy")
    cupy.cuda.Device(ordinal).use()
    context = c_void_p()
    call("cuDevicePrimaryCtxRetain", byref(context), ordinal)
    call("cuCtxSetCurrent", context)


@dataclass(frozen=True)
class PointerFacts:
    """What the driver knows about one address."""

    address: int
    kind: str
    """``device``, ``managed``, ``pinned`` (host memory CUDA knows), or ``host``."""
    device: int
    """Ordinal of the device; -1 for host memory."""
    base: int
    """First address of the allocation."""
    nbytes: int
    """Bytes of the whole allocation."""
    buffer_id: int
    """Never used twice in a process: tells a new allocation at an old address."""
    ipc: bool
    """Whether the allocation has a legacy IPC handle."""
    pool: bool
    """Whether it comes from a stream-ordered pool."""

    @property
    def why_no_ipc(self) -> str:
        """Why peers cannot map it, or nothing."""
        if self.ipc and self.kind == "device":
            return ""
        cure = "it is staged through the communicator's window"
        if self.kind == "managed":
            return f"managed memory has no IPC handle: {cure}"
        if self.kind != "device":
            return f"{self.kind} memory is not GPU memory"
        if self.pool:
            return f"memory of a stream-ordered pool (cudaMallocAsync) has no IPC handle: {cure}"
        return f"memory made by virtual-memory calls has no legacy IPC handle: {cure}"


def pointer_facts(address: int) -> PointerFacts:
    """Return what the driver knows about ``address``, which may be any number."""
    found = driver.pointer_attributes(address)
    kind = {1: "pinned", 2: "device"}.get(found["memory_type"], "host")
    if found["managed"]:
        kind = "managed"
    base, nbytes = found["base"], found["nbytes"]
    if kind == "device":
        # The attributes of a pool or VMM piece name the mapping; the call names the allocation.
        start, size = c_uint64(), c_size_t()
        with contextlib.suppress(CudaError):
            call("cuMemGetAddressRange_v2", byref(start), byref(size), address)
            base, nbytes = start.value, size.value
    return PointerFacts(
        address=address,
        kind=kind,
        device=found["device"] if kind in ("device", "managed") else -1,
        base=base,
        nbytes=nbytes,
        buffer_id=found["buffer_id"],
        ipc=bool(found["ipc_capable"]),
        pool=bool(found["pool"]),
    )


class DeviceMemory:
    """A plain allocation (cudaMalloc's kind) on the current device, which peers can map.

    Freed by :meth:`close`, which waits for the device as cudaFree does; peers must have closed
    their mappings before.
    """

    def __init__(self, nbytes: int, *, zero: bool = False) -> None:
        address = c_uint64()
        call("cuMemAlloc_v2", byref(address), max(nbytes, 1))
        self.address, self.nbytes = address.value, nbytes
        if zero:
            call("cuMemsetD8_v2", self.address, 0, max(nbytes, 1))

    def array(self, shape: int | tuple[int, ...], dtype: object) -> Any:
        """Return a CuPy array on the first bytes; it keeps this object alive."""
        cupy = importlib.import_module("cupy")
        memory = cupy.cuda.UnownedMemory(self.address, max(self.nbytes, 1), self)
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))

    def close(self) -> None:
        """Free it. Waits for the device. Idempotent."""
        address, self.address = self.address, 0
        if address:
            call("cuMemFree_v2", address)


def free(address: int) -> None:
    """Free a :class:`DeviceMemory`'s address. Waits for the device."""
    call("cuMemFree_v2", address)


class PinnedMemory:
    """Pinned host memory that kernels address by the same pointer (unified addressing)."""

    def __init__(self, nbytes: int) -> None:
        address = c_void_p()
        call("cuMemHostAlloc", byref(address), max(nbytes, 1), 3)  # portable, mapped
        assert address.value
        self.address, self.nbytes = address.value, nbytes
        view = memoryview((ctypes.c_char * nbytes).from_address(self.address)).cast("B")
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(view, np.uint8)
        self.bytes[:] = 0

    def close(self) -> None:
        """Free it; arrays on it must not be used any more. Idempotent."""
        address, self.address = self.address, 0
        if address:
            call("cuMemFreeHost", address)


@dataclass(frozen=True)
class IpcHandle:
    """``nbytes`` at ``offset`` of an allocation, to be opened by another process."""

    handle: bytes
    """Names the whole allocation."""
    offset: int
    nbytes: int
    buffer_id: int
    """Identity of the allocation in the exporting process."""
    base: int
    """Address of the allocation in the exporting process."""


def export_handle(address: int, nbytes: int) -> IpcHandle:
    """Return the handle of ``nbytes`` at ``address`` of plain device memory.

    Raises:
        UnsupportedError: this memory has none; the text says why.
    """
    facts = pointer_facts(address)
    if facts.why_no_ipc:
        raise UnsupportedError(facts.why_no_ipc)
    if address + nbytes > facts.base + facts.nbytes:
        raise UnsupportedError(
            f"{nbytes} bytes at {address:#x} leave the allocation of {facts.nbytes} bytes at "
            f"{facts.base:#x}"
        )
    handle = driver.IpcMemHandle()
    call("cuIpcGetMemHandle", byref(handle), facts.base)
    return IpcHandle(bytes(handle), address - facts.base, nbytes, facts.buffer_id, facts.base)


def open_handle(handle: bytes) -> int:
    """Map a peer's allocation and return its base here. Once per allocation and process.

    Raises:
        CudaError: it cannot be mapped: other GPU not visible, no peer access, container limits.
    """
    address = c_uint64()
    call(
        "cuIpcOpenMemHandle_v2", byref(address), driver.IpcMemHandle.from_buffer_copy(handle), 1
    )  # 1: peer access is enabled where the allocation is on another device
    return address.value


def close_handle(base: int) -> None:
    """Unmap what :func:`open_handle` returned. Waits for the device."""
    call("cuIpcCloseMemHandle", base)


class Event:
    """A point in a stream. Closed with its owner; never waited for, only asked."""

    def __init__(self) -> None:
        handle = c_void_p()
        call("cuEventCreate", byref(handle), 2)  # no timing
        self.handle = handle.value

    def record(self, stream: int) -> None:
        """Put the event after all work given to ``stream`` so far."""
        call("cuEventRecord", self.handle, stream)

    def done(self) -> bool:
        """Return whether the work before it is complete (also when never recorded).

        Raises:
            CudaError: the device or an earlier kernel failed.
        """
        code = driver.library().cuEventQuery(self.handle)
        if code and code != driver.NOT_READY:
            raise driver.failed("cuEventQuery", code)
        return not code

    def close(self) -> None:
        """Destroy it. Idempotent."""
        handle, self.handle = self.handle, None
        if handle:
            call("cuEventDestroy_v2", handle)


class Stream:
    """A stream of our own, independent of the legacy default stream."""

    def __init__(self) -> None:
        handle = c_void_p()
        call("cuStreamCreate", byref(handle), 1)  # CU_STREAM_NON_BLOCKING
        assert handle.value
        self.ptr: int = handle.value

    def close(self) -> None:
        """Destroy it; work given to it still runs. Idempotent."""
        handle, self.ptr = self.ptr, 0
        if handle:
            call("cuStreamDestroy_v2", handle)


def wait_event(stream: int, event: Event) -> None:
    """Let later work of ``stream`` wait for ``event`` on the device. Does not block the host."""
    call("cuStreamWaitEvent", stream, event.handle, 0)


def copy_async(dst: int, src: int, nbytes: int, stream: int) -> None:
    """Copy between any two addresses, ordered on ``stream``.

    Returns at once for device and pinned memory; pageable host memory may block the host.
    """
    if nbytes:
        call("cuMemcpyAsync", dst, src, nbytes, stream)


def copy_now(dst: int, src: int, nbytes: int) -> None:
    """Copy between any two addresses and wait for it; ordered on the legacy default stream.

    A copy from pageable memory returns when it is staged (CUDA driver API, "API synchronization
    behavior"); another process may look before it has arrived. Hence the wait.
    """
    if nbytes:
        call("cuMemcpy", dst, src, nbytes)
        call("cuStreamSynchronize", 0)


def flush_nic_writes(*, all_devices: bool) -> None:
    """Make what a NIC has written to this GPU visible: to its own kernels, or to all GPUs. Local.

    Needed where ``DeviceFacts.gpudirect_ordering`` is below 100 (200 for all). Blocks the host for
    the flush itself, some microseconds.

    Raises:
        CudaError: the device does not offer it (``gpudirect_flush`` bit 0).
    """
    call("cuFlushGPUDirectRDMAWrites", 0, 200 if all_devices else 100)  # 0: the current context
