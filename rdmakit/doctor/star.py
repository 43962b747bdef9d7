"""A control plane in the shape of a star: every rank talks to the first one only.

MPI's own collectives go over ways between any two ranks. Where one node drops the packets of
another they hang, and with them the program that was to find out. Point-to-point messages to and
from the first rank need no more than the launcher needed itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from rdmakit.errors import TransferTimeout

__all__ = ["StarBootstrap"]

_TAG = 31_870
"""Of a communicator that nobody else uses meanwhile; below MPI's guaranteed 32767."""
_NAP = 1e-3


class StarBootstrap:
    """See :class:`rdmakit.protocols.Bootstrap`. Gathers at the first of ``ranks``."""

    def __init__(
        self,
        comm: Any,
        ranks: Sequence[int] | None = None,
        *,
        seconds: float = 60.0,
        depth: int = 0,
    ) -> None:
        """Make it. Local: nothing is sent.

        Args:
            comm: an mpi4py communicator, such as COMM_WORLD; not duplicated, which would be a
                collective of all ranks.
            ranks: of ``comm``, this one among them; None: all.
            seconds: limit of a blocking call.
            depth: how often it was split, which keeps the messages of parts apart.
        """
        self.comm = comm
        self.ranks = list(range(comm.Get_size())) if ranks is None else list(ranks)
        self.rank = self.ranks.index(comm.Get_rank())
        self.size = len(self.ranks)
        self.seconds = seconds
        self._tag = _TAG + depth
        self._depth = depth

    def allgather(self, data: bytes) -> list[bytes]:
        """Return every rank's ``data``, by rank. Collective, blocking.

        Raises:
            TransferTimeout: not all came within the limit; on the first rank it names them.
        """
        steps = _Gather(self, data)
        end = time.monotonic() + self.seconds
        while (told := steps.test()) is None:
            if time.monotonic() > end:
                raise TransferTimeout(
                    f"rank {self.ranks[self.rank]}: no word from {steps.missing()} within "
                    f"{self.seconds:g} s"
                )
            time.sleep(_NAP)
        return told

    def barrier(self) -> None:
        """Return when all ranks have called."""
        self.allgather(b"")

    def start_barrier(self) -> Callable[[], bool]:
        """Start a barrier and return its test."""
        test = self.start_gather(b"")
        return lambda: test() is not None

    def start_gather(self, data: bytes) -> Callable[[], list[bytes] | None]:
        """Start an all-gather and return its test. One at a time."""
        return _Gather(self, data).test

    def split(self, color: int, key: int) -> StarBootstrap:
        """Return the control plane of the ranks with equal ``color``, ordered by ``key``."""
        told = [
            msgspec.json.decode(text, type=tuple[int, int])
            for text in self.allgather(msgspec.json.encode((color, key)))
        ]
        same = [rank for rank in range(self.size) if told[rank][0] == color]
        return self.subset(sorted(same, key=lambda rank: told[rank][1]))

    def subset(self, ranks: Sequence[int]) -> StarBootstrap:
        """Return the control plane of ``ranks``, in that order. Local here."""
        chosen = [self.ranks[rank] for rank in ranks]
        return StarBootstrap(self.comm, chosen, seconds=self.seconds, depth=self._depth + 1)

    def free(self) -> None:
        """Do nothing: the communicator is the caller's."""

    def abort(self, code: int) -> None:
        """End every rank of the job."""
        self.comm.Abort(code)


class _Gather:
    """One all-gather under way."""

    def __init__(self, star: StarBootstrap, data: bytes) -> None:
        self._star = star
        self._told: dict[int, bytes] = {star.rank: data}
        self._sends: list[Any] = []
        self._result: list[bytes] | None = None
        self._steps = self._first() if star.rank == 0 else self._other(data)
        self.test()  # the first step is made now

    def test(self) -> list[bytes] | None:
        """Return the result, None before it is there. Local, does not block."""
        if self._result is None:
            self._result = next(self._steps)
        return self._result

    def missing(self) -> str:
        """Return who has not been heard of."""
        star = self._star
        if star.rank:
            return f"rank {star.ranks[0]}, which gathers"
        late = [str(star.ranks[r]) for r in range(star.size) if r not in self._told]
        return f"rank(s) {', '.join(late[:8]) or 'none; what was sent is not taken'}"

    def _receive(self, rank: int) -> bytes | None:
        star = self._star
        message = star.comm.improbe(star.ranks[rank], star._tag)
        return None if message is None else bytes(message.recv())

    def _first(self) -> Iterator[list[bytes] | None]:
        star = self._star
        waiting = list(range(1, star.size))
        while waiting:
            for rank in list(waiting):
                data = self._receive(rank)
                if data is not None:
                    self._told[rank] = data
                    waiting.remove(rank)
            if waiting:
                yield None
        told = [self._told[rank] for rank in range(star.size)]
        packed = msgspec.msgpack.encode(told)
        self._sends = [star.comm.isend(packed, to, star._tag) for to in star.ranks[1:]]
        yield from self._finish(told)

    def _other(self, data: bytes) -> Iterator[list[bytes] | None]:
        star = self._star
        self._sends = [star.comm.isend(data, star.ranks[0], star._tag)]
        while (packed := self._receive(0)) is None:
            yield None
        yield from self._finish(msgspec.msgpack.decode(packed, type=list[bytes]))

    def _finish(self, told: list[bytes]) -> Iterator[list[bytes] | None]:
        # Tested one by one: a request that is done must not be tested again.
        while self._sends:
            self._sends = [request for request in self._sends if not request.Test()]
            if self._sends:
                yield None
        while True:
            yield told
