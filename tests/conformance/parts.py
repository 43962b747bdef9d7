"""What communicators split from another must do, as cases that run in threads and in processes."""

from __future__ import annotations

import numpy as np

from rdmakit import ANY_SOURCE, Communicator, CommunicatorClosed, InvalidArgument, Kind
from rdmakit.datatypes import SUM
from rdmakit.request import Request
from rdmakit.status import UNDEFINED, Status
from tests.conformance.messages import raises, ring, values
from tests.conformance.nonblocking import KINDS, begin
from tests.conformance.values import check


def works(comm: Communicator) -> None:
    """Collectives of all kinds and messages give what they should."""
    for kind in Kind:
        for count in (1, 300, 20_000):
            check(comm, kind, count, "float64", SUM, root=comm.size - 1)
    started = [begin(comm, kind, 4000, 2) for kind in KINDS]
    for request, right in started:
        request.Wait()
        right()
    after, before = ring(comm)
    y, status = np.zeros(500), Status()
    comm.Sendrecv(values(500, comm.rank), after, 1, y, ANY_SOURCE, 1, status)
    assert status.source == before
    assert (y == values(500, before)).all()
    comm.Barrier()
    for group in (comm.node, comm.rail):
        x = np.ones(300)
        group.Allreduce(x, x)
        assert (x == group.size).all()


def every_second(comm: Communicator) -> None:
    part = comm.Split(comm.rank % 2, 0)
    assert part is not None
    members = list(range(comm.rank % 2, comm.size, 2))
    assert (part.rank, part.size) == (comm.rank // 2, len(members))
    homes = [comm.layout.node_of(rank) for rank in members]
    assert [part.layout.node_of(r) for r in range(part.size)] == [
        sorted(set(homes), key=homes.index).index(home) for home in homes
    ]
    works(part)
    works(comm)
    part.close()
    works(comm)


def keys_turn_ranks_around(comm: Communicator) -> None:
    part = comm.Split(0, -comm.rank)
    assert part is not None
    assert part.rank == comm.size - 1 - comm.rank
    works(part)
    same = comm.Split(3, 7)
    assert same is not None
    assert same.rank == comm.rank
    works(same)


def some_are_nowhere(comm: Communicator) -> None:
    for nothing in (UNDEFINED, None):
        part = comm.Split(nothing if comm.rank == 0 else 5, comm.rank)
        if comm.rank == 0:
            assert part is None
        else:
            assert part is not None
            assert part.size == comm.size - 1
            works(part)
            part.close()
        comm.Barrier()
    with raises(InvalidArgument, "color -3"):
        comm.Split(-3)


def duplicates_are_apart(comm: Communicator) -> None:
    """Equal tags and calls under way on both at once, in different orders, do not meet."""
    other = comm.Dup()
    assert (other.rank, other.size, other.layout) == (comm.rank, comm.size, comm.layout)
    after, before = ring(comm)
    y, z = np.zeros(300), np.zeros(300)
    receives = [other.Irecv(z, before, 1), comm.Irecv(y, before, 1)]
    pairs = [(comm, 1), (other, 2)]
    if comm.rank % 2:
        pairs.reverse()
    started = []
    for which, salt in pairs:  # not the same order on all ranks: that is allowed
        started += [begin(which, kind, 9000, salt) for kind in KINDS]
    sends = [
        comm.Isend(values(300, comm.rank, salt=1), after, 1),
        other.Isend(values(300, comm.rank, salt=2), after, 1),
    ]
    Request.Waitall([*receives, *sends, *(request for request, _ in started)])
    for _, right in started:
        right()
    assert (y == values(300, before, salt=1)).all()
    assert (z == values(300, before, salt=2)).all()
    assert not comm.Iprobe()


def of_given_ranks(comm: Communicator) -> None:
    members = [comm.size - 1, *range(comm.size - 2)] if comm.size > 2 else [0]
    if comm.rank in members:
        part = comm.Create_group(members)
        assert part.rank == members.index(comm.rank)
        works(part)
        part.close()
    part = comm.Create(members)
    assert (part is None) == (comm.rank not in members)
    if part is not None:
        works(part)
    for ranks, text in (([0, 0], "none twice"), ([], "at least one"), ([comm.size], "not in 0..")):
        with raises(InvalidArgument, text):
            comm.Create(ranks)
    if comm.rank == comm.size - 1 and comm.size > 1:
        with raises(InvalidArgument, "must not call"):
            comm.Create_group([0])


def parts_of_parts(comm: Communicator) -> None:
    now: Communicator = comm
    depth = 0
    while now.size > 1:
        part = now.Split(now.rank * 2 // now.size)
        assert part is not None
        assert part.size < now.size
        works(part)
        now, depth = part, depth + 1
    works(now)
    if depth:
        works(comm)


def numbers_come_round(comm: Communicator) -> None:
    """More communicators than there are numbers, a few at a time."""
    x = np.ones(3)
    held = []
    for turn in range(1 << 9):
        part = comm.Dup()
        if turn % 50 == 0:
            part.Allreduce(x, x.copy())
        held.append(part)
        if len(held) == 4:
            held.pop(turn % 4).close()


def closed_with_its_origin(comm: Communicator) -> None:
    origin = comm.Dup()
    part = origin.Split(comm.rank % 2)
    assert part is not None
    inner = part.Dup()
    y = np.zeros(20_000)
    request = inner.Iallreduce(np.ones(20_000), y)
    origin.close()
    assert request.done
    assert (y == part.size).all()
    for gone in (part, inner, origin):
        assert gone.closed
        gone.close()
        with raises(CommunicatorClosed, "closed"):
            gone.Barrier()
    works(comm)


CASES = (
    every_second,
    keys_turn_ranks_around,
    some_are_nowhere,
    duplicates_are_apart,
    of_given_ranks,
    parts_of_parts,
    closed_with_its_origin,
)
