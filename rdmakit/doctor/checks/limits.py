"""Limits of the process: locked memory, open files, processes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rdmakit.doctor.context import Context
from rdmakit.doctor.model import Check, Finding, Status

__all__ = ["CHECKS"]

_ENOUGH = 1 << 36
"""Bytes: 64 GiB may be locked by any job that is met in practice."""
_IPC_LOCK = 14
"""Bit of CAP_IPC_LOCK (linux/capability.h); ib_umem_get does not look at the limit with it."""
_FILES, _FILES_PER_PEER = 256, 4
"""Files that a rank holds open alone (libraries, devices, event channels), and for each peer."""
_TASKS, _TASKS_PER_RANK = 256, 64
"""Threads of launcher and shell, and of a rank with MPI, UCX and CUDA."""


def _soft(context: Context, title: str) -> int | None:
    """Return a soft limit of /proc/self/limits; -1: unlimited; None: not known."""
    text = context.read("/proc/self/limits") or ""
    match = re.search(rf"^{title}\s+(\S+)\s", text, re.MULTILINE)
    if match is None:
        return None
    return -1 if match[1] == "unlimited" else int(match[1])


def _may_lock(context: Context) -> bool:
    """Return whether the process has CAP_IPC_LOCK, which the kernel asks for before the limit.

    A rootless container's own does not count: it must hold in the first user namespace.
    """
    held = re.search(
        r"^CapEff:\s*([0-9a-f]{1,16})\s*$", context.read("/proc/self/status") or "", re.MULTILINE
    )
    return (
        held is not None
        and bool(int(held[1], 16) >> _IPC_LOCK & 1)
        and (context.read("/proc/self/uid_map") or "").split() == ["0", "0", str((1 << 32) - 1)]
    )


def _memlock(context: Context) -> Iterator[Finding]:
    limit = _soft(context, "Max locked memory")
    free = _may_lock(context)  # read always, so that it is among the files that are collected
    if limit is None:
        yield MEMLOCK.finding(Status.UNKNOWN, "/proc/self/limits does not tell")
    elif limit < 0 or limit >= _ENOUGH:
        yield MEMLOCK.finding(Status.OK, "unlimited" if limit < 0 else f"{limit >> 20} MiB")
    elif free:
        yield MEMLOCK.finding(Status.OK, f"{limit >> 10} KiB, not enforced: CAP_IPC_LOCK")
    else:
        rdma = bool(context.machine.nics)
        yield MEMLOCK.finding(
            Status.FAIL if rdma and limit < 1 << 26 else Status.WARN,
            f"{limit >> 10} KiB may be locked by a process",
            expected="unlimited",
            cure="ulimit -l unlimited where the job starts: /etc/security/limits.conf ('* - "
            "memlock unlimited'), LimitMEMLOCK=infinity of the launcher's daemon (slurmd, sshd), "
            "docker run --ulimit memlock=-1",
            urgency=10,
        )


def _files(context: Context) -> Iterator[Finding]:
    limit = _soft(context, "Max open files")
    need = _FILES + _FILES_PER_PEER * context.job_size
    if limit is None:
        yield FILES.finding(Status.UNKNOWN, "/proc/self/limits does not tell")
    elif limit < 0 or limit >= need:
        text = "unlimited" if limit < 0 else f"{limit} files for {context.job_size} rank(s)"
        yield FILES.finding(Status.OK, text)
    else:
        yield FILES.finding(
            Status.FAIL if limit < _FILES // 4 + context.job_size else Status.WARN,
            f"{limit} files may be open in a process",
            expected=f"{need} or more for {context.job_size} rank(s)",
            cure="ulimit -n 65536 where the job starts: /etc/security/limits.conf ('* - nofile "
            "65536'), LimitNOFILE=65536 of the launcher's daemon (slurmd, sshd), docker run "
            "--ulimit nofile=65536",
            urgency=30,
        )


def _processes(context: Context) -> Iterator[Finding]:
    limits = []
    own = _soft(context, "Max processes")
    if own is not None and own >= 0:
        limits.append((own, "the user's limit (ulimit -u)"))
    group = context.read("/sys/fs/cgroup/pids.max") or ""
    if group.isascii() and group.isdigit():
        limits.append((int(group), "the control group's limit (pids.max)"))
    if own is None and not group:
        yield PROCESSES.finding(Status.UNKNOWN, "/proc/self/limits does not tell")
        return
    here = max(len(context.ranks), 1)
    need = _TASKS + _TASKS_PER_RANK * here
    limit, which = min(limits, default=(need, ""))
    if limit >= need:
        text = f"{limit} processes and threads" if which else "unlimited"
        yield PROCESSES.finding(Status.OK, text)
    else:
        yield PROCESSES.finding(
            Status.WARN,
            f"{limit} processes and threads: {which}",
            expected=f"{need} or more for {here} rank(s) on this node",
            cure="ulimit -u unlimited where the job starts (/etc/security/limits.conf '* - nproc "
            "unlimited'); docker run --pids-limit=-1, podman the same, TasksMax=infinity of the "
            "launcher's daemon",
            urgency=35,
        )


MEMLOCK = Check(
    "host.memlock",
    "Locked memory",
    "RDMA registers memory by locking it: with a small limit registration fails, or UCX goes "
    "over TCP without a word.",
    _memlock,
)

FILES = Check(
    "host.files",
    "Open files",
    "Every connection over TCP, event channel and shared segment is an open file: a rank of a "
    "large job runs out of them while it connects.",
    _files,
)

PROCESSES = Check(
    "host.processes",
    "Processes and threads",
    "Ranks, MPI, UCX and CUDA start threads; where they cannot, the start fails with "
    "'Resource temporarily unavailable'.",
    _processes,
)

CHECKS = (MEMLOCK, FILES, PROCESSES)
