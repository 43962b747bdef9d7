"""The cache of peers' allocations, over a driver that behaves as CUDA's does."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmakit.errors import RdmaKitError, UnsupportedError
from rdmakit.intra.ipc_cache import HandleCache, Mapping


@dataclass(frozen=True)
class Piece:
    handle: bytes
    offset: int
    buffer_id: int
    base: int


class FakeDriver:
    """One open of an allocation at a time; counts opens and closes."""

    def __init__(self) -> None:
        self.open: dict[int, bytes] = {}
        self.opens: Counter[bytes] = Counter()
        self.closes: Counter[bytes] = Counter()
        self.closed_order: list[bytes] = []
        self._next = 0x7000_0000_0000

    def open_handle(self, handle: bytes) -> int:
        assert handle not in self.open.values(), "already mapped in this context"
        self._next += 1 << 30
        self.open[self._next] = handle
        self.opens[handle] += 1
        return self._next

    def close_handle(self, base: int) -> None:
        handle = self.open.pop(base)
        self.closes[handle] += 1
        self.closed_order.append(handle)


def piece(base: int = 0x1000, offset: int = 0, buffer_id: int = 1) -> Piece:
    return Piece(f"{base:x}/{buffer_id}".encode().ljust(64, b"\0"), offset, buffer_id, base)


def test_two_pieces_of_a_block_are_one_open() -> None:
    # REPORTS 2 and 5: a handle names the block; a second open of it fails
    driver = FakeDriver()
    cache = HandleCache(driver, "me")
    a, b = cache.acquire("p", piece(offset=0)), cache.acquire("p", piece(offset=512))
    assert b.address - a.address == 512
    assert sum(driver.opens.values()) == 1
    cache.release(a)
    assert len(cache) == 1
    cache.release(b)
    assert not driver.open
    assert driver.opens == driver.closes


def test_view_of_a_view_adds_offsets() -> None:
    # REPORTS 4: x[10:] arrived as x[0:]
    driver = FakeDriver()
    cache = HandleCache(driver, "me")
    whole = cache.acquire("p", piece(offset=4096))
    view = cache.acquire("p", piece(offset=4096 + 40 + 20))
    assert view.address == whole.address + 60


def test_address_reused_by_a_new_allocation() -> None:
    driver = FakeDriver()
    cache = HandleCache(driver, "me")
    old = cache.acquire("p", piece(buffer_id=1))
    with pytest.raises(RdmaKitError, match="freed"):
        cache.acquire("p", piece(buffer_id=2))
    cache.release(old)
    new = cache.acquire("p", piece(buffer_id=2))
    assert new.address != old.address
    assert driver.opens[piece(buffer_id=2).handle] == 1


def test_equal_bases_in_two_processes_are_two() -> None:
    driver = FakeDriver()
    cache = HandleCache(driver, "me")
    handles = [Piece(bytes([n]) * 64, 0, 1, 0x1000) for n in range(2)]
    a, b = (cache.acquire(f"p{n}", handles[n]) for n in range(2))
    assert a.address != b.address
    assert len(cache) == 2


def test_own_memory_is_never_opened() -> None:
    cache = HandleCache(FakeDriver(), "me")
    with pytest.raises(RdmaKitError, match="this process"):
        cache.acquire("me", piece())


def test_bound_is_kept_and_named() -> None:
    cache = HandleCache(FakeDriver(), "me", limit=2)
    kept = [cache.acquire("p", piece(base=n << 20)) for n in range(2)]
    with pytest.raises(UnsupportedError, match="2 allocations"):
        cache.acquire("p", piece(base=9 << 20))
    cache.acquire("p", piece(base=0, offset=64))  # no new open
    cache.release(kept[1])
    cache.acquire("p", piece(base=9 << 20))


def test_release_twice_counts_once() -> None:
    driver = FakeDriver()
    cache = HandleCache(driver, "me")
    a, b = cache.acquire("p", piece()), cache.acquire("p", piece())
    cache.release(a)
    cache.release(a)
    assert len(driver.open) == 1
    cache.release(b)
    assert not driver.open


def test_open_that_fails_leaves_nothing() -> None:
    class Refusing(FakeDriver):
        def open_handle(self, handle: bytes) -> int:
            raise RuntimeError("refused")

    cache = HandleCache(Refusing(), "me")
    with pytest.raises(RuntimeError):
        cache.acquire("p", piece())
    assert len(cache) == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 3), st.integers(0, 99))))
def test_any_order_opens_once_and_closes_as_often(steps: list[tuple[bool, int, int, int]]) -> None:
    driver = FakeDriver()
    cache = HandleCache(driver, "me")
    held: list[tuple[Mapping, Piece]] = []
    bases: dict[tuple[int, int], int] = {}
    for give_back, peer, block, pick in steps:
        if give_back and held:
            mapping, _ = held.pop(pick % len(held))
            cache.release(mapping)
            continue
        thing = Piece(bytes([peer, block]) * 32, pick * 16, block + 1, block << 20)
        mapping = cache.acquire(f"p{peer}", thing)
        held.append((mapping, thing))
        base = mapping.address - thing.offset
        assert driver.open[base] == thing.handle
        bases[peer, block] = base
    assert len(cache) == len({thing.handle for _, thing in held})
    for mapping, _ in reversed(held):
        cache.release(mapping)
    assert not driver.open
    assert driver.opens == driver.closes
    assert len(cache) == 0
