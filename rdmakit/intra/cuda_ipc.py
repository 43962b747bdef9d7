"""Device memory of a node's ranks that all of them address: CUDA IPC windows and registrations.

A window or registration is made by all ranks of the node together: each exports a handle of plain
device memory, opens those of its peers, and tries them with real data, so that a container, cgroup
or MIG border is found here and not by a crash later. Where any rank fails, all undo what they did
and raise the same error.

Teardown: nobody uses the memory any more (the caller waits for its own kernels), barrier, all
unmap their peers' memory, barrier, each frees its own.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache

import numpy as np

from rdmakit.drivers import cuda
from rdmakit.drivers.cuda import DeviceFacts, DeviceMemory, IpcHandle
from rdmakit.errors import CudaError, RdmaKitError, SetupError
from rdmakit.intra.ipc_cache import HandleCache, Mapping
from rdmakit.protocols import Bootstrap

__all__ = ["Shared", "describe_denial", "exchange_facts", "share", "share_window"]

_PROBE = 4096
"""Bytes each pair of ranks tries: one page, more than one memory transaction of any path."""


@cache
def _process() -> str:
    return f"{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(8)}"


@cache
def _handles() -> HandleCache:
    return HandleCache(cuda, _process())


@dataclass
class Shared:
    """Memory of equal size on every rank of a node, mapped by all.

    Attributes:
        addresses: where each rank's piece is in this process, by rank.
        nbytes: size of each piece.
        owner: what keeps this rank's piece alive.
    """

    addresses: tuple[int, ...]
    nbytes: int
    owner: object
    _mappings: list[Mapping] = field(default_factory=list, repr=False)

    def unmap(self) -> None:
        """Unmap the peers' pieces. Local, idempotent; their kernels must be done with this one."""
        for mapping in reversed(self._mappings):
            _handles().release(mapping)
        self._mappings = []

    def close(self, bootstrap: Bootstrap) -> None:
        """Unmap everywhere, then let go of the own piece. Collective, blocking, idempotent.

        The caller has waited for its own kernels.
        """
        if self.owner is None:
            return
        bootstrap.barrier()
        self.unmap()
        bootstrap.barrier()
        owner, self.owner = self.owner, None
        if isinstance(owner, DeviceMemory):
            owner.close()


def exchange_facts(bootstrap: Bootstrap, device: int) -> tuple[DeviceFacts, ...]:
    """Return every rank's device facts, by rank. Collective, blocking.

    Raises:
        SetupError: on every rank when any cannot tell.
    """
    text = ""
    try:
        text = json.dumps(asdict(cuda.device_facts(device)))
    except CudaError as exc:
        text = json.dumps({"problem": str(exc)})
    told = [json.loads(entry) for entry in bootstrap.allgather(text.encode())]
    _raise_first([entry.get("problem", "") for entry in told], "no facts of the GPU")
    for entry in told:
        entry["capability"] = tuple(entry["capability"])
    return tuple(DeviceFacts(**entry) for entry in told)


def describe_denial(
    mine: DeviceFacts, theirs: DeviceFacts, visible: Sequence[str], error: str
) -> str:
    """Return why a peer's memory cannot be mapped, and the cure. Pure.

    Args:
        mine: this rank's device.
        theirs: the peer's device.
        visible: UUIDs of the devices this process sees.
        error: what CUDA said.
    """
    if (mine.mig or theirs.mig) and mine.uuid != theirs.uuid:
        return (
            f"MIG instances cannot map each other's memory ({mine.uuid} and {theirs.uuid}); "
            f"results are right through host memory, but bandwidth is not comparable: {error}"
        )
    if theirs.uuid not in visible:
        return (
            f"this rank sees {len(visible)} GPU(s), not the peer's (bus id {theirs.pci}; its own "
            f"is {mine.pci}): peer mapping needs both visible. Under Slurm use --gpus-per-node "
            f"with --gpu-bind=none in place of --gpus-per-task; with CUDA_VISIBLE_DEVICES name "
            f"all GPUs of the node: {error}"
        )
    if mine.uuid != theirs.uuid:
        return f"no peer access between the GPUs at {mine.pci} and {theirs.pci}: {error}"
    return (
        f"CUDA IPC is refused on one GPU ({mine.pci}); a container needs the host's IPC and PID "
        f"namespaces for it (docker: --ipc=host --pid=host): {error}"
    )


