"""Devices, memory kinds and IPC windows on a driver made of host memory; ranks are threads."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from rdmakit.drivers import cuda, cuda_driver
from rdmakit.errors import CudaError, InvalidArgument, SetupError, UnsupportedError
from rdmakit.intra import cuda_ipc
from rdmakit.intra.cuda_ipc import exchange_facts, share, share_window
from rdmakit.intra.device_plan import grid_for
from rdmakit.intra.device_words import check_memory, notes_on
from rdmakit.intra.ipc_cache import HandleCache
from rdmakit.memory import MemoryBootstrap, run_threads
from tests.conformance.fake_cuda import Gpu, Library, Machine

HOST = [Gpu(0xA0 + n, f"0000:{n + 1:02X}:00.0") for n in range(8)]


class Array:
    def __init__(self, address: int, count: int, dtype: str = "float32") -> None:
        self.address, self.count, self.dtype = address, count, np.dtype(dtype)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Library], None]:
    """Let the calling thread be a process with this driver."""
    mine = threading.local()
    monkeypatch.setattr(cuda_driver, "library", lambda: mine.library)
    monkeypatch.setattr(cuda_ipc, "_process", lambda: mine.name)
    monkeypatch.setattr(cuda_ipc, "_handles", lambda: mine.handles)

    def become(library: Library) -> None:
        mine.library, mine.name = library, f"process/{threading.get_ident()}"
        mine.handles = HandleCache(cuda, mine.name)

    return become


def ranks(
    use: Any, machine: Machine, visible: Sequence[Sequence[int]],
    body: Callable[[MemoryBootstrap, Library], Any],
) -> list[Any]:  # fmt: skip
    def main(boot: MemoryBootstrap) -> Any:
        library = Library(machine, visible[boot.rank])
        use(library)
        return body(boot, library)

    return run_threads(len(visible), main)


# -- devices -----------------------------------------------------------------------------------


def test_ordinals_are_not_identities(use: Any) -> None:
    # REPORTS 32: every rank has CUDA_VISIBLE_DEVICES=<rank>, so each has ordinal 0
    def body(boot: MemoryBootstrap, library: Library) -> Any:
        return exchange_facts(boot, 0)

    for facts in ranks(use, Machine(HOST), [[3], [5], [0]], body):
        assert [entry.ordinal for entry in facts] == [0, 0, 0]
        assert [entry.pci for entry in facts] == ["0000:04:00.0", "0000:06:00.0", "0000:01:00.0"]
        assert len({entry.uuid for entry in facts}) == 3
        assert grid_for(facts).sharing == 1


def test_another_order_of_the_same_devices(use: Any) -> None:
    # REPORTS 32: CUDA_VISIBLE_DEVICES=7,6,5 on one rank; the same GPU is the same by its UUID
    def body(boot: MemoryBootstrap, library: Library) -> Any:
        return exchange_facts(boot, 2 if boot.rank else 0)

    for facts in ranks(use, Machine(HOST), [[5, 6, 7], [7, 6, 5]], body):
        assert facts[0].uuid == facts[1].uuid == f"GPU-{0:08x}-0000-0000-0000-{0xA5:012x}"
        assert [entry.ordinal for entry in facts] == [0, 2]
        grid = grid_for(facts)
        assert grid.sharing == 2
        # REPORTS 31: several ranks on one GPU are served, and it is said
        assert "2 ranks share one GPU" in " ".join(notes_on(facts, grid))


def test_a_mig_instance_is_known_by_its_own_uuid(use: Any) -> None:
    # REPORTS 53
    slices = [Gpu(n, "0000:01:00.0", "NVIDIA H200 MIG 1g.18gb", ((16, 16),)) for n in (1, 2)]

    def body(boot: MemoryBootstrap, library: Library) -> Any:
        return exchange_facts(boot, 0)

    facts = ranks(use, Machine(slices), [[0], [1]], body)[0]
    assert [entry.uuid[:4] for entry in facts] == ["MIG-", "MIG-"]
    assert facts[0].uuid != facts[1].uuid
    assert facts[0].pci == facts[1].pci
    assert facts[0].mig
    grid = grid_for(facts)
    assert (grid.sharing, grid.blocks) == (1, 16)
    assert "MIG instances" in " ".join(notes_on(facts, grid))


def test_a_driver_without_devices_or_newer_calls(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    use(Library(Machine(HOST), []))
    assert "finds no usable device" in cuda.why_not()
    assert not cuda.available()
    use(Library(Machine(HOST), [0]))
    with pytest.raises(CudaError, match="cuFlushGPUDirectRDMAWrites: CUDA_ERROR_NOT_FOUND"):
        cuda.flush_nic_writes(all_devices=True)
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_DEVICE"):
        cuda.device_facts(9)

    def gone() -> Any:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(cuda_driver, "library", gone)
    assert cuda.why_not() == "no NVIDIA driver: libcuda.so.1: cannot open shared object file"


def test_a_stream_that_is_captured(use: Any) -> None:
    library = Library(Machine(HOST), [0])
    use(library)
    library.capturing = {8: 1, 0: 906, 9: 2, 10: 1_000}
    assert not cuda.is_capturing(7)
    assert cuda.is_capturing(8)
    assert cuda.is_capturing(0), "the legacy stream, while another that waits for it is captured"
    assert cuda.is_capturing(9), "a capture that was broken has not ended"
    with pytest.raises(CudaError, match="cuStreamIsCapturing"):
        cuda.is_capturing(10)


# -- memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("device", ""),
        ("managed", "managed memory has no IPC handle: it is staged"),  # REPORTS 8
        ("pool", r"stream-ordered pool \(cudaMallocAsync\) has no IPC handle: it is staged"),  # 7
        ("virtual", "virtual-memory calls has no legacy IPC handle: it is staged"),  # REPORTS 7
        ("pinned", "pinned memory is not GPU memory"),
    ],
)
def test_kinds_of_memory(use: Any, kind: str, text: str) -> None:
    machine = Machine(HOST)
    use(Library(machine, [0]))
    made = machine.allocate(4096, HOST[0], kind)
    if text:
        with pytest.raises(UnsupportedError, match=text):
            cuda.export_handle(made.base + 64, 100)
    else:
        handle = cuda.export_handle(made.base + 64, 100)
        assert (handle.offset, handle.nbytes, handle.base) == (64, 100, made.base)
    if kind == "pinned":
        with pytest.raises(InvalidArgument, match="x is pinned memory, not GPU memory"):
            check_memory("x", Array(made.base, 4), 0)
    else:
        check_memory("x", Array(made.base, 4), 0)


def test_memory_that_cannot_be_used_is_named(use: Any) -> None:
    machine = Machine(HOST)
    use(Library(machine, [0, 1]))
    there = machine.allocate(4096, HOST[1])
    here = machine.allocate(4096, HOST[0])
    for array, kind, text in (
        (Array(there.base, 4), UnsupportedError, "x is on device 1; this communicator's .* is 0"),
        (Array(0, 4), InvalidArgument, "x is a null pointer with 4 elements"),
        (Array(here.base + 2, 4), UnsupportedError, "not aligned to its 4-byte elements"),
        (Array(ctypes.addressof(ctypes.c_int()), 1), InvalidArgument, "x is host memory, not GPU"),
    ):
        with pytest.raises(kind, match=text):
            check_memory("x", array, 0)
    check_memory("x", Array(0, 0), 0)
    with pytest.raises(UnsupportedError, match="leave the allocation of 4096 bytes"):
        cuda.export_handle(here.base + 4000, 100)


# -- IPC ---------------------------------------------------------------------------------------


def test_pieces_of_one_block(use: Any) -> None:
    # REPORTS 2, 4 and 5: a handle names the block; views of views; the block is opened once
    machine = Machine(HOST)

    def body(boot: MemoryBootstrap, library: Library) -> None:
        facts = exchange_facts(boot, 0)
        block = machine.allocate(1 << 12, HOST[0])
        numbers = block.memory.view(np.float32)
        numbers[:] = np.arange(1024) + 10_000 * boot.rank
        a, b = numbers[:9], numbers[64:84]
        tail = numbers[10:][5:][:7]
        all_ = [share(boot, facts, x.ctypes.data, x.nbytes, block) for x in (a, b, tail)]
        assert library.opens == boot.size - 1
        for shared, x, first in zip(all_, (a, b, tail), (0, 64, 15), strict=True):
            for peer, address in enumerate(shared.addresses):
                seen = np.ctypeslib.as_array((ctypes.c_float * x.size).from_address(address))
                assert (seen == np.arange(first, first + x.size) + 10_000 * peer).all()
        for shared in all_:
            assert library.closes == 0
            shared.close(boot)
        assert library.closes == library.opens

    ranks(use, machine, [[0], [0], [0]], body)


def test_windows_are_tried_with_data(use: Any) -> None:
    def body(boot: MemoryBootstrap, library: Library) -> None:
        shared = share_window(boot, exchange_facts(boot, 0), 1 << 16)
        assert len(set(shared.addresses)) == boot.size
        shared.close(boot)
        shared.close(boot)
        assert not library.opened

    machine = Machine(HOST)
    ranks(use, machine, [[0, 1], [1, 0]], body)
    assert not machine.allocations


def test_one_gpu_for_each_task_hides_the_peers(use: Any) -> None:
    # REPORTS 34: the reason on every rank, with the cure; nothing stays open
    def body(boot: MemoryBootstrap, library: Library) -> str:
        with pytest.raises(SetupError) as caught:
            share_window(boot, exchange_facts(boot, 0), 1 << 16)
        assert not library.opened
        return str(caught.value)

    machine = Machine(HOST)
    texts = ranks(use, machine, [[0], [1]], body)
    assert len(set(texts)) == 1
    for part in (
        "this rank sees 1 GPU(s), not the peer's (bus id 0000:02:00.0; its own is 0000:01:00.0)",
        "--gpus-per-node", "--gpu-bind=none", "CUDA_VISIBLE_DEVICES", "CUDA_ERROR_INVALID_DEVICE",
    ):  # fmt: skip
        assert part in texts[0], texts[0]
    assert not machine.allocations


def test_mig_instances_do_not_map_each_other(use: Any) -> None:
    # REPORTS 53
    slices = [Gpu(n, "0000:01:00.0", "NVIDIA H200 MIG 3g.71gb") for n in (1, 2)]

    def body(boot: MemoryBootstrap, library: Library) -> str:
        with pytest.raises(SetupError) as caught:
            share_window(boot, exchange_facts(boot, 0), 1 << 16)
        return str(caught.value)

    for visible in ([[0], [1]], [[0, 1], [1, 0]]):
        for text in ranks(use, Machine(slices), visible, body):
            assert "MIG instances cannot map each other's memory (MIG-" in text
            assert "results are right through host memory" in text


def test_memory_without_a_handle_on_one_rank_is_an_error_on_all(use: Any) -> None:
    # REPORTS 7 and 8
    machine = Machine(HOST)

    def body(boot: MemoryBootstrap, library: Library) -> None:
        facts = exchange_facts(boot, 0)
        for kind, text in (("pool", "stream-ordered pool"), ("managed", "managed memory")):
            made = machine.allocate(4096, HOST[0], kind if boot.rank == 1 else "device")
            with pytest.raises(SetupError, match=f"cannot be shared: local rank 1: .*{text}"):
                share(boot, facts, made.base, 4096, made)
        made = machine.allocate(4096, HOST[0])
        with pytest.raises(SetupError, match=r"local rank 1.*: 96 bytes, but local rank 0 has 64"):
            share(boot, facts, made.base, 64 + 32 * (boot.rank == 1), made)
        assert not library.opened

    ranks(use, machine, [[0], [0], [0]], body)


def test_no_room_on_one_rank_is_an_error_on_all(use: Any) -> None:
    machine = Machine(HOST)

    def body(boot: MemoryBootstrap, library: Library) -> None:
        if boot.rank == 1:
            library.cuMemAlloc_v2 = lambda address, nbytes: 2  # type: ignore[method-assign]
        with pytest.raises(SetupError, match="local rank 1: no room for a window of 65536 bytes"):
            share_window(boot, exchange_facts(boot, 0), 1 << 16)

    ranks(use, machine, [[0], [0]], body)
    assert not machine.allocations


def test_a_mapping_that_carries_nothing_is_found(use: Any) -> None:
    machine = Machine(HOST)
    elsewhere = machine.allocate(1 << 16, HOST[7])

    def body(boot: MemoryBootstrap, library: Library) -> None:
        if boot.rank == 1:

            def wrong(address: Any, handle: Any, flags: int) -> int:
                library.opened.add(elsewhere.base)
                address._obj.value = elsewhere.base
                return 0

            library.cuIpcOpenMemHandle_v2 = wrong  # type: ignore[method-assign]
        with pytest.raises(SetupError, match="mapped but does not carry data"):
            share_window(boot, exchange_facts(boot, 0), 1 << 16)

    ranks(use, machine, [[0], [0]], body)
