"""Children that are talked to, and libibverbs' door: what they say when something is wrong."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rdmakit.drivers import cuda_driver, verbs
from rdmakit.drivers.spawn import MARK, PythonChild
from rdmakit.drivers.verbs import VerbsUnavailable
from rdmakit.errors import CudaError, SetupError
from rdmakit.proof.registration import try_registration


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Any]:
    """Make a module of some lines and start it."""
    made: list[PythonChild] = []

    def start(text: str) -> PythonChild:
        (tmp_path / "spoken_to.py").write_text(f"import sys, time\nM = {MARK!r}\n{text}")
        env = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONUNBUFFERED": "1"}
        made.append(PythonChild("spoken_to", env=env))
        return made[-1]

    yield start
    for child in made:
        child.end(0.1)


def test_talk(program: Any) -> None:
    child = program("print('noise'); print(M + sys.stdin.readline().strip()); print('more')")
    child.tell({"x": [1, 2]})
    assert child.hear(20) == {"x": [1, 2]}
    child.end(20)
    assert child.said.splitlines()[0] == "noise"
    assert child.said.splitlines()[-1] == "more"
    child.end(1)


def test_a_child_that_dies_says_why(program: Any) -> None:
    child = program("raise SystemExit('no such device')")
    with pytest.raises(SetupError, match="ended: no such device"):
        child.hear(20)


def test_a_silent_child_is_given_up_and_killed(program: Any) -> None:
    child = program("print(M + '1', flush=True)\nwhile True: time.sleep(1)")
    assert child.hear(20) == 1
    with pytest.raises(SetupError, match=r"said nothing for 0\.1 s"):
        child.hear(0.1)
    start = time.monotonic()
    child.end(0.1)
    assert time.monotonic() - start < 20
    with pytest.raises(ProcessLookupError):
        os.kill(child._process.pid, 0)


def test_words_that_are_no_json(program: Any) -> None:
    child = program("print(M + '{')")
    with pytest.raises(SetupError, match="child said"):
        child.hear(20)


def test_no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(SetupError, match="no interpreter"):
        PythonChild("x")


# -- libibverbs -------------------------------------------------------------------------------


class Library:
    """Stands for libibverbs with one device."""

    def __init__(self, *, region: int = 5, code: int = 0, context: int = 3) -> None:
        self.region, self.code, self.context = region, code, context
        self.open = 0
        self.asked: list[tuple[Any, ...]] = []

    def ibv_get_device_list(self, count: Any) -> Any:
        count._obj.value = 1
        return [7]

    def ibv_free_device_list(self, devices: Any) -> None:
        pass

    def ibv_get_device_name(self, device: int) -> bytes:
        return b"mlx5_0"

    def ibv_open_device(self, device: int) -> int:
        self.open += bool(self.context)
        return self.context

    def ibv_close_device(self, context: int) -> int:
        self.open -= 1
        return 0

    def ibv_alloc_pd(self, context: int) -> int:
        self.open += 1
        return 4

    def ibv_dealloc_pd(self, domain: int) -> int:
        self.open -= 1
        return 0

    def ibv_reg_mr(self, *args: Any) -> int:
        self.asked.append(args)
        ctypes.set_errno(self.code)
        self.open += bool(self.region)
        return self.region

    ibv_reg_dmabuf_mr = ibv_reg_mr

    def ibv_dereg_mr(self, region: int) -> int:
        self.open -= 1
        return 0


def put(monkeypatch: pytest.MonkeyPatch, library: Any) -> Any:
    monkeypatch.setattr(verbs, "_library", lambda: library)
    return library


def test_register(monkeypatch: pytest.MonkeyPatch) -> None:
    library = put(monkeypatch, Library())
    assert verbs.register("mlx5_0", 4096, 8192) == ""
    assert verbs.register_dmabuf("mlx5_0", 9, 4096, 8192) == ""
    assert library.asked == [(4, 4096, 8192, 7), (4, 0, 8192, 4096, 9, 7)]
    assert library.open == 0


def test_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    library = put(monkeypatch, Library(region=0, code=14))
    assert verbs.register("mlx5_0", 4096, 8192) == "Bad address (errno 14)"
    assert library.open == 0


def test_not_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    library = put(monkeypatch, Library(context=0))
    with pytest.raises(VerbsUnavailable, match="no device 'mlx5_9' among"):
        verbs.register("mlx5_9", 1, 1)
    with pytest.raises(VerbsUnavailable, match="mlx5_0 cannot be opened"):
        verbs.register("mlx5_0", 1, 1)
    assert library.open == 0
    put(monkeypatch, SimpleNamespace())
    with pytest.raises(VerbsUnavailable, match="has no ibv_reg_mr"):
        verbs.register("mlx5_0", 1, 1)


def test_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "LIBRARY", "libnothere.so.9")
    verbs._library.cache_clear()
    with pytest.raises(VerbsUnavailable, match="install libibverbs1"):
        verbs.register("mlx5_0", 1, 1)
    verbs._library.cache_clear()


def test_registration_of_gpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    library = put(monkeypatch, Library())
    fd = os.open("/dev/null", os.O_RDONLY)
    monkeypatch.setattr(cuda_driver, "dmabuf_of", lambda a, n: (fd, 0x10000, 8192))
    found = try_registration(1, "receiver", ("mlx5_0:1",), "gpu", 0x10010, 4096)
    assert (found.device, found.peermem, found.dmabuf) == ("mlx5_0", True, True)
    assert library.asked[1] == (4, 0, 8192, 0x10000, fd, 7)
    with pytest.raises(OSError):
        os.fstat(fd)

    def none(address: int, nbytes: int) -> Any:
        raise CudaError("cuMemGetHandleForAddressRange", 801, "CUDA_ERROR_NOT_SUPPORTED")

    monkeypatch.setattr(cuda_driver, "dmabuf_of", none)
    put(monkeypatch, Library(region=0, code=14))
    found = try_registration(1, "receiver", ("mlx5_0:1",), "gpu", 0x10010, 4096)
    assert (found.peermem, found.dmabuf) == (False, False)
    assert "NOT_SUPPORTED" in found.dmabuf_note


def test_registration_without_a_device() -> None:
    found = try_registration(0, "sender", (), "host", 1, 1)
    assert (found.peermem, found.dmabuf, found.device) == (None, None, "")
    assert found.peermem_note.startswith("not possible here: no RDMA device")
    found = try_registration(0, "sender", ("nosuch_0:1",), "host", 1, 1)
    assert found.peermem is None
    assert found.peermem_note.startswith("not possible here: ")
