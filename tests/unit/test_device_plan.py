"""How a collective on device memory is chosen and laid out; no GPU needed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmakit.datatypes import AVG, MAX, PROD, SUM, TABLE, ReduceOp, dtype_of
from rdmakit.drivers.cuda import DeviceFacts, PointerFacts
from rdmakit.errors import (
    CollectiveMismatch,
    InvalidArgument,
    PeerLost,
    TransferTimeout,
    UnsupportedError,
)
from rdmakit.intra.cuda_ipc import Shared, describe_denial
from rdmakit.intra.device_calls import Place, plan_call
from rdmakit.intra.device_kernels import MAX_TEAMS, TEAMS, WindowLayout, Word, unit_of
from rdmakit.intra.device_local import merge_dims
from rdmakit.intra.device_plan import grid_for, pieces, split
from rdmakit.intra.device_registry import Registration
from rdmakit.intra.device_words import explain, notes_on
from rdmakit.plan.shape import Kind

H200 = DeviceFacts(
    ordinal=0, uuid="GPU-0", pci="0000:18:00.0", name="NVIDIA H200", capability=(9, 0), sms=132,
    l2_bytes=60 << 20, memory_bytes=141 << 30, dma_buf=True, gpudirect_rdma=True,
    gpudirect_ordering=100, gpudirect_flush=1, ipc_events=True, mps=False, mig=False,
    exclusive=False,
)  # fmt: skip


def node(n: int, gpus: int, **changes: Any) -> list[DeviceFacts]:
    return [replace(H200, uuid=f"GPU-{r % gpus}", **changes) for r in range(n)]


@dataclass(frozen=True)
class Array:
    address: int
    count: int
    dtype: np.dtype[Any]


def place(rank: int, size: int, lookup: Any = lambda a, n: None) -> Place:
    return Place(rank, size, 66, WindowLayout(132), lookup)


def test_all_blocks_fit_one_on_each_sm() -> None:
    # REPORTS 31: several ranks on one GPU
    for n in (1, 2, 3, 4, 8, 16):
        grid = grid_for(node(n, 1, mps=True))
        assert n == 1 or grid.blocks * n <= 132
        assert grid.blocks * TEAMS <= MAX_TEAMS
        assert grid.sharing == n
        assert grid.resident
    assert grid_for(node(8, 8)).blocks == 132
    assert grid_for(node(8, 8)).resident


def test_virtual_nodes_on_one_gpu_leave_room_for_each_other() -> None:
    grid = grid_for(node(2, 1, mps=True), crowd=4)  # 2x2 ranks
    assert grid.blocks * 4 <= 132
    assert grid.sharing == 4
    assert not grid_for(node(1, 1), crowd=2).resident


def test_sharing_without_mps_is_known_and_named() -> None:
    grid = grid_for(node(4, 2))
    assert not grid.resident
    notes = " ".join(notes_on(node(4, 2), grid))
    assert "2 ranks share one GPU" in notes
    assert "nvidia-cuda-mps-control" in notes


def test_smaller_share_of_one_rank_is_everybodys() -> None:
    facts = node(4, 1, mps=True)
    facts[2] = replace(facts[2], sms=40)  # CUDA_MPS_ACTIVE_THREAD_PERCENTAGE
    assert grid_for(facts).blocks == 10


@given(
    st.lists(st.integers(0, 64), min_size=1, max_size=6),
    st.integers(0, 1000),
    st.sampled_from([1, 2, 4, 8]),
)
def test_split_covers_the_array_on_aligned_packs(
    offsets: list[int], count: int, itemsize: int
) -> None:
    addresses = [0x1000 + offset * itemsize for offset in offsets]
    cut = split(addresses, count, itemsize)
    assert cut.head * itemsize + cut.packs * 16 <= count * itemsize
    if cut.packs:
        assert all((a + cut.head * itemsize) % 16 == 0 for a in addresses)
    if len({a % 16 for a in addresses}) == 1:
        assert count * itemsize - cut.head * itemsize - cut.packs * 16 < 16


@given(st.integers(1, 1 << 33), st.integers(1, 264), st.sampled_from([4096, 49152, 65536]))
def test_pieces_are_whole_packs_and_fit(nbytes: int, blocks: int, tile: int) -> None:
    piece, used = pieces(nbytes, blocks, tile)
    assert piece % 16 == 0
    assert 0 < piece <= tile
    assert 1 <= used <= blocks
    if nbytes <= blocks * TEAMS * tile:
        assert piece * TEAMS * used >= nbytes


def test_ranks_with_equal_calls_agree_whatever_their_addresses() -> None:
    dtype = np.dtype("float32")
    calls = [
        plan_call(
            place(rank, 4), Kind.ALLREDUCE, Array(0x7000_0000 + 4 * rank, 1 << 22, dtype),
            Array(0x9000_0000 + 64 * rank, 1 << 22, dtype), SUM, 0,
        )
        for rank in range(4)
    ]  # fmt: skip
    assert len({c.args.signature for c in calls}) == 1
    assert len({(c.kernel, c.blocks, c.args.piece) for c in calls}) == 1
    assert calls[0].kernel == "allreduce_staged"


@pytest.mark.parametrize("odd", ["count", "dtype", "op", "kind", "root"])
def test_another_call_has_another_signature(odd: str) -> None:
    usual = dict(kind=Kind.BROADCAST, count=1000, dtype="float32", op=SUM, root=0)
    if odd in ("dtype", "op"):
        usual["kind"] = Kind.ALLREDUCE
    other = dict(usual)
    other[odd] = {
        "count": 1001, "dtype": "int32", "op": MAX, "kind": Kind.ALLGATHER, "root": 1,
    }[odd]  # fmt: skip

    def mark(c: dict[str, Any]) -> int:
        array = Array(0x1000, c["count"], np.dtype(c["dtype"]))
        return plan_call(place(0, 2), c["kind"], array, array, c["op"], c["root"]).args.signature

    assert mark(usual) != mark(other)
    assert mark(usual) & 15 == 0


def test_registered_memory_is_used_in_place() -> None:
    shared = Shared((0x10_0000_0000, 0x20_0000_0000), 1 << 30, object())
    entry = Registration(7, 0x10_0000_0000, shared)
    dtype = np.dtype("float32")
    array = Array(entry.address + 1024, 1 << 24, dtype)
    call = plan_call(place(0, 2, lambda a, n: entry), Kind.ALLREDUCE, array, array, SUM, 0)
    assert call.kernel == "allreduce_direct"
    assert list(call.args.send[:2]) == [0x10_0000_0000 + 1024, 0x20_0000_0000 + 1024]
    elsewhere = Array(entry.address + 2048, 1 << 24, dtype)
    moved = plan_call(place(0, 2, lambda a, n: entry), Kind.ALLREDUCE, elsewhere, array, SUM, 0)
    assert moved.args.signature != call.args.signature


def test_all_to_all_agrees_by_its_blocks_and_its_output() -> None:
    """Inputs may lie anywhere; outputs at one place of one registration, or at none."""
    dtype, block = np.dtype("float32"), 100_003
    bases = (0x10_0000_0000, 0x20_0000_0000, 0x30_0000_0000)
    entries = [Registration(5, base, Shared(bases, 1 << 24, object())) for base in bases]
    calls, staged = [], []
    for rank, entry in enumerate(entries):
        send = Array(0x7000_0000 + 4 * rank, 3 * block, dtype)
        recv = Array(entry.address + 4, 3 * block, dtype)

        def lookup(at: int, nbytes: int, entry: Registration = entry) -> Registration | None:
            return entry if entry.address <= at and at + nbytes <= entry.end else None

        calls.append(plan_call(place(rank, 3, lookup), Kind.ALLTOALL, send, recv, SUM, 0))
        staged.append(plan_call(place(rank, 3), Kind.ALLTOALL, send, recv, SUM, 0))
    for planned, name in ((calls, "alltoall_direct"), (staged, "alltoall_staged")):
        assert {c.kernel for c in planned} == {name}
        assert len({(c.args.signature, c.blocks, c.args.piece) for c in planned}) == 1
        assert {(c.args.count, dict(c.variant.macros)["RDK_T"]) for c in planned} == {
            (block, "uint32")
        }
    for rank, call in enumerate(calls):
        assert list(call.args.recv[:3]) == [base + 4 for base in bases]
        assert list(call.args.send[:3]) == [
            0x7000_0000 + 4 * r if r == rank else 0 for r in range(3)
        ]
        assert call.args.packs == 0, "odd blocks are aligned differently"
    even = [Array(base, 3 << 20, dtype) for base in (0x7000_0000, bases[0])]
    call = plan_call(place(0, 3, lambda *_: entries[0]), Kind.ALLTOALL, *even, SUM, 0)
    assert (call.args.head, call.args.packs * 16) == (0, 4 << 20)
    small = [Array(base, 30, dtype) for base in (0x7000_0000, bases[0])]
    call = plan_call(place(0, 3, lambda *_: entries[0]), Kind.ALLTOALL, *small, SUM, 0)
    assert call.kernel == "alltoall_staged"


def test_all_to_all_of_other_arrays_is_refused() -> None:
    dtype = np.dtype("int16")
    for send, recv, text in (
        (Array(0x1000, 10, dtype), Array(0x2000, 10, dtype), "a multiple of 3 ranks"),
        (Array(0x1000, 12, dtype), Array(0x2000, 9, dtype), "12 elements and recvbuf 9"),
        (Array(0x1000, 12, dtype), Array(0x1000, 12, dtype), "overlap"),
        (Array(0x1016, 12, dtype), Array(0x1000, 12, dtype), "overlap"),
    ):
        with pytest.raises(InvalidArgument, match=text):
            plan_call(place(0, 3), Kind.ALLTOALL, send, recv, SUM, 0)
    plan_call(
        place(0, 3), Kind.ALLTOALL, Array(0x1018, 12, dtype), Array(0x1000, 12, dtype), SUM, 0
    )


def test_pairs_that_are_not_reduced_are_named() -> None:
    for (name, op), reason in TABLE.items():
        array = Array(0x1000, 10, dtype_of(name))
        if reason:
            with pytest.raises(UnsupportedError, match=f"{op.name} of {name} is not served"):
                plan_call(place(0, 2), Kind.ALLREDUCE, array, array, op, 0)
        else:
            plan_call(place(0, 2), Kind.ALLREDUCE, array, array, op, 0)
    array = Array(0x1000, 10, np.dtype("M8[s]"))
    with pytest.raises(UnsupportedError, match="datetime64"):
        plan_call(place(0, 2), Kind.REDUCE_SCATTER, array, array, SUM, 0)
    plan_call(place(0, 2), Kind.BROADCAST, array, array, SUM, 0)


def test_kernels_count_the_elements_of_their_own_type() -> None:
    """A sum of complex numbers is one of twice as many floats, a product is not."""

    def planned(name: str, op: ReduceOp, kind: Kind = Kind.ALLREDUCE) -> Any:
        send = Array(0x7000_0000, 1 << 20, np.dtype(name))
        recv = Array(
            0x9000_0000, (1 << 20) // (2 if kind is Kind.REDUCE_SCATTER else 1), send.dtype
        )
        return plan_call(place(0, 2), kind, send, recv, op, 0)

    for kind, count in ((Kind.ALLREDUCE, 1 << 20), (Kind.REDUCE_SCATTER, 1 << 19)):
        for name, op, macro, factor in (
            ("complex64", SUM, "float32", 2), ("complex128", AVG, "float64", 2),
            ("complex128", PROD, "complex128", 1), ("bool", SUM, "uint8", 1),
            ("int16", SUM, "uint16", 1), ("int16", MAX, "int16", 1),
        ):  # fmt: skip
            call = planned(name, op, kind)
            assert dict(call.variant.macros)["RDK_T"] == macro
            assert call.args.count == count * factor
            assert call.args.piece * np.dtype(macro).itemsize % 16 == 0
    # One kernel serves both, but the ranks have called different things.
    a, b = planned("int32", SUM), planned("uint32", SUM)
    assert a.variant == b.variant
    assert a.args.signature != b.args.signature


def test_reports_of_kernels_in_words() -> None:
    words = [0] * Word.COUNT
    words[Word.PEER], words[Word.WANT], words[Word.GOT] = 3, 0x120, 0x560
    calls = {0x120: "allreduce (oneshot) of 8 float32 sum", 0x560: "barrier"}
    for state, kind, text in (
        (Word.TIMED_OUT, TransferTimeout, "local rank 3 did not come within 5 s"),
        (Word.MISMATCH, CollectiveMismatch, "local rank 3 called barrier"),
        (Word.TOLD, PeerLost, "local rank 3 has reported a failure"),
    ):
        words[Word.STATE] = state
        error = explain(words, calls, 1, [4, 5, 6, 7], 5.0)
        assert isinstance(error, kind)
        assert text in str(error)
        assert "rank 5, local rank 1: allreduce (oneshot) of 8 float32 sum" in str(error)
        assert ": rank 7, local rank 3 " in str(error)


def test_denied_mapping_names_cause_and_cure() -> None:
    mine, theirs = node(2, 2)
    theirs = replace(theirs, pci="0000:2a:00.0")
    # REPORTS 34: one GPU for each task
    text = describe_denial(mine, theirs, ["GPU-0"], "CUDA error 101")
    assert "--gpu-bind=none" in text
    assert "0000:2a:00.0" in text
    # REPORTS 53: MIG
    mig = replace(theirs, uuid="MIG-1", mig=True)
    assert "MIG instances" in describe_denial(replace(mine, mig=True), mig, ["GPU-0"], "")
    # REPORTS 32: another number for the same GPU is no obstacle
    assert "refused on one GPU" in describe_denial(mine, replace(mine, ordinal=3), ["GPU-0"], "")


def test_memory_without_a_handle_is_named() -> None:
    # REPORTS 7 and 8
    facts = PointerFacts(0x1000, "device", 0, 0x1000, 64, 1, ipc=False, pool=True)
    assert "stream-ordered pool" in facts.why_no_ipc
    assert "managed memory" in replace(facts, kind="managed", pool=False).why_no_ipc
    assert "virtual-memory" in replace(facts, pool=False).why_no_ipc
    assert not replace(facts, ipc=True, pool=False).why_no_ipc


def test_units_and_dimensions() -> None:
    assert unit_of(16, 24, 1 << 20) == 8
    assert unit_of(6, 8) == 2
    assert unit_of(7) == 1
    assert merge_dims((4, 5, 6), (120, 24, 4)) == ((120,), (4,))
    assert merge_dims((4, 1, 6), (48, 999, 8)) == ((24,), (8,))
    assert merge_dims((3, 4), (4, 12)) == ((3, 4), (4, 12))
    assert merge_dims((), ()) == ((1,), (0,))
