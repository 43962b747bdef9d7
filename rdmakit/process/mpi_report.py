"""What the MPI library of a rank is, told by a short-lived child process that never starts MPI.

``python -m rdmakit.process.mpi_report SETTINGS`` prints it as JSON. A child, because a library
that is opened to be asked stays in the process that asked.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping

from rdmakit.drivers.host import Runner, run
from rdmakit.drivers.mpi_library import family_of, find_mpi_library, mpirun_beside
from rdmakit.drivers.report_child import ChildReport, ask_child, print_report, settings_given
from rdmakit.drivers.ucx_probe import probe
from rdmakit.errors import RdmaKitError

__all__ = ["MpiReport", "ask_mpi", "read_mpi"]

_LIMIT = 30.0
_SETTINGS = ("MPI4PY_", "LD_", "PATH", "OPAL_PREFIX", "OMPI_", "MPIR_CVAR_", "I_MPI_")
_ASK_LIBRARY = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
text, length = ctypes.create_string_buffer(1 << 16), ctypes.c_int()
library.MPI_Get_library_version(text, ctypes.byref(length))
print("library", text.value.decode(errors="replace").splitlines()[0], flush=True)
print("cuda", library.MPIX_Query_cuda_support(), flush=True)
"""
"""Both calls are allowed before MPI_Init. What the second does without it is seen by its end."""


class MpiReport(ChildReport, frozen=True, kw_only=True):
    """What the child saw; ``problem``: why no library would be loaded, or nothing is known."""

    path: str = ""
    family: str = ""
    """openmpi, mpich or intel; empty where that is not known."""
    wheel: str = ""
    """Name and version of the PyPI wheel it belongs to."""
    library: str = ""
    """What MPI_Get_library_version says, its first line."""
    cuda: bool | None = None
    """What MPIX_Query_cuda_support says; None where it does not say."""
    evidence: str = ""
    """Which of its files needs which UCX; empty where it brings none."""
    ucx: str = ""
    """Release of the UCX that it brings."""
    ucx_directory: str = ""
    mpirun: str = ""
    """The launcher that was installed with the library."""
    path_mpirun: str = ""
    """The mpirun that the shell would find."""
    path_family: str = ""
    """Its family by what it prints."""


def ask_mpi(runner: Runner, environ: Mapping[str, str]) -> MpiReport:
    """Return what a child process learns of the MPI under ``environ``. Local, 30 s at most.

    ``problem`` says why there is nothing; never raises.
    """
    own = {name: value for name, value in environ.items() if name.startswith(_SETTINGS)}
    return ask_child(
        runner,
        "rdmakit.process.mpi_report",
        MpiReport,
        _LIMIT,
        task="look for MPI",
        about="MPI",
        settings=own,
    )


def read_mpi(environ: Mapping[str, str]) -> MpiReport:
    """Return the report. Local; starts short commands."""
    try:
        path = find_mpi_library(environ)
    except (RdmaKitError, OSError) as exc:
        return MpiReport(problem=str(exc))
    launcher = shutil.which("mpirun", path=environ.get("PATH"))
    launched = _launcher_family(launcher) if launcher else ""
    if path is None:
        return MpiReport(
            problem="mpi4py would find no MPI library",
            path_mpirun=launcher or "",
            path_family=launched,
        )
    family = family_of(path)
    beside = mpirun_beside(path, family)
    library, cuda = _ask_library(str(path), environ)
    mpi = probe(environ=environ).mpi
    return MpiReport(
        path=str(path),
        family=family or "",
        wheel=mpi.wheel if mpi else "",
        library=library,
        cuda=cuda,
        evidence=mpi.evidence if mpi else "",
        ucx=mpi.ucx.version if mpi and mpi.ucx else "",
        ucx_directory=mpi.ucx.directory if mpi and mpi.ucx else "",
        mpirun=str(beside or ""),
        path_mpirun=os.path.realpath(launcher) if launcher else "",
        path_family=launched,
    )


def _ask_library(path: str, environ: Mapping[str, str]) -> tuple[str, bool | None]:
    command = (sys.executable, "-I", "-S", "-c", _ASK_LIBRARY, path)
    result = run(command, 10.0, {**os.environ, **environ})
    told = dict(line.split(" ", 1) for line in result.stdout.splitlines() if " " in line)
    cuda = told.get("cuda", "")
    return told.get("library", "").strip(), {"1": True, "0": False}.get(cuda.strip())


def _launcher_family(mpirun: str) -> str:
    """Return the family of an mpirun by its ``--version``."""
    result = run((mpirun, "--version"), 10.0)
    text = (result.stdout + result.stderr).lower()
    if "open mpi" in text or "openrte" in text or "prrte" in text or "prte" in text:
        return "openmpi"
    if "intel" in text:
        return "intel"
    return "mpich" if "hydra" in text or "mpich" in text else ""


def main() -> None:
    """Print the report under this process's environment and the settings in the argument."""
    print_report(read_mpi({**os.environ, **settings_given()}))


if __name__ == "__main__":
    main()
