"""Environment variables that change what a job does, and no others: they are shown and kept."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

__all__ = ["PREFIXES", "settings"]

PREFIXES = (
    "RDMAKIT_",
    "UCX_",
    "NCCL_",
    "OMPI_",
    "PRTE_",
    "PMIX_",
    "PMI_",
    "MPI_LOCAL",
    "HYDI_",
    "MPICH_",
    "MPIR_",
    "I_MPI_",
    "FI_",
    "CUDA_",
    "CUPY_",
    "SLURM_",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
)
"""Settings that change what a job does, by the start of their names."""

# Slurm keeps its sign-on in SLURM_JWT.
_SECRET = re.compile(r"JWT|TOKEN|SECRET|PASSW|CREDENTIAL|COOKIE|PRIVATE|AUTH|API_?KEY")


def settings(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    r"""Return the variables of :data:`PREFIXES`, without those whose names tell of a secret.

    Local. None: those of this process. Bytes that are no UTF-8 become ``\udcff`` and the like,
    since no message or file could carry them.
    """
    env = os.environ if environ is None else environ
    return {
        _readable(name): _readable(env[name])
        for name in sorted(env)
        if name.startswith(PREFIXES) and not _SECRET.search(name)
    }


def _readable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
