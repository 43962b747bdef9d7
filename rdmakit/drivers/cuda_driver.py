"""CUDA's driver library through ctypes: the few calls this package makes, and its errors.

Needs no Python package, only ``libcuda.so.1`` of the installed driver. Importing this module does
nothing; the library is loaded, never initialised, at the first call. Calls that need a context use
the thread's current one (see :func:`rdmakit.drivers.cuda.activate`). All are local; none waits for
the device unless its docstring says so. Numbers of attributes and flags are those of CUDA's
``cuda.h``, which are stable.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from typing import Any

from rdmakit.errors import CudaError

__all__ = [
    "NOT_READY",
    "CudaError",
    "IpcMemHandle",
    "Launch",
    "Uuid",
    "call",
    "device_attribute",
    "dmabuf_of",
    "failed",
    "is_capturing",
    "library",
    "pointer_attributes",
]

LIBRARY = "libcuda.so.1"
NOT_READY = 600
"""CUDA_ERROR_NOT_READY: what a query says while work is under way."""
_CAPTURE_IMPLICIT = 906  # the legacy stream while another stream captures


class Uuid(ctypes.Structure):
    """CUuuid."""

    _fields_ = (("bytes", c_char * 16),)


class IpcMemHandle(ctypes.Structure):
    """CUipcMemHandle: names a whole allocation to another process."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


_P, _ADDR = c_void_p, c_uint64
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuGetErrorName": (c_int, POINTER(ctypes.c_char_p)),
    "cuGetErrorString": (c_int, POINTER(ctypes.c_char_p)),
    "cuInit": (c_uint,),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetName": (_P, c_int, c_int),
    "cuDeviceGetUuid_v2": (POINTER(Uuid), c_int),
    "cuDeviceGetPCIBusId": (_P, c_int, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDeviceTotalMem_v2": (POINTER(c_size_t), c_int),
    "cuDeviceGetP2PAttribute": (POINTER(c_int), c_int, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(_P), c_int),
    "cuCtxSetCurrent": (_P,),
    "cuPointerGetAttributes": (c_uint, POINTER(c_int), POINTER(_P), _ADDR),
    "cuMemAlloc_v2": (POINTER(_ADDR), c_size_t),
    "cuMemFree_v2": (_ADDR,),
    "cuMemHostAlloc": (POINTER(_P), c_size_t, c_uint),
    "cuMemFreeHost": (_P,),
    "cuMemHostRegister_v2": (_P, c_size_t, c_uint),
    "cuMemHostUnregister": (_P,),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
    "cuMemGetAddressRange_v2": (POINTER(_ADDR), POINTER(c_size_t), _ADDR),
    "cuMemGetHandleForAddressRange": (_P, _ADDR, c_size_t, c_int, ctypes.c_ulonglong),
    "cuMemcpy": (_ADDR, _ADDR, c_size_t),
    "cuMemcpyAsync": (_ADDR, _ADDR, c_size_t, _P),
    "cuMemsetD8_v2": (_ADDR, ctypes.c_ubyte, c_size_t),
    "cuIpcGetMemHandle": (POINTER(IpcMemHandle), _ADDR),
    "cuIpcOpenMemHandle_v2": (POINTER(_ADDR), IpcMemHandle, c_uint),
    "cuIpcCloseMemHandle": (_ADDR,),
    "cuEventCreate": (POINTER(_P), c_uint),
    "cuEventDestroy_v2": (_P,),
    "cuEventRecord": (_P, _P),
    "cuEventQuery": (_P,),
    "cuStreamCreate": (POINTER(_P), c_uint),
    "cuStreamDestroy_v2": (_P,),
    "cuStreamSynchronize": (_P,),
    "cuStreamWaitEvent": (_P, _P, c_uint),
    "cuStreamIsCapturing": (_P, POINTER(c_int)),
    "cuLaunchKernel": (_P, *(c_uint,) * 7, _P, _P, _P),
    "cuFlushGPUDirectRDMAWrites": (c_int, c_int),
}


@cache
def library() -> ctypes.CDLL:
    """Load the driver library. Idempotent; initialises nothing.

    Raises:
        OSError: there is none.
    """
    lib = ctypes.CDLL(LIBRARY)
    for name, types in _SIGNATURES.items():
        function = getattr(lib, name, None)
        if function is not None:  # an older driver lacks the newer ones; calling one says so
            function.argtypes, function.restype = types, c_int
    return lib


