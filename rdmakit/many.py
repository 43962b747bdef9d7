"""All-reduce of many arrays in few messages: they are fused into buckets.

Each call costs some microseconds whatever its size, so many small arrays are copied into a bucket,
reduced as one, and copied back. How the buckets are filled is in :mod:`rdmakit.plan.buckets`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from rdmakit.agreement import refusal
from rdmakit.arguments import IN_PLACE, resolve
from rdmakit.buffer import Buffer
from rdmakit.calls import Calls
from rdmakit.config import format_size
from rdmakit.datatypes import SUM, MemoryKind, Op, ReduceOp, check_reduction, op_of
from rdmakit.device_side import stream_of
from rdmakit.errors import InvalidArgument, UnsupportedError
from rdmakit.family import Run, Work
from rdmakit.fusion import (
    Bucket,
    DeviceArea,
    DeviceAreas,
    DeviceFused,
    HostFused,
    buffers_of,
    check_apart,
    described,
    fill,
    on_gpu,
)
from rdmakit.packing import HostScratch
from rdmakit.plan.shape import Kind
from rdmakit.request import Request, check_timeout

__all__ = ["BUCKET_BYTES", "Many"]

BUCKET_BYTES = 25 << 20
"""Bytes of a bucket; what PyTorch's DistributedDataParallel takes."""
_PLANS_KEPT = 8

Plan = Sequence[tuple[Bucket, HostFused | None]]
"""Buckets, with their copies where they are in host memory and not alone."""
Begin = Callable[[], Run | None]


