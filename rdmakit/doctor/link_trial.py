"""The PCIe link of a GPU while bytes go over it: an idle GPU lowers its link."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from rdmakit.discovery.sysfs import read_sysfs
from rdmakit.doctor.context import Context
from rdmakit.doctor.model import Check, Finding, Status
from rdmakit.drivers.host import HostTree
from rdmakit.topology.acs import judge_link
from rdmakit.topology.model import PciDevice, normal_address

__all__ = ["PCIE_LOAD", "try_link"]

_BYTES = 64 << 20
"""Of a copy: over a millisecond on the fastest link there is, so that the queue never runs dry."""
_FIRST, _MOST = 32, 4096
"""Copies that are queued before the link is looked at; more where they end before that."""
_SECONDS = 10.0
"""Of the copies of one look, on the slowest link."""
_LOOKS = 5.0
"""After which there is no further look: reading all of a large machine's devices takes long."""


def _between(_: Context) -> Iterator[Finding]:
    yield PCIE_LOAD.finding(Status.SKIPPED, "tried by the ranks: --path")


PCIE_LOAD = Check(
    "pcie.load",
    "PCIe links of GPUs under load",
    "A link that stays at a lower generation or width slows every byte to and from the GPU.",
    _between,
    needs=("gpu", "live", "job"),
)


def try_link(
    door: Any,
    device: int,
    host: str,
    tree: HostTree | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Finding:
    """Copy from pinned memory to this rank's GPU, and look at its link meanwhile. Local, blocking.

    Takes 64 MiB on the GPU and of the host. The copies last until the link was read: some tens of
    milliseconds, or twice what reading takes; at most 15 seconds.

    Args:
        door: :mod:`rdmakit.drivers.cuda`, or a fake; the device is the current one.
        device: its ordinal.
        host: this rank's.
        tree: files of this machine.
        clock: time in seconds.
    """
    tree = tree or HostTree()
    address = normal_address(door.device_facts(device).pci) or ""
    subject = f"{host} {address}"
    to, of = door.DeviceMemory(_BYTES), door.PinnedMemory(_BYTES)
    stream, event = door.Stream(), door.Event()
    try:
        begun, copies = clock(), _FIRST
        while True:
            start = clock()
            for _ in range(copies):
                door.copy_async(to.address, of.address, _BYTES, stream.ptr)
            event.record(stream.ptr)
            seen = {one.address: one for one in read_sysfs(tree).pci}
            busy = not event.done()
            while not event.done():
                if clock() - start > _SECONDS:
                    return _too_slow(copies, subject)
                time.sleep(1e-4)
            rate = copies * _BYTES / max(clock() - start, 1e-9) / 1e9
            if busy or copies >= _MOST or clock() - begun > _LOOKS:
                return _judged(seen, address, subject, rate, busy=busy)
            copies *= 2  # reading took longer than the copies
    finally:
        stream.close()
        event.close()
        to.close()
        of.close()


def _too_slow(copies: int, subject: str) -> Finding:
    return PCIE_LOAD.finding(
        Status.FAIL,
        f"{copies * _BYTES >> 20} MiB to the GPU took more than {_SECONDS:g} s",
        subject=subject,
        expected="a tenth of a second or two",
        cure="dmesg | grep -i -e xid -e pcie -e aer; reseat the card or its riser",
        urgency=20,
    )


def _judged(
    seen: dict[str, PciDevice], address: str, subject: str, rate: float, *, busy: bool
) -> Finding:
    gpu = seen.get(address)
    if gpu is None or not gpu.link.describe():
        text = f"{rate:.1f} GB/s from pinned memory; sysfs does not tell the link of {address}"
        return PCIE_LOAD.finding(Status.UNKNOWN, text, subject=subject)
    above = seen.get(gpu.parent)
    text = f"{gpu.link.describe()}, {rate:.1f} GB/s from pinned memory"
    if not busy:
        text += "; the copies had ended before the link was looked at"
        return PCIE_LOAD.finding(Status.UNKNOWN, text, subject=subject)
    problem = judge_link(gpu.link, gpu=False, partner=above.link if above is not None else None)
    if not problem:
        return PCIE_LOAD.finding(Status.OK, text, subject=subject)
    return PCIE_LOAD.finding(
        Status.WARN,
        f"{text}: {problem.removeprefix('WARN: ').partition(':')[0]} under load",
        subject=subject,
        expected="what both ends of the link can do",
        cure="reseat the card, check riser and slot, and the BIOS's setting of the slot's "
        f"generation (lspci -vvv -s {address} shows LnkSta and LnkCap)",
        urgency=35,
    )
