"""Settings from RDMAKIT_* variables and the sizes users type; the only reader of them."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from rdmakit.errors import InvalidArgument

__all__ = ["GPU_DIRECT", "UCX_POLICIES", "Config", "format_size", "parse_size"]

UCX_POLICIES = ("auto", "mpi", "wheel", "system", "none")
GPU_DIRECT = ("auto", "on", "off")

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_size(text: str) -> int:
    """Return the bytes in ``text``: ``8``, ``64K``, ``64KiB``, ``1.5M``, ``1G`` (powers of 1024).

    ``K``, ``KB`` and ``KiB`` are all 1024 bytes, as nccl-tests and OSU users type them.

    Raises:
        InvalidArgument: not a size, not whole bytes, or negative.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", str(text), re.IGNORECASE)
    if match is None:
        raise InvalidArgument(f"{text!r} is not a size; write bytes as 8, 64K, 1.5M or 1G")
    size = float(match[1]) * _UNITS[match[2].lower()]
    if size != int(size):
        raise InvalidArgument(f"{text!r} is {size} bytes; a size is a whole number of bytes")
    return int(size)


def format_size(nbytes: int) -> str:
    """Return ``nbytes`` in the largest unit that divides it: ``64K``, ``1M``, ``1000``."""
    for unit in ("T", "G", "M", "K"):
        scale = _UNITS[unit.lower()]
        if nbytes >= scale and nbytes % scale == 0:
            return f"{nbytes // scale}{unit}"
    return str(nbytes)


@dataclass(frozen=True)
class Config:
    """What a communicator is built with; must be equal on all ranks, which is checked."""

    ucx: str = "auto"
    """Which UCX to use (RDMAKIT_UCX): auto, mpi, wheel, system, or none for the MPI channel."""
    gpu_direct: str = "auto"
    """RDMAKIT_GPU_DIRECT: messages of GPU memory by UCX on device pointers (on), through pinned
    host memory (off), or by UCX where a NIC can read GPU memory (auto)."""
    nics: str = "auto"
    """RDMAKIT_NICS: the network devices of each rank's UCX are chosen by topology (auto), by UCX
    (off), or by topology among these ports (``mlx5_0,mlx5_3:1``, patterns too)."""
    ranks_per_node: int = 0
    """RDMAKIT_RANKS_PER_NODE: cut each host into virtual nodes of so many ranks; 0 is off."""
    timeout: float = 60.0
    """RDMAKIT_TIMEOUT: seconds one wait may take before TransferTimeout."""
    check: bool = False
    """RDMAKIT_CHECK: compare each collective call between the ranks before data moves."""
    window_bytes: int = 3 << 20
    """RDMAKIT_WINDOW: bytes of shared memory each rank gives its node's window."""
    node_id: str = ""
    """RDMAKIT_NODE_ID: takes the place of the kernel's boot id where that misleads; per host."""
    handlers: bool = True
    """RDMAKIT_HANDLERS: signal handler and watchdog that name a stuck or ended rank."""

    def __post_init__(self) -> None:
        if self.ucx not in UCX_POLICIES:
            raise InvalidArgument(f"RDMAKIT_UCX={self.ucx!r}; one of {', '.join(UCX_POLICIES)}")
        if self.gpu_direct not in GPU_DIRECT:
            raise InvalidArgument(
                f"GPU direct (RDMAKIT_GPU_DIRECT) {self.gpu_direct!r}: one of "
                f"{', '.join(GPU_DIRECT)}"
            )
        if self.nics not in ("auto", "off") and not self.named_nics:
            raise InvalidArgument(
                f"network devices (RDMAKIT_NICS) {self.nics!r}: auto, off, or names of RDMA ports "
                "as mlx5_0,mlx5_1"
            )
        if self.ranks_per_node < 0:
            raise InvalidArgument(
                f"ranks per node (RDMAKIT_RANKS_PER_NODE) {self.ranks_per_node}: 0 or more"
            )
        if not 0 < self.timeout < math.inf:
            raise InvalidArgument(
                f"timeout (RDMAKIT_TIMEOUT) {self.timeout:g}: seconds, more than 0"
            )
        if self.window_bytes < 1 << 16:
            raise InvalidArgument(f"RDMAKIT_WINDOW={self.window_bytes}; at least 64K")

    given: frozenset[str] = field(default=frozenset(), compare=False)
    """Settings that somebody chose here; the others follow the first rank's."""

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **defaults: object) -> Config:
        """Read the RDMAKIT_* variables; ``defaults`` stand where one is not set.

        Raises:
            InvalidArgument: a variable has a value that is not understood; the text names it.
        """
        env = os.environ if environ is None else environ
        values: dict[str, object] = {}
        for variable, name, convert in (
            ("RDMAKIT_UCX", "ucx", str.lower),
            ("RDMAKIT_GPU_DIRECT", "gpu_direct", str.lower),
            ("RDMAKIT_NICS", "nics", _nics),
            ("RDMAKIT_RANKS_PER_NODE", "ranks_per_node", int),
            ("RDMAKIT_TIMEOUT", "timeout", float),
            ("RDMAKIT_CHECK", "check", _flag),
            ("RDMAKIT_WINDOW", "window_bytes", parse_size),
            ("RDMAKIT_NODE_ID", "node_id", str),
            ("RDMAKIT_HANDLERS", "handlers", _flag),
        ):
            text = env.get(variable, "").strip()
            if text:
                try:
                    text.encode()  # what is no UTF-8 cannot be sent to other ranks
                    values[name] = convert(text)
                except ValueError as exc:
                    raise InvalidArgument(f"{variable}={text!r}: {exc}") from exc
        return cls(**{**defaults, **values, "given": frozenset(values)})  # type: ignore[arg-type]

    @property
    def named_nics(self) -> tuple[str, ...]:
        """Compute ports that the user names; none with ``auto`` and ``off``."""
        if self.nics in ("auto", "off"):
            return ()
        return tuple(name for part in self.nics.split(",") if (name := part.strip()))

    def chosen(self, **values: object) -> Config:
        """Return this with ``values`` in place, as somebody's choice."""
        return replace(self, **values, given=self.given | set(values))  # type: ignore[arg-type]

    def shared(self) -> dict[str, object]:
        """Return the settings that must be equal on all ranks."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _OWN}

    def following(self, first: Mapping[str, object]) -> Config:
        """Return this with the first rank's value of every setting not chosen here."""
        taken = {name: value for name, value in first.items() if name not in self.given}
        return replace(self, **taken)  # type: ignore[arg-type]

    def describe(self) -> str:
        """Return ``name=value`` of every shared setting, in one line."""
        return " ".join(f"{name}={value}" for name, value in self.shared().items())


_OWN = ("node_id", "given")
"""Settings of a rank or host alone."""


def _nics(text: str) -> str:
    return text.lower() if text.lower() in ("auto", "off") else text


def _flag(text: str) -> bool:
    lowered = text.lower()
    if lowered in ("1", "y", "yes", "true", "on"):
        return True
    if lowered in ("0", "n", "no", "false", "off"):
        return False
    raise InvalidArgument("not a yes or no; write 1 or 0")
