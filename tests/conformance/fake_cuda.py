"""CUDA's driver library made of host memory: devices that some processes see, allocations, IPC.

One :class:`Machine` has the GPUs and all memory; a :class:`Library` is what one process has of it:
other ordinals, other visible devices. Ranks are threads, so that mapped memory is the memory.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

INVALID_VALUE, OUT_OF_MEMORY, NO_DEVICE, INVALID_DEVICE = 1, 2, 100, 101
ALREADY_MAPPED, NO_PEER_ACCESS, NOT_FOUND, IMPLICIT = 208, 217, 500, 906
_NAMES = {
    INVALID_VALUE: "CUDA_ERROR_INVALID_VALUE", OUT_OF_MEMORY: "CUDA_ERROR_OUT_OF_MEMORY",
    NO_DEVICE: "CUDA_ERROR_NO_DEVICE", INVALID_DEVICE: "CUDA_ERROR_INVALID_DEVICE",
    ALREADY_MAPPED: "CUDA_ERROR_ALREADY_MAPPED",
    NO_PEER_ACCESS: "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", NOT_FOUND: "CUDA_ERROR_NOT_FOUND",
    IMPLICIT: "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
}  # fmt: skip


@dataclass(frozen=True)
class Gpu:
    uuid: int
    pci: str
    name: str = "NVIDIA H200"
    attributes: tuple[tuple[int, int], ...] = ()

    @property
    def is_mig(self) -> bool:
        return " MIG " in self.name


@dataclass
class Allocation:
    memory: Any
    gpu: Gpu
    number: int
    kind: str = "device"
    """``device``, ``managed``, ``pool``, ``virtual`` or ``pinned``."""

    @property
    def base(self) -> int:
        return int(self.memory.ctypes.data)


@dataclass
class Machine:
    """What all processes of a host share."""

    gpus: Sequence[Gpu]
    allocations: dict[int, Allocation] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.Lock)
    numbers: Any = field(default_factory=lambda: itertools.count(1))

    def allocate(self, nbytes: int, gpu: Gpu, kind: str = "device") -> Allocation:
        with self.lock:
            made = Allocation(np.zeros(max(nbytes, 1), np.uint8), gpu, next(self.numbers), kind)
            self.allocations[made.base] = made
        return made

    def holds(self, address: int) -> Allocation | None:
        with self.lock:
            for each in self.allocations.values():
                if each.base <= address < each.base + each.memory.nbytes:
                    return each
        return None


class Library:
    """The driver in one process that sees ``visible`` of the machine's GPUs, in that order."""

    def __init__(self, machine: Machine, visible: Sequence[int]) -> None:
        self.machine = machine
        self.visible = [machine.gpus[index] for index in visible]
        self.opened: set[int] = set()
        self.opens = self.closes = 0
        self.capturing: dict[int, int] = {}

    def cuInit(self, flags: int) -> int:
        return 0 if self.visible else NO_DEVICE

    def cuGetErrorName(self, code: int, text: Any) -> int:
        text._obj.value = _NAMES.get(code, "CUDA_ERROR_UNKNOWN").encode()
        return 0

    cuGetErrorString = cuGetErrorName

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self.visible)
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        if not 0 <= ordinal < len(self.visible):
            return INVALID_DEVICE
        device._obj.value = ordinal
        return 0

    def cuDeviceGetName(self, text: Any, size: int, device: int) -> int:
        text.value = self.visible[device].name.encode()
        return 0

    def cuDeviceGetPCIBusId(self, text: Any, size: int, device: int) -> int:
        text.value = self.visible[device].pci.encode()
        return 0

    def cuDeviceGetUuid_v2(self, uuid: Any, device: int) -> int:
        ctypes.memmove(
            ctypes.addressof(uuid._obj), self.visible[device].uuid.to_bytes(16, "big"), 16
        )
        return 0

    def cuDeviceTotalMem_v2(self, total: Any, device: int) -> int:
        total._obj.value = 141 << 30
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:
        usual = {16: 132, 75: 9, 76: 0}
        value._obj.value = (usual | dict(self.visible[device].attributes)).get(attribute, 0)
        return 0

    # -- memory -------------------------------------------------------------------------------

    def cuMemAlloc_v2(self, address: Any, nbytes: int) -> int:
        address._obj.value = self.machine.allocate(nbytes, self.visible[0]).base
        return 0

    def cuMemFree_v2(self, address: int) -> int:
        with self.machine.lock:
            return 0 if self.machine.allocations.pop(address, None) else INVALID_VALUE

    def cuMemsetD8_v2(self, address: int, value: int, nbytes: int) -> int:
        ctypes.memset(address, value, nbytes)
        return 0

    def cuMemcpy(self, to: int, of: int, nbytes: int) -> int:
        ctypes.memmove(to, of, nbytes)
        return 0

    def cuStreamSynchronize(self, stream: int) -> int:
        return 0

    def cuStreamIsCapturing(self, stream: int, status: Any) -> int:
        code = self.capturing.get(stream, 0)
        status._obj.value = code if code < 100 else 0
        return code if code >= 100 else 0

    def cuMemGetAddressRange_v2(self, base: Any, nbytes: Any, address: int) -> int:
        found = self.machine.holds(address)
        if found is None:
            return NOT_FOUND
        base._obj.value, nbytes._obj.value = found.base, found.memory.nbytes
        return 0

    def cuPointerGetAttributes(self, n: int, numbers: Any, places: Any, address: int) -> int:
        found = self.machine.holds(address)
        facts: dict[int, int] = {}
        if found is not None:
            ordinal = self.visible.index(found.gpu) if found.gpu in self.visible else -2
            facts = {
                2: 1 if found.kind == "pinned" else 2, 7: found.number,
                8: found.kind == "managed", 9: ordinal, 10: found.kind == "device",
                11: found.base, 12: found.memory.nbytes, 13: 1, 17: 77 * (found.kind == "pool"),
            }  # fmt: skip
        for index in range(n):
            width = ctypes.c_uint64 if numbers[index] in (7, 11, 12, 17) else ctypes.c_int
            width.from_address(places[index]).value = facts.get(numbers[index], 0)
        return 0

    def cuIpcGetMemHandle(self, handle: Any, address: int) -> int:
        found = self.machine.holds(address)
        if found is None or found.kind != "device":
            return INVALID_VALUE
        data = found.base.to_bytes(8, "big").ljust(64, b"\0")
        ctypes.memmove(ctypes.addressof(handle._obj), data, 64)
        return 0

    def cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: int) -> int:
        base = int.from_bytes(bytes(handle)[:8], "big")
        found = self.machine.allocations.get(base)
        if found is None:
            return INVALID_VALUE
        if found.gpu not in self.visible:
            return INVALID_DEVICE
        if found.gpu.is_mig and found.gpu != self.visible[0]:
            return NO_PEER_ACCESS
        if base in self.opened:
            return ALREADY_MAPPED
        self.opened.add(base)
        self.opens += 1
        address._obj.value = base
        return 0

    def cuIpcCloseMemHandle(self, base: int) -> int:
        if base not in self.opened:
            return INVALID_VALUE
        self.opened.remove(base)
        self.closes += 1
        return 0
