"""Shared memory and huge pages."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rdmakit.config import Config, parse_size
from rdmakit.doctor.context import Context
from rdmakit.doctor.model import Check, Finding, Status
from rdmakit.errors import InvalidArgument

__all__ = ["CHECKS"]

_SHM = "/dev/shm"
_OTHERS = 8 << 20
"""Bytes that MPI and UCX take in /dev/shm for each rank, above what was measured of either."""
_DOCKER = 64 << 20
"""What docker and Kubernetes give without being asked."""
_CURE = (
    "mount -o remount,size=50% /dev/shm; docker run --shm-size=8g (or --ipc=host); Kubernetes: an "
    "emptyDir of medium Memory mounted at /dev/shm"
)


def _need(context: Context) -> tuple[int, int]:
    """Return (bytes in /dev/shm that a job of ours needs here, ranks)."""
    ranks = len(context.ranks) or len(context.machine.gpus) or 1
    try:
        window = Config.from_env(context.environ).window_bytes
    except InvalidArgument:
        window = Config().window_bytes  # what is wrong with a setting is told elsewhere
    return ranks * (window + _OTHERS), ranks


def _told_size(context: Context) -> int | None:
    """Return the size of /dev/shm by its mount's options; half of the memory where it has none."""
    options = None
    for line in (context.read("/proc/mounts") or "").splitlines():
        words = line.split()
        if len(words) > 3 and words[1] == _SHM:
            options = words[3].split(",")
    if options is None:
        return None
    memory = re.search(r"^MemTotal:\s+(\d+) kB", context.read("/proc/meminfo") or "", re.MULTILINE)
    every = int(memory[1]) << 10 if memory else None
    size = next((o.removeprefix("size=") for o in options if o.startswith("size=")), "50%")
    if size.endswith("%"):
        share = size.removesuffix("%")
        return every * int(share) // 100 if every is not None and share.isdigit() else None
    try:
        return parse_size(size.upper())
    except (ValueError, InvalidArgument):
        return None


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.4g} MiB" if size < 1 << 30 else f"{size / (1 << 30):.4g} GiB"


def _shm(context: Context) -> Iterator[Finding]:
    need, ranks = _need(context)
    space = context.tree.space(_SHM) if context.live else None
    size, free = space if space is not None else (_told_size(context), None)
    expected = f"{_mib(need)} or more for {ranks} rank(s) of this node"
    if size is None:
        if context.live:
            yield SHM.finding(
                Status.FAIL,
                "there is no /dev/shm",
                expected=expected,
                cure="mount -t tmpfs -o mode=1777 tmpfs /dev/shm",
                urgency=12,
            )
        else:
            yield SHM.finding(Status.UNKNOWN, "its size is not in the files (/proc/mounts)")
    elif size < need:
        given = ", what a container gets that asks for nothing" if size == _DOCKER else ""
        yield SHM.finding(
            Status.FAIL,
            f"/dev/shm has {_mib(size)}{given}",
            expected=expected,
            cure=_CURE,
            urgency=12,
        )
    elif free is not None and free < need:
        yield SHM.finding(
            Status.FAIL,
            f"{_mib(free)} of {_mib(size)} in /dev/shm are free",
            expected=expected,
            cure="ls -l /dev/shm: remove what ended jobs left there (sm_segment.*, "
            f"vader_segment.*, mpich_shm_*, ucx_shm_*), or enlarge it: {_CURE}",
            urgency=12,
        )
    elif size <= _DOCKER:
        yield SHM.finding(
            Status.WARN,
            f"/dev/shm has {_mib(size)}: enough for {ranks} rank(s), not for many more",
            expected="1 GiB or more",
            cure=_CURE,
            urgency=60,
        )
    else:
        left = "" if free is None else f", {_mib(free)} free"
        yield SHM.finding(Status.OK, f"{_mib(size)}{left}; {_mib(need)} needed")


def _huge(context: Context) -> Iterator[Finding]:
    asked = {
        name: value
        for name, value in context.environ.items()
        if name.startswith("UCX_")
        and "HUGE" in f"{name}={value}".upper()
        and value.strip().lower() not in ("n", "no", "off", "0")
    }
    text = context.read("/proc/meminfo") or ""
    numbers = {
        name: int(match[1])
        for name in ("HugePages_Total", "HugePages_Free", "Hugepagesize")
        if (match := re.search(rf"^{name}:\s+(\d+)", text, re.MULTILINE))
    }
    strict = {n: v for n, v in asked.items() if v.strip().lower() in ("y", "yes", "on", "1")}
    if "HugePages_Total" not in numbers:
        yield HUGE.finding(Status.UNKNOWN, "/proc/meminfo does not tell of huge pages")
        return
    free, total = numbers.get("HugePages_Free", 0), numbers["HugePages_Total"]
    here = f"{free} of {total} huge pages of {numbers.get('Hugepagesize', 0)} KiB are free"
    names = ", ".join(f"{name}={value}" for name, value in asked.items())
    if not asked:
        yield HUGE.finding(Status.OK, f"{here}; no setting asks for them")
    elif free:
        yield HUGE.finding(Status.OK, f"{here}; asked for by {names}")
    else:
        yield HUGE.finding(
            Status.FAIL if strict else Status.WARN,
            f"{here}, but {names} asks for them",
            expected="free huge pages",
            cure=f"sysctl -w vm.nr_hugepages=1024, or unset {' '.join(asked)}",
            urgency=40,
        )


SHM = Check(
    "host.shm",
    "Shared memory (/dev/shm)",
    "Ranks of a node exchange through files in /dev/shm; one that is too small fails late, with a "
    "bus error where it is written.",
    _shm,
)

HUGE = Check(
    "host.hugepages",
    "Huge pages",
    "UCX takes shared memory in huge pages only where a setting asks for it; without free ones "
    "it then has none.",
    _huge,
)

CHECKS = (SHM, HUGE)
