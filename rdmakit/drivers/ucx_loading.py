"""Loads UCX and its Python binding once per process; the only door to ``import ucxx``.

``load`` collects facts (``ucx_probe``), decides (``ucx_policy``) and carries the decision out. It
is right whichever of mpi4py.MPI, ucxx and this module comes first, except that ``import ucxx``
between mpi4py.MPI and ``load`` maps a second UCX, which is refused by name.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import threading
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

from rdmakit.config import UCX_POLICIES
from rdmakit.drivers.host import HostTree
from rdmakit.drivers.ucx_policy import (
    CORE,
    MINIMUM_UCX,
    Decision,
    ModuleFile,
    UcxFacts,
    decide,
    version_tuple,
)
from rdmakit.drivers.ucx_probe import mapped_libraries, mapped_version, probe
from rdmakit.errors import InvalidArgument, SetupError, UcxUnavailable

__all__ = [
    "UcxLibrary",
    "UcxModule",
    "bindings",
    "endpoint_transports",
    "flushed",
    "load",
    "loaded",
    "start_flush",
    "ucx_version_string",
]

_FIELD_TRANSPORTS = 1 << 3
_NAME_BYTES = 32
_MOST_LANES = 64
_TREE = HostTree()


class UcxModule(NamedTuple):
    """One ib or cuda module of UCX, opened or not."""

    name: str
    path: str
    loaded: bool
    error: str
    """The loader's text, or why it was not tried; empty when loaded."""


@dataclass(frozen=True)
class UcxLibrary:
    """The UCX of this process."""

    source: str
    """``mapped-mpi``, ``mapped-wheel`` or ``mapped-system`` when found mapped; ``mpi``, ``wheel``
    or ``system`` when opened by rdmakit."""
    version: str
    libraries: dict[str, str]
    """The four libraries and the file each is mapped from."""
    modules: tuple[UcxModule, ...]
    has_cuda: bool
    """Whether device memory is understood. Without it a device pointer crashes UCX."""
    has_ib: bool
    """Whether InfiniBand and RoCE transports are there (a device may still be missing)."""
    reason: str
    """One sentence: which files and why these."""
    warnings: tuple[str, ...]
    ucxx: str
    """Package and version of the binding."""


class _State:
    lock = threading.Lock()
    policy = ""
    library: UcxLibrary | None = None
    failure: SetupError | None = None
    modules: tuple[ModuleType, ModuleType] | None = None


def load(policy: str = "auto") -> UcxLibrary:
    """Bring one UCX and ucxx into this process and say which. Local, idempotent, thread-safe.

    What is refused before anything was opened may be tried again, under another policy too;
    once a library was opened the outcome is final. The environment is left as it was.

    Raises:
        InvalidArgument: ``policy`` is none of ``config.UCX_POLICIES``.
        SetupError: two UCX are mapped, the policy contradicts what is mapped, or an earlier
            call loaded under another policy.
        UcxUnavailable: no usable UCX; the text says why and what serves instead.
    """
    if policy not in UCX_POLICIES:
        raise InvalidArgument(f"UCX policy {policy!r}; one of {', '.join(UCX_POLICIES)}")
    with _State.lock:
        if _State.policy and policy != _State.policy:
            raise SetupError(
                f"UCX was loaded under the policy {_State.policy!r}, now {policy!r} is asked for; "
                "a process can hold one UCX only: use one RDMAKIT_UCX for the whole process"
            )
        if _State.failure is not None:
            raise type(_State.failure)(str(_State.failure))
        if _State.library is None:
            facts = probe(_TREE)
            decision = decide(facts, policy)
            if decision.error_kind:
                kind = SetupError if decision.error_kind == "setup" else UcxUnavailable
                raise kind(" Also: ".join((decision.error, *facts.problems)))
            _State.policy = policy
            try:
                _State.library = _carry_out(decision, facts)
            except SetupError as exc:
                _State.failure = exc
                raise
        return _State.library


def loaded() -> UcxLibrary:
    """Return the UCX of this process. Local.

    Raises:
        SetupError: ``load`` has not succeeded in this process.
    """
    if _State.library is None:
        raise SetupError("UCX is not loaded: call rdmakit.drivers.ucx_loading.load() first")
    return _State.library


def bindings() -> tuple[ModuleType, ModuleType]:
    """Return the modules ``ucxx._lib.libucxx`` and ``ucxx._lib.arr``. Local.

    Raises:
        SetupError: ``load`` has not succeeded in this process.
    """
    if _State.modules is None:
        raise SetupError("UCX is not loaded: call rdmakit.drivers.ucx_loading.load() first")
    return _State.modules


