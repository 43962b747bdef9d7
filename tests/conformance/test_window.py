"""The cases of a Window on the in-memory one and on shared memory, ranks being threads."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from rdmakit.errors import SetupError
from rdmakit.intra import posix_shm
from rdmakit.intra.posix_shm import PosixWindow, Segment, probe_reach
from rdmakit.memory import MemoryBootstrap, MemoryWindow, run_threads
from rdmakit.protocols import Window
from tests.conformance.window_cases import WINDOW_CASES, too_many_counters

KINDS = ("memory", "shm", "shm-named")


def maker(kind: str, boot: MemoryBootstrap) -> Any:
    def make(nbytes: int, flags: int) -> Window:
        if kind == "memory":
            return MemoryWindow.create(boot, nbytes, flags)
        return PosixWindow.create(boot, nbytes, flags, named=kind == "shm-named")

    return make


def segments() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob(f"rdmakit-{os.getuid()}-{os.getpid()}-*")}


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("case", WINDOW_CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_window(kind: str, case: Any, n: int) -> None:
    run_threads(n, lambda boot: case(boot, maker(kind, boot)))
    assert not segments()


@pytest.mark.parametrize("kind", KINDS[1:])
def test_more_counters_than_a_page_holds(kind: str) -> None:
    run_threads(2, lambda boot: too_many_counters(maker(kind, boot)))


@pytest.mark.parametrize("named", [False, True])
def test_one_rank_without_room_is_an_error_on_all(
    monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    real = os.posix_fallocate

    def full(fd: int, offset: int, nbytes: int) -> None:
        if nbytes == 3 * posix_shm.mmap.PAGESIZE:
            raise OSError(28, os.strerror(28))
        real(fd, offset, nbytes)

    monkeypatch.setattr(posix_shm.os, "posix_fallocate", full)

    def main(boot: MemoryBootstrap) -> str:
        with pytest.raises(SetupError) as caught:
            # The failing rank asks for three pages and the others do not; sizes must be equal
            # in a right program, but who fails first is the same to all.
            PosixWindow.create(boot, (2 if boot.rank == 1 else 1) * 4096, 1, named=named)
        return str(caught.value)

    texts = run_threads(3, main)
    assert len(set(texts)) == 1
    assert "local rank 1" in texts[0]
    assert "RDMAKIT_WINDOW" in texts[0]
    assert "bytes free" in texts[0]
    assert not segments()


def test_another_segment_under_the_same_path_is_not_taken() -> None:
    segment = Segment.create(8192, b"a" * 16, named=True)
    try:
        assert stat.S_IMODE(Path(segment.address).stat().st_mode) == 0o600
        assert Segment.open(segment.address, 8192, b"b" * 16) is None
        assert Segment.open(segment.address, 4096, b"a" * 16) is None
        assert Segment.open(segment.address + "x", 8192, b"a" * 16) is None
        seen = Segment.open(segment.address, 8192, b"a" * 16)
        assert seen is not None
        seen.close()
    finally:
        segment.close()
    segment.close()
    assert not segments()


def test_a_folder_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(posix_shm, "SHM", tmp_path / "missing")
    for named in (False, True):
        with pytest.raises(SetupError, match=r"cannot make shared memory in .*missing"):
            Segment.create(4096, b"a" * 16, named=named)


def test_no_descriptor_is_left_open() -> None:
    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def main(boot: MemoryBootstrap) -> None:
        for kind in KINDS[1:]:
            window = maker(kind, boot)(4096, 1)
            boot.barrier()
            window.close()
        probe_reach(boot, "here", named=False)
        probe_reach(boot, "here", named=True)

    run_threads(2, main)
    before = count()
    for _ in range(5):
        run_threads(2, main)
    assert count() <= before


def test_a_window_keeps_no_descriptor() -> None:
    def target(path: Path) -> str:
        try:
            return str(path.readlink())
        except FileNotFoundError:
            return ""  # another rank's look at the folder, over by now

    def main(boot: MemoryBootstrap) -> None:
        window = PosixWindow.create(boot, 4096, 1)
        boot.barrier()
        assert not [t for t in map(target, Path("/proc/self/fd").iterdir()) if "/shm/" in t]
        window.area(boot.rank)[:] = boot.rank + 1
        boot.barrier()
        assert [int(window.area(r)[4095]) for r in range(boot.size)] == [1, 2, 3]
        boot.barrier()
        window.close()

    run_threads(3, main)


def test_memory_under_a_view_stays_after_close() -> None:
    segment = Segment.create(8192, b"a" * 16, named=False)
    view = memoryview(segment.map)
    segment.close()
    assert bytes(view[:17]) == b"a" * 16 + b"\0"
    view[8191] = 7
    assert view[8191] == 7
    view.release()
    segment.close()
    with pytest.raises(ValueError, match="closed"):
        len(segment.map)


@pytest.mark.parametrize("made", [0, 1])
@pytest.mark.parametrize("how", ["window", "reach"])
def test_too_many_open_files(monkeypatch: pytest.MonkeyPatch, how: str, made: int) -> None:
    """Of the rank with the number ``n``, at its first open or at its peer's segment."""
    real, opened = os.open, threading.local()

    def full(path: Any, flags: int, mode: int = 0o777) -> int:
        opened.count = getattr(opened, "count", 0) + 1
        if getattr(opened, "scarce", False) and opened.count > made:
            raise OSError(24, os.strerror(24))
        return real(path, flags, mode)

    monkeypatch.setattr(posix_shm.os, "open", full)

    def main(boot: MemoryBootstrap) -> str:
        opened.scarce = boot.rank == 1
        calls: dict[str, Any] = {
            "window": lambda: PosixWindow.create(boot, 4096, 1),
            "reach": lambda: probe_reach(boot, "here", named=False),
        }
        with pytest.raises(SetupError) as caught:
            calls[how]()
        return str(caught.value)

    texts = run_threads(3, main)
    assert len(set(texts)) == 1
    assert "rank 1: " in texts[0]
    assert "ulimit -n" in texts[0]
    assert "close communicators" in texts[0]


@pytest.mark.parametrize("named", [False, True])
def test_reach_is_only_between_ranks_of_one_host(named: bool) -> None:
    def main(boot: MemoryBootstrap) -> Any:
        return probe_reach(boot, "ab"[boot.rank // 2], named=named)

    for reach, keys in run_threads(4, main):
        assert keys == ["a", "a", "b", "b"]
        assert reach == [[a // 2 == b // 2 for b in range(4)] for a in range(4)]
    assert not segments()
