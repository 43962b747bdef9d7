"""The cases of a Channel on the in-memory one, ranks being threads; and tags."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmakit.errors import InvalidArgument, PeerLost
from rdmakit.inter.staged import StagedChannel
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
from tests.conformance.cases import wait_for
from tests.conformance.channel_cases import CHANNEL_CASES
from tests.conformance.fake_gpu import Door


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("case", CHANNEL_CASES, ids=lambda case: case.__name__)
def test_channel(case: Any, n: int) -> None:
    run_threads(n, lambda boot: case(boot, lambda: MemoryChannel.create(boot)))


_EQUAL_SIZES_ONLY = ("channel_shorter_than_its_room", "channel_longer_than_its_room")


@pytest.mark.parametrize("piece", [1000, 1 << 16])
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(
    "case",
    [case for case in CHANNEL_CASES if case.__name__ not in _EQUAL_SIZES_ONLY],
    ids=lambda case: case.__name__,
)
def test_channel_through_pinned_memory(case: Any, n: int, piece: int) -> None:
    def main(boot: MemoryBootstrap) -> None:
        case(boot, lambda: StagedChannel(Door(), MemoryChannel.create(boot), piece=piece))

    run_threads(n, main)


def test_many_messages_wait_for_none_other() -> None:
    """More messages than the pool has pieces, received in the opposite order."""

    def main(boot: MemoryBootstrap) -> None:
        channel = StagedChannel(Door(), MemoryChannel.create(boot), piece=64)
        data = np.zeros((200, 300), np.uint8)
        if boot.rank == 0:
            data += np.arange(200, dtype=np.uint8)[:, None]
        move = channel.recv if boot.rank else channel.send
        order = range(200) if boot.rank == 0 else reversed(range(200))
        requests = [move(1 - boot.rank, channel.wrap(data[i]), i) for i in order]
        wait_for(lambda: (channel.progress(), all(r.done() for r in requests))[1], "200 messages")
        assert (data == np.arange(200, dtype=np.uint8)[:, None]).all()
        boot.barrier()
        channel.close()

    run_threads(2, main)


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
