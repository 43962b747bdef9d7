"""What UCX's settings mean: lists of transports and devices, names of settings. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Sequence

__all__ = ["allowed_transports", "near", "not_available", "unknown_settings"]

_SHARED = ("posix", "sysv", "xpmem", "knem", "cma")
_ALIASES = {
    "mm": ("posix", "sysv", "xpmem"),
    "sm": _SHARED,
    "shm": _SHARED,
    "ib": ("rc_verbs", "rc_mlx5", "ud_verbs", "ud_mlx5", "dc_mlx5", "gga_mlx5", "srd"),
    "rc": ("rc_verbs", "rc_mlx5"),
    "rc_v": ("rc_verbs",),
    "rc_x": ("rc_mlx5",),
    "ud": ("ud_verbs", "ud_mlx5"),
    "ud_v": ("ud_verbs",),
    "ud_x": ("ud_mlx5",),
    "dc": ("dc_mlx5",),
    "dc_x": ("dc_mlx5",),
    "gga": ("gga_mlx5",),
    "cuda": ("cuda_copy", "cuda_ipc", "gdr_copy"),
    "rocm": ("rocm_copy", "rocm_ipc", "rocm_gdr"),
    "ze": ("ze_copy", "ze_ipc", "ze_gdr"),
}
"""Names that stand for several transports (``ucp_tl_aliases`` of UCX)."""
_PLAIN = ("tcp", "self", "cma", "knem", "posix", "sysv", "xpmem", "cuda_copy", "cuda_ipc")
_FOREIGN = re.compile(
    r"UCX_(HOME|DIR|ROOT|PATH|PREFIX|BASE|INC|INCLUDE|LIB|LIBDIR|LIBRARY|LIB_DIR|BIN|VERSION|VER|"
    r"INSTALL\w*|SRC|SOURCE\w*|MODULE_DIR|CONFIG_DIR|PKG_CONFIG\w*)"
)
"""Set by module files of clusters for other uses; UCX reads them at most while it starts."""
_FAMILIES = {
    "IB": ("UCX_RC_", "UCX_UD_", "UCX_DC_", "UCX_GGA_", "UCX_SRD_", "UCX_IB_"),
    "RC": ("UCX_RC_", "UCX_DC_"),
    "UD": ("UCX_UD_",),
    "DC": ("UCX_DC_",),
    "MM": ("UCX_POSIX_", "UCX_SYSV_", "UCX_XPMEM_"),
    "SM": ("UCX_POSIX_", "UCX_SYSV_", "UCX_XPMEM_", "UCX_CMA_", "UCX_KNEM_"),
}
"""A setting of several transports at once, such as UCX_RC_TX_QUEUE_LEN, has one's ending."""
_MODULES = {
    "CUDA": "cuda",
    "GDR_COPY": "cuda",
    "ROCM": "rocm",
    "ZE": "ze",
    "KNEM": "knem",
    "XPMEM": "xpmem",
    "CMA": "cma",
    "UGNI": "ugni",
    "GAUDI": "gaudi",
    **dict.fromkeys(("IB", "RC", "UD", "DC", "GGA", "SRD", "RDMA_CM"), "ib"),
}
"""Beginnings of names whose module must be loaded for UCX to know them."""


def allowed_transports(
    tls: str | None, offered: Collection[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (transports of ``offered`` that UCX_TLS allows, names that it does not offer).

    ``rc,sm`` allows these, ``^cma`` all but that one, ``all`` or nothing everything.
    """
    if tls is None or tls.strip() in ("", "all"):
        return tuple(offered), ()
    text = tls.strip()
    negated = text.startswith("^")
    names = [part.strip() for part in text.removeprefix("^").split(",") if part.strip()]
    picked: set[str] = set()
    missing = []
    for name in names:
        # \rc_mlx5 takes a name as it is; ud:aux is for making connections only.
        bare = name.removeprefix("\\")
        if bare.endswith(":aux"):
            continue
        if bare == "all":
            picked |= set(offered)
            continue
        hits = {own for own in (bare, *_ALIASES.get(bare, ())) if own in offered}
        picked |= hits
        if not hits:
            missing.append(name)
    if negated:
        # Leaving out what is not there is no mistake; leaving out what no UCX has is one.
        missing = [name for name in missing if not _known(name)]
        return tuple(own for own in offered if own not in picked), tuple(missing)
    return tuple(own for own in offered if own in picked), tuple(missing)


def _known(name: str) -> bool:
    return name in _ALIASES or name in _PLAIN or any(name in own for own in _ALIASES.values())


def not_available(said: Iterable[str], what: str) -> tuple[str, ...]:
    """Return the names that UCX's warnings call not available.

    Args:
        said: messages of UCX.
        what: ``transport`` or ``network device``.
    """
    found: dict[str, None] = {}
    for line in said:
        match = re.search(rf"{what}s? ((?:'[^']*',? ?)+)(?:is|are) not available", line)
        if match:
            found |= dict.fromkeys(re.findall(r"'([^']*)'", match[1]))
    return tuple(found)


def near(name: str, known: Sequence[str], cutoff: float = 0.75) -> str:
    """Return the known name that is most like ``name``, or nothing."""
    return next(iter(difflib.get_close_matches(name, known, 1, cutoff)), "")


def unknown_settings(
    names: Iterable[str], known: Collection[str], modules: Collection[str]
) -> list[tuple[str, str]]:
    """Return (name, nearest known name or nothing) of settings that UCX does not know.

    Args:
        names: UCX_* variables that are set.
        known: every setting that UCX prints with the modules it has loaded.
        modules: of ``cuda``, ``ib`` and so on, those that are loaded; names of one that is not
            cannot be judged.
    """
    found = []
    listed = sorted(known)
    for name in names:
        if name in known or _FOREIGN.fullmatch(name) or not name.startswith("UCX_"):
            continue
        rest = name.removeprefix("UCX_")
        owner = next((m for p, m in _MODULES.items() if rest.startswith(f"{p}_")), None)
        if owner is not None and owner not in modules:
            continue
        family, _, ending = rest.partition("_")
        places = _FAMILIES.get(family, ())
        if ending and any(k.startswith(places) and k.endswith(f"_{ending}") for k in listed):
            continue
        found.append((name, near(name, listed)))
    return found
