"""``ucx_info -v`` and ``-d``, of old and new UCX, whole or through grep."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from rdmakit.topology.text import lines_of

__all__ = ["UcxDomain", "UcxInfo", "parse_ucx_info"]


@dataclass(frozen=True)
class UcxDomain:
    """A memory domain: what one component can register and move."""

    name: str
    component: str = ""
    memory: dict[str, str] | None = None
    """Flags by memory type (``access,reg,cache``); None where the text has no such line."""
    transports: tuple[tuple[str, str, str], ...] = ()
    """(transport, device, type)."""
    dead: bool = False
    """Whether UCX found no usable device in it."""


@dataclass(frozen=True)
class UcxInfo:
    """What the text shows; None for what it does not."""

    version: str | None = None
    library: str | None = None
    configure: str | None = None
    domains: tuple[UcxDomain, ...] = ()
    loose: tuple[str, ...] = ()
    """Transports whose domain is not in the text (grep), in order, repeated as there."""

    def _option(self, name: str) -> bool | None:
        if self.configure is None:
            return None
        if re.search(rf"--without-{name}\b|--with-{name}=no\b", self.configure):
            return False
        return True if re.search(rf"--with-{name}\b", self.configure) else None

    @property
    def built_with_cuda(self) -> bool | None:
        """Whether it was configured with CUDA; that CUDA works is shown by transports only."""
        return self._option("cuda")

    @property
    def built_with_gdrcopy(self) -> bool | None:
        """Whether it was configured with GDRCopy."""
        return self._option("gdrcopy")

    @property
    def built_with_verbs(self) -> bool | None:
        """Whether it was configured with InfiniBand verbs."""
        return self._option("verbs")

    @property
    def transports(self) -> tuple[str, ...] | None:
        """Transports in order, each once; None where the text lists none."""
        names = [t for d in self.domains for t, _, _ in d.transports] + list(self.loose)
        return tuple(dict.fromkeys(names)) if names else None

    def has(self, transport: str) -> bool | None:
        """Return whether a transport is offered; None where the text lists none."""
        return None if self.transports is None else transport in self.transports

    @property
    def net_devices(self) -> tuple[str, ...]:
        """Network devices, as UCX_NET_DEVICES takes them."""
        devices = [
            device
            for domain in self.domains
            for _, device, kind in domain.transports
            if device and (kind == "network" or (not kind and _is_ib(domain)))
        ]
        return tuple(dict.fromkeys(devices))

    @property
    def dead_devices(self) -> tuple[str, ...]:
        """RDMA devices of which no port is usable."""
        return tuple(domain.name for domain in self.domains if domain.dead and _is_ib(domain))

    @property
    def rails(self) -> int | None:
        """RDMA ports that UCX offers."""
        devices = {
            device
            for domain in self.domains
            if _is_ib(domain)
            for _, device, _ in domain.transports
            if device
        }
        if devices:
            return len(devices)
        counts = [
            self.loose.count(name) for name in ("rc_mlx5", "rc_verbs", "ud_verbs") if self.loose
        ]
        return max(counts) if counts else None

    @property
    def gpudirect_rdma(self) -> bool | None:
        """Whether NICs can register GPU memory, by the RDMA domains' own memory types.

        That gdr_copy or cuda_ipc is there says nothing about it.
        """
        known = [d.memory for d in self.domains if _is_ib(d) and d.memory is not None]
        return any("cuda" in memory for memory in known) if known else None

    @property
    def dmabuf(self) -> bool | None:
        """Whether NICs can register GPU memory by dma-buf; None where the text cannot say."""
        known = [d.memory for d in self.domains if _is_ib(d) and d.memory is not None]
        if any("dmabuf" in flags for memory in known for flags in memory.values()):
            return True
        return False if self.gpudirect_rdma is False else None

    @property
    def verdict(self) -> str:
        """What to conclude about GPU memory between nodes, in a line."""
        if self.gpudirect_rdma is None:
            if self.transports is None:
                return ""
            return "GPUDirect RDMA: unknown; needs the memory types in ucx_info -d"
        known = [d for d in self.domains if _is_ib(d) and d.memory is not None]
        names = ", ".join(d.name for d in known if not d.dead) or "no usable NIC"
        if self.gpudirect_rdma:
            return f"GPUDirect RDMA: {names} can register GPU memory"
        have = [name for name in ("cuda_ipc", "gdr_copy", "rc_mlx5") if self.has(name)]
        also = f", although {', '.join(have)} are there" if have else ""
        return (
            f"FAIL for GPUDirect RDMA: {names} lists host memory only (no nvidia_peermem, no "
            f"dma-buf){also}"
        )


def _is_ib(domain: UcxDomain) -> bool:
    return domain.component == "ib"


@dataclass
class _Domain:
    name: str
    component: str = ""
    memory: dict[str, str] | None = None
    transports: list[list[str]] = field(default_factory=list)
    dead: bool = False

    def built(self) -> UcxDomain:
        transports = tuple((t[0], t[1], t[2]) for t in self.transports)
        return UcxDomain(self.name, self.component, self.memory, transports, self.dead)


def parse_ucx_info(text: str) -> UcxInfo:
    """Return what ``ucx_info`` printed. Never raises; another text gives an empty result."""
    domains: list[_Domain] = []
    loose: list[list[str]] = []
    said: dict[str, str] = {}
    for line in lines_of(text):
        bare = re.sub(r"^\s*#*\s*", "", line).rstrip()
        name, colon, value = bare.partition(":")
        name, value = name.strip().lower(), value.strip()
        if not colon:
            if "no supported devices found" in bare and domains:
                domains[-1].dead = True
            continue
        if name in ("library version", "library path", "configured with"):
            said.setdefault(name, value)
        elif name == "memory domain":
            domains.append(_Domain(value))
        elif name == "component" and domains:
            domains[-1].component = value
        elif name == "memory types" and domains:
            domains[-1].memory = _memory(value)
        elif name == "transport" and re.fullmatch(r"[a-z]\w*", value):
            (domains[-1].transports if domains else loose).append([value, "", ""])
        elif name in ("device", "type"):
            entries = domains[-1].transports if domains else loose
            if entries:
                entries[-1][1 if name == "device" else 2] = value
        elif name == "connection manager":
            domains.append(_Domain("", "connection manager"))
    return UcxInfo(
        said.get("library version"),
        said.get("library path"),
        said.get("configured with"),
        tuple(d.built() for d in domains if d.component != "connection manager"),
        tuple(entry[0] for entry in loose),
    )


def _memory(text: str) -> dict[str, str]:
    """``host (access,reg,cache), cuda (access,reg)`` -> flags by type."""
    pairs = re.findall(r"([a-z][a-z-]*)\s*(?:\(([^)]*)\))?(?:,|$|\s)", text)
    return {name: flags for name, flags in pairs}
