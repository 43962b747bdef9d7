"""Which GPU each rank takes: decided by all ranks together, before anything makes a context."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rdmakit.drivers import cuda, cuda_tools
from rdmakit.errors import CudaError, InvalidArgument
from rdmakit.protocols import Bootstrap

__all__ = ["Choice", "assign", "choose_device", "parse_map"]


@dataclass(frozen=True)
class Choice:
    """Where the arrays of a run are; ``device`` and ``reason`` are equal on all ranks."""

    device: str
    """gpu or cpu."""
    ordinal: int = -1
    """This rank's GPU."""
    reason: str = ""
    """Why not on the GPU, where that was left open."""


def parse_map(text: str) -> tuple[str, ...]:
    """Return the entries of ``--gpu-map``: ordinals or UUIDs of GPUs, by local rank. Pure.

    Raises:
        InvalidArgument: an entry is neither.
    """
    entries = tuple(entry.strip() for entry in text.split(","))
    for entry in entries:
        ordinal = entry.isascii() and entry.isdigit()
        if not ordinal and not entry.upper().startswith(("GPU-", "MIG-")):
            raise InvalidArgument(
                f"--gpu-map {text!r}: {entry!r} is neither the number of a visible GPU nor a UUID "
                "(GPU-..., MIG-...); write one for each rank of a host, as 0,1,2,3"
            )
    return entries


def assign(
    hosts: Sequence[str], visible: Sequence[Sequence[str]], gpu_map: Sequence[str] = ()
) -> tuple[list[int], list[str]]:
    """Return each rank's ordinal, and each rank's problem or nothing. Pure.

    With a map the ranks of a host take its entries in turn, and begin anew at its end. Without,
    each takes the visible GPU that the fewest ranks before it have: where all see the same GPUs,
    those are taken in turn.

    Args:
        hosts: what names the host of each rank.
        visible: UUIDs of the GPUs that each rank sees, by ordinal; at least one.
        gpu_map: from :func:`parse_map`.
    """
    before: Counter[str] = Counter()
    users: Counter[str] = Counter()
    ordinals, problems = [], []
    for host, uuids in zip(hosts, visible, strict=True):
        local = before[host]
        before[host] += 1
        if gpu_map:
            wanted = gpu_map[local % len(gpu_map)]
            found = _find(wanted, uuids)
            seen = ", ".join(f"{i} ({uuid})" for i, uuid in enumerate(uuids))
            problems.append(
                "" if len(found) == 1 else
                f"{wanted!r} of local rank {local} "
                f"{'is more than one' if found else 'is none'} of the visible GPUs {seen}"
            )  # fmt: skip
            ordinals.append(found[0] if found else -1)
        else:
            problems.append("")
            ordinals.append(min(range(len(uuids)), key=lambda i: (users[uuids[i]], i)))
        if ordinals[-1] >= 0:
            users[uuids[ordinals[-1]]] += 1
    return ordinals, problems


def _find(wanted: str, uuids: Sequence[str]) -> list[int]:
    if wanted.isdigit():
        return [int(wanted)] if int(wanted) < len(uuids) else []
    return [i for i, uuid in enumerate(uuids) if uuid.lower().startswith(wanted.lower())]


def choose_device(
    bootstrap: Bootstrap,
    wanted: str,
    gpu_map: Sequence[str],
    host: str,
    door: Any = cuda,
    tools: Any = cuda_tools,
) -> Choice:
    """Choose for all ranks alike, and make this rank's GPU the current one. Collective, blocking.

    Before it no context is made on any GPU.

    Args:
        bootstrap: control plane of the job.
        wanted: gpu, cpu, or auto: the GPU if all ranks can use one.
        gpu_map: from :func:`parse_map`; with one, auto is gpu.
        host: what names this rank's host, such as its kernel's boot id.
        door: :mod:`rdmakit.drivers.cuda`, or a fake.
        tools: :mod:`rdmakit.drivers.cuda_tools`, or a fake.

    Raises:
        InvalidArgument: on every rank, the same: GPUs are wanted and some rank cannot use one.
    """
    if wanted == "cpu":
        return Choice("cpu")
    reason, uuids = door.why_not(), list[str]()
    if not reason:
        try:
            uuids = list(tools.device_uuids())
        except CudaError as exc:
            reason = f"the GPUs cannot be asked: {exc}"
    mine = msgspec.json.encode({"host": host, "reason": reason, "uuids": uuids})
    told = [msgspec.json.decode(entry) for entry in bootstrap.allgather(mine)]
    problems = [entry["reason"] for entry in told]
    ordinal = -1
    if not any(problems):
        ordinals, problems = assign(
            [entry["host"] for entry in told], [entry["uuids"] for entry in told], gpu_map
        )
        ordinal = ordinals[bootstrap.rank]
    if not any(problems):
        problem = ""
        try:
            door.activate(ordinal)
        except (CudaError, RuntimeError) as exc:
            problem = f"GPU {ordinal} ({uuids[ordinal]}) cannot be used: {exc}"
        problems = [text.decode() for text in bootstrap.allgather(problem.encode())]
    bad = [rank for rank, text in enumerate(problems) if text]
    if not bad:
        return Choice("gpu", ordinal)
    more = f" (and {len(bad) - 1} more ranks)" if len(bad) > 1 else ""
    text = f"rank {bad[0]}{more}: {problems[bad[0]]}"
    if wanted == "gpu" or gpu_map:
        raise InvalidArgument(f"{'--gpu-map' if gpu_map else '--device gpu'}: {text}")
    return Choice("cpu", reason=text)
