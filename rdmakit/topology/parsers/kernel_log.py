"""The kernel's log (``dmesg``): what the drivers of GPUs and NICs complained about."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rdmakit.topology.model import normal_address
from rdmakit.topology.text import lines_of

__all__ = ["KernelLog", "Xid", "parse_kernel_log"]

_STAMP = re.compile(r"^(?:<\d+>|kern\s*:\w+\s*:)?\s*(?:\[[^\]]*\]\s*)?")
_XID = re.compile(
    r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+?)(?:\s+GPU-[^)]*)?\): (\d{1,4}),?\s*(.*)", re.ASCII
)
_PROCESS = re.compile(r"\bpid='?(?P<pid>\d+)'?(?:, *name='?(?P<name>[^,']+))?", re.ASCII)
_PEERMEM = re.compile(
    r"\b(?:nvidia[_-]peermem|nv_peer_mem)\b.*(?:Unknown symbol|disagrees about version)", re.I
)
_MISMATCH = re.compile(r"NVRM: API mismatch: the client has the version (\S+?),?(?:\s|$)", re.I)
_MODULE = re.compile(
    r"\bmlx5_core ([0-9a-f:.]+?):? .*?Port module event.*?module \d+, Cable "
    r"(error|plugged|unplugged),?\s*(.*)",
    re.I,
)


@dataclass(frozen=True)
class Xid:
    """An error that the NVIDIA driver reported of a GPU."""

    pci: str
    number: int
    text: str

    @property
    def process(self) -> str:
        """The process whose work it was, ``python3 (pid 4711)``; empty where none is named."""
        found = _PROCESS.search(self.text)
        if found is None:
            return ""
        name = found["name"] or ""
        known = name and "unknown" not in name
        return f"{name} (pid {found['pid']})" if known else f"pid {found['pid']}"


@dataclass(frozen=True)
class KernelLog:
    """What was found, in order. Where the buffer is full, older lines are lost."""

    known: bool = False
    """Whether there was a log at all: reading it may need root."""
    xids: tuple[Xid, ...] = ()
    peermem: tuple[str, ...] = ()
    """Why nvidia_peermem did not load or register."""
    mismatch: tuple[str, ...] = ()
    """Versions of user libraries that the NVIDIA module refused."""
    cables: tuple[tuple[str, str], ...] = ()
    """(PCI address, what is wrong) of transceivers and cables, by the last word on each card."""


def parse_kernel_log(text: str) -> KernelLog:
    """Return the complaints in ``text``. Never raises."""
    xids: dict[Xid, None] = {}
    peermem: dict[str, None] = {}
    mismatch: dict[str, None] = {}
    cables: dict[str, str] = {}
    known = False
    for line in lines_of(text):
        known = known or bool(line.strip())
        if match := _XID.search(line):
            address = match[1] if "." in match[1] else f"{match[1]}.0"
            xids[Xid(normal_address(address) or match[1], int(match[2]), match[3].strip())] = None
        elif _PEERMEM.search(line):
            peermem[_STAMP.sub("", line).strip()] = None
        elif match := _MISMATCH.search(line):
            mismatch[match[1]] = None
        elif match := _MODULE.search(line):
            address = normal_address(match[1]) or match[1]
            cables.pop(address, None)
            if match[2].lower() == "error":
                cables[address] = match[3].strip() or "no reason given"
    return KernelLog(known, tuple(xids), tuple(peermem), tuple(mismatch), tuple(cables.items()))
