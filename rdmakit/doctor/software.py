"""The software of a node as several checks look at it, found out once. Local.

Where there are only files, what ``ucx_info`` printed there takes the place of a child process;
what it does not tell stays unknown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from rdmakit.doctor.context import Context
from rdmakit.doctor.interfaces import Interface, read_interfaces
from rdmakit.drivers.python_report import PythonReport, ask_python
from rdmakit.drivers.ucx_report import UcxReport, ask_ucx
from rdmakit.process.mpi_report import MpiReport, ask_mpi
from rdmakit.topology.parsers.ucx_info import UcxInfo

__all__ = ["RDMA", "Software", "software", "yes"]

RDMA = re.compile(r"(rc|dc|ud|gga)(_\w+)?|srd|ib")
"""Transports over InfiniBand, RoCE and EFA."""
_T = TypeVar("_T")


@dataclass
class Software:
    """What is there, each part looked at when it is first asked for."""

    context: Context

    @cached_property
    def ucx(self) -> UcxReport | None:
        """The UCX that ranks use; None where there are only files."""
        return self._ask(lambda: ask_ucx(self.context.runner, self.context.environ))

    @cached_property
    def mpi(self) -> MpiReport | None:
        """The MPI library that ranks use; None where there are only files."""
        return self._ask(lambda: ask_mpi(self.context.runner, self.context.environ))

    @cached_property
    def python(self) -> PythonReport | None:
        """Python's packages; None where there are only files."""
        return self._ask(lambda: ask_python(self.context.runner))

    @cached_property
    def interfaces(self) -> tuple[Interface, ...]:
        """Network interfaces by name."""
        return read_interfaces(self.context.tree)

    @property
    def info(self) -> UcxInfo:
        """What ``ucx_info`` printed; empty where nothing of it is there."""
        return self.context.texts.ucx

    @property
    def why_no_ucx(self) -> str:
        """Why nothing is known of UCX, or nothing."""
        if self.ucx is not None:
            return self.ucx.problem
        if self.info.transports is None and self.info.version is None:
            return "no output of ucx_info -d and -v among the files"
        return ""

    @property
    def ucx_version(self) -> str:
        """Release of UCX; empty where it is not known."""
        return self.ucx.version if self.ucx is not None else self.info.version or ""

    @property
    def transports(self) -> dict[str, tuple[str, ...]] | None:
        """Devices by transport with everything allowed; None where that is not known."""
        if self.ucx is not None:
            return None if self.ucx.problem else _by_transport(self.ucx.every)
        if self.info.transports is None:
            return None
        found = {name: () for name in self.info.transports}
        return found | _by_transport(
            [(t, d) for domain in self.info.domains for t, d, _ in domain.transports if d]
        )

    @property
    def rdma_transports(self) -> tuple[str, ...]:
        """Those of :attr:`transports` that go over RDMA devices."""
        return tuple(name for name in self.transports or {} if RDMA.fullmatch(name))

    @property
    def has_cuda(self) -> bool | None:
        """Whether UCX understands GPU memory; None where that is not known."""
        transports = self.transports
        if transports is None:
            return False if self.info.built_with_cuda is False else None
        if any(name.startswith("cuda") for name in transports):
            return True
        return False if self.whole else None

    @property
    def whole(self) -> bool:
        """Whether :attr:`transports` are all there are: of a part of a text nothing follows."""
        return self.ucx is not None or "self" in (self.transports or {})

    @property
    def net_devices(self) -> tuple[str, ...]:
        """Devices that UCX_NET_DEVICES may name."""
        transports = self.transports or {}
        net = [d for t, ds in transports.items() if t == "tcp" or RDMA.fullmatch(t) for d in ds]
        return tuple(dict.fromkeys(net or self.info.net_devices))

    def registering(self, kind: str) -> dict[str, bool] | None:
        """Return which RDMA devices of UCX register memory of ``kind``; None: not known."""
        if self.ucx is not None:
            if self.ucx.registers is None:
                return None
            devices = {
                device.partition(":")[0]
                for transport, device in self.ucx.every
                if RDMA.fullmatch(transport)
            }
            able = self.ucx.registers.get(kind, ())
            return {device: device in able for device in sorted(devices)} or None
        known = {
            domain.name: kind in domain.memory
            for domain in self.info.domains
            if domain.component == "ib" and domain.memory is not None and not domain.dead
        }
        return known or None

    def setting(self, name: str) -> str | None:
        """Return a setting of the node's ranks, None where it is not set."""
        return self.context.environ.get(name)

    def _ask(self, ask: Callable[[], _T]) -> _T | None:
        return ask() if self.context.live else None


class _Last:
    context: Context | None = None
    software: Software | None = None


def software(context: Context) -> Software:
    """Return what is known of a node's software; checks of one context share it."""
    if _Last.software is None or _Last.context is not context:
        _Last.context, _Last.software = context, Software(context)
    return _Last.software


def _by_transport(pairs: Iterable[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for transport, device in pairs:
        found[transport] = (*found.get(transport, ()), device)
    return found


def yes(environ: Mapping[str, str], name: str) -> bool | None:
    """Return a yes-or-no setting, None where it is not set or neither."""
    text = environ.get(name, "").strip().lower()
    if text in ("1", "y", "yes", "true", "on"):
        return True
    return False if text in ("0", "n", "no", "false", "off") else None
