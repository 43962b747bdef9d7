"""What kernels report, what memory is refused, and what is to be known of devices, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rdmakit.drivers.cuda import DeviceFacts, pointer_facts
from rdmakit.errors import (
    CollectiveMismatch,
    InvalidArgument,
    PeerLost,
    RdmaKitError,
    TransferTimeout,
    TransportError,
    UnsupportedError,
)
from rdmakit.intra.device_calls import DeviceArray
from rdmakit.intra.device_kernels import Word
from rdmakit.intra.device_plan import Grid

__all__ = ["check_memory", "explain", "notes_on"]

_CALL = 0xFFFFFFF0  # the rest of a signature is the phase


def explain(
    words: Sequence[int] | memoryview,
    calls: Mapping[int, str],
    rank: int,
    ranks: Sequence[int],
    timeout: float,
) -> RdmaKitError:
    """Return the error that a kernel has written into the host's words.

    Args:
        words: the words; see :class:`rdmakit.intra.device_kernels.Word`.
        calls: this rank's calls by signature.
        rank: this rank in the node.
        ranks: ranks in the job of the node's, by which the user knows them.
        timeout: seconds the kernels wait.
    """
    state, peer, phase = words[Word.STATE], words[Word.PEER], words[Word.PHASE]
    call = calls.get(words[Word.WANT] & _CALL, "a collective")
    where = f"rank {ranks[rank]}, local rank {rank}: {call}, meeting {phase}"
    other = f"rank {ranks[peer]}, local rank {peer}"
    if state == Word.TIMED_OUT:
        return TransferTimeout(f"{where}: {other} did not come within {timeout:g} s")
    if state == Word.MISMATCH:
        theirs = calls.get(words[Word.GOT] & _CALL, "something that this rank never called")
        return CollectiveMismatch(f"{where}: {other} called {theirs}")
    if state == Word.TOLD:
        return PeerLost(f"{where}: {other} has reported a failure")
    return TransportError(f"{where}: aborted while waiting for {other}")


def notes_on(facts: Sequence[DeviceFacts], grid: Grid) -> tuple[str, ...]:
    """Return what a person should know about the devices of a node."""
    notes = []
    if grid.sharing > 1:
        notes.append(
            f"{grid.sharing} ranks share one GPU ({facts[0].name}): results are right, bandwidth "
            "figures are not a link's"
        )
    if not grid.resident:
        notes.append(
            "ranks share a GPU without MPS: the driver runs them in turn and each meeting costs "
            "milliseconds; start it with nvidia-cuda-mps-control -d"
        )
    if any(entry.mig for entry in facts):
        notes.append("MIG instances: figures are not comparable with those of a whole GPU")
    return tuple(notes)


def check_memory(name: str, array: DeviceArray, device: int) -> None:
    """See that kernels on ``device`` can use the array. Local; asks the driver about its address.

    Raises:
        InvalidArgument: a null pointer, or memory that is not a GPU's.
        UnsupportedError: elements that are not aligned, or another device's memory.
    """
    if not array.count:
        return
    if not array.address:
        raise InvalidArgument(f"{name} is a null pointer with {array.count} elements")
    if array.address % array.dtype.itemsize:
        raise UnsupportedError(
            f"{name} at {array.address:#x} is not aligned to its {array.dtype.itemsize}-byte "
            "elements"
        )
    facts = pointer_facts(array.address)
    if facts.kind not in ("device", "managed"):
        raise InvalidArgument(f"{name} is {facts.kind} memory, not GPU memory")
    if facts.kind == "device" and facts.device != device:
        raise UnsupportedError(
            f"{name} is on device {facts.device}; this communicator's device is {device}"
        )
