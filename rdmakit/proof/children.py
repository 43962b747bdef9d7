"""The pair of children from the side of the ranks: one run for each variant of the settings."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from rdmakit.drivers.spawn import PythonChild
from rdmakit.errors import SetupError
from rdmakit.process.launcher import LAUNCHER_VARIABLES
from rdmakit.proof.evidence import ChildResult, Hello, Order, TableUse, Variant
from rdmakit.proof.tables import parse_tables, use_of

__all__ = [
    "VARIANTS",
    "Child",
    "End",
    "Setting",
    "child_environment",
    "run_variant",
    "variants_for",
]

_T = TypeVar("_T")
_START = 30.0
"""Seconds for Python, NumPy and UCX to be loaded, from a cold network folder."""
_CLOSE = 5.0
_DROPPED = ("UCX_LOG_FILE", "UCX_LOG_LEVEL", "UCX_PROTO_INFO", "UCX_PROTO_INFO_DIR")
"""They would take the tables elsewhere."""


@dataclass(frozen=True)
class Setting:
    """One variant: what is set beside the settings that hold anyway."""

    name: str
    memory: str
    variables: Mapping[str, str]

    @property
    def text(self) -> str:
        """Return NAME=value."""
        return " ".join(f"{name}={value}" for name, value in self.variables.items())


VARIANTS = (
    Setting("default", "gpu", {}),
    Setting("gdr-off", "gpu", {"UCX_IB_GPU_DIRECT_RDMA": "n"}),
    Setting("dmabuf-off", "gpu", {"UCX_CUDA_COPY_DMABUF": "n"}),
    Setting("host", "host", {}),
)
"""UCX 1.20: the first keeps the InfiniBand module from looking for either way into GPU memory;
the second keeps the CUDA module from handing out dma-bufs."""


def variants_for(memory: str, staged: bool) -> tuple[Setting, ...]:
    """Return what is run: for host memory, and where rdmakit stages, there is nothing to vary."""
    if memory == "host":
        return (Setting("default", "host", {}),)
    return VARIANTS[-1:] if staged else VARIANTS


def child_environment(setting: Setting, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return a child's environment: this one's without the launcher's, and tables asked for."""
    env = {
        name: value
        for name, value in (os.environ if environ is None else environ).items()
        if not LAUNCHER_VARIABLES.match(name) and name not in _DROPPED
    }
    return {**env, "UCX_PROTO_INFO": "y", "UCX_WARN_UNUSED_ENV_VARS": "n", **setting.variables}


class End(Protocol):
    """What :class:`Child` offers; fakes in tests."""

    def hello(self) -> Hello:
        """Return its first word. Blocking."""
        ...

    def run(self, address: str) -> ChildResult:
        """Let it exchange messages with the peer. Blocking."""
        ...

    def end(self) -> str:
        """End it and return what it printed. Blocking, idempotent."""
        ...


class Child:
    """One child process of this rank."""

    def __init__(self, order: Order, setting: Setting) -> None:
        """Start it. Local.

        Raises:
            SetupError: it cannot be started; so for the others, where it ended or is silent.
        """
        self._order = order
        self._process = PythonChild("rdmakit.proof.child", env=child_environment(setting))
        self._process.tell(order)

    def hello(self) -> Hello:
        """Return its first word. Blocking."""
        return _typed(self._process.hear(max(_START, self._order.seconds)), Hello)

    def run(self, address: str) -> ChildResult:
        """Let it exchange messages with the peer. Blocking."""
        self._process.tell(address)
        return _typed(self._process.hear(self._order.seconds), ChildResult)

    def end(self) -> str:
        """End it and return what it printed. Blocking, idempotent."""
        self._process.end(_CLOSE)
        return self._process.said


def _typed(word: Any, kind: type[_T]) -> _T:
    try:
        return msgspec.convert(word, kind)
    except msgspec.ValidationError as exc:
        raise SetupError(f"the child said {word!r}: {exc}") from exc


class _Said(msgspec.Struct):
    """What the two ranks tell each other of their children."""

    problem: str = ""
    address: str = ""
    library: str = ""
    result: ChildResult | None = None
    use: TableUse | None = None


def run_variant(
    setting: Setting,
    order: Order | None,
    share: Callable[[bytes], tuple[bytes, bytes] | None],
    library: str,
    start: Callable[[Order, Setting], End] = Child,
) -> Variant | None:
    """Run a pair of children, one of each rank of a pair. Collective over ``share``, blocking.

    Args:
        setting: the variant.
        order: this rank's child's; None on ranks of no pair, which only take part in the exchange.
        share: gives each rank's bytes to all; returns those of this rank's pair, sender first.
        library: the libucp of this rank.
        start: makes the child.

    Returns:
        The variant, equal on both ranks; None on ranks of no pair.
    """
    mine = _Said()
    child: End | None = None
    try:
        if order is not None:
            try:
                child = start(order, setting)
                hello = child.hello()
                mine.address, mine.library = hello.address, hello.library
            except SetupError as exc:
                mine.problem = str(exc)
        told = _share(share, mine)
        if child is not None and order is not None and told and not any(t.problem for t in told):
            try:
                mine.result = child.run(told[1 - order.role].address)
            except SetupError as exc:
                mine.problem = str(exc)
        _share(share, _Said())  # both are done: now their ends may go
        if child is not None and order is not None:
            tables = parse_tables(child.end())
            side = "receiver" if order.role else "sender"
            kind = "cuda" if setting.memory == "gpu" else "host"
            mine.use = use_of(tables, kind, order.nbytes, side)
            mine.library = "" if mine.library in ("", library) else mine.library
        told = _share(share, mine)
    finally:
        if child is not None:
            child.end()
    return _variant(setting, order, told) if told and order is not None else None


def _share(share: Callable[[bytes], tuple[bytes, bytes] | None], mine: _Said) -> list[_Said]:
    told = share(msgspec.json.encode(mine))
    return [msgspec.json.decode(part, type=_Said) for part in told or ()]


def _variant(setting: Setting, order: Order, told: list[_Said]) -> Variant:
    problems = [
        f"{side}: {said.problem}"
        for side, said in zip(("sender", "receiver"), told, strict=True)
        if said.problem
    ]
    result = told[0].result
    rate = None
    if not problems and result is not None and result.seconds > 0:
        rate = float(f"{order.nbytes * result.messages / result.seconds / 1e9:.4g}")
    return Variant(
        name=setting.name,
        setting=setting.text,
        memory=setting.memory,
        GBps=rate,
        uses=tuple(said.use for said in told if said.use is not None),
        same_library=not any(said.library for said in told),
        dmabuf=result.dmabuf if result is not None else "",
        problem="; ".join(problems),
    )
