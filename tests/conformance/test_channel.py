"""The cases of a Channel on the in-memory one, ranks being threads; and tags."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmakit.errors import InvalidArgument, PeerLost
from rdmakit.inter.tags import (
    COMMUNICATORS,
    MESSAGES,
    SEQUENCES,
    SOURCES,
    TagKind,
    pack,
    unpack,
    with_source,
)
from rdmakit.memory import MemoryBootstrap, MemoryChannel, run_threads
from tests.conformance.cases import CHANNEL_CASES


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("case", CHANNEL_CASES, ids=lambda case: case.__name__)
def test_channel(case: Any, n: int) -> None:
    run_threads(n, lambda boot: case(boot, lambda: MemoryChannel.create(boot)))


def test_a_dead_peer_is_told() -> None:
    def main(boot: MemoryBootstrap) -> None:
        channel = MemoryChannel.create(boot)
        channel.check_peers()
        boot.barrier()
        if boot.rank == 0:
            channel.recv(1, channel.wrap(np.zeros(4, np.uint8)), 0)
            channel.lose(1)
            with pytest.raises(PeerLost, match="rank 1"):
                channel.check_peers()

    run_threads(2, main)


@given(
    communicator=st.integers(0, COMMUNICATORS - 1),
    source=st.integers(0, SOURCES - 1),
    kind=st.sampled_from(list(TagKind)),
    sequence=st.integers(0, 1 << 40),
    message=st.integers(0, MESSAGES - 1),
)
def test_tags_hold_their_fields(
    communicator: int, source: int, kind: TagKind, sequence: int, message: int
) -> None:
    tag = with_source(pack(communicator, kind, sequence, message), source)
    assert 0 <= tag < 1 << 64
    assert unpack(tag) == (communicator, source, kind, sequence % SEQUENCES, message)
    assert with_source(pack(communicator, kind, sequence), source) + message == tag


@pytest.mark.parametrize(
    ("communicator", "message"), [(COMMUNICATORS, 0), (-1, 0), (0, MESSAGES), (0, -1)]
)
def test_fields_that_do_not_fit_are_refused(communicator: int, message: int) -> None:
    with pytest.raises(InvalidArgument, match="tag field"):
        pack(communicator, TagKind.COLLECTIVE, 0, message)


@pytest.mark.parametrize("source", [-1, SOURCES])
def test_sources_that_do_not_fit_are_refused(source: int) -> None:
    with pytest.raises(InvalidArgument, match="source"):
        with_source(0, source)
