"""Collectives on GPU arrays through pinned host memory: what runs where no kernel or NIC reaches.

An array is cut into pieces. While the messages of one piece travel, later pieces are copied (and
in a node of equal shards reduced) by the GPU; the host looks at events and moves messages, and
never blocks on the device. The last copies to the GPU are under way when a call returns, ordered
on its stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rdmakit.buffer import Buffer, array_at
from rdmakit.datatypes import HALVES, MemoryKind, ReduceOp
from rdmakit.errors import TransferTimeout, UnsupportedError
from rdmakit.packing import moved
from rdmakit.plan.shape import Call, Kind
from rdmakit.reduction import average
from rdmakit.waiting import Waiter

if TYPE_CHECKING:
    from rdmakit.intra.device_node import DeviceNode
    from rdmakit.stepped import Stepped

__all__ = ["HostCall", "Staging"]

HostCall = Callable[[Kind, Buffer, Buffer, ReduceOp, int], None]
"""Does a collective on host memory: kind, send, recv, op, root. Blocking."""

PIECE = 4 << 20
"""Bytes of a piece in host memory."""
DEPTH = 3
"""Pieces under way: one copied in, one in messages, one copied out."""
_GRACE = 2.0


class _Slot:
    """Memory of one piece under way."""

    def __init__(self, door: Any, nbytes: int, *, shard: bool) -> None:
        self.pinned = door.PinnedMemory(nbytes)
        self.shard = door.DeviceMemory(nbytes) if shard else None
        self.event = door.Event()

    def close(self) -> None:
        for part in (self.event, self.pinned, self.shard):
            if part is not None:
                part.close()


class Staging:
    """Collectives of one group through host memory."""

    def __init__(
        self,
        door: Any,
        waiter: Waiter,
        node: DeviceNode | None = None,
        piece: int = PIECE,
        direct: Stepped | None = None,
        ranks: int = 1,
    ) -> None:
        """Describe it; memory is taken at the first call. Local.

        Args:
            door: :mod:`rdmakit.drivers.cuda`.
            waiter: deadline of waits.
            node: reduces and gathers inside the node, where all nodes have equally many ranks.
            piece: bytes of a piece in host memory.
            direct: reduces shards over the rails where messages take GPU memory as it is.
            ranks: of the group; what a mean is divided by.
        """
        self._direct = direct
        self._rail_stream: Any = None
        self._rail_done: Any = None
        self._door, self._waiter, self._node, self._piece = door, waiter, node, piece
        self._ranks = ranks
        self._slots: list[_Slot] = []
        self._wide: Any = None
        self._large: list[Any] = []
        self._done: Any = None

    def run(
        self,
        kind: Kind,
        send: Buffer,
        recv: Buffer,
        op: ReduceOp,
        root: int,
        stream: Any,
        whole: HostCall,
        rail: HostCall | None,
    ) -> None:
        """Do it. Collective; blocks until all messages are done; ``recv`` is ready on ``stream``.

        ``stream`` is an object with ``ptr``, which the node keeps until its next call.

        Raises:
            UnsupportedError: ``stream`` is captured into a CUDA graph.
            TransferTimeout: the GPU or a peer passed the deadline; as ``whole`` and ``rail``.
        """
        door = self._door
        number: int = stream.ptr
        if door.is_capturing(number):
            raise UnsupportedError(
                "GPU arrays go through host memory here, which a CUDA graph cannot hold: call it "
                "outside the capture"
            )
        if not max(send.count, recv.count):
            return
        if self._done is None:
            self._done = door.Event()
        else:
            door.wait_event(number, self._done)  # the last call's memory is used again
        if not self._slots:
            shard = self._node is not None
            self._slots = [_Slot(door, self._piece, shard=shard) for _ in range(DEPTH)]
        exact = op is ReduceOp.EXACT_SUM  # a node would round what it gives to the rail
        if kind is Kind.ALLREDUCE and self._node is not None and rail is not None and not exact:
            self._in_shards(self._node, send, recv, op, stream, rail)
        elif kind in (Kind.ALLREDUCE, Kind.BROADCAST):
            self._in_pieces(kind, send, recv, op, root, number, whole)
        else:
            self._at_once(kind, send, recv, op, root, number, whole)
        self._done.record(number)

    def _in_shards(
        self,
        node: DeviceNode,
        send: Buffer,
        recv: Buffer,
        op: ReduceOp,
        held: Any,
        rail: HostCall,
    ) -> None:
        """Reduce-scatter in the node, all-reduce of the shard on the rail, all-gather.

        What a NIC wrote into a shard is read by this rank's kernel alone, which pushes it to the
        peers: so no flush.
        """
        stream: int = held.ptr
        copy, size, dtype = self._door.copy_async, node.size, send.dtype
        itemsize, ranks = dtype.itemsize, node.size
        # A mean of the nodes' means where a sum might overflow; else a sum, divided once.
        mean = op is ReduceOp.AVG and dtype.name not in HALVES
        direct = self._direct if op is not ReduceOp.AVG else None  # the host divides
        op = ReduceOp.SUM if mean else op
        pieces = _cut(send.count, self._piece // itemsize * ranks)

        def ragged(first: int, last: int) -> bool:
            return (last - first) % ranks != 0

        def wide() -> int:
            if self._wide is None:
                self._wide = self._door.DeviceMemory(self._piece * size)
            address: int = self._wide.address
            return address

        def start(index: int, slot: _Slot) -> None:
            first, last = pieces[index]
            each = -(-(last - first) // ranks)
            source = send.address + first * itemsize
            if ragged(first, last):
                copy(wide(), source, (last - first) * itemsize, stream)
                source = wide()
            assert slot.shard is not None
            shard = _at(slot.shard.address, each, dtype)
            node.run(Kind.REDUCE_SCATTER, _at(source, each * ranks, dtype), shard, op, 0, held)
            if direct is None:
                copy(slot.pinned.address, shard.address, shard.nbytes, stream)

        def finish(index: int, slot: _Slot) -> None:
            first, last = pieces[index]
            each = -(-(last - first) // ranks)
            node.check()
            assert slot.shard is not None
            shard = _at(slot.shard.address, each, dtype)
            if direct is not None:
                self._on_rail(direct, shard, op, stream)
            else:
                host = _at(slot.pinned.address, each, dtype, MemoryKind.HOST)
                rail(Kind.ALLREDUCE, host, host, op, 0)
                if mean:
                    average(array_at(host.address, each, dtype), self._ranks)
                copy(shard.address, host.address, host.nbytes, stream)
            target = recv.address + first * itemsize
            into = wide() if ragged(first, last) else target
            node.run(Kind.ALLGATHER, shard, _at(into, each * ranks, dtype), op, 0, held)
            if into != target:
                copy(target, into, (last - first) * itemsize, stream)

        self._pipeline(len(pieces), start, finish, stream)

    def _on_rail(self, direct: Stepped, shard: Buffer, op: ReduceOp, stream: int) -> None:
        """All-reduce a shard over the rail, on a stream of its own: not behind later pieces."""
        if self._rail_stream is None:
            self._rail_stream, self._rail_done = self._door.Stream(), self._door.Event()
        own: int = self._rail_stream.ptr
        direct.run(Kind.ALLREDUCE, shard, shard, op, 0, own)
        self._rail_done.record(own)
        self._door.wait_event(stream, self._rail_done)

    def _in_pieces(
        self,
        kind: Kind,
        send: Buffer,
        recv: Buffer,
        op: ReduceOp,
        root: int,
        stream: int,
        whole: HostCall,
    ) -> None:
        """Copy, do it on the host, copy, for each piece."""
        copy, dtype, itemsize = self._door.copy_async, send.dtype, send.dtype.itemsize
        pieces = _cut(send.count, self._piece // itemsize)

        def start(index: int, slot: _Slot) -> None:
            first, last = pieces[index]
            where = send.address + first * itemsize
            copy(slot.pinned.address, where, (last - first) * itemsize, stream)

        def finish(index: int, slot: _Slot) -> None:
            first, last = pieces[index]
            host = _at(slot.pinned.address, last - first, dtype, MemoryKind.HOST)
            whole(kind, host, host, op, root)
            copy(recv.address + first * itemsize, host.address, host.nbytes, stream)

        self._pipeline(len(pieces), start, finish, stream)

    def _pipeline(
        self,
        count: int,
        start: Callable[[int, _Slot], None],
        finish: Callable[[int, _Slot], None],
        stream: int,
    ) -> None:
        def begin(index: int) -> None:
            slot = self._slots[index % DEPTH]
            start(index, slot)
            slot.event.record(stream)

        for index in range(min(DEPTH, count)):
            begin(index)
        for index in range(count):
            slot = self._slots[index % DEPTH]
            self._wait(slot.event)
            finish(index, slot)
            if index + DEPTH < count:
                begin(index + DEPTH)

    def run_form(
        self,
        call: Call,
        rank: int,
        send: Buffer,
        recv: Buffer,
        stream: int,
        whole: Callable[[Kind, Buffer, Buffer], None],
    ) -> None:
        """Do a call that has a form: copy its blocks, do it on the host, copy the results.

        Collective, blocking; ``recv`` is ready on ``stream``, and what is between its blocks is
        not touched. ``whole`` does the collective on host memory. Raises as :meth:`run`.
        """
        if not call.longest:
            return
        one = call.in_place and call.kind is Kind.ALLTOALL
        if self._done is None:
            self._done = self._door.Event()
        else:
            self._wait(self._done)  # the last call's memory is used again, and may be replaced
        hosts = self._pinned((send, recv))
        if one:
            hosts[0] = hosts[1]
        self._blocks(hosts[0], send, _reads(call, rank, send.count), stream)
        self._done.record(stream)
        self._wait(self._done)
        whole(call.kind, hosts[0], hosts[1])
        self._blocks(recv, hosts[1], _writes(call, rank, recv.count), stream)
        self._done.record(stream)

    def _blocks(
        self, to: Buffer, of: Buffer, parts: Sequence[tuple[int, int]], stream: int
    ) -> None:
        itemsize = of.dtype.itemsize
        for at, count in parts:
            if count:
                first, nbytes = at * itemsize, count * itemsize
                self._door.copy_async(to.address + first, of.address + first, nbytes, stream)

    def _pinned(self, buffers: Sequence[Buffer]) -> list[Buffer]:
        """Return host memory for the buffers, kept for later calls."""
        hosts = []
        for index, buffer in enumerate(buffers):
            nbytes = max(1, buffer.nbytes)
            if len(self._large) <= index:
                self._large.append(self._door.PinnedMemory(nbytes))
            elif self._large[index].nbytes < nbytes:
                self._large[index].close()
                self._large[index] = self._door.PinnedMemory(nbytes)
            address = self._large[index].address
            hosts.append(_at(address, buffer.count, buffer.dtype, MemoryKind.HOST))
        return hosts

    def _at_once(
        self,
        kind: Kind,
        send: Buffer,
        recv: Buffer,
        op: ReduceOp,
        root: int,
        stream: int,
        whole: HostCall,
    ) -> None:
        """Copy all, do it on the host, copy all: for kinds whose blocks cannot be cut alike."""
        copy, event = self._door.copy_async, self._slots[0].event
        event.record(stream)
        self._wait(event)  # of the last call: its memory may be replaced
        hosts = self._pinned((send, recv))
        copy(hosts[0].address, send.address, send.nbytes, stream)
        event.record(stream)
        self._wait(event)
        whole(kind, hosts[0], hosts[1], op, root)
        copy(recv.address, hosts[1].address, recv.nbytes, stream)

    def _wait(self, event: Any) -> None:
        """Poll until the GPU has passed ``event``; kernels find their own deadline first."""
        waiter = self._waiter
        limit = waiter.timeout + _GRACE
        try:
            waiter.until(event.done, (waiter.progress,), lambda: "waiting for the GPU", limit)
        except TransferTimeout:
            if self._node is not None:
                self._node.abort()
            raise

    def close(self) -> None:
        """Free its memory. Local; waits for the device. Not after an error: peers may write it."""
        for slot in self._slots:
            slot.close()
        for part in (self._wide, self._done, self._rail_stream, self._rail_done, *self._large):
            if part is not None:
                part.close()
        self._slots, self._large, self._wide, self._done = [], [], None, None
        self._rail_stream, self._rail_done = None, None


def _reads(call: Call, rank: int, count: int) -> Sequence[tuple[int, int]]:
    """Return (first, count) of what ``rank`` reads of SEND."""
    if not moved(call.kind, rank, call.root)["reads"]:
        return []
    if call.kind is Kind.SCATTER:
        return list(zip(call.send_offsets(rank), call.blocks, strict=True))
    if call.kind is Kind.ALLTOALL:
        ranks = range(call.layout.size)
        return [(call.send_offsets(rank)[q], call.elements(rank, q)) for q in ranks]
    return [(0, count)]


def _writes(call: Call, rank: int, count: int) -> Sequence[tuple[int, int]]:
    """Return (first, count) of what ``rank`` writes of RECV."""
    if not moved(call.kind, rank, call.root)["writes"]:
        return []
    if call.kind in (Kind.GATHER, Kind.ALLGATHER):
        return list(zip(call.recv_offsets(rank), call.blocks, strict=True))
    if call.kind is Kind.ALLTOALL:
        ranks = range(call.layout.size)
        return [(call.recv_offsets(rank)[q], call.elements(q, rank)) for q in ranks]
    return [(0, count)]


def _cut(count: int, most: int) -> Sequence[tuple[int, int]]:
    """Return (first, last) of pieces of up to ``most`` elements."""
    return [(first, min(first + most, count)) for first in range(0, count, most)]


def _at(
    address: int, count: int, dtype: np.dtype[Any], kind: MemoryKind = MemoryKind.DEVICE
) -> Buffer:
    return Buffer(address, count, dtype, kind, False)
