"""A GPU's PCIe link under load, on a fake driver and fake machines."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rdmakit.doctor.link_trial import try_link
from rdmakit.doctor.model import Status
from rdmakit.drivers.host import HostTree
from tests.unit import fake_machines as fakes


class Door:
    """Copies that end after the event was asked ``asks`` times."""

    def __init__(self, pci: str, asks: int) -> None:
        self.pci, self.asks, self.open, self.copies = pci, asks, 0, 0
        door = self

        class Held:
            ptr = address = 1

            def __init__(self, *_: object) -> None:
                door.open += 1

            def record(self, stream: int) -> None:
                assert door.copies

            def done(self) -> bool:
                door.asks -= 1
                return door.asks < 0

            def close(self) -> None:
                door.open -= 1

        self.DeviceMemory = self.PinnedMemory = self.Stream = self.Event = Held

    def device_facts(self, device: int) -> Any:
        return SimpleNamespace(pci=self.pci)

    def copy_async(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        self.copies += 1


def machine(root: Path, now: int, width: int) -> HostTree:
    m = fakes.Fake(root)
    m.base("host")
    m.cpus(["0-7"])
    m.driver()
    top = m.bridge("pci0000:00/0000:00:01.0", numa=0)
    m.gpu(f"{top}/0000:01:00.0", "NVIDIA A100", numa=0, now=now, width=width, max_width=16)
    return HostTree(root)


@pytest.mark.parametrize(
    ("now", "width", "asks", "status", "word"),
    [
        (4, 16, 3, Status.OK, "Gen4 x16"),
        (1, 16, 3, Status.WARN, "2.5 of 16 GT/s under load"),
        (4, 8, 3, Status.WARN, "x8 of x16 lanes under load"),
        (1, 16, 0, Status.UNKNOWN, "had ended before"),
    ],
)
def test_links(tmp_path: Path, now: int, width: int, asks: int, status: Status, word: str) -> None:
    door = Door("00000000:01:00.0", asks)
    finding = try_link(door, 0, "host", machine(tmp_path, now, width))
    assert finding.status is status
    assert word in finding.found
    assert finding.subject == "host 0000:01:00.0"
    assert bool(finding.cure) == (status is Status.WARN)
    assert not door.open


def test_a_link_that_sysfs_does_not_know(tmp_path: Path) -> None:
    finding = try_link(Door("0000:07:00.0", 2), 0, "host", machine(tmp_path, 4, 16))
    assert finding.status is Status.UNKNOWN


def test_copies_that_do_not_end(tmp_path: Path) -> None:
    door, now = Door("0000:01:00.0", 10**9), iter(range(1000))
    tree = machine(tmp_path, 4, 16)
    finding = try_link(door, 0, "host", tree, clock=lambda: float(next(now)))
    assert finding.status is Status.FAIL
    assert "took more than 10 s" in finding.found
    assert not door.open
