"""Which GPUs a process may use, and under which number: CUDA's renumbering, MIG, Slurm.

CUDA's ordinal, nvidia-smi's index and the minor number of /dev/nvidia# are three numbers; a GPU
is the same only by PCI address or UUID.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rdmakit.topology.model import Gpu

__all__ = ["VARIABLES", "Visible", "hidden_peers", "visible_gpus"]

VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES")
"""Variables that decide it."""


@dataclass(frozen=True)
class Visible:
    """GPUs of a process in CUDA's order."""

    gpus: tuple[str, ...] | None
    """Labels (``GPU3``): the process's device 0 first. None where that cannot be known."""
    devices: tuple[str, ...] = ()
    """UUID of each: of the GPU, or of its MIG device."""
    note: str = ""


def visible_gpus(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> Visible:
    """Return what CUDA shows a process with this environment. Pure; never raises.

    Numbers count in CUDA's own order, which is by PCI address with CUDA_DEVICE_ORDER=PCI_BUS_ID
    and wherever all GPUs are of one model. As in CUDA, the list ends at its first wrong entry.
    """
    given = environ.get("CUDA_VISIBLE_DEVICES")
    ordered = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({g.name for g in gpus}) <= 1
    order_note = (
        ""
        if ordered
        else "GPUs of several models: CUDA numbers the fastest first; set "
        "CUDA_DEVICE_ORDER=PCI_BUS_ID to have nvidia-smi's order"
    )
    if given is None:
        labels = tuple(gpu.label for gpu in gpus)
        return Visible(labels if ordered else None, tuple(g.uuid for g in gpus), order_note)
    labels_, devices, note = [], [], ""
    for entry in (part.strip() for part in given.split(",")):
        found = _one(gpus, entry)
        if found is None:
            if entry and entry not in ("-1", "void", "none", "NoDevFiles"):
                note = f"CUDA_VISIBLE_DEVICES={given}: {entry!r} is no GPU here; CUDA stops there"
            break
        gpu, device = found
        if not ordered and entry.isdigit():
            return Visible(None, (), f"CUDA_VISIBLE_DEVICES={given}: {order_note}")
        if device not in devices:
            labels_.append(gpu.label)
            devices.append(device)
    if any(device.startswith("MIG-") for device in devices) and len(devices) > 1:
        note = (
            f"CUDA_VISIBLE_DEVICES names {len(devices)} devices with MIG ones among them: CUDA "
            "shows a process one MIG device only"
        )
        labels_, devices = labels_[:1], devices[:1]
    return Visible(tuple(labels_), tuple(devices), note)


def _one(gpus: Sequence[Gpu], entry: str) -> tuple[Gpu, str] | None:
    """Return (GPU, its or its MIG device's UUID) of an entry, None where it names none."""
    if entry.isascii() and entry.isdigit():
        place = int(entry)
        return (gpus[place], gpus[place].uuid or gpus[place].label) if place < len(gpus) else None
    if entry.startswith("MIG-GPU-"):  # drivers before 470: MIG-GPU-<uuid>/<instance>/<part>
        uuid = entry.removeprefix("MIG-").partition("/")[0]
        gpu = next((gpu for gpu in gpus if gpu.uuid == uuid), None)
        return (gpu, entry) if gpu is not None else None
    if entry.startswith("MIG-"):
        mig = [(g, m.uuid) for g in gpus for m in g.mig if m.uuid.startswith(entry)]
        return mig[0] if len(mig) == 1 else None
    if entry.startswith("GPU-"):
        # As CUDA does, the beginning of a UUID is enough where it is of one GPU only.
        found = [gpu for gpu in gpus if gpu.uuid.startswith(entry)]
        return (found[0], found[0].uuid) if len(found) == 1 else None
    return None


def hidden_peers(visible: Sequence[tuple[str, ...] | None]) -> str:
    """Return what is wrong where the ranks of a node cannot see each other's GPUs.

    Args:
        visible: GPUs of each rank of one node, by a name that is the same for all of them (PCI
            address or UUID).
    """
    known = [gpus for gpus in visible if gpus]
    if len(known) < 2 or len(known) < len(visible):
        return ""
    if all(len(gpus) == 1 for gpus in known) and len(set(known)) > 1:
        return (
            f"each of the {len(known)} ranks of the node sees one GPU, not those of the others: "
            "CUDA IPC and P2P between them are not possible if the job scheduler hides them (one "
            "GPU per task); use srun --gpus-per-node with --gpu-bind=none"
        )
    return ""
