"""The node's kernels that only move, on this CPU: all-to-all and all-gather, block by block.

On the machinery of test_node_kernels.py: the kernels' own source, and the arguments of real plans.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any

import numpy as np
import pytest

from rdmakit.datatypes import SUM
from rdmakit.intra import device_calls
from rdmakit.intra import device_kernels as kernels
from rdmakit.intra.device_calls import Place, plan_call
from rdmakit.intra.device_kernels import move_variant
from rdmakit.plan.shape import Kind
from tests.unit.test_node_kernels import BLOCKS, TEAMS, Built, Memory, build, lookup_of, made

MOVES = ("alltoall_direct", "alltoall_staged", "allgather_direct", "allgather_staged")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((ranks, dtype), id=f"{ranks}-{dtype}")
        for ranks, dtype in ((2, "uint32"), (3, "uint8"), (4, "uint64"), (5, "uint16"))
    ],
)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    ranks, dtype = request.param
    make = partial(move_variant, np.dtype(dtype).itemsize, 0, ranks)
    return build(tmp_path_factory.mktemp("moves"), ranks, dtype, ranks % 2 == 0, make, MOVES)


def sent(source: int, target: int, count: int, dtype: np.dtype[Any]) -> Any:
    """Return a block: its elements differ from their neighbours, and from those of other blocks."""
    index = np.arange(count)
    return ((index * 7 + source * 31 + target * 101 + index // 200 * 13) % 251).astype(dtype)


def run(
    built: Built, windows: list[Memory], kind: Kind, algorithm: str, count: int,
    overs: list[int], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Do one call on all ranks, and see that every element is right and nothing else written."""
    n, dtype = built.ranks, built.dtype
    targets = n if kind is Kind.ALLTOALL else 1
    inputs = [np.concatenate([sent(r, p, count, dtype) for p in range(targets)]) for r in range(n)]
    sends = [made(count * targets, dtype, overs[2 * r]) for r in range(n)]
    recvs = [made(count * n, dtype, overs[2 * r + 1]) for r in range(n)]
    for array, values in zip(sends, inputs, strict=True):
        array.values[:] = values
    # The library has one type of elements; what is larger and would fit is another variant.
    monkeypatch.setattr(kernels, "unit_of", lambda *_: dtype.itemsize)
    monkeypatch.setattr(device_calls, "algorithm_for", lambda *_, **__: algorithm)
    calls = []
    for rank in range(n):
        lookup = lookup_of([recvs], rank) if algorithm == "direct" else lambda *_: None
        place = Place(rank, n, BLOCKS, built.layout, lookup)
        call = plan_call(place, kind, sends[rank], recvs[rank], SUM, 0)
        call.args.window[:n] = [w.address for w in windows]
        calls.append(call)
    name = f"{kind.value}_{algorithm}"
    assert {c.kernel for c in calls} == {name}
    assert len({(c.blocks, c.args.piece, c.args.signature) for c in calls}) == 1
    pointers = (ctypes.c_void_p * n)(*(ctypes.addressof(c.args) for c in calls))
    built.library.launch(MOVES.index(name), pointers, calls[0].blocks)
    for rank in range(n):
        target = rank if kind is Kind.ALLTOALL else 0
        want = np.concatenate([sent(r, target, count, dtype) for r in range(n)])
        assert (recvs[rank].values == want).all(), (name, count, overs, rank)
        assert (sends[rank].values == inputs[rank]).all(), "the input was changed"
        for array in (sends[rank], recvs[rank]):
            array.memory.check_guards()
    for window in windows:
        window.check_guards()


def test_every_element(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts around packs and tiles, alike and unlike alignment, one kind after the other.

    The windows are kept from call to call: what an earlier one left must not be taken for new, and
    a rank that is ahead must not write where a peer still reads.
    """
    n, lanes = built.ranks, 16 // built.dtype.itemsize
    windows = [Memory(built.layout.nbytes, 0) for _ in range(n)]
    slots = built.layout.tile // n // 16 * lanes * BLOCKS * TEAMS
    counts = [1, 2, lanes, lanes + 1, 3 * lanes - 1, 40 * lanes, slots - 1, slots, slots + lanes]
    counts += [3 * slots + 5, 4 * slots]
    alike, shifted = [0] * 2 * n, [1 % lanes] * 2 * n
    one, ragged = [0] * (2 * n - 1) + [1 % lanes], [r % lanes for r in range(2 * n)]
    for count in counts:
        for overs in (alike, shifted, one, ragged):
            for algorithm in ("direct", "staged"):
                for kind in (Kind.ALLTOALL, Kind.ALLGATHER):
                    run(built, windows, kind, algorithm, count, overs, monkeypatch)


def test_windows_hold_their_slots() -> None:
    for ranks in range(2, kernels.MAX_RANKS + 1):
        for layout in (kernels.WindowLayout(4), kernels.WindowLayout(4, kernels.PUSH_TILE, True)):
            array = made(ranks * 1_000_003, np.dtype("uint8"), 0)
            other = made(ranks * 1_000_003, np.dtype("uint8"), 0)
            place = Place(0, ranks, BLOCKS, layout, lambda *_: None)
            args = plan_call(place, Kind.ALLTOALL, array, other, SUM, 0).args
            assert 0 < args.piece * ranks <= layout.tile
            assert args.piece % 16 == 0
