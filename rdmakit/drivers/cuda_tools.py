"""What choosing and measuring GPUs needs of CUDA besides :mod:`rdmakit.drivers.cuda`.

Importing it does nothing. All calls are local; none makes a context unless it says so.
"""

from __future__ import annotations

import importlib
from ctypes import byref, c_int, c_size_t
from typing import Any

from rdmakit.drivers.cuda import device_facts
from rdmakit.drivers.cuda_driver import call
from rdmakit.errors import CudaError

__all__ = [
    "device_uuids",
    "free_bytes",
    "link_between",
    "new_stream",
    "pin",
    "trim",
    "unpin",
    "zeros",
]

_P2P_ACCESS, _P2P_ATOMICS = 2, 3  # CUdevice_P2PAttribute


def device_uuids() -> tuple[str, ...]:
    """Return the UUID of each visible device, by ordinal. Needs the driver.

    Raises:
        CudaError: the driver refuses.
    """
    call("cuInit", 0)
    count = c_int()
    call("cuDeviceGetCount", byref(count))
    return tuple(device_facts(ordinal).uuid for ordinal in range(count.value))


def free_bytes() -> int:
    """Return the free memory of the current device, other processes' use taken off.

    Raises:
        CudaError: there is no context.
    """
    free, total = c_size_t(), c_size_t()
    call("cuMemGetInfo_v2", byref(free), byref(total))
    return free.value


def link_between(mine: str, theirs: str) -> str:
    """Return what joins two GPUs, by UUID: ``same-GPU``, ``NVLink``, ``PCIe``, or nothing.

    Nothing where this process does not see the other GPU, or they have no peer access. NVLink is
    told from PCIe by native atomics over the link, which PCIe has not (CUDA driver API,
    CUdevice_P2PAttribute).
    """
    if mine == theirs:
        return "same-GPU"
    uuids = device_uuids()
    if mine not in uuids or theirs not in uuids:
        return ""
    pair = []
    for uuid in (mine, theirs):
        device = c_int()
        call("cuDeviceGet", byref(device), uuids.index(uuid))
        pair.append(device.value)

    def asked(attribute: int) -> bool:
        value = c_int()
        try:
            call("cuDeviceGetP2PAttribute", byref(value), attribute, *pair)
        except CudaError:
            return False
        return bool(value.value)

    if not asked(_P2P_ACCESS):
        return ""
    return "NVLink" if asked(_P2P_ATOMICS) else "PCIe"


def zeros(count: int, dtype: object) -> Any:
    """Return a zeroed CuPy array of CuPy's memory pool, as users have it. Makes a context.

    Raises:
        MemoryError: no room on the device.
    """
    return importlib.import_module("cupy").zeros(count, dtype)


def trim() -> None:
    """Give what CuPy's memory pool holds for later back to the device. Waits for the device."""
    importlib.import_module("cupy").get_default_memory_pool().free_all_blocks()


def new_stream() -> Any:
    """Return a stream that runs beside all others; its ``ptr`` is the CUstream."""
    return importlib.import_module("cupy").cuda.Stream(non_blocking=True)


def pin(address: int, nbytes: int) -> None:
    """Pin host memory of any origin, so that copies to and from GPUs run beside the host.

    ``address`` is at the start of a page; undone by :func:`unpin` before the memory goes.

    Raises:
        CudaError: it cannot be pinned (RLIMIT_MEMLOCK, or it is already).
    """
    call("cuMemHostRegister_v2", address, nbytes, 1)  # 1: for all contexts of the process


def unpin(address: int) -> None:
    """Undo :func:`pin`."""
    call("cuMemHostUnregister", address)
