"""All checks, in the order in which they run."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from rdmakit.doctor.checks import (
    counters,
    expected,
    gpu_driver,
    gpu_state,
    gpudirect,
    ipc,
    isolation,
    kernel,
    limits,
    memory,
    mpi,
    mpi_settings,
    nccl,
    net,
    packages,
    pcie,
    ports,
    ucx,
    ucx_settings,
    ucx_tls,
    verbs,
)
from rdmakit.doctor.model import Check
from rdmakit.errors import InvalidArgument

__all__ = ["CHECKS", "select"]

CHECKS: tuple[Check, ...] = (
    *limits.CHECKS,
    *memory.CHECKS,
    *kernel.CHECKS,
    *isolation.CHECKS,
    *gpu_driver.CHECKS,
    *gpudirect.CHECKS,
    *gpu_state.CHECKS,
    *pcie.CHECKS,
    *verbs.CHECKS,
    *ports.CHECKS,
    *counters.CHECKS,
    *expected.CHECKS,
    *ucx.CHECKS,
    *ucx_tls.CHECKS,
    *ucx_settings.CHECKS,
    *mpi.CHECKS,
    *mpi_settings.CHECKS,
    *nccl.CHECKS,
    *packages.CHECKS,
    *ipc.CHECKS,
    *net.CHECKS,
)


def select(only: Sequence[str] = (), skip: Sequence[str] = (), of: Sequence[str] = ()) -> list[str]:
    """Return the identifiers that are asked for; a pattern (``host.*``) names several.

    Args:
        only: these alone; none: all.
        skip: without these.
        of: all identifiers; those of :data:`CHECKS` where there are none.

    Raises:
        InvalidArgument: a name fits no check, or nothing is left.
    """
    every = list(of) or [check.id for check in CHECKS]
    for pattern in (*only, *skip):
        if not any(_fits(name, pattern) for name in every):
            raise InvalidArgument(f"no check {pattern!r}; rdmakit doctor --list shows them")
    chosen = [
        name
        for name in every
        if (not only or any(_fits(name, pattern) for pattern in only))
        and not any(_fits(name, pattern) for pattern in skip)
    ]
    if not chosen:
        raise InvalidArgument("no check is left: --skip takes away all that --only names")
    return chosen


def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")