class Many(Calls):
    """All-reduces of many arrays; see :class:`rdmakit.collectives.Collectives`."""

    _bucket_plans: OrderedDict[tuple[Any, ...], Plan] | None = None
    _bucket_memory = np.empty(0, np.uint8)
    _bucket_areas: DeviceAreas | None = None

    def allreduce_many(
        self,
        arrays: Iterable[object],
        op: Op = SUM,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        timeout: float | None = None,
        stream: object = None,
    ) -> None:
        """Reduce each of ``arrays`` over all ranks, in place, as Allreduce of one by one would.

        Collective, blocking. Arrays of one type are copied into buckets in the order given and
        reduced as one; one of ``bucket_bytes`` or more is reduced where it lies, without a copy.
        The bucket's memory belongs to the communicator and is used by one call after another; on
        the host it is one piece as large as the largest bucket. Results of floats that are rounded
        may differ in the last bits from those of single calls, as those of other sizes do; they are
        bitwise equal on all ranks.

        On GPU arrays everything is ordered on ``stream``, as in :meth:`Allreduce`.

        Args:
            arrays: any shapes, types and strides, also none; all in host memory or all on the GPU,
                of the same shapes and types in the same order on all ranks. With checking on that
                is compared; without, ranks that differ time out or get wrong values. One in
                Fortran order is so on all ranks.
            op: as in :meth:`Allreduce`; each type must have it.
            bucket_bytes: bytes of a bucket; equal on all ranks. 1 fuses nothing.
            timeout: seconds one wait may take; default: the configuration's.
            stream: for GPU arrays, as in :meth:`Allreduce`.

        Raises:
            InvalidArgument: something is no array, read-only, or given twice; nothing was sent.
            UnsupportedError: memory, type or operation cannot be served; nothing was sent.
            CollectiveMismatch: with checking on: shapes, types, op or bucket_bytes differ.
            Exception: as :meth:`Allreduce`.
        """
        try:
            held, buffers, op, plan = self._planned(arrays, op, bucket_bytes)
            check_timeout(timeout)
        except (InvalidArgument, UnsupportedError) as exc:
            self._refuse("allreduce_many", exc)
            raise
        usual = self._waiter.timeout
        self._waiter.timeout = timeout or usual
        try:
            self._take_turn()
            self._agree_many(
                _told("allreduce_many", held, buffers, op, bucket_bytes, self._config.check)
            )
            if on_gpu(buffers):
                self._many_on_device(plan, buffers, op, stream, held)
                return
            for bucket, fused in plan:
                self._reduce_bucket(bucket, fused, op, (held, fused))
        finally:
            self._waiter.timeout = usual

    def iallreduce_many(
        self,
        arrays: Iterable[object],
        op: Op = SUM,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        stream: object = None,
    ) -> Request:
        """Begin :meth:`allreduce_many`. Collective, does not block.

        The arrays belong to the call until its request's Wait or Test says that it is complete.
        Host arrays are copied into their bucket at its turn, and back when it is done, also while
        the program calls nothing. GPU arrays are copied into their buckets, each with memory of
        its own, in this call; Wait or Test copies them back, ordered on ``stream``.

        Raises:
            Exception: as :meth:`allreduce_many`, and for GPU arrays what Iallreduce refuses.
        """
        try:
            held, buffers, op, plan = self._planned(arrays, op, bucket_bytes)
        except (InvalidArgument, UnsupportedError) as exc:
            if self._config.check and not self._state.failure:
                told = refusal("allreduce_many", exc)
                begin = partial(self._agreement.start, told)
                self._submit(f"{self.label}allreduce_many refused", None, begin)
            raise
        told = _told("allreduce_many", held, buffers, op, bucket_bytes, self._config.check)
        label = f"{self.label}allreduce_many {format_size(sum(b.nbytes for b in buffers))}"
        if on_gpu(buffers):
            return self._later_many_on_device(plan, buffers, op, stream, told, label, held)
        steps: list[Begin] = [partial(self._agreement.start, told)]
        for bucket, fused in plan:
            steps += self._bucket_begins(bucket, fused, op, (held, fused))
        return self._submit(label, held, *steps)

    # -- what is checked, and planned once ----------------------------------------------------

    def _planned(
        self, arrays: Iterable[object], op: Op, bucket_bytes: int
    ) -> tuple[list[object], tuple[Buffer, ...], ReduceOp, Plan]:
        self._check_usable()
        op = op_of(op)
        held = list(arrays)
        buffers = buffers_of(held)
        key = (buffers, op, bucket_bytes)
        if self._bucket_plans is None:
            self._bucket_plans = OrderedDict()
        plan = self._bucket_plans.get(key)
        if plan is not None:
            self._bucket_plans.move_to_end(key)
            return held, buffers, op, plan
        self._check_many(held, buffers, op)
        plan = self._plan_buckets(fill(buffers, bucket_bytes))
        self._bucket_plans[key] = plan
        if len(self._bucket_plans) > _PLANS_KEPT:
            self._bucket_plans.popitem(last=False)
        return held, buffers, op, plan

    def _check_many(
        self, arrays: Sequence[object], buffers: Sequence[Buffer], op: ReduceOp, first: int = 0
    ) -> None:
        """Check what one rank can check alone; ``first`` is the index of the first. Local."""
        for index, (array, buffer) in enumerate(zip(arrays, buffers, strict=True), first):
            if buffer.kind is not buffers[0].kind:
                places = buffers[0].kind.value, buffer.kind.value
                raise InvalidArgument(
                    f"arrays[{first}] is in {places[0]} memory and arrays[{index}] in {places[1]} "
                    "memory: all must be in the same; make two calls"
                )
            try:
                check_reduction(buffer.dtype, op)
                resolve(Kind.ALLREDUCE, IN_PLACE, array, self.rank, self.size, writes=True)
                if buffer.kind is MemoryKind.DEVICE:
                    self._gpu().side.check("it", buffer)
            except (InvalidArgument, UnsupportedError) as exc:
                raise type(exc)(f"arrays[{index}]: {exc}") from exc
        check_apart(buffers)

    def _plan_buckets(self, found: Sequence[Bucket]) -> Plan:
        copied = [b.nbytes for b in found if not b.alone and not on_gpu(b.parts)]
        if copied and self._bucket_memory.nbytes < max(copied):
            assert self._bucket_plans is not None
            # They are of the smaller piece, which calls under way still hold.
            self._bucket_plans.clear()
            self._bucket_memory = np.empty(max(copied), np.uint8)
        plan: list[tuple[Bucket, HostFused | None]] = []
        for bucket in found:
            plain = bucket.alone or on_gpu(bucket.parts)
            plan.append((bucket, None if plain else HostFused(bucket, self._bucket_memory)))
        return tuple(plan)

    def _agree_many(self, told: str) -> None:
        if self._config.check:
            self._agreement.agree(told)

    # -- host memory --------------------------------------------------------------------------

    def _reduce_bucket(
        self, bucket: Bucket, fused: HostFused | None, op: ReduceOp, keep: tuple[object, ...]
    ) -> None:
        flat = bucket.parts[0] if fused is None else fused.flat
        name = self._algorithm(Kind.ALLREDUCE, flat.nbytes, flat, op, "auto")
        what, scratch = (Kind.ALLREDUCE, flat, flat, op, name, 0), self._state.scratch
        call = self._host_call(*what, keep, scratch)[0]
        if fused is None:
            call()
            return
        fused.gather()
        call()
        fused.scatter()

    def _bucket_begins(
        self,
        bucket: Bucket,
        fused: HostFused | None,
        op: ReduceOp,
        keep: tuple[object, ...],
        *,
        gathered: bool = False,
    ) -> list[Begin]:
        """Return what reduces a bucket at its turn; ``gathered``: its arrays are in it already."""
        flat = bucket.parts[0] if fused is None else fused.flat
        name = self._algorithm(Kind.ALLREDUCE, flat.nbytes, flat, op, "auto")
        what = (Kind.ALLREDUCE, flat, flat, op, name, 0)
        begins: list[Begin] = list(self._host_steps(*what, keep, HostScratch()))
        if fused is None:
            return begins
        return [*([] if gathered else [fused.gather]), *begins, fused.scatter]

    # -- GPU memory ---------------------------------------------------------------------------

    def _fused_on_device(self, bucket: Bucket) -> DeviceFused | None:
        """Return a bucket's copies with memory that is free now; None where it is alone."""
        if bucket.alone:
            return None
        side = self._gpu().side
        if self._bucket_areas is None:
            self._bucket_areas = DeviceAreas(side.gpu.door)
        return DeviceFused(bucket, self._bucket_areas.take(bucket.nbytes), side.gpu, side.device)

    def _give_area(self, area: DeviceArea) -> None:
        if self._bucket_areas is not None:
            self._bucket_areas.give(area)

    def _many_stream(self, stream: object, buffers: Sequence[Buffer]) -> Any:
        """Return what a call on GPU arrays is ordered on, after what makes them ready."""
        side = self._gpu().side
        found = stream_of(stream, side.gpu.door)
        if side.gpu.door.is_capturing(found.ptr):
            raise UnsupportedError(
                "arrays are fused in memory that the next call uses again, which a CUDA graph "
                "cannot hold: capture single calls, or call it outside the capture"
            )
        side.enter()
        side.follow(found.ptr, buffers)
        return found

    def _many_on_device(
        self, plan: Plan, buffers: Sequence[Buffer], op: ReduceOp, stream: object, keep: object
    ) -> None:
        held = self._many_stream(stream, buffers)
        for bucket, _ in plan:
            fused = self._fused_on_device(bucket)
            self._reduce_device_bucket(bucket, fused, op, held, (keep, fused))
            if fused is not None:
                self._give_area(fused.area)

    def _reduce_device_bucket(
        self,
        bucket: Bucket,
        fused: DeviceFused | None,
        op: ReduceOp,
        stream: Any,
        keep: object,
        *,
        gathered: bool = False,
    ) -> None:
        if fused is None:
            part = bucket.parts[0]
            self._run_device(Kind.ALLREDUCE, part, part, op, 0, stream, keep)
            return
        with fused.ordered(stream.ptr):
            if not gathered:
                fused.gather()
            self._run_device(Kind.ALLREDUCE, fused.flat, fused.flat, op, 0, stream, keep)
            fused.scatter()

    def _begin_device_bucket(
        self,
        bucket: Bucket,
        fused: DeviceFused | None,
        op: ReduceOp,
        stream: Any,
        *,
        gathered: bool = False,
    ) -> Begin:
        """Start a bucket on a stream; return what is asked until it is done."""
        flat = bucket.parts[0] if fused is None else fused.flat
        if fused is not None and not gathered:
            with fused.ordered(stream.ptr):
                fused.gather()
        try:
            return self._gpu().start(Kind.ALLREDUCE, flat, flat, op, 0, stream)
        except (InvalidArgument, UnsupportedError):
            raise  # nothing was started
        except BaseException as exc:
            self._fail(exc)
            raise

    def _agree_many_on_device(self, told: str) -> None:
        """Let ranks compare before kernels start; where they have to, earlier calls end first."""
        if self._config.check or not self._gpu().begun:
            self._take_turn()
        self._agree_many(told)

    def _later_many_on_device(
        self,
        plan: Plan,
        buffers: Sequence[Buffer],
        op: ReduceOp,
        stream: object,
        told: str,
        label: str,
        held: list[object],
    ) -> Request:
        on = self._many_stream(stream, buffers)
        self._agree_many_on_device(told)
        parts = [(bucket, self._fused_on_device(bucket)) for bucket, _ in plan]
        begins = [self._begin_device_bucket(bucket, fused, op, on) for bucket, fused in parts]

        def finish() -> None:
            self._gpu().side.enter()
            for _, fused in parts:
                if fused is not None:
                    with fused.ordered(on.ptr):
                        fused.scatter()
                    self._give_area(fused.area)

        return self._submit_finished(label, (held, parts, on), finish, *begins)

    def _submit_finished(
        self, label: str, keep: object, finish: Callable[[], None], *begins: Begin
    ) -> Request:
        """Submit what the program's own thread has to finish, in Wait or Test."""
        self._check_usable()
        request = _Finished(self._state, self._waiter, label, keep)
        request.after = finish
        self._state.submit(Work(request, *begins))
        return request

    def _release(self) -> None:
        super()._release()
        if self._bucket_areas is not None and self._state.failure != "it was closed":
            _QUARANTINE.append(self._bucket_areas)  # kernels of a failed call may still use it
        self._bucket_plans, self._bucket_areas = None, None
        self._bucket_memory = np.empty(0, np.uint8)


_QUARANTINE: list[object] = []
"""Memory of failed calls, into which a late peer may still write."""


class _Finished(Request):
    """A request with something left to do when it is waited for."""

    after: Callable[[], None] | None = None

    def _finish(self, status: Any) -> None:
        super()._finish(status)
        after, self.after = self.after, None
        if after is not None:
            after()


def _told(
    name: str,
    arrays: Sequence[object],
    buffers: Sequence[Buffer],
    op: ReduceOp,
    bucket_bytes: int,
    check: bool,
) -> str:
    if not check:
        return name
    text = described(arrays, buffers)
    return f"{name} op={op.value} bucket_bytes={bucket_bytes} {text}"
