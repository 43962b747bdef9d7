"""What ranks of one node share: GPUs, /dev/shm, namespaces, and whether MPS joins them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from rdmakit.doctor.context import Context, RankView
from rdmakit.doctor.model import Check, Finding, Status
from rdmakit.topology.visible import Visible, hidden_peers, visible_gpus

__all__ = ["CHECKS"]

_MPS_PIPE = "/tmp/nvidia-mps"


def _visible(context: Context) -> dict[int, Visible]:
    return {v.rank: visible_gpus(context.machine.gpus, v.environ) for v in context.ranks}


def _gpu_of(view: RankView, visible: Visible) -> str:
    """Return what a rank's GPU is called; its local rank picks one of those it sees."""
    if told := view.facts.get("gpu"):
        return told
    if not visible.devices:
        return ""
    return visible.devices[view.local_rank % len(visible.devices)]


def _mps(context: Context) -> Iterator[Finding]:
    visible = _visible(context)
    users = Counter(gpu for view in context.ranks if (gpu := _gpu_of(view, visible[view.rank])))
    shared = {gpu: count for gpu, count in users.items() if count > 1}
    pipe = context.environ.get("CUDA_MPS_PIPE_DIRECTORY", _MPS_PIPE)
    running = context.tree.exists(f"{pipe}/control")
    if not users:
        yield MPS.finding(Status.SKIPPED, "no rank of this node has a GPU")
    elif shared and not running:
        most = max(shared.values())
        yield MPS.finding(
            Status.WARN,
            f"{most} ranks share a GPU and MPS does not run ({pipe}/control is not there)",
            expected="one rank per GPU, or MPS",
            cure="nvidia-cuda-mps-control -d (once per node, before the job), or fewer ranks per "
            "node",
            urgency=30,
        )
    elif "CUDA_MPS_PIPE_DIRECTORY" in context.environ and not running:
        yield MPS.finding(
            Status.WARN,
            f"CUDA_MPS_PIPE_DIRECTORY={pipe}, but no MPS listens there: CUDA goes on without it",
            cure="nvidia-cuda-mps-control -d, or unset CUDA_MPS_PIPE_DIRECTORY",
            urgency=50,
        )
    else:
        state = "runs" if running else "does not run, and no two ranks share a GPU"
        yield MPS.finding(Status.OK, f"MPS {state}")


def _namespaces(context: Context) -> Iterator[Finding]:
    """Compare the namespaces of the ranks' processes."""
    pids = _values(context, "pid")
    if len(set(pids.values())) > 1:
        odd = _odd(pids)
    else:
        # A process number that is nobody's here, or two ranks', is of another PID namespace.
        every = Counter(view.pid for view in context.ranks)
        odd = [
            view.rank
            for view in context.ranks
            if every[view.pid] > 1 or not context.tree.exists(f"/proc/{view.pid}/.")
        ]
        if len(odd) == len(context.ranks) == len(every):
            odd = []  # no rank at all is seen: /proc tells nothing here
    told = [_apart("PID", odd)] if odd else []
    # What /proc says of those is another process's.
    ipc = {rank: value for rank, value in _values(context, "ipc").items() if rank not in odd}
    if len(set(ipc.values())) > 1:
        told.append(_apart("IPC", _odd(ipc)))
    if told:
        yield NAMESPACES.finding(
            Status.FAIL,
            f"of the {len(context.ranks)} ranks of this node {', '.join(told)}: no CUDA IPC, no "
            "cma and no System V shared memory with the others",
            expected="one PID and one IPC namespace for the ranks of a node",
            cure="start the ranks of a host in one container, or docker run --pid=host --ipc=host "
            "(Kubernetes: hostPID and hostIPC, or one pod for a node)",
            urgency=20,
        )
    elif pids or ipc:
        yield NAMESPACES.finding(Status.OK, f"{len(context.ranks)} ranks in one namespace each")
    else:
        yield NAMESPACES.finding(Status.UNKNOWN, "/proc/PID/ns of the ranks is not readable")


def _apart(kind: str, ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - 6} more" if len(ranks) > 6 else ""
    return f"rank(s) {', '.join(map(str, ranks[:6]))}{more} have another {kind} namespace"


def _odd(told: Mapping[int, str]) -> list[int]:
    """Return the ranks that have not what most have."""
    usual = Counter(told.values()).most_common(1)[0][0]
    return [rank for rank, value in told.items() if value != usual]