def call(name: str, *args: object) -> None:
    """Call a driver function.

    Raises:
        CudaError: it returned an error, or this driver does not have it.
    """
    function = getattr(library(), name, None)
    if function is None:
        raise failed(name, 500)  # CUDA_ERROR_NOT_FOUND
    code = function(*args)
    if code:
        raise failed(name, code)


def failed(what: str, code: int) -> CudaError:
    """Return the error of a call that returned ``code``, with the driver's words for it."""
    return CudaError(what, code, *_describe(code))


def _describe(code: int) -> tuple[str, str]:
    texts = []
    for name in ("cuGetErrorName", "cuGetErrorString"):
        text = ctypes.c_char_p()
        known = not getattr(library(), name)(code, byref(text)) and text.value
        texts.append(known.decode() if isinstance(known, bytes) else "unknown error")
    return texts[0], texts[1]


def device_attribute(device: int, attribute: int) -> int:
    """Return a CUdevice_attribute; 0 where this driver does not know it."""
    value = c_int()
    if library().cuDeviceGetAttribute(byref(value), attribute, device):
        return 0
    return value.value


_DMA_BUF_FD = 1
_PAGE = 4096


def dmabuf_of(address: int, nbytes: int) -> tuple[int, int, int]:
    """Return (file descriptor, start, bytes) of a dma-buf over GPU memory; the caller closes it.

    Start and bytes are whole pages about what was asked for.

    Raises:
        CudaError: this driver, its kernel module or the memory's kind has none.
    """
    start = address // _PAGE * _PAGE
    whole = -(-(address + nbytes - start) // _PAGE) * _PAGE
    fd = c_int(-1)
    call("cuMemGetHandleForAddressRange", byref(fd), start, whole, _DMA_BUF_FD, 0)
    return fd.value, start, whole


_POINTER_ATTRIBUTES: dict[str, tuple[int, Any]] = {
    "memory_type": (2, c_uint),
    "buffer_id": (7, c_uint64),
    "managed": (8, c_uint),
    "device": (9, c_int),
    "ipc_capable": (10, c_uint),
    "base": (11, c_uint64),
    "nbytes": (12, c_size_t),
    "mapped": (13, c_uint),
    "pool": (17, c_uint64),
}


def pointer_attributes(address: int) -> dict[str, int]:
    """Return what the driver knows of any address; all zero for memory that CUDA does not know."""
    names = list(_POINTER_ATTRIBUTES)
    values = [kind() for _, kind in _POINTER_ATTRIBUTES.values()]
    numbers = (c_int * len(names))(*(number for number, _ in _POINTER_ATTRIBUTES.values()))
    places = (c_void_p * len(names))(*(ctypes.addressof(value) for value in values))
    call("cuPointerGetAttributes", len(names), numbers, places, address)
    return {name: int(value.value) for name, value in zip(names, values, strict=True)}


def is_capturing(stream: int) -> bool:
    """Return whether work on ``stream`` goes into a CUDA graph under capture."""
    status = c_int()
    code = library().cuStreamIsCapturing(stream, byref(status))
    if code == _CAPTURE_IMPLICIT:
        return True
    if code:
        raise failed("cuStreamIsCapturing", code)
    return status.value != 0


class Launch:
    """A kernel with its grid and one argument block, to be launched any number of times.

    Launching is asynchronous and ordered on the stream. The arguments are copied at each launch
    (and into a graph at capture), so they may be changed afterwards.
    """

    __slots__ = ("_call", "_params", "args", "blocks", "function")

    def __init__(self, function: int, blocks: int, threads: int, args: ctypes.Structure) -> None:
        self.function, self.blocks, self.args = function, blocks, args
        self._params = (c_void_p * 1)(ctypes.addressof(args))
        kernel, n, m = c_void_p(function), c_uint(blocks), c_uint(threads)
        one, zero, params = c_uint(1), c_uint(0), c_void_p(ctypes.addressof(self._params))
        launch = library().cuLaunchKernel

        def start(stream: int) -> int:
            code: int = launch(kernel, n, one, one, m, one, one, zero, stream, params, None)
            return code

        self._call = start

    def __call__(self, stream: int) -> None:
        """Launch on ``stream`` (a CUstream; 0 is the legacy default stream).

        Raises:
            CudaError: it could not be launched.
        """
        code = self._call(stream)
        if code:
            raise failed("cuLaunchKernel", code)
