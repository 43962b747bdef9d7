"""Kernels from source text, compiled by NVRTC through CuPy and kept in CuPy's cache on disk."""

from __future__ import annotations

import importlib
from typing import Any

from rdmakit.errors import SetupError

__all__ = ["get_kernel", "is_compiled"]

_modules: dict[tuple[int, str, tuple[str, ...]], Any] = {}
_functions: dict[tuple[int, str, tuple[str, ...], str], int] = {}


def is_compiled(device: int, source: str, options: tuple[str, ...], name: str) -> bool:
    """Return whether :func:`get_kernel` would return at once."""
    return (device, source, options, name) in _functions


def get_kernel(device: int, source: str, options: tuple[str, ...], name: str) -> int:
    """Return the CUfunction ``name`` of ``source`` on ``device``, which must be the current one.

    Local. Compiles at the first call (tenths of a second; later processes read CuPy's cache).
    Not for use while a stream captures.

    Raises:
        SetupError: it cannot be compiled; the text holds the compiler's.
    """
    key = (device, source, options, name)
    if key in _functions:
        return _functions[key]
    cupy = importlib.import_module("cupy")
    module = _modules.get(key[:3])
    if module is None:
        module = cupy.RawModule(code=source, options=options, backend="nvrtc")
    try:
        function = module.get_function(name)
        handle = int(function.kernel.ptr)
    except cupy.cuda.compiler.CompileException as exc:
        raise SetupError(f"NVRTC cannot compile kernel {name}: {exc}") from exc
    _modules[key[:3]] = module
    _functions[key] = handle
    return handle