def ucx_version_string() -> str:
    """Return the release of the UCX mapped into this process, as ``1.20.1``. Local.

    Raises:
        SetupError: no libucp is mapped, or it does not say.
    """
    path = _mapped_libucp()
    version, error = mapped_version(path)
    if not version:
        raise SetupError(f"{path} does not tell its version: {error}")
    return version


def endpoint_transports(ep_handle: int) -> tuple[tuple[str, str], ...]:
    """Return (transport, device) of each lane of an endpoint, as UCX reports it. Local.

    Structures as in ``ucp/api/ucp.h`` of UCX 1.19 to 1.21 (``ucp_ep_attr_t``). A lane that is
    still wiring up may show a transport that is replaced later: ask after a first message.

    Args:
        ep_handle: The raw ``ucp_ep_h`` of an open endpoint: ``UCXEndpoint.handle``.

    Raises:
        InvalidArgument: the handle is null.
        SetupError: no UCX is mapped, or it refuses the query.
    """
    if not ep_handle:
        raise InvalidArgument("endpoint handle is null; expected UCXEndpoint.handle")
    query = _libucp().ucp_ep_query
    query.argtypes = [ctypes.c_void_p, ctypes.POINTER(_EndpointAttributes)]
    query.restype = ctypes.c_int8
    entries = (_TransportEntry * _MOST_LANES)()
    attributes = _EndpointAttributes(field_mask=_FIELD_TRANSPORTS)
    attributes.transports.entries = entries
    attributes.transports.num_entries = _MOST_LANES
    attributes.transports.entry_size = ctypes.sizeof(_TransportEntry)
    status = query(ep_handle, ctypes.byref(attributes))
    if status != 0:
        raise SetupError(f"ucp_ep_query refused the transports of an endpoint: status {status}")
    return tuple(
        ((entry.transport or b"").decode(), (entry.device or b"").decode())
        for entry in entries[: attributes.transports.num_entries]
    )


def start_flush(worker_handle: int) -> int:
    """Start a flush of a worker; return 0 when nothing was left to send. Local.

    ucxx has no flush. The parameter structure is all zero: ``op_attr_mask`` 0 asks for nothing.

    Raises:
        SetupError: no UCX is mapped, or it refuses.
    """
    flush = _libucp().ucp_worker_flush_nbx
    flush.argtypes, flush.restype = [ctypes.c_void_p, ctypes.c_void_p], ctypes.c_void_p
    request = flush(worker_handle, ctypes.byref(_NO_PARAMETERS)) or 0
    if request >= (1 << 64) - 100:  # UCS_PTR_IS_ERR: a negative status in place of a pointer
        raise SetupError(f"ucp_worker_flush_nbx failed: status {request - (1 << 64)}")
    return int(request)


def flushed(request: int) -> bool:
    """Return whether a flush is complete, and free it if so. Local, does not block."""
    library = _libucp()
    check, free = library.ucp_request_check_status, library.ucp_request_free
    check.argtypes, check.restype = [ctypes.c_void_p], ctypes.c_int8
    free.argtypes, free.restype = [ctypes.c_void_p], None
    if check(request) == 1:  # UCS_INPROGRESS
        return False
    free(request)
    return True


@functools.cache
def _libucp() -> ctypes.CDLL:
    return ctypes.CDLL(_mapped_libucp(), mode=os.RTLD_NOLOAD)


_NO_PARAMETERS = (ctypes.c_char * 256)()


class _TransportEntry(ctypes.Structure):
    _fields_ = (("transport", ctypes.c_char_p), ("device", ctypes.c_char_p))


class _Transports(ctypes.Structure):
    _fields_ = (
        ("entries", ctypes.POINTER(_TransportEntry)),
        ("num_entries", ctypes.c_uint),
        ("entry_size", ctypes.c_size_t),
    )


class _EndpointAttributes(ctypes.Structure):
    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("name", ctypes.c_char * _NAME_BYTES),
        # Two sockaddr_storage: 128 bytes each, aligned as an unsigned long.
        ("local_sockaddr", ctypes.c_uint64 * 16),
        ("remote_sockaddr", ctypes.c_uint64 * 16),
        ("transports", _Transports),
        ("user_data", ctypes.c_void_p),
    )


