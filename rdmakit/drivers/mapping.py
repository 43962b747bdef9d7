"""Shared mappings of files that keep no descriptor: the C library's mmap over Python's.

Python's mmap duplicates the descriptor it is given and keeps the copy (before 3.13 there is no
way around it). Here an anonymous mmap object owns the range of addresses, with all of its care:
no unmapping under a live view, none twice, length known. The file is then mapped over the range.
"""

from __future__ import annotations

import ctypes
import mmap
import os

__all__ = ["map_shared"]

_MAP_FIXED = 0x10
"""Python has no name for it; Linux's asm-generic/mman-common.h, and so x86-64, ARM and POWER."""


def map_shared(fd: int, nbytes: int) -> mmap.mmap:
    """Return ``nbytes`` of the file ``fd``, mapped shared, to read and write. Local.

    ``fd`` may be closed then. The object unmaps at its ``close`` or when it is dropped; ``close``
    raises BufferError while a view of it lives.

    Raises:
        OSError: the kernel refused (ENOMEM, EACCES); nothing stays mapped.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    call = libc.mmap
    call.restype = ctypes.c_void_p
    call.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    ]  # fmt: skip
    # Private: a shared anonymous range would be a file of its own and be counted as such.
    owner = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE)
    view = ctypes.c_char.from_buffer(owner)
    address = ctypes.addressof(view)
    del view
    place = call(
        address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd, 0
    )
    if place != address:
        code = ctypes.get_errno()
        owner.close()
        raise OSError(code, os.strerror(code))
    return owner
