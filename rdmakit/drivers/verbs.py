"""libibverbs through ctypes: whether an RDMA device's driver takes some memory.

Six calls, none of the data path. (PyPI's ``ibverbs`` binding does far more, is marked alpha and
has one release line of this year; to be looked at again.) Nothing is loaded on import.
All calls are local; a registration is given back at once.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint64, c_void_p
from functools import cache
from typing import Any

__all__ = ["LIBRARY", "VerbsUnavailable", "register", "register_dmabuf"]

LIBRARY = "libibverbs.so.1"
_ACCESS = 1 | 2 | 4
"""Local write, remote write, remote read: what zero-copy messages need (verbs.h)."""
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ibv_get_device_list": (POINTER(c_void_p), (POINTER(c_int),)),
    "ibv_free_device_list": (None, (POINTER(c_void_p),)),
    "ibv_get_device_name": (c_char_p, (c_void_p,)),
    "ibv_open_device": (c_void_p, (c_void_p,)),
    "ibv_close_device": (c_int, (c_void_p,)),
    "ibv_alloc_pd": (c_void_p, (c_void_p,)),
    "ibv_dealloc_pd": (c_int, (c_void_p,)),
    "ibv_reg_mr": (c_void_p, (c_void_p, c_void_p, c_size_t, c_int)),
    "ibv_reg_dmabuf_mr": (c_void_p, (c_void_p, c_uint64, c_size_t, c_uint64, c_int, c_int)),
    "ibv_dereg_mr": (c_int, (c_void_p,)),
}


class VerbsUnavailable(RuntimeError):
    """A registration could not be tried; the text says why."""


def register(device: str, address: int, nbytes: int) -> str:
    """Register memory by its address (ibv_reg_mr) and give it back; return why not, or nothing.

    GPU memory is taken so where the kernel has a peer memory client (nvidia_peermem).

    Raises:
        VerbsUnavailable: it could not be tried.
    """
    return _tried(device, "ibv_reg_mr", lambda pd: (pd, address, nbytes, _ACCESS))


def register_dmabuf(device: str, fd: int, address: int, nbytes: int) -> str:
    """Register memory by a dma-buf (ibv_reg_dmabuf_mr); as :func:`register`.

    Args:
        device: such as ``mlx5_0``.
        fd: of the memory, from its start.
        address: under which the NIC is to know it.
        nbytes: of the memory.
    """
    return _tried(device, "ibv_reg_dmabuf_mr", lambda pd: (pd, 0, nbytes, address, fd, _ACCESS))


def _tried(device: str, name: str, args: Callable[[int], tuple[Any, ...]]) -> str:
    library = _library()
    call = getattr(library, name, None)
    if call is None:
        raise VerbsUnavailable(f"{LIBRARY} has no {name}: rdma-core older than 34")
    with _domain(library, device) as domain:
        ctypes.set_errno(0)
        region = call(*args(domain))
        if not region:
            return _why()
        library.ibv_dereg_mr(region)
        return ""


@contextmanager
def _domain(library: ctypes.CDLL, device: str) -> Iterator[int]:
    """Yield a protection domain of ``device``."""
    count = c_int()
    devices = library.ibv_get_device_list(ctypes.byref(count))
    if not devices:
        raise VerbsUnavailable(f"ibv_get_device_list: {_why()}")
    context = None
    try:
        names = [
            (library.ibv_get_device_name(devices[i]) or b"").decode() for i in range(count.value)
        ]
        if device not in names:
            raise VerbsUnavailable(f"no device {device!r} among {names or 'none'}")
        ctypes.set_errno(0)
        context = library.ibv_open_device(devices[names.index(device)])
    finally:
        library.ibv_free_device_list(devices)
    if not context:
        raise VerbsUnavailable(f"{device} cannot be opened: {_why()}; see /dev/infiniband/uverbs*")
    try:
        ctypes.set_errno(0)
        domain = library.ibv_alloc_pd(context)
        if not domain:
            raise VerbsUnavailable(f"{device}: ibv_alloc_pd: {_why()}")
        try:
            yield domain
        finally:
            library.ibv_dealloc_pd(domain)
    finally:
        library.ibv_close_device(context)


def _why() -> str:
    code = ctypes.get_errno()
    return f"{os.strerror(code)} (errno {code})" if code else "no reason given"


@cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(LIBRARY, use_errno=True)
    except OSError as exc:
        raise VerbsUnavailable(f"{exc}: install libibverbs1 (rdma-core)") from exc
    for name, (result, args) in _SIGNATURES.items():
        function = getattr(library, name, None)
        if function is not None:
            function.restype, function.argtypes = result, args
    return library
