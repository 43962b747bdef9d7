"""NVIDIA's management library: GPUs, their links and their peers. The only door to pynvml.

``python -m rdmakit.drivers.nvml`` prints the facts as JSON: discovery asks a child process, so
that a driver that hangs takes nothing with it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from rdmakit.drivers.host import Runner
from rdmakit.topology.cpulist import MOST_CPUS
from rdmakit.topology.facts import NvLink, NvmlFacts, NvmlGpu
from rdmakit.topology.model import MigDevice, normal_address

__all__ = ["COMMAND", "ask_nvml", "decode_nvml", "have_pynvml", "read_nvml"]

COMMAND = (sys.executable, "-m", "rdmakit.drivers.nvml")
_LIMIT = 20.0
"""Seconds: without persistence mode the driver starts every GPU first."""
_MOST_LINKS = 36
_GENERATIONS = {1: 1, 2: 2, 3: 2, 4: 3, 5: 3, 6: 4, 7: 5}
"""NVML_NVLINK_VERSION_*: 1.0, 2.0, 2.2, 3.0, 3.1, 4.0, 5.0 (an H200 answers 6)."""


def have_pynvml() -> bool:
    """Return whether nvidia-ml-py is installed. Imports nothing."""
    return importlib.util.find_spec("pynvml") is not None


def ask_nvml(run: Runner) -> NvmlFacts:
    """Return what a child process learns from NVML. Local, blocking, at most 20 s.

    ``problem`` says why there is nothing; never raises.
    """
    result = run(COMMAND, _LIMIT)
    if not result.ok:
        last = result.stderr.strip().splitlines()[-1:]
        return NvmlFacts(problem=result.error or (last[0] if last else f"status {result.rc}"))
    return decode_nvml(result.stdout)


def decode_nvml(text: str) -> NvmlFacts:
    """Return the facts of a JSON text; ``problem`` says what is wrong with it."""
    try:
        return msgspec.json.decode(text, type=NvmlFacts)
    except (msgspec.MsgspecError, UnicodeError) as exc:
        return NvmlFacts(problem=f"NVML's answer is not understood: {exc}")


def read_nvml() -> NvmlFacts:
    """Return what NVML says in this process. Local; never raises."""
    if not have_pynvml():
        return NvmlFacts(problem="nvidia-ml-py is not installed")
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as exc:
        return NvmlFacts(problem=f"NVML: {exc}")
    try:
        return _Reader(pynvml).facts()
    finally:
        pynvml.nvmlShutdown()


class _Reader:
    """Asks NVML; what a GPU or an old driver cannot say is None."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml

    def _ask(self, name: str, *args: Any) -> Any:
        function: Callable[..., Any] | None = getattr(self._nvml, name, None)
        if function is None:
            return None
        try:
            return function(*args)
        except (self._nvml.NVMLError, ValueError, TypeError, AttributeError):
            return None

    def facts(self) -> NvmlFacts:
        """Return everything."""
        count = self._ask("nvmlDeviceGetCount") or 0
        handles = [self._ask("nvmlDeviceGetHandleByIndex", index) for index in range(count)]
        cuda = self._ask("nvmlSystemGetCudaDriverVersion_v2")
        pairs = range(count)
        return NvmlFacts(
            driver=_text(self._ask("nvmlSystemGetDriverVersion")),
            cuda=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else "",
            gpus=tuple(self._gpu(index, handle) for index, handle in enumerate(handles) if handle),
            ancestors=self._pairs(handles, self._ancestor),
            p2p=self._pairs(handles, self._p2p),
            p2p_nvlink=self._pairs(handles, self._p2p_nvlink),
            problem="" if all(handles[i] for i in pairs) else "NVML does not open every GPU",
        )

    def _pairs(
        self, handles: Sequence[Any], ask: Callable[[Any, Any], Any]
    ) -> tuple[tuple[Any, ...], ...]:
        if not all(handles):
            return ()
        return tuple(
            tuple(
                "X" if a is b and ask == self._p2p else None if a is b else ask(a, b)
                for b in handles
            )
            for a in handles
        )

    def _gpu(self, index: int, handle: Any) -> NvmlGpu:
        ask = self._ask
        pci = ask("nvmlDeviceGetPciInfo", handle)
        links = self._links(handle)
        mode = ask("nvmlDeviceGetMigMode", handle)
        return NvmlGpu(
            index,
            _text(ask("nvmlDeviceGetName", handle)),
            _text(ask("nvmlDeviceGetUUID", handle)),
            normal_address(_text(pci.busId)) if pci is not None else None,
            ask("nvmlDeviceGetMinorNumber", handle),
            self._mask("nvmlDeviceGetCpuAffinity", handle, MOST_CPUS),
            self._mask("nvmlDeviceGetMemoryAffinity", handle, 64, 0),
            ask("nvmlDeviceGetNumaNodeId", handle),
            ask("nvmlDeviceGetCurrPcieLinkGeneration", handle),
            ask("nvmlDeviceGetCurrPcieLinkWidth", handle),
            ask("nvmlDeviceGetMaxPcieLinkGeneration", handle),
            ask("nvmlDeviceGetMaxPcieLinkWidth", handle),
            links,
            _GENERATIONS.get(ask("nvmlDeviceGetNvLinkVersion", handle, 0)) if links else None,
            None if mode is None else bool(mode[0]),
            self._mig(handle) if mode is not None and mode[0] else (),
        )

    def _mask(self, name: str, handle: Any, bits: int, *scope: int) -> tuple[int, ...] | None:
        # Words of the machine's unsigned long; more of them than needed are allowed.
        words = self._ask(name, handle, (bits + 63) // 64, *scope)
        if words is None:
            return None
        return (
            tuple(
                64 * place + bit
                for place, word in enumerate(words)
                for bit in range(64)
                if int(word) >> bit & 1
            )
            or None
        )

    def _links(self, handle: Any) -> tuple[NvLink, ...]:
        found = []
        kinds = {
            getattr(self._nvml, "NVML_NVLINK_DEVICE_TYPE_GPU", 0): "gpu",
            getattr(self._nvml, "NVML_NVLINK_DEVICE_TYPE_SWITCH", 2): "switch",
            getattr(self._nvml, "NVML_NVLINK_DEVICE_TYPE_IBMNPU", 1): "other",
        }
        for link in range(_MOST_LINKS):
            state = self._ask("nvmlDeviceGetNvLinkState", handle, link)
            if state is None:
                break
            if not state:
                continue
            remote = self._ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
            kind = self._ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
            address = normal_address(_text(remote.busId)) if remote is not None else None
            if address is not None and address.startswith("ffff"):
                address = None  # the other end is hidden, as in a virtual machine
            found.append(NvLink(kinds.get(kind) if kind is not None else None, address))
        return tuple(found)

    def _mig(self, handle: Any) -> tuple[MigDevice, ...]:
        found = []
        for index in range(self._ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
            device = self._ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
            if device is None:
                continue
            name = _text(self._ask("nvmlDeviceGetName", device)).rpartition("MIG ")[2]
            found.append(MigDevice(name, _text(self._ask("nvmlDeviceGetUUID", device))))
        return tuple(found)

    def _ancestor(self, a: Any, b: Any) -> str | None:
        level = self._ask("nvmlDeviceGetTopologyCommonAncestor", a, b)
        # NVML_TOPOLOGY_*; INTERNAL: two GPUs of one board.
        words = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
        return words.get(level) if level is not None else None

    def _p2p(self, a: Any, b: Any) -> str | None:
        words = {0: "OK", 1: "CNS", 2: "GNS", 3: "TNS", 4: "DR", 5: "NS", 6: "U"}
        read = self._ask("nvmlDeviceGetP2PStatus", a, b, 0)
        write = self._ask("nvmlDeviceGetP2PStatus", a, b, 1)
        if read is None or write is None:
            return None
        return words.get(read or write)

    def _p2p_nvlink(self, a: Any, b: Any) -> bool | None:
        status = self._ask("nvmlDeviceGetP2PStatus", a, b, 2)
        return None if status is None else status == 0


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(read_nvml()).decode() + "\n")
