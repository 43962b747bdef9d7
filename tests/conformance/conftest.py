"""Settings of the tests here: ranks are threads, and buffers can be small."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from rdmakit import device_side, staging, stepped
from rdmakit.inter import staged


@pytest.fixture(autouse=True)
def _switch_often() -> Iterator[None]:
    """Ranks that are threads hand over the interpreter often, or each wait costs 5 ms."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let arrays of a few KiB take several pieces, areas and chunks."""
    monkeypatch.setattr(staging.Staging.__init__, "__defaults__", (None, 1 << 10, None, 1))
    monkeypatch.setattr(staged.StagedChannel.__init__, "__kwdefaults__", {"piece": 1 << 8})
    monkeypatch.setattr(stepped, "AREA", 1 << 15)
    monkeypatch.setattr(device_side, "AREA", 1 << 15)
    monkeypatch.setattr(stepped, "_CHUNK", 1 << 10)
    monkeypatch.setattr(stepped, "_SMALL", 1 << 8)
