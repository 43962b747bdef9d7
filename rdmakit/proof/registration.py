"""Whether the NIC's driver takes the very memory of the messages. Local."""

from __future__ import annotations

import os

from rdmakit.drivers import cuda_driver, verbs
from rdmakit.drivers.verbs import VerbsUnavailable
from rdmakit.errors import CudaError
from rdmakit.proof.evidence import Registration

__all__ = ["try_registration"]


def try_registration(
    rank: int, side: str, ports: tuple[str, ...], memory: str, address: int, nbytes: int
) -> Registration:
    """Register the memory with the first of ``ports`` and give it back. Local.

    Args:
        rank: this rank.
        side: ``sender`` or ``receiver``.
        ports: RDMA ports that UCX uses, as ``mlx5_0:1``.
        memory: ``host`` or ``gpu``.
        address: of the memory.
        nbytes: of it.
    """
    if not ports:
        note = "not possible here: no RDMA device carries the messages"
        return Registration(rank=rank, side=side, peermem_note=note, dmabuf_note=note)
    device = ports[0].partition(":")[0]
    direct, direct_note = _by_address(device, address, nbytes)
    if memory == "gpu":
        by_file, file_note = _by_file(device, address, nbytes)
    else:
        by_file, file_note = None, "not for host memory"
    return Registration(
        rank=rank,
        side=side,
        device=device,
        peermem=direct,
        peermem_note=direct_note,
        dmabuf=by_file,
        dmabuf_note=file_note,
    )


def _by_address(device: str, address: int, nbytes: int) -> tuple[bool | None, str]:
    try:
        problem = verbs.register(device, address, nbytes)
    except VerbsUnavailable as exc:
        return None, f"not possible here: {exc}"
    return not problem, problem


def _by_file(device: str, address: int, nbytes: int) -> tuple[bool | None, str]:
    try:
        fd, start, whole = cuda_driver.dmabuf_of(address, nbytes)
    except (CudaError, OSError) as exc:
        return False, f"no dma-buf of this memory: {exc}"
    try:
        problem = verbs.register_dmabuf(device, fd, start, whole)
    except VerbsUnavailable as exc:
        return None, f"not possible here: {exc}"
    finally:
        os.close(fd)
    return not problem, problem