def share(
    bootstrap: Bootstrap,
    facts: Sequence[DeviceFacts],
    address: int,
    nbytes: int,
    owner: object,
) -> Shared:
    """Map ``nbytes`` at ``address`` of every rank on all ranks. Collective, blocking.

    The memory is held by ``owner`` until :meth:`Shared.close`, and may hold data: nothing is
    written to it.

    Raises:
        SetupError: on every rank, when any rank's memory has no handle (managed memory, a
            stream-ordered pool, virtual memory), sizes differ, or a peer cannot map it.
    """
    rank = bootstrap.rank
    message: dict[str, object] = {"nbytes": nbytes, "process": _process()}
    try:
        handle = cuda.export_handle(address, nbytes)
        message |= asdict(handle) | {"handle": handle.handle.hex()}
    except RdmaKitError as exc:
        message["problem"] = str(exc)
    told = [json.loads(text) for text in bootstrap.allgather(json.dumps(message).encode())]
    problems = [entry.get("problem", "") for entry in told]
    for peer, entry in enumerate(told):
        if entry["nbytes"] != told[0]["nbytes"]:
            problems[peer] = f"{entry['nbytes']} bytes, but local rank 0 has {told[0]['nbytes']}"
    _raise_first(problems, "the memory cannot be shared")

    shared = Shared((), nbytes, owner)
    addresses = []
    problem = ""
    for peer, entry in enumerate(told):
        if peer == rank:
            addresses.append(address)
            continue
        remote = IpcHandle(
            bytes.fromhex(entry["handle"]),
            entry["offset"],
            nbytes,
            entry["buffer_id"],
            entry["base"],
        )
        try:
            mapping = _handles().acquire(entry["process"], remote)
        except CudaError as exc:
            visible = _visible()
            problem = f"memory of local rank {peer}: " + describe_denial(
                facts[rank], facts[peer], visible, str(exc)
            )
            break
        except RdmaKitError as exc:
            problem = f"memory of local rank {peer}: {exc}"
            break
        shared._mappings.append(mapping)
        addresses.append(mapping.address)
    shared.addresses = tuple(addresses)
    problems = [text.decode() for text in bootstrap.allgather(problem.encode())]
    if any(problems):
        shared.unmap()
        bootstrap.barrier()
        shared.owner = None
        _raise_first(problems, "the memory cannot be mapped")
    return shared


def share_window(bootstrap: Bootstrap, facts: Sequence[DeviceFacts], nbytes: int) -> Shared:
    """Make zeroed windows of ``nbytes`` and try them between every pair. Collective, blocking.

    Raises:
        SetupError: on every rank; names the rank, the peer and the cure.
    """
    own: DeviceMemory | None = None
    problem = ""
    try:
        own = DeviceMemory(nbytes, zero=True)
    except CudaError as exc:
        problem = f"no room for a window of {nbytes} bytes on the GPU: {exc}"
    problems = [text.decode() for text in bootstrap.allgather(problem.encode())]
    if own is None or any(problems):
        if own is not None:
            own.close()
        _raise_first(problems, "no window on this node's GPUs")
    assert own is not None
    try:
        shared = share(bootstrap, facts, own.address, nbytes, own)
    except SetupError:
        own.close()
        raise
    try:
        problem = _try_out(bootstrap, shared)
    except CudaError as exc:
        problem = f"trying the mapped memory failed: {exc}"
    problems = [text.decode() for text in bootstrap.allgather(problem.encode())]
    if any(problems):
        shared.close(bootstrap)
        _raise_first(problems, "memory is mapped but does not carry data")
    return shared


def _try_out(bootstrap: Bootstrap, shared: Shared) -> str:
    """Read what each peer wrote, write to each peer, and see what arrived."""
    rank, size = bootstrap.rank, bootstrap.size
    seed = secrets.randbits(63)
    seeds = [int(text) for text in bootstrap.allgather(str(seed).encode())]

    def pattern(writer: int, reader: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        generator = np.random.default_rng((seeds[writer], writer, reader))
        return generator.integers(0, 256, _PROBE, np.uint8)

    problem = ""
    seen = np.empty(_PROBE, np.uint8)
    place = [shared.addresses[r] + shared.nbytes - (size + 1) * _PROBE for r in range(size)]
    own = pattern(rank, rank)
    cuda.copy_now(place[rank] + size * _PROBE, own.ctypes.data, _PROBE)
    bootstrap.barrier()
    for peer in range(size):
        cuda.copy_now(seen.ctypes.data, place[peer] + size * _PROBE, _PROBE)
        if not np.array_equal(seen, pattern(peer, peer)):
            problem = problem or f"reading the memory of local rank {peer} gives wrong bytes"
        mine = pattern(rank, peer)
        cuda.copy_now(place[peer] + rank * _PROBE, mine.ctypes.data, _PROBE)
    bootstrap.barrier()
    for peer in range(size):
        cuda.copy_now(seen.ctypes.data, place[rank] + peer * _PROBE, _PROBE)
        if not np.array_equal(seen, pattern(peer, rank)):
            problem = problem or f"what local rank {peer} wrote here did not arrive"
    bootstrap.barrier()
    return problem


def _visible() -> list[str]:
    found = []
    for ordinal in range(64):
        try:
            found.append(cuda.device_facts(ordinal).uuid)
        except CudaError:
            break
    return found


def _raise_first(problems: Sequence[str], what: str) -> None:
    for rank, text in enumerate(problems):
        if text:
            more = sum(1 for other in problems if other) - 1
            also = f" (and {more} more)" if more else ""
            raise SetupError(f"{what}: local rank {rank}{also}: {text}")
