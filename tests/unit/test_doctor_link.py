"""A GPU's PCIe link under load, on a fake driver and fake machines."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rdmakit.doctor.link_trial import try_link
from rdmakit.doctor.model import Status
from rdmakit.drivers.host import HostTree
from tests.unit import fake_machines as fakes


class Door:
    """Copies that take ``seconds`` each, one after the other, by a clock that only this moves."""

    def __init__(self, pci: str, seconds: float) -> None:
        self.pci, self.seconds, self.open, self.copies = pci, seconds, 0, 0
        self.now = self.free = 0.0
        self.tick = 1e-3
        """Seconds that it takes to ask an event."""
        door = self

        class Held:
            ptr = address = 1

            def __init__(self, *_: object) -> None:
                door.open += 1

            def record(self, stream: int) -> None:
                assert door.copies
                self.end = door.free

            def done(self) -> bool:
                door.now += door.tick
                return door.now >= self.end

            def close(self) -> None:
                door.open -= 1

        self.DeviceMemory = self.PinnedMemory = self.Stream = self.Event = Held

    def device_facts(self, device: int) -> Any:
        return SimpleNamespace(pci=self.pci)

    def copy_async(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        assert nbytes == 64 << 20
        self.copies += 1
        self.free = max(self.free, self.now) + self.seconds

    def clock(self) -> float:
        return self.now


class SlowTree(HostTree):
    """Files of a machine where looking at all of its devices takes ``seconds``."""

    def __init__(self, root: Path, door: Door, seconds: float) -> None:
        super().__init__(root)
        self._door, self._seconds = door, seconds

    def read_text(self, path: str) -> str | None:
        if path == "/sys/devices/system/cpu/online":  # once each time
            self._door.now += self._seconds
        return super().read_text(path)


def machine(root: Path, now: int, width: int) -> HostTree:
    m = fakes.Fake(root)
    m.base("host")
    m.cpus(["0-7"])
    m.driver()
    top = m.bridge("pci0000:00/0000:00:01.0", numa=0)
    m.gpu(f"{top}/0000:01:00.0", "NVIDIA A100", numa=0, now=now, width=width, max_width=16)
    return HostTree(root)


@pytest.mark.parametrize(
    ("now", "width", "status", "word"),
    [
        (4, 16, Status.OK, "Gen4 x16"),
        (1, 16, Status.WARN, "2.5 of 16 GT/s under load"),
        (4, 8, Status.WARN, "x8 of x16 lanes under load"),
    ],
)
def test_links(tmp_path: Path, now: int, width: int, status: Status, word: str) -> None:
    door = Door("00000000:01:00.0", 2e-3)
    finding = try_link(door, 0, "host", machine(tmp_path, now, width), door.clock)
    assert finding.status is status
    assert word in finding.found
    assert finding.subject == "host 0000:01:00.0"
    assert bool(finding.cure) == (status is Status.WARN)
    assert door.copies == 32
    assert not door.open


def test_the_copies_last_until_the_link_was_read(tmp_path: Path) -> None:
    """Reading takes 0.5 s: 32 + 64 + 128 + 256 copies of 2 ms, of which the last 256 outlast it."""
    door = Door("00000000:01:00.0", 2e-3)
    machine(tmp_path, 1, 16)
    tree = SlowTree(tmp_path, door, 0.5)
    finding = try_link(door, 0, "host", tree, door.clock)
    assert finding.status is Status.WARN
    assert "under load" in finding.found
    assert door.copies == 32 + 64 + 128 + 256
    rate = re.search(r"([\d.]+) GB/s", finding.found)
    assert rate is not None
    # 64 MiB in 2 ms, of the last look alone.
    assert float(rate[1]) == pytest.approx((64 << 20) / 2e-3 / 1e9, rel=0.01)
    assert not door.open


def test_a_link_that_is_never_read_in_time(tmp_path: Path) -> None:
    """A look takes 2 s, copies next to nothing: no further look after 5 s."""
    door = Door("00000000:01:00.0", 1e-6)
    machine(tmp_path, 1, 16)
    finding = try_link(door, 0, "host", SlowTree(tmp_path, door, 2.0), door.clock)
    assert finding.status is Status.UNKNOWN
    assert "had ended before" in finding.found
    assert door.copies == 32 + 64 + 128
    assert not door.open


def test_a_link_that_sysfs_does_not_know(tmp_path: Path) -> None:
    door = Door("0000:07:00.0", 2e-3)
    finding = try_link(door, 0, "host", machine(tmp_path, 4, 16), door.clock)
    assert finding.status is Status.UNKNOWN


def test_copies_that_do_not_end(tmp_path: Path) -> None:
    door = Door("0000:01:00.0", 1.0)
    door.tick = 0.5
    tree = machine(tmp_path, 4, 16)
    finding = try_link(door, 0, "host", tree, door.clock)
    assert finding.status is Status.FAIL
    assert "2048 MiB to the GPU took more than 10 s" in finding.found
    assert not door.open