def _values(context: Context, kind: str) -> dict[int, str]:
    """Return the identity of each rank's namespace by its own word, else by /proc."""
    if kind == "pid" and all(view.facts.get("processes") for view in context.ranks):
        return {view.rank: view.facts["processes"] for view in context.ranks}
    # The link reads pid:[4026531836]; one that is not readable stays as it is.
    told = {
        view.rank: context.tree.resolve(f"/proc/{view.pid}/ns/{kind}").rpartition("/")[2]
        for view in context.ranks
    }
    return {rank: value for rank, value in told.items() if "[" in value}


def _gpus(context: Context) -> Iterator[Finding]:
    visible = _visible(context)
    notes = sorted({own.note for own in visible.values() if own.note})
    known = [own.devices if own.gpus is not None else None for own in visible.values()]
    problem = hidden_peers(known)
    if problem:
        # With CUDA_VISIBLE_DEVICES alone CUDA IPC still works; a device group does not let it.
        yield GPUS.finding(
            Status.WARN,
            problem,
            expected="every rank sees all GPUs of its node",
            cure="srun --gpus-per-node=N --gpu-bind=none; let rdmakit pick by local rank",
            urgency=28,
        )
    for note in notes:
        yield GPUS.finding(
            Status.WARN,
            note,
            cure="unset CUDA_VISIBLE_DEVICES, or export CUDA_DEVICE_ORDER=PCI_BUS_ID",
            urgency=32,
        )
    empty = [rank for rank, own in visible.items() if own.gpus == ()]
    if empty and len(empty) < len(visible):
        yield GPUS.finding(
            Status.FAIL,
            f"rank(s) {', '.join(map(str, empty[:8]))} see no GPU, others of this node do",
            cure="set CUDA_VISIBLE_DEVICES alike for all ranks: unset CUDA_VISIBLE_DEVICES",
            urgency=20,
        )
    elif not problem and not notes:
        counts = sorted({len(own.devices) for own in visible.values()})
        text = ", ".join(map(str, counts))
        yield GPUS.finding(Status.OK, f"ranks see {text} GPU(s) each, the same for all")


def _shm(context: Context) -> Iterator[Finding]:
    told = {
        view.rank: view.facts.get("shm", "") or _shm_of(context, view) for view in context.ranks
    }
    values = Counter(value for value in told.values() if value)
    if not values:
        yield SHM.finding(Status.UNKNOWN, "which /dev/shm the ranks have is not readable")
    elif len(values) > 1:
        usual = values.most_common(1)[0][0]
        odd = [rank for rank, value in told.items() if value and value != usual]
        yield SHM.finding(
            Status.FAIL,
            f"{len(values)} different /dev/shm among the ranks of this node (ranks "
            f"{', '.join(map(str, odd[:6]))} apart): no shared memory between them",
            expected="one /dev/shm for all ranks of a node",
            cure="one container per node, or docker run --ipc=host",
            urgency=21,
        )
    else:
        yield SHM.finding(Status.OK, f"{len(context.ranks)} ranks, one /dev/shm")


def _shm_of(context: Context, view: RankView) -> str:
    """Return the device of a rank's /dev/shm by its mounts (/proc/PID/mountinfo)."""
    text = context.tree.read_text(f"/proc/{view.pid}/mountinfo") or ""
    for line in reversed(text.splitlines()):
        fields = line.split()
        if len(fields) > 4 and fields[4] == "/dev/shm":
            return fields[2]
    return ""


MPS = Check(
    "ipc.mps",
    "Ranks on one GPU, and MPS",
    "Without MPS ranks on one GPU take turns: a barrier between them costs milliseconds.",
    _mps,
    needs=("gpu", "live"),
)
NAMESPACES = Check(
    "ipc.namespaces",
    "Namespaces of the ranks",
    "Ranks in different containers share no process numbers and no IPC, on the same host.",
    _namespaces,
    needs=("live", "job"),
)
GPUS = Check(
    "ipc.gpus",
    "GPUs that ranks see",
    "A GPU that the scheduler hides from a rank cannot be reached by CUDA IPC or P2P.",
    _gpus,
    needs=("gpu", "live", "job"),
)
SHM = Check(
    "ipc.shm",
    "Shared /dev/shm",
    "Ranks of a node exchange host arrays through /dev/shm.",
    _shm,
    needs=("live", "job"),
)

CHECKS = (MPS, NAMESPACES, GPUS, SHM)
