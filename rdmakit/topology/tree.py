"""The PCI tree: relations between devices and the hops between them.

A PCIe switch is one upstream port with a downstream port for each device below it. Within one
switch two devices meet at its upstream port, with at most one downstream port of each side
between: PIX. Anything deeper below one root port is PXB.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from rdmakit.topology.model import PciDevice
from rdmakit.topology.words import Path, Relation

__all__ = ["PciTree"]

_DEEPEST = 64


class PciTree:
    """Devices and bridges of one machine by address."""

    def __init__(self, devices: Sequence[PciDevice], numa_count: int = 0) -> None:
        """Make it; ``numa_count``: NUMA nodes with CPUs, 0 where that is not known."""
        self._devices = {device.address: device for device in devices}
        self._numa_count = numa_count

    def device(self, address: str) -> PciDevice | None:
        """Return a device of the tree."""
        return self._devices.get(address)

    @cached_property
    def host_bridges(self) -> tuple[str, ...]:
        """Names of the roots that devices hang on, in order of their first device."""
        roots = [self.chain(address)[-1] for address in self._devices if self.chain(address)]
        return tuple(dict.fromkeys(root for root in roots if root not in self._devices))

    def chain(self, address: str) -> tuple[str, ...]:
        """Return the bridges above a device, nearest first; a known host bridge comes last."""
        found: list[str] = []
        device = self._devices.get(address)
        while device is not None and device.parent and len(found) < _DEEPEST:
            found.append(device.parent)
            device = self._devices.get(device.parent)
        return tuple(found)

    def numa(self, address: str) -> int | None:
        """Return the NUMA node of a device, by itself or the nearest bridge that knows."""
        for place in (address, *self.chain(address)):
            device = self._devices.get(place)
            if device is not None and device.numa is not None and device.numa >= 0:
                return device.numa
        return 0 if self._numa_count == 1 else None

    def meeting(self, a: str, b: str) -> str | None:
        """Return the lowest bridge, or the host bridge, above both devices."""
        above = set(self.chain(b))
        return next((bridge for bridge in self.chain(a) if bridge in above), None)

    def relation(self, a: str, b: str) -> Relation | None:
        """Return how two devices are connected, None where the tree does not tell."""
        if a == b:
            return Relation(Path.SELF)
        if a not in self._devices or b not in self._devices:
            return None
        meeting = self.meeting(a, b)
        if meeting is None:
            return self._across(a, b)
        if meeting not in self._devices:
            return Relation(Path.PHB)
        below = [self.chain(x).index(meeting) for x in (a, b)]
        return Relation(Path.PIX if max(below) <= 1 else Path.PXB)

    def _across(self, a: str, b: str) -> Relation | None:
        if not all(chain and chain[-1] not in self._devices for chain in map(self.chain, (a, b))):
            return None  # the tree is cut: they may meet further up
        numa = self.numa(a), self.numa(b)
        if None in numa:
            return None
        return Relation(Path.NODE if numa[0] == numa[1] else Path.SYS)

    def between(self, a: str, b: str) -> tuple[str, ...]:
        """Return the bridges that traffic from ``a`` to ``b`` passes, in order.

        Up to and including where they meet; both host bridges where they do not.
        """
        meeting = self.meeting(a, b)
        up, down = list(self.chain(a)), list(self.chain(b))
        if meeting is not None:
            up = up[: up.index(meeting) + 1]
            down = down[: down.index(meeting)]
        return (*up, *reversed(down))
