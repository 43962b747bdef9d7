"""Access control of a bridge and a device's control register, from PCI configuration space. Pure.

Layout: PCI Express Base Specification. Capabilities begin where the byte at 0x34 points to; PCI
Express is 0x10 with Device Control at +8. Extended capabilities begin at 0x100; ACS is 0x000D with
its control register at +6.
"""

from __future__ import annotations

from rdmakit.topology.model import Acs, PciControl

__all__ = ["read_acs", "read_control"]

_EXTENDED = 0x100
_ACS = 0x000D
_MOST = 96
"""Capabilities that fit into the extended space; a longer chain is a loop."""
_STATUS, _HAS_LIST, _FIRST = 0x06, 0x10, 0x34
_EXPRESS = 0x10


def read_acs(config: bytes) -> tuple[Acs | None, bool]:
    """Return (access control, whether that is known).

    Without root the kernel gives the first 64 bytes only, so that None is not known. A bridge
    without the capability has no access control: (None, True).
    """
    if len(config) < _EXTENDED + 4:
        return None, False
    place = _EXTENDED
    for _ in range(_MOST):
        header = int.from_bytes(config[place : place + 4], "little")
        if header in (0, 0xFFFFFFFF):
            break
        if header & 0xFFFF == _ACS:
            control = int.from_bytes(config[place + 6 : place + 8], "little")
            return (
                Acs(
                    request_redirect=bool(control & 0x4),
                    completion_redirect=bool(control & 0x8),
                    upstream_forward=bool(control & 0x10),
                    source_validation=bool(control & 0x1),
                ),
                True,
            )
        place = header >> 20
        if not _EXTENDED <= place <= len(config) - 8:
            break
    return None, True


def read_control(config: bytes) -> PciControl | None:
    """Return a device's control register; None without root, or where it is no PCIe device."""
    if len(config) < _EXTENDED or not config[_STATUS] & _HAS_LIST:
        return None
    place = config[_FIRST] & 0xFC
    for _ in range(_MOST):
        if not 0x40 <= place <= _EXTENDED - 10:
            return None
        if config[place] == _EXPRESS:
            control = int.from_bytes(config[place + 8 : place + 10], "little")
            size = control >> 12 & 7
            return PciControl(bool(control & 0x10), 128 << size if size <= 5 else None)
        place = config[place + 1] & 0xFC
    return None