def _carry_out(decision: Decision, facts: UcxFacts) -> UcxLibrary:
    for path in decision.open:
        try:
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        except OSError as exc:
            raise UcxUnavailable(
                f"{path} cannot be loaded: {exc}. Chosen because: {decision.reason}. The MPI "
                "channel serves instead."
            ) from exc
    version = _checked_version()
    modules = tuple(_open_module(module) for module in decision.modules)
    _State.modules = _import_ucxx()
    libraries = _one_file_each()
    loaded = {module.name for module in modules if module.loaded}
    warnings = [*decision.warnings, *_missing_libraries(modules), *facts.problems]
    return UcxLibrary(
        source=decision.source,
        version=version,
        libraries=libraries,
        modules=modules,
        has_cuda="libuct_cuda" in loaded,
        has_ib="libuct_ib" in loaded,
        reason=decision.reason,
        warnings=tuple(warnings),
        ucxx=facts.ucxx[0],
    )


def _checked_version() -> str:
    """Return the release that is really mapped; ucxx on an older one ends the process."""
    version = ucx_version_string()
    if version_tuple(version) < MINIMUM_UCX:
        raise UcxUnavailable(
            f"{_mapped_libucp()} is UCX {version}; ucxx needs "
            f"{'.'.join(map(str, MINIMUM_UCX))} or newer. The MPI channel serves instead."
        )
    return version


def _one_file_each() -> dict[str, str]:
    mapped = mapped_libraries(_TREE)
    for name in CORE:
        paths = mapped.get(name, ())
        if len(paths) > 1:
            raise SetupError(
                f"{name} is mapped from two files, {' and '.join(paths)}; a process can hold one "
                "UCX only. Something loads UCX by path beside rdmakit; or set RDMAKIT_UCX=none."
            )
    return {name: mapped[name][0] for name in CORE if name in mapped}


def _mapped_libucp() -> str:
    paths = mapped_libraries(_TREE).get("libucp", ())
    if not paths:
        raise SetupError("no libucp is mapped into this process: UCX is not loaded")
    return paths[0]


def _open_module(module: ModuleFile) -> UcxModule:
    if module.skip:
        return UcxModule(module.name, module.path, False, module.skip)
    try:
        # Global, so that libuct_ib_mlx5 and the like find what their base module defines.
        ctypes.CDLL(module.path, mode=ctypes.RTLD_GLOBAL)
    except OSError as exc:
        return UcxModule(module.name, module.path, False, str(exc))
    return UcxModule(module.name, module.path, True, "")


def _missing_libraries(modules: tuple[UcxModule, ...]) -> list[str]:
    """Return one line for each library of the RDMA stack whose absence closed a module."""
    cures = {
        "libibverbs.so": "no InfiniBand or RoCE; install libibverbs1 (rdma-core)",
        "librdmacm.so": "no RDMA connection manager; install librdmacm1 (rdma-core)",
        "libmlx5.so": "no mlx5 transports, ConnectX runs rc_verbs; install ibverbs-providers",
    }
    lines: dict[str, str] = {}
    for module in modules:
        for library, cure in cures.items():
            if not module.loaded and module.error.startswith(library):
                lines.setdefault(library, f"{module.name}: {module.error} ({cure})")
    return list(lines.values())


def _import_ucxx() -> tuple[ModuleType, ModuleType]:
    before = {name: value for name, value in os.environ.items() if name.startswith("UCX_")}
    try:
        _disarm_libucx()
        return importlib.import_module("ucxx._lib.libucxx"), importlib.import_module(
            "ucxx._lib.arr"
        )
    # ucxx also asks NVML while it is imported, whose errors are of no common kind.
    except Exception as exc:
        raise UcxUnavailable(
            f"import ucxx failed on {_mapped_libucp()}: {type(exc).__name__}: {exc}. The MPI "
            "channel serves instead; reinstall with pip install 'rdmakit[cpu]', "
            "'rdmakit[cuda12]' or 'rdmakit[cuda13]'."
        ) from exc
    finally:
        # ucxx writes its own taste (one rail, for example) where MPI's UCX would read it.
        for name in [name for name in os.environ if name.startswith("UCX_")]:
            if name not in before:
                del os.environ[name]
        os.environ.update(before)


def _disarm_libucx() -> None:
    """Keep libucx from mapping its files beside the UCX in use; all four are mapped by now."""
    try:
        libucx = importlib.import_module("libucx")
    except ImportError:
        return
    # A plain attribute of a package; mypy sees a ModuleType without it.
    setattr(libucx, "load_library", lambda: [])  # noqa: B010
