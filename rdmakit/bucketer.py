"""Gradients that are reduced while the others are still computed."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from rdmakit.buffer import as_buffer
from rdmakit.config import format_size
from rdmakit.datatypes import AVG, Op, op_of
from rdmakit.errors import InvalidArgument, TransportError, UnsupportedError
from rdmakit.fusion import (
    Bucket,
    DeviceFused,
    HostFused,
    buffers_of,
    described,
    fill,
    on_gpu,
)
from rdmakit.many import BUCKET_BYTES, Many
from rdmakit.request import Request

__all__ = ["GradientBucketer"]

_LEGACY_STREAM = 1
"""The default stream as the driver knows it; a Buffer's 0 is none."""
_QUARANTINE: list[object] = []
"""Memory of failed steps, into which a late peer may still write."""


class _Slot:
    """A bucket and how far it is in this step."""

    def __init__(self, number: int, bucket: Bucket) -> None:
        self.number, self.bucket = number, bucket
        self.fused: HostFused | DeviceFused | None = None
        self.missing = len(bucket.indices)
        self.request: Request | None = None
        self.stream: Any = None
        """Of GPU arrays: what the last copy into the bucket was ordered on."""


class GradientBucketer:
    """All-reduces the same arrays again and again, in buckets, each as soon as it is full.

    In each step every array is said to be :meth:`ready` once, in any order and from any thread;
    then :meth:`wait`. Buckets are filled in the order of ``arrays``, so give them in the order in
    which they become ready (of a backward pass: the last layer first). A full bucket starts when
    those before it have started, so ranks that finish in other orders start them alike. The
    progress thread moves them while the program computes.

    From the first ``ready`` of a step to ``wait`` the communicator, its node and its rail are the
    bucketer's: make no other collective calls on them, or give it a communicator of its own
    (``comm.Dup()``). Each bucket of several arrays has memory of its own, as large as its arrays,
    which goes with the bucketer; the communicator must outlive it.

    On GPU arrays copies into a bucket are ordered on CuPy's stream that is current at ``ready``,
    copies out on the one current at ``wait``, which does not wait for the GPU. Where calls on GPU
    arrays cannot go on without the host (see Iallreduce), all of it happens in ``wait``.

    Attributes:
        buckets: the indices of the arrays in each bucket, in the order in which they start.
    """

    def __init__(
        self,
        comm: Many,
        arrays: Iterable[object],
        *,
        bucket_bytes: int = BUCKET_BYTES,
        op: Op = AVG,
    ) -> None:
        """Plan it. Local; ranks give the same shapes, types, sizes and operation.

        With checking on, ranks compare each bucket before it moves.

        Args:
            comm: a communicator, or its node or rail.
            arrays: reduced in place; as for ``allreduce_many``. They are kept alive.
            bucket_bytes: bytes of a bucket; an array of as many or more is reduced where it lies.
            op: the reduction; integers have no AVG.

        Raises:
            InvalidArgument: something is no array, read-only, or given twice.
            UnsupportedError: memory, type or operation cannot be served.
        """
        comm._check_usable()
        self._comm, self._op = comm, op_of(op)
        self._arrays = list(arrays)
        self._buffers = list(buffers_of(self._arrays))
        comm._check_many(self._arrays, self._buffers, self._op)
        self._on_gpu = on_gpu(self._buffers)
        found = fill(self._buffers, bucket_bytes)
        self._slots = [_Slot(number, bucket) for number, bucket in enumerate(found)]
        self.buckets = tuple(bucket.indices for bucket in found)
        self._where: dict[int, tuple[_Slot, int]] = {}
        for slot in self._slots:
            if self._on_gpu:
                slot.fused = comm._fused_on_device(slot.bucket)
            elif not slot.bucket.alone:
                slot.fused = HostFused(slot.bucket, np.empty(slot.bucket.nbytes, np.uint8))
            for position, index in enumerate(slot.bucket.indices):
                self._where[index] = slot, position
        self._ready = [False] * len(self._arrays)
        self._started = 0
        self._blocking = False
        self._lock = threading.Lock()

    def ready(self, index: int, array: object = None) -> None:
        """Say that an array has this rank's values: it is not to be touched until ``wait``.

        Local until it fills a bucket, which is then started with all full ones that follow; does
        not block, but for the first call on GPU arrays.

        Args:
            index: place in ``arrays``.
            array: what takes its place from now on; of the same shape, type and memory, and apart
                from the others.

        Raises:
            InvalidArgument: it is ready already, there is none, or ``array`` does not fit.
            CommunicatorClosed: an earlier error.
        """
        with self._lock:
            self._comm._check_usable()
            if not 0 <= index < len(self._arrays):
                raise InvalidArgument(f"index {index}: there are arrays 0..{len(self._arrays) - 1}")
            if self._ready[index]:
                raise InvalidArgument(
                    f"arrays[{index}] is ready already in this step (rank {self._comm.rank}): each "
                    "once, then wait()"
                )
            if array is not None:
                self._replace(index, array)
            if index in self._where:
                self._put(*self._where[index])
            self._ready[index] = True
            self._start_full()

    def wait(self, *, timeout: float | None = None) -> None:
        """Return when all arrays are reduced and in place; the next step may begin. Blocking.

        Args:
            timeout: seconds one wait may take; default: the configuration's.

        Raises:
            InvalidArgument: arrays are not ready on this rank; the text names them. Say that they
                are and call it again; the other ranks wait meanwhile.
            CollectiveMismatch: with checking on: ranks gave different arrays.
            Exception: as Allreduce; the communicator is unusable.
        """
        with self._lock:
            missing = [index for index, ready in enumerate(self._ready) if not ready]
            if missing:
                names = ", ".join(map(str, missing[:20])) + (", ..." if len(missing) > 20 else "")
                raise InvalidArgument(
                    f"wait: {len(missing)} of {len(self._ready)} arrays are not ready on rank "
                    f"{self._comm.rank}: {names}; call ready() for each of them first"
                )
            try:
                for slot in self._slots:
                    if slot.request is not None:
                        slot.request.Wait(timeout=timeout)
                    else:
                        self._do(slot, timeout)
            except TransportError:
                _QUARANTINE.append((self._slots, self._arrays))
                raise
            for slot in self._slots:
                slot.missing, slot.request = len(slot.bucket.indices), None
            self._ready = [False] * len(self._arrays)
            self._started = 0

    def _replace(self, index: int, array: object) -> None:
        new, old = as_buffer(array, f"arrays[{index}]", writable=True), self._buffers[index]
        shapes = [getattr(a, "shape", (b.count,)) for a, b in
                  ((array, new), (self._arrays[index], old))]  # fmt: skip
        lies = [b.order == "F" for b in (new, old)]
        if shapes[0] != shapes[1] or new.dtype != old.dtype or new.kind is not old.kind:
            raise InvalidArgument(
                f"arrays[{index}]: expected {old.dtype} of shape {tuple(shapes[1])} in "
                f"{old.kind.value} memory, got {new.dtype} of shape {tuple(shapes[0])} in "
                f"{new.kind.value} memory (rank {self._comm.rank})"
            )
        if lies[0] != lies[1]:
            raise InvalidArgument(
                f"arrays[{index}]: one of the old and the new array is in Fortran order; both "
                "must be, or none"
            )
        self._comm._check_many([array], [new], self._op, first=index)
        self._arrays[index], self._buffers[index] = array, new
        if index in self._where:
            slot, position = self._where[index]
            slot.bucket = slot.bucket.changed(position, new)
            if slot.fused is not None:
                slot.fused.change(position, slot.bucket.parts[position])

    def _put(self, slot: _Slot, position: int) -> None:
        if self._on_gpu:
            slot.stream = self._comm._many_stream(None, (slot.bucket.parts[position],))
        if isinstance(slot.fused, DeviceFused):
            with slot.fused.ordered(slot.stream.ptr):
                slot.fused.put(position)
        elif slot.fused is not None:
            slot.fused.put(position)
        slot.missing -= 1

    def _start_full(self) -> None:
        while self._started < len(self._slots) and not self._slots[self._started].missing:
            slot = self._slots[self._started]
            self._started += 1
            if not self._blocking:
                self._start(slot)

    def _told(self, slot: _Slot) -> str:
        if not self._comm._config.check:
            return "gradients"
        arrays = [self._arrays[index] for index in slot.bucket.indices]
        buffers = [self._buffers[index] for index in slot.bucket.indices]
        return (
            f"gradients op={self._op.value} bucket {slot.number + 1} of {len(self._slots)}: "
            f"{described(arrays, buffers)}"
        )

    def _keep(self, slot: _Slot) -> tuple[object, ...]:
        """Return what owns the memory of a bucket."""
        arrays = tuple(self._arrays[index] for index in slot.bucket.indices)
        return arrays, slot.fused, slot.stream

    def _start(self, slot: _Slot) -> None:
        comm, bucket = self._comm, slot.bucket
        label = f"{comm.label}gradients {slot.number} {format_size(bucket.nbytes)}"
        keep, fused = self._keep(slot), slot.fused
        if not self._on_gpu:
            assert not isinstance(fused, DeviceFused)
            begins = comm._bucket_begins(bucket, fused, self._op, keep, gathered=True)
            compare = partial(comm._agreement.start, self._told(slot))
            slot.request = comm._submit(label, keep, compare, *begins)
            return
        assert not isinstance(fused, HostFused)
        comm._agree_many_on_device(self._told(slot))
        try:
            begin = comm._begin_device_bucket(bucket, fused, self._op, slot.stream, gathered=True)
        except UnsupportedError:
            # On all ranks alike, since it hangs on the way and the operation: see wait.
            self._blocking = True
            return

        def scatter() -> None:
            if fused is not None:
                with fused.ordered(comm._many_stream(None, ()).ptr):
                    fused.scatter()

        slot.request = comm._submit_finished(label, keep, scatter, begin)

    def _do(self, slot: _Slot, timeout: float | None) -> None:
        """Reduce a bucket of GPU arrays now, with the host's help."""
        comm, fused = self._comm, slot.fused
        assert not isinstance(fused, HostFused)
        stream = comm._many_stream(None, ())
        usual = comm._waiter.timeout
        comm._waiter.timeout = timeout or usual
        try:
            comm._take_turn()
            ready = replace(slot.bucket.parts[0], stream=slot.stream.ptr or _LEGACY_STREAM)
            comm._gpu().side.follow(stream.ptr, (ready,))
            keep = self._keep(slot)
            comm._reduce_device_bucket(slot.bucket, fused, self._op, stream, keep, gathered=True)
        finally:
            comm._waiter.timeout = usual
