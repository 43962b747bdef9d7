"""What one rank can check alone of a call in blocks, a reduce or a scan."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rdmakit.arguments import check_apart, check_dims, is_in_place, laid
from rdmakit.buffer import Buffer
from rdmakit.datatypes import AVG, MemoryKind, ReduceOp, why_not_moved
from rdmakit.errors import InvalidArgument, UnsupportedError
from rdmakit.forms import ROOTED, Calling, Prepared, Told
from rdmakit.plan.shape import Form, Kind
from rdmakit.specs import Blocks, absent, array_of, blocks_of, gapless

__all__ = ["prepare"]


def prepare(
    calling: Calling,
    sendbuf: object,
    recvbuf: object,
    op: ReduceOp,
    *,
    rank: int,
    size: int,
    root: int = 0,
    counts: object = None,
) -> Prepared:
    """Check the arguments of one rank. Local.

    Args:
        calling: which call.
        sendbuf: as mpi4py takes it, or in place; of no meaning where MPI ignores it.
        recvbuf: likewise.
        op: the reduction, where the call has one.
        rank: this rank.
        size: ranks of the group.
        root: of a rooted call.
        counts: recvcounts of Reduce_scatter.

    Raises:
        InvalidArgument: arguments that do not fit each other.
        UnsupportedError: what cannot be served, by name.
    """
    if not 0 <= root < size:
        raise InvalidArgument(f"root {root} is not in 0..{size - 1}")
    if op is AVG and calling.kind in (Kind.SCAN, Kind.EXSCAN):
        raise UnsupportedError(
            f"AVG of {calling.name} is not served: each rank would divide by another number; "
            "take SUM and divide it"
        )
    asked = _Asked(calling, sendbuf, recvbuf, rank, size, root, counts)
    make = {
        Kind.GATHER: _Asked.gather,
        Kind.ALLGATHER: _Asked.gather,
        Kind.SCATTER: _Asked.scatter,
        Kind.REDUCE_SCATTER: _Asked.reduce_scatter,
        Kind.ALLTOALL: _Asked.alltoall,
    }.get(calling.kind, _Asked.whole)
    ready = make(asked)
    _check_types(ready.send, ready.recv)
    check_dims(ready.send, ready.recv)
    return ready


def _check_types(send: Buffer, recv: Buffer) -> None:
    if send.kind is not recv.kind:
        places = {MemoryKind.HOST: "host memory", MemoryKind.DEVICE: "GPU memory"}
        raise InvalidArgument(
            f"sendbuf is {places[send.kind]} and recvbuf {places[recv.kind]}: both must be the same"
        )
    if send.dtype != recv.dtype:
        raise InvalidArgument(f"sendbuf is {send.dtype} and recvbuf {recv.dtype}")
    problem = why_not_moved(recv.dtype)
    if problem:
        raise UnsupportedError(problem)


@dataclass(frozen=True)
class _Asked:
    """The arguments of one rank."""

    calling: Calling
    sendbuf: object
    recvbuf: object
    rank: int
    size: int
    root: int
    counts: object

    @property
    def at_root(self) -> bool:
        return self.rank == self.root or self.calling.kind not in ROOTED

    def laid(self, send: Buffer, recv: Buffer) -> tuple[Buffer, Buffer]:
        """Return the arrays as their elements are counted, by a rule that all ranks follow alike.

        In rooted calls always in C order: a rank that has one array cannot know how the root's
        lie. With counts as they lie in memory: they have no gaps.
        """
        if self.calling.kind in ROOTED and not self.calling.vector:
            return send, recv
        return laid(send, recv)

    def in_place(self, value: object, name: str) -> bool:
        if not is_in_place(value):
            return False
        if not self.at_root:
            raise InvalidArgument(f"IN_PLACE as {name} of {self.calling.name}: only at the root")
        return True

    def simple(self, value: object, name: str, *, writable: bool = False) -> Buffer:
        """Return an array without blocks; of a call with counts it has no gaps."""
        buffer = array_of(value, name, writable=writable)
        return gapless(buffer, name) if self.calling.vector else buffer

    def blocks(self, value: object, name: str, *, writable: bool = False) -> Blocks:
        """Return an array with a block for each rank."""
        if self.calling.vector:
            return blocks_of(value, name, self.size, writable=writable)
        buffer = array_of(value, name, writable=writable, blocks=self.size)
        if buffer.count % self.size:
            raise InvalidArgument(
                f"{name} has {buffer.count} elements, no multiple of {self.size} ranks"
            )
        return Blocks(buffer, (buffer.count // self.size,) * self.size)

    def own(self, blocks: Blocks) -> Buffer:
        """Return this rank's block."""
        buffer, count = blocks.buffer, blocks.counts[self.rank]
        if buffer.strided is None:
            return blocks.block(self.rank)
        first = replace(buffer.strided, first=self.rank * count)
        return replace(buffer, count=count, strided=first)

    def form(
        self,
        counts: tuple[int, ...],
        send_at: tuple[int, ...] = (),
        recv_at: tuple[int, ...] = (),
    ) -> Form:
        """Return the form of blocks: with counts if and only if the call has them, on all ranks."""
        return Form(0, counts, send_at, recv_at) if self.calling.vector else Form(counts[0])

    def done(self, send: Buffer, recv: Buffer, form: Form) -> Prepared:
        return Prepared(self.calling, send, recv, form)

    # -- whole arrays: Reduce, Scan, Exscan -----------------------------------------------------

    def whole(self) -> Prepared:
        in_place = self.in_place(self.sendbuf, "sendbuf")
        if not self.at_root:
            send = array_of(self.sendbuf, "sendbuf")
            send, recv = self.laid(send, absent(send))
            return self.done(send, recv, Form(send.count))
        recv = array_of(self.recvbuf, "recvbuf", writable=True)
        same = in_place or self.sendbuf is self.recvbuf
        send, recv = self.laid(recv if same else array_of(self.sendbuf, "sendbuf"), recv)
        if send.count != recv.count:
            raise InvalidArgument(
                f"recvbuf has {recv.count} elements; expected {send.count}, as in sendbuf"
            )
        if not same and (send.address, send.strided) != (recv.address, recv.strided):
            check_apart(send, recv)
        return self.done(send, recv, Form(send.count))

    # -- one block from each rank: Gather, Gatherv, Allgatherv ------------------------------------

    def gather(self) -> Prepared:
        in_place = self.in_place(self.sendbuf, "sendbuf")
        if not self.at_root:
            send = self.simple(self.sendbuf, "sendbuf")
            send, recv = self.laid(send, absent(send))
            if self.calling.vector:
                return self._told(send, recv, (send.count,), ())
            return self.done(send, recv, Form(send.count))
        into = self.blocks(self.recvbuf, "recvbuf", writable=True)
        if in_place:
            into = replace(into, buffer=self.laid(into.buffer, into.buffer)[1])
            send, recv = self.own(into), into.buffer
        else:
            send, recv = self.laid(self.simple(self.sendbuf, "sendbuf"), into.buffer)
            into = replace(into, buffer=recv)
            self._fits(send, into, "sendbuf", "recvbuf")
        if self.calling.kind is Kind.GATHER and self.calling.vector:
            return self._told(send, recv, into.counts, into.at)
        return self.done(send, recv, self.form(into.counts, recv_at=into.at))

    # -- one block to each rank: Scatter, Scatterv ------------------------------------------------

    def scatter(self) -> Prepared:
        in_place = self.in_place(self.recvbuf, "recvbuf")
        if not self.at_root:
            recv = self.simple(self.recvbuf, "recvbuf", writable=True)
            recv, send = self.laid(recv, absent(recv))
            if self.calling.vector:
                return self._told(send, recv, (recv.count,), ())
            return self.done(send, recv, Form(recv.count))
        of = self.blocks(self.sendbuf, "sendbuf")
        if in_place:
            of = replace(of, buffer=self.laid(of.buffer, of.buffer)[0])
            send, recv = of.buffer, self.own(of)
        else:
            own = self.simple(self.recvbuf, "recvbuf", writable=True)
            send, recv = self.laid(of.buffer, own)
            of = replace(of, buffer=send)
            self._fits(recv, of, "recvbuf", "sendbuf")
        if self.calling.vector:
            return self._told(send, recv, of.counts, of.at)
        return self.done(send, recv, self.form(of.counts, send_at=of.at))

    def _fits(self, own: Buffer, blocks: Blocks, name: str, others: str) -> None:
        """See that this rank's array has the count of its block, and is it or apart from all."""
        count = blocks.counts[self.rank]
        if own.count != count:
            raise InvalidArgument(
                f"{name} has {own.count} elements; expected {count}, as the block of rank "
                f"{self.rank} in {others}"
            )
        block = self.own(blocks)
        if (own.address, own.strided) != (block.address, block.strided):
            _check_parts(Blocks(own, (own.count,)), blocks)

    def _told(
        self, send: Buffer, recv: Buffer, tells: tuple[int, ...], at: tuple[int, ...]
    ) -> Prepared:
        name, root = self.calling.name, self.root
        scatters = self.calling.kind is Kind.SCATTER

        def settle(told: Told) -> Form:
            counts = told[root]
            for rank, theirs in enumerate(told):
                if rank != root and theirs != (counts[rank],):
                    raise ValueError(
                        f"{name}: rank {rank} has an array of {theirs[0]} elements; root {root} "
                        f"has a count of {counts[rank]} for it"
                    )
            return Form(0, counts, at, ()) if scatters else Form(0, counts, (), at)

        return Prepared(self.calling, send, recv, None, tells, settle)

    # -- Reduce_scatter_block (in place), Reduce_scatter ------------------------------------------

    def reduce_scatter(self) -> Prepared:
        if not self.calling.vector:
            whole = self.blocks(self.recvbuf, "recvbuf", writable=True)
            buffer = self.laid(whole.buffer, whole.buffer)[0]
            return self._front(buffer, whole.counts)
        counts = None
        if self.counts is not None:
            given = np.asarray(self.counts)
            if given.shape != (self.size,) or given.dtype.kind not in "iu" or (given < 0).any():
                raise InvalidArgument(
                    f"recvcounts: expected {self.size} numbers from 0 on, got {self.counts!r}"
                )
            counts = tuple(given.tolist())
        if self.in_place(self.sendbuf, "sendbuf"):
            buffer = array_of(self.recvbuf, "recvbuf", writable=True)
            if counts is None or buffer.count < sum(counts):
                raise InvalidArgument(
                    f"Reduce_scatter in place: recvbuf has {buffer.count} elements, recvcounts are "
                    f"{counts}: it must hold the input, sum(recvcounts) elements"
                )
            return self._front(self.laid(buffer, buffer)[0], counts)
        recv = array_of(self.recvbuf, "recvbuf", writable=True)
        send, recv = self.laid(array_of(self.sendbuf, "sendbuf"), recv)
        if counts is None:
            check_apart(send, recv)
            return Prepared(
                self.calling, send, recv, None, (recv.count, send.count), _settle_counts
            )
        if send.count != sum(counts) or recv.count != counts[self.rank]:
            raise InvalidArgument(
                f"sendbuf has {send.count} elements and recvbuf {recv.count}; expected "
                f"{sum(counts)} and {counts[self.rank]} (recvcounts {counts})"
            )
        if recv.address != Blocks(send, counts).block(self.rank).address or recv.strided:
            check_apart(send, recv)
        return self.done(send, recv, Form(0, counts))

    def _front(self, buffer: Buffer, counts: tuple[int, ...]) -> Prepared:
        send = replace(buffer, count=sum(counts))
        recv = replace(buffer, count=counts[self.rank])
        return self.done(send, recv, replace(self.form(counts), in_place=True))

    # -- a block from each rank to each rank ------------------------------------------------------

    def alltoall(self) -> Prepared:
        in_place = self.in_place(self.sendbuf, "sendbuf")
        into = self.blocks(self.recvbuf, "recvbuf", writable=True)
        of = into if in_place else self.blocks(self.sendbuf, "sendbuf")
        send, recv = self.laid(of.buffer, into.buffer)
        of, into = replace(of, buffer=send), replace(into, buffer=recv)
        if not in_place:
            _check_parts(of, into)
        if self.calling.vector:
            return self._told_rows(of, into, in_place=in_place)
        if send.count != recv.count:
            raise InvalidArgument(
                f"recvbuf has {recv.count} elements; expected {send.count}, as in sendbuf"
            )
        return self.done(send, recv, Form(of.counts[0], in_place=in_place))

    def _told_rows(self, of: Blocks, into: Blocks, *, in_place: bool) -> Prepared:
        size = self.size

        def settle(told: Told) -> Form:
            flags = {row[0] for row in told}
            if len(flags) > 1:
                raise ValueError("Alltoallv: IN_PLACE on some ranks only")
            rows = [row[1 : size + 1] for row in told]
            for s, row in enumerate(rows):
                for d, count in enumerate(row):
                    if told[d][1 + size + s] != count:
                        raise ValueError(
                            f"Alltoallv: rank {s} sends {count} elements to rank {d}, which "
                            f"expects {told[d][1 + size + s]}"
                        )
            send_at = () if in_place else of.at
            return Form(0, tuple(rows), send_at, into.at, in_place)

        tells = (int(in_place), *of.counts, *into.counts)
        return Prepared(self.calling, of.buffer, into.buffer, None, tells, settle)


def _settle_counts(told: Told) -> Form:
    """Make the form of a Reduce_scatter whose ranks know their own counts only."""
    counts = tuple(own for own, _ in told)
    for rank, (_, whole) in enumerate(told):
        if whole != sum(counts):
            raise ValueError(
                f"Reduce_scatter: sendbuf of rank {rank} has {whole} elements; the results of all "
                f"ranks have {sum(counts)}"
            )
    return Form(0, counts)


def _check_parts(send: Blocks, recv: Blocks) -> None:
    """See that blocks which are read and blocks which are written share no byte."""
    if send.buffer.strided is not None or recv.buffer.strided is not None:
        check_apart(send.buffer, recv.buffer)
        return
    edges = [(part, 0) for part in send.parts()] + [(part, 1) for part in recv.parts()]
    ends = [0, 0]
    for (first, last), side in sorted(edges):
        if first < ends[1 - side]:
            raise InvalidArgument("sendbuf and recvbuf overlap; only exactly in place is allowed")
        ends[side] = max(ends[side], last)
