"""What the UCX of a rank can do here, told by a short-lived child process.

``python -m rdmakit.drivers.ucx_report SETTINGS`` loads the UCX that RDMAKIT_UCX chooses, makes one
context with the given settings and one with everything allowed, and prints a report as JSON. A
child, because a process can hold one UCX only and a broken one may end it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from rdmakit.drivers import ucx_loading
from rdmakit.drivers.host import Runner
from rdmakit.drivers.report_child import ChildReport, ask_child, print_report, settings_given
from rdmakit.errors import RdmaKitError

__all__ = ["UcxModuleReport", "UcxReport", "ask_ucx", "read_ucx"]

_LIMIT = 30.0
"""Seconds; UCX opens every RDMA device and, with its CUDA module, starts the GPU driver."""
_PRINT_CONFIG = 1  # UCS_CONFIG_PRINT_CONFIG
_RESOURCE = re.compile(r"^#\s+resource .* -- (\S+?)/(\S+)", re.M)
_REGISTERS = re.compile(r"UCX\s+DEBUG register (\S+) memory on: (.*)")
_UNUSED = re.compile(r"unused environment variables?: (.*)")
_SAID = re.compile(r"UCX\s+(WARN|ERROR|FATAL)\s+(.*)")


class UcxModuleReport(msgspec.Struct, frozen=True):
    """One ib or cuda module."""

    name: str
    path: str
    loaded: bool
    error: str = ""


class UcxReport(ChildReport, frozen=True, kw_only=True):
    """What the child saw; ``problem``: why there is no UCX, or nothing is known of it."""

    version: str = ""
    source: str = ""
    reason: str = ""
    warnings: tuple[str, ...] = ()
    ucxx: str = ""
    libraries: dict[str, str] = msgspec.field(default_factory=dict)
    modules: tuple[UcxModuleReport, ...] = ()
    has_cuda: bool = False
    has_ib: bool = False
    every: tuple[tuple[str, str], ...] = ()
    """(transport, device) with everything allowed."""
    used: tuple[tuple[str, str], ...] = ()
    """(transport, device) that the settings leave."""
    refused: str = ""
    """Why no context can be made with the settings; empty where it can."""
    said: tuple[str, ...] = ()
    """Warnings and errors of UCX under the settings."""
    registers: dict[str, tuple[str, ...]] | None = None
    """Memory domains that register a memory type; None where UCX did not tell."""
    effective: dict[str, str] = msgspec.field(default_factory=dict)
    """The context's settings as they are, without the prefix."""
    names: tuple[str, ...] = ()
    """Every setting that this UCX knows, with the prefix."""
    unused: tuple[str, ...] = ()
    """UCX_* variables that UCX itself calls unused."""


def ask_ucx(run: Runner, environ: Mapping[str, str]) -> UcxReport:
    """Return what a child process learns under the UCX_* and RDMAKIT_UCX of ``environ``.

    Local, blocking, at most 30 s. ``problem`` says why there is nothing; never raises.
    """
    own = {k: v for k, v in environ.items() if k.startswith("UCX_") or k == "RDMAKIT_UCX"}
    return ask_child(
        run,
        "rdmakit.drivers.ucx_report",
        UcxReport,
        _LIMIT,
        task="load UCX",
        about="UCX",
        settings=own,
    )


def read_ucx(settings: Mapping[str, str]) -> UcxReport:
    """Return the report of this process, whose UCX_* become ``settings``. Once per process."""
    policy = settings.get("RDMAKIT_UCX", "").strip().lower() or "auto"
    for name in [name for name in os.environ if name.startswith("UCX_")]:
        del os.environ[name]
    os.environ.update({k: v for k, v in settings.items() if k.startswith("UCX_")})
    with _log_file() as log:
        try:
            library = ucx_loading.load(policy)
        except RdmaKitError as exc:
            return UcxReport(problem=str(exc))
        report = UcxReport(
            version=library.version,
            source=library.source,
            reason=library.reason,
            warnings=library.warnings,
            ucxx=library.ucxx,
            libraries=library.libraries,
            modules=tuple(UcxModuleReport(*module) for module in library.modules),
            has_cuda=library.has_cuda,
            has_ib=library.has_ib,
        )
        used, effective, refused = _context({})
        split = len(_written(log, library.libraries["libucs"]))
        every, _, blocked = _context({"TLS": "all", "NET_DEVICES": "all"})
        if blocked:
            said = _SAID.findall(_written(log, library.libraries["libucs"]))
            why = "; ".join(dict.fromkeys([blocked, *(what.strip() for _, what in said)]))
            return msgspec.structs.replace(report, problem=f"UCX makes no context: {why}")
        names = _names(library.libraries["libucs"])
        text = _written(log, library.libraries["libucs"])
    said = [f"{level} {what.strip()}" for level, what in _SAID.findall(text[:split])]
    registers = {
        kind: tuple(re.findall(r"[^\s,]+", domains))
        for kind, domains in _REGISTERS.findall(text[split:])
    }
    unused = [
        entry.split()[0]
        for line in _UNUSED.findall(text)
        for entry in line.split(";")
        if entry.split()
    ]
    return msgspec.structs.replace(
        report,
        every=every,
        used=used,
        refused=refused,
        said=tuple(x for x in dict.fromkeys(said) if "unused environment" not in x),
        registers=registers or None,
        effective=effective,
        names=names,
        unused=tuple(dict.fromkeys(unused)),
    )


