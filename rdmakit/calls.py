"""How a collective call is done: checked, planned, bound to memory, and run now or in its turn."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from rdmakit.agreement import refusal
from rdmakit.arguments import resolve
from rdmakit.baseline import mpi_call, mpi_start, why_not_mpi
from rdmakit.buffer import Buffer, gpu_key
from rdmakit.config import Config, format_size
from rdmakit.datatypes import MemoryKind, Op, ReduceOp, check_reduction, op_of
from rdmakit.errors import InvalidArgument, TransportError, UnsupportedError
from rdmakit.executor import Bound, Places
from rdmakit.family import Family, Poll, Run, Work
from rdmakit.group import Group
from rdmakit.inter.tags import MESSAGES, SEQUENCES, TagKind, pack
from rdmakit.layout import RankLayout
from rdmakit.packing import HostPacked, HostScratch, moved
from rdmakit.plan.planner import ALGORITHMS, program, why_not
from rdmakit.plan.select import choose, limits_for
from rdmakit.plan.shape import Call, Kind
from rdmakit.plan.steps import Program, Space
from rdmakit.process.phase import current
from rdmakit.protocols import Bootstrap, Channel, Window
from rdmakit.reduction import frame, on_the_way
from rdmakit.request import Request, check_timeout
from rdmakit.staging import HostCall
from rdmakit.waiting import Waiter

__all__ = ["Calls"]

_BOUND_KEPT = 32
_KNOWN_KEPT = 1024
"""Calls on CuPy arrays whose check is remembered."""
_HELD_KEPT = 1 << 20
"""Bytes of memory of its own that a plan which is kept for later calls may have."""
_REDUCES = (Kind.ALLREDUCE, Kind.REDUCE_SCATTER)

Asked = tuple[Kind, Buffer, Buffer, ReduceOp, str, int]
"""A checked call: kind, send, recv, op, algorithm, root."""


class Calls(Group):
    """What the collectives of a group have in common; see :mod:`rdmakit.collectives`."""

    def __init__(
        self,
        layout: RankLayout,
        bootstrap: Bootstrap,
        window: Window | None,
        channel: Channel | None,
        waiter: Waiter,
        config: Config,
        *,
        identity: int = 0,
        job_ranks: tuple[int, ...] | None = None,
        mpi: Any = None,
        label: str = "",
        family: Family | None = None,
    ) -> None:
        super().__init__(bootstrap, waiter, config, label, family)
        self.layout, self.window, self.channel = layout, window, channel
        self._mpi, self._identity = mpi, identity
        peers = layout.nodes[layout.node_of(self.rank)]
        self._places = Places(
            {rank: index for index, rank in enumerate(peers)},
            job_ranks or tuple(range(self.size)),
        )
        self._first_tag = pack(identity, TagKind.COLLECTIVE, 0)
        self._sequence = 0
        self._bound: OrderedDict[tuple[Any, ...], Bound] = OrderedDict()
        self._known: dict[tuple[Any, ...], tuple[Buffer, Buffer, ReduceOp, str]] = {}

    # -- now ----------------------------------------------------------------------------------

    def _now(
        self,
        kind: Kind,
        sendbuf: object,
        recvbuf: object,
        op: Op,
        algorithm: str,
        root: int,
        timeout: float | None,
        stream: object,
    ) -> None:
        try:
            send, recv, op, name = self._resolve(kind, sendbuf, recvbuf, op, algorithm, root)
        except (InvalidArgument, UnsupportedError) as exc:
            self._agreement.refuse(kind.value, exc)
            raise
        usual = self._waiter.timeout
        if timeout is not None:
            check_timeout(timeout)
            self._waiter.timeout = timeout
        try:
            self._take_turn()
            self._compare((kind, send, recv, op, name, root))
            if name == "device":
                self._run_device(kind, send, recv, op, root, stream)
            else:
                keep, scratch = (sendbuf, recvbuf), self._state.scratch
                self._host_call(kind, send, recv, op, name, root, keep, scratch)[0]()
        finally:
            self._waiter.timeout = usual

    def _resolve(
        self,
        kind: Kind,
        sendbuf: object,
        recvbuf: object,
        op: Op,
        algorithm: str,
        root: int,
    ) -> tuple[Buffer, Buffer, ReduceOp, str]:
        """Check everything that one rank can check alone."""
        self._check_usable()
        key, into = None, gpu_key(recvbuf)
        if into is not None and type(op) in (ReduceOp, str):
            of = into if sendbuf is recvbuf else gpu_key(sendbuf)
            key = (kind, of, into, op, algorithm, root) if of is not None else None
            found = self._known.get(key) if key is not None else None
            if found is not None:
                return found
        op = op_of(op)
        writes = kind is not Kind.BROADCAST or self.rank != root
        send, recv = resolve(kind, sendbuf, recvbuf, self.rank, self.size, writes=writes)
        if not 0 <= root < self.size:
            raise InvalidArgument(f"root {root} is not in 0..{self.size - 1}")
        if kind in _REDUCES:
            check_reduction(recv.dtype, op)
        name = self._algorithm(kind, max(send.nbytes, recv.nbytes), recv, op, algorithm)
        if name == "device":
            self._gpu().check(send, recv)
        if key is not None:
            if len(self._known) >= _KNOWN_KEPT:
                self._known.clear()
            self._known[key] = send, recv, op, name
        return send, recv, op, name

    def _host_call(
        self,
        kind: Kind,
        send: Buffer,
        recv: Buffer,
        op: ReduceOp,
        name: str,
        root: int,
        keep: tuple[object, ...],
        scratch: HostScratch,
    ) -> tuple[Callable[[], object], Program | None, np.dtype[Any]]:
        """Return the call on host arrays, its program where it has one, and the type on the way."""
        packed: HostPacked | None = None
        if send.strided is not None or recv.strided is not None:
            packed = HostPacked(send, recv, scratch, **moved(kind, self.rank, root))
            send, recv, keep = packed.send, packed.recv, (*keep, *packed.keep)
        call: Callable[[], object]
        if name == "mpi":
            call, steps = self._mpi_call(kind, send, recv, op, root, keep), None
            dtype = on_the_way(recv.dtype, op)[0]
        else:
            bound = self._bind(kind, send, recv, op, name, root)
            call, steps, dtype = partial(self._run, bound, keep), bound.program, bound.dtype
        return (packed.around(call) if packed is not None else call), steps, dtype

    def _algorithm(self, kind: Kind, nbytes: int, recv: Buffer, op: ReduceOp, wanted: str) -> str:
        if recv.kind is MemoryKind.DEVICE:
            if wanted not in ("auto", "device"):
                raise UnsupportedError(f"algorithm {wanted!r} on GPU memory: auto or device")
            return "device"
        if wanted in ("auto", "mpi"):
            why_not_it = "this group has no MPI communicator"
            if self._mpi is not None:
                dtype, inner = on_the_way(recv.dtype, op)
                why_not_it = why_not_mpi(kind, dtype, inner, alike=wanted == "auto")
            if wanted == "auto":
                return choose(kind, self.layout, nbytes, mpi=not why_not_it)
            if why_not_it:
                raise UnsupportedError(f"mpi {kind.value}: {why_not_it}")
            return wanted
        if wanted not in ALGORITHMS:
            names = ", ".join(("auto", *ALGORITHMS, "mpi"))
            raise InvalidArgument(f"unknown algorithm {wanted!r}; one of {names}")
        reason = why_not(wanted, kind, self.layout)
        if reason:
            raise UnsupportedError(f"{wanted} {kind.value}: {reason}")
        return wanted

    def _bind(
        self, kind: Kind, send: Buffer, recv: Buffer, op: ReduceOp, algorithm: str, root: int
    ) -> Bound:
        key = (kind, send.address, recv.address, send.count, recv.dtype, op, algorithm, root)
        bound = self._bound.get(key)
        if bound is not None:
            self._bound.move_to_end(key)
            return bound
        framed = frame(kind, algorithm, self.layout, send, recv, op)
        send, recv, itemsize = framed.send, framed.recv, framed.recv.dtype.itemsize
        window = self.window.nbytes if self.window is not None else self._config.window_bytes
        count = recv.count if kind is Kind.REDUCE_SCATTER else send.count
        call = Call(kind, self.layout, count, limits_for(itemsize, window), root)
        steps = program(algorithm, call, self.rank)
        room = self.channel.messages if self.channel is not None else MESSAGES
        if steps.tags > room:
            raise UnsupportedError(
                f"{algorithm} of {count} elements needs {steps.tags} message tags, "
                f"{room} are there: cut the array"
            )
        bound = Bound(
            steps,
            recv.dtype,
            {Space.SEND: (send.address, send.count), Space.RECV: (recv.address, recv.count)},
            self._places,
            self.window,
            self.channel,
            self._waiter,
            self._engine,
            framed.reduce,
            f"{self.label}{kind.value}/{algorithm} {format_size(recv.nbytes)}",
            framed.prepare,
            framed.finish,
        )
        if framed.held > _HELD_KEPT:
            return bound
        self._bound[key] = bound
        if len(self._bound) > _BOUND_KEPT:
            self._bound.popitem(last=False)
        return bound

    def _run(self, bound: Bound, keep: tuple[object, ...]) -> None:
        family = self._state
        if family.works or family.taken or family.failure:
            self._take_turn()
        sequence = self._sequence
        self._sequence = sequence + 1
        family.taken = True
        before = current.enter(bound.label)
        try:
            bound.run(self._first_tag + sequence % SEQUENCES * MESSAGES, keep)
        except BaseException as exc:
            self._fail(exc)
            raise
        finally:
            current.restore(before)
            family.taken = False

    def _next_tag(self) -> int:
        """Return what keeps the next operation apart; called in the order of the operations."""
        tag = self._first_tag + self._sequence % SEQUENCES * MESSAGES
        self._sequence += 1
        return tag

    def _run_device(
        self,
        kind: Kind,
        send: Buffer,
        recv: Buffer,
        op: ReduceOp,
        root: int,
        stream: object,
        keep: object = None,
    ) -> None:
        if self._state.failure or self._state.works:
            self._take_turn()
        try:
            self._gpu().run(kind, send, recv, op, root, stream, *self._host_calls())
        except (InvalidArgument, UnsupportedError):
            raise  # nothing was started
        except BaseException as exc:
            self._fail(exc)
            raise

    def _host_calls(self) -> tuple[HostCall, HostCall | None]:
        """Return how this group, and its rail, do a collective on host memory."""
        return self._on_host, None

    def _on_host(self, kind: Kind, send: Buffer, recv: Buffer, op: ReduceOp, root: int) -> None:
        name = self._algorithm(kind, max(send.nbytes, recv.nbytes), recv, op, "auto")
        if name == "mpi":
            self._mpi_call(kind, send, recv, op, root, ())()
        else:
            self._run(self._bind(kind, send, recv, op, name, root), ())

    def _mpi_call(
        self, kind: Kind, send: Buffer, recv: Buffer, op: ReduceOp, root: int, keep: object
    ) -> Callable[[], object]:
        framed = frame(kind, "mpi", self.layout, send, recv, op)
        call, failed = mpi_call(self._mpi, kind, framed.send, framed.recv, framed.op, root)
        call = framed.around(call)
        name = f"{self.label}{kind.value}/mpi {format_size(recv.nbytes)}"
        enter, restore, timeout = current.enter, current.restore, self._waiter.timeout
        family, channel, threaded = self._state, self.channel, self._engine.threaded

        def run(keep: object = keep) -> None:
            if family.works or family.taken or family.failure:
                self._take_turn()
            if not threaded:  # on no rank: nobody moves other things while MPI blocks
                start = self._start_mpi(kind, send, recv, op, root)
                self._submit(name, keep, start, background=False).Wait(timeout=timeout)
                return
            before = None if current.watched else enter(name, (), 0, timeout)
            try:
                if channel is not None and channel.holds:  # nothing moves it inside MPI
                    polls = (channel.progress,)
                    self._waiter.until(channel.flush, polls, lambda: f"{name}: flushing")
                call()
            except failed as exc:
                error = TransportError(f"{name}: MPI says {exc}")
                self._fail(error)
                raise error from exc
            finally:
                if before is not None:
                    restore(before)

        return run

    # -- later, in the order of the calls -----------------------------------------------------

    def _later(
        self,
        kind: Kind,
        sendbuf: object,
        recvbuf: object,
        op: Op,
        algorithm: str,
        root: int,
        stream: object,
    ) -> Request:
        try:
            send, recv, op, name = self._resolve(kind, sendbuf, recvbuf, op, algorithm, root)
            begins: list[Callable[[], Run | None]] = []
            if name != "device":
                what, keep = (kind, send, recv, op, name, root), (sendbuf, recvbuf)
                begins = self._host_steps(*what, keep, HostScratch())
        except (InvalidArgument, UnsupportedError) as exc:
            if self._config.check and not self._state.failure:
                label, told = f"{self.label}{kind.value} refused", refusal(kind.value, exc)
                self._submit(label, None, partial(self._agreement.start, told))
            raise
        if name == "device":
            return self._later_on_device(kind, send, recv, op, root, stream, (sendbuf, recvbuf))
        compare = partial(self._start_compare, (kind, send, recv, op, name, root))
        label = f"{self.label}{kind.value}/{name} {format_size(recv.nbytes)}"
        return self._submit(label, (sendbuf, recvbuf), compare, *begins)

    def _host_steps(
        self,
        kind: Kind,
        send: Buffer,
        recv: Buffer,
        op: ReduceOp,
        name: str,
        root: int,
        keep: tuple[object, ...],
        scratch: HostScratch,
    ) -> list[Callable[[], Run | None]]:
        """Return what a checked call on host arrays does at its turn, one after the other."""
        packed: HostPacked | None = None
        if send.strided is not None or recv.strided is not None:
            packed = HostPacked(send, recv, scratch, **moved(kind, self.rank, root))
            send, recv, keep = packed.send, packed.recv, (*keep, *packed.keep)
        start: Callable[[], Run | None]
        if name == "mpi":
            start = self._start_mpi(kind, send, recv, op, root)
        else:
            bound = self._bind(kind, send, recv, op, name, root)
            start = partial(_started, bound, self._next_tag, keep)
        return [start] if packed is None else [packed.gather, start, packed.scatter]

    def _start_mpi(
        self, kind: Kind, send: Buffer, recv: Buffer, op: ReduceOp, root: int
    ) -> Callable[[], Run]:
        framed = frame(kind, "mpi", self.layout, send, recv, op)
        call, failed = mpi_start(self._mpi, kind, framed.send, framed.recv, framed.op, root)
        label = f"{self.label}{kind.value}/mpi {format_size(recv.nbytes)}"

        def mapped(action: Callable[[], Any]) -> Any:
            try:
                return action()
            except failed as exc:
                raise TransportError(f"{label}: MPI says {exc}") from exc

        def start() -> Run:
            if framed.prepare is not None:
                framed.prepare()
            request = mapped(call)

            def complete() -> bool:
                # With ``call``, which holds what MPI reads.
                if not mapped(request.Test):
                    return False
                if framed.finish is not None and call is not None:
                    framed.finish()
                return True

            return Poll(complete, label)

        return start

    def _submit(
        self,
        label: str,
        keep: object,
        *steps: Callable[[], Run | None],
        background: bool = True,
    ) -> Request:
        self._check_usable()
        request = Request(self._state, self._waiter, label, keep)
        self._state.submit(Work(request, *steps), background=background)
        return request

    def _later_on_device(
        self,
        kind: Kind,
        send: Buffer,
        recv: Buffer,
        op: ReduceOp,
        root: int,
        stream: object,
        keep: tuple[object, ...],
    ) -> Request:
        """Start on a stream; the request is complete when the stream has passed it.

        Nothing of the host's is needed, so it does not wait for its turn, but it takes one: calls
        on host arrays that come later begin after it. The first makes windows, blocking.
        """
        if self._config.check or not self._gpu().begun:
            self._take_turn()
        self._compare((kind, send, recv, op, "device", root))
        try:
            begin = self._gpu().start(kind, send, recv, op, root, stream)
        except (InvalidArgument, UnsupportedError):
            raise  # nothing was started
        except BaseException as exc:
            self._fail(exc)
            raise
        label = f"{self.label}{kind.value}/device {format_size(recv.nbytes)}"
        return self._submit(label, keep, begin)

    def _release(self) -> None:
        self._bound.clear()
        self._state.failure = self._state.failure or "it was closed"


def _started(bound: Bound, next_tag: Callable[[], int], keep: tuple[object, ...]) -> Run:
    return bound.start(next_tag(), keep)
