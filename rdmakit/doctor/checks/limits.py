"""Limits of the process: locked memory, open files, processes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rdmakit.doctor.context import Context
from rdmakit.doctor.model import Check, Finding, Status

__all__ = ["CHECKS"]

_ENOUGH = 1 << 36
"""Bytes: 64 GiB may be locked by any job that is met in practice."""


def _soft(context: Context, title: str) -> int | None:
    """Return a soft limit of /proc/self/limits; -1: unlimited; None: not known."""
    text = context.read("/proc/self/limits") or ""
    match = re.search(rf"^{title}\s+(\S+)\s", text, re.MULTILINE)
    if match is None:
        return None
    return -1 if match[1] == "unlimited" else int(match[1])


def _memlock(context: Context) -> Iterator[Finding]:
    limit = _soft(context, "Max locked memory")
    if limit is None:
        yield MEMLOCK.finding(Status.UNKNOWN, "/proc/self/limits does not tell")
    elif limit < 0 or limit >= _ENOUGH:
        yield MEMLOCK.finding(Status.OK, "unlimited" if limit < 0 else f"{limit >> 20} MiB")
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


MEMLOCK = Check(
    "host.memlock",
    "Locked memory",
    "RDMA registers memory by locking it: with a small limit registration fails, or UCX goes "
    "over TCP without a word.",
    _memlock,
)

CHECKS = (MEMLOCK,)