def _context(config: dict[str, str]) -> tuple[tuple[tuple[str, str], ...], dict[str, str], str]:
    """Return (transports with devices, settings, why there is none) of a new context."""
    ucx, _ = ucx_loading.bindings()
    try:
        context = ucx.UCXContext(config_dict=config, feature_flags=(ucx.Feature.TAG,))
    except Exception as exc:
        return (), {}, f"{type(exc).__name__}: {exc}"
    pairs = tuple(dict.fromkeys(_RESOURCE.findall(context.info)))
    return pairs, {str(k): str(v) for k, v in context.config.items()}, ""


@contextlib.contextmanager
def _log_file() -> Iterator[Path]:
    """Let UCX, which is not loaded yet, write all that it has to say into a file."""
    with tempfile.TemporaryDirectory(prefix="rdmakit-ucx-") as folder:
        log = Path(folder) / "log"
        log.touch()
        # debug: only there UCX tells which domains register which memory.
        os.environ |= {"UCX_LOG_LEVEL": "debug", "UCX_LOG_FILE": str(log)}
        os.environ.pop("UCX_LOG_FILE_FILTER", None)
        os.environ["UCX_WARN_UNUSED_ENV_VARS"] = "y"
        yield log


def _written(log: Path, libucs: str) -> str:
    """Return what UCX has logged so far, what it still holds back too."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(libucs, mode=os.RTLD_NOLOAD).ucs_log_flush()
    return log.read_text(errors="replace")


def _names(libucs: str) -> tuple[str, ...]:
    """Return the names of all settings, as ``ucx_info -c`` would print them.

    Also lets UCX write its warning of variables that nothing read, into its log.
    """
    library = ctypes.CDLL(libucs, mode=os.RTLD_NOLOAD)
    libc = ctypes.CDLL(None)
    libc.fopen.restype, libc.fopen.argtypes = ctypes.c_void_p, [ctypes.c_char_p] * 2
    libc.fclose.argtypes = [ctypes.c_void_p]
    try:
        show = library.ucs_config_parser_print_all_opts
        every = ctypes.addressof(ctypes.c_char.in_dll(library, "ucs_config_global_list"))
        warn = library.ucs_config_parser_print_env_vars_once
    except (AttributeError, ValueError):
        return ()
    # (stream, prefix, flags, list, filter); releases before the filter ignore a fifth argument.
    void = ctypes.c_void_p
    show.argtypes = [void, ctypes.c_char_p, ctypes.c_ulong, void, ctypes.c_char_p]
    show.restype = None
    warn.argtypes, warn.restype = [ctypes.c_char_p], None
    with tempfile.NamedTemporaryFile(prefix="rdmakit-ucx-") as file:
        stream = libc.fopen(os.fsencode(file.name), b"w")
        if not stream:
            return ()
        show(stream, b"UCX_", _PRINT_CONFIG, every, None)
        libc.fclose(stream)
        text = Path(file.name).read_text(errors="replace")
    warn(b"UCX_")
    return tuple(dict.fromkeys(re.findall(r"^(UCX_\w+)=", text, re.M)))


def main() -> None:
    """Print the report of the settings in the first argument."""
    print_report(read_ucx(settings_given()))
    # Whatever UCX or a GPU driver does while it is taken down is of no interest here.
    os._exit(0)


if __name__ == "__main__":
    main()
