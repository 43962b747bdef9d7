"""Which MPI library mpi4py will load, told from files alone.

Loading the wrong one cannot be undone, and under Open MPI's mpirun it kills the process, so
the search that mpi4py and the dynamic linker make is repeated here without opening anything.
"""

from __future__ import annotations

import mmap
import os
import re
import site
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import EXTENSION_SUFFIXES, PathFinder
from pathlib import Path
from typing import Literal

from rdmakit.drivers.host import HostTree, elf_links, elf_search, mapped_files
from rdmakit.errors import SetupError

__all__ = [
    "FAMILY_NAMES",
    "MpiFamily",
    "family_of",
    "find_mpi_library",
    "mapped_mpi",
    "mpirun_beside",
]

MpiFamily = Literal["openmpi", "mpich", "intel"]

FAMILY_NAMES: Mapping[str, str] = {"openmpi": "Open MPI", "mpich": "MPICH", "intel": "Intel MPI"}

_LIBRARY = re.compile(r"libmpi(ch)?(_abi|_cray|_gnu\w*|_intel|_nvidia|_aocc|_mt)*\.so(\.\d+)*")
"""Names of the library itself, not of what lies beside it (libmpi_cxx, libmpi_mpifh)."""
# The order in which mpi4py tries names in a directory.
_NAMES = ("libmpi.so", "libmpi.so.12", "libmpi.so.40")
_LD_CACHE = Path("/etc/ld.so.cache")
_SYSTEM_DIRECTORIES = (Path("/lib64"), Path("/usr/lib64"), Path("/lib"), Path("/usr/lib"))


def find_mpi_library(environ: Mapping[str, str]) -> Path | None:
    """Return the file that ``from mpi4py import MPI`` will load as libmpi, or has loaded.

    Local; loads neither MPI nor mpi4py's extension.

    Returns:
        The path with links resolved; None where mpi4py would find no library.

    Raises:
        SetupError: mpi4py is not installed.
    """
    if "mpi4py.MPI" in sys.modules:
        mapped = mapped_mpi(HostTree())
        return Path(mapped) if mapped else None
    for name in re.split(r"[ :]+", environ.get("LD_PRELOAD", "")):
        if _LIBRARY.fullmatch(Path(name).name) and _loadable(Path(name)):
            return Path(name).resolve()
    package = _mpi4py_directory()
    for suffix in EXTENSION_SUFFIXES:  # built for one MPI, as distributions and clusters do
        if (package / f"MPI{suffix}").is_file():
            return _needed_by(package / f"MPI{suffix}", environ)
    abi = re.sub(r"[ _-]", "", environ.get("MPI4PY_MPIABI", "")).lower()
    if abi:  # then mpi4py leaves the search to the linker
        abi = "mpich" if abi == "impi" else abi
        for suffix in EXTENSION_SUFFIXES:
            if (package / f"MPI.{abi}{suffix}").is_file():
                return _needed_by(package / f"MPI.{abi}{suffix}", environ)
        return None
    for path in _candidates(environ):
        if _loadable(path):
            return path.resolve()
    return None


def mapped_mpi(tree: HostTree) -> str:
    """Return the libmpi that is mapped into this process; empty where there is none. Local."""
    return next((p for p in mapped_files(tree) if _LIBRARY.fullmatch(Path(p).name)), "")


def family_of(library: Path) -> MpiFamily | None:
    """Return the MPI family of the file ``library`` by the symbols in it, or None if unknown.

    Libraries of MPICH's ABI (MVAPICH, ParaStation, Cray) count as mpich.
    """
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data.find(b"ompi_mpi_comm_self") >= 0 or data.find(b"Open MPI v") >= 0:
            return "openmpi"
        if data.find(b"I_MPI_Check_image_status") >= 0:
            return "intel"
        if data.find(b"MPIR_") >= 0 or data.find(b"MPICH") >= 0:
            return "mpich"
    return None


def mpirun_beside(library: Path, family: MpiFamily | None) -> Path | None:
    """Return the mpirun that was installed with ``library``, or None if none is found."""
    names = ("mpirun.openmpi", "mpirun") if family == "openmpi" else ("mpirun.mpich", "mpirun")
    for parent in library.parents[:-1]:  # not /bin: it belongs to no library but the system's
        for name in names:
            if os.access(parent / "bin" / name, os.X_OK):
                return parent / "bin" / name
    return None


def _mpi4py_directory() -> Path:
    spec = PathFinder.find_spec("mpi4py")
    if spec is None or not spec.submodule_search_locations:
        raise SetupError(f"mpi4py is not installed for {sys.executable}: pip install mpi4py")
    return Path(next(iter(spec.submodule_search_locations)))


def _candidates(environ: Mapping[str, str]) -> Iterator[Path]:
    """Yield the files that mpi4py's wheel tries, in its order."""
    chosen = environ.get("MPI4PY_LIBMPI")
    entries = chosen.split(":") if chosen is not None else [*_prefix_libraries(), ""]
    for entry in entries:
        path = Path(os.path.expandvars(entry)).expanduser()
        if entry and path.is_dir():
            yield from (path / name for name in _NAMES)
        elif entry and "/" in entry:
            yield path
        else:
            for name in (entry,) if entry else _NAMES:
                yield from _linker_search(name, environ)


def _prefix_libraries() -> Iterator[str]:
    if sys.exec_prefix != sys.base_exec_prefix:
        yield f"{sys.exec_prefix}/lib"
    if site.ENABLE_USER_SITE and site.USER_BASE:
        yield f"{Path(site.USER_BASE).absolute()}/lib"
    if sys.base_exec_prefix in site.PREFIXES and sys.base_exec_prefix != "/usr":
        yield f"{sys.base_exec_prefix}/lib"


def _linker_search(
    name: str,
    environ: Mapping[str, str],
    rpath: Sequence[str] = (),
    runpath: Sequence[str] = (),
) -> Iterator[Path]:
    """Yield where the dynamic linker looks for ``name``."""
    for directory in [*rpath, *environ.get("LD_LIBRARY_PATH", "").split(":"), *runpath]:
        if directory:
            yield Path(directory) / name
    if _LD_CACHE.is_file():  # its string table holds the paths, each ended by a zero byte
        pattern = rb"(?<=\0)(/[^\0]*/" + re.escape(os.fsencode(name)) + rb")\0"
        for match in re.finditer(pattern, _LD_CACHE.read_bytes()):
            yield Path(os.fsdecode(match[1]))
    yield from (directory / name for directory in _SYSTEM_DIRECTORIES)


def _needed_by(extension: Path, environ: Mapping[str, str]) -> Path | None:
    """Return the libmpi that the linker finds for ``extension``."""
    rpath, runpath = elf_search(str(extension))
    for name in elf_links(extension).needed:
        if _LIBRARY.fullmatch(name):
            for path in _linker_search(name, environ, rpath, runpath):
                if _loadable(path):
                    return path.resolve()
    return None


def _loadable(path: Path) -> bool:
    """Return whether ``path`` is a library for this process; libmpi.so is a text in wheels."""
    try:
        with path.open("rb") as file, Path("/proc/self/exe").open("rb") as own:
            header, mine = file.read(20), own.read(20)
    except OSError:
        return False
    return header[:6] == mine[:6] and header[18:20] == mine[18:20]
