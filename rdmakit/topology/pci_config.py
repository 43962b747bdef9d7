"""Access control of a bridge, read from its PCI configuration space. Pure.

Layout: PCI Express Base Specification, extended capabilities from 0x100, ACS is 0x000D with its
control register at +6.
"""

from __future__ import annotations

from rdmakit.topology.model import Acs

__all__ = ["read_acs"]

_EXTENDED = 0x100
_ACS = 0x000D
_MOST = 96
"""Capabilities that fit into the extended space; a longer chain is a loop."""


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
