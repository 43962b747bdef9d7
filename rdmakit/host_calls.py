"""A checked call on host arrays: its algorithm, bound to memory, run now or at its turn."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rdmakit.baseline import mpi_call, mpi_start, why_not_mpi
from rdmakit.buffer import Buffer
from rdmakit.config import Config, format_size
from rdmakit.datatypes import MemoryKind, ReduceOp
from rdmakit.errors import InvalidArgument, TransportError, UnsupportedError
from rdmakit.executor import Bound, Places
from rdmakit.family import Family, Poll, Run, Work
from rdmakit.group import Group
from rdmakit.inter.tags import MESSAGES, SEQUENCES, TagKind, pack
from rdmakit.layout import RankLayout
from rdmakit.packing import HostPacked, HostScratch, moved
from rdmakit.plan.planner import ALGORITHMS, program, why_not
from rdmakit.plan.select import choose, limits_for
from rdmakit.plan.shape import Form, Kind
from rdmakit.plan.steps import Planned, Space
from rdmakit.process.phase import current
from rdmakit.protocols import Bootstrap, Channel, Window
from rdmakit.reduction import REDUCES, Frame, frame, on_the_way
from rdmakit.request import Request
from rdmakit.rounded import Rounded, rounds_between
from rdmakit.waiting import Waiter

__all__ = ["HostCalls"]

_BOUND_KEPT = 32
_HELD_KEPT = 1 << 20
"""Bytes of memory of its own that a plan which is kept for later calls may have."""


class HostCalls(Group):
    """What the calls of a group do on host arrays."""

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
        named: tuple[int, ...] | None = None,
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
            named or tuple(range(self.size)),
        )
        self._first_tag = pack(identity, TagKind.COLLECTIVE, 0)
        self._sequence = 0
        self._bound: OrderedDict[tuple[Any, ...], Bound] = OrderedDict()
        self._known: dict[tuple[Any, ...], tuple[Buffer, Buffer, ReduceOp, str]] = {}

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

    # -- now ----------------------------------------------------------------------------------

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
        form: Form | None = None,
    ) -> tuple[Callable[[], object], Sequence[Planned], str]:
        """Return the call on host arrays, what was planned for it, and another type on the way."""
        packed: HostPacked | None = None
        if send.strided is not None or recv.strided is not None:
            packed = HostPacked(send, recv, scratch, **moved(kind, self.rank, root))
            send, recv, keep = packed.send, packed.recv, (*keep, *packed.keep)
        call: Callable[[], object]
        planned: Sequence[Planned] = ()
        wire = on_the_way(recv.dtype, op)[0].name if kind in REDUCES else recv.dtype.name
        if name == "mpi":
            call = self._mpi_call(kind, send, recv, op, root, keep, form)
        elif rounds_between(kind, name, self.layout, recv, op):
            halves = Rounded.of(self.layout, self.rank, send, recv, op, scratch)
            first, second = self._bind_halves(halves)
            keep = (*keep, halves.keep)
            runs = partial(self._run, first, keep), partial(self._run, second, keep)
            call, planned = partial(halves.done, *runs), (first.planned, second.planned)
            wire = f"{wire} {recv.dtype.name}"
        else:
            bound = self._bind(kind, send, recv, op, name, root, form)
            call, planned, wire = (
                partial(self._run, bound, keep),
                (bound.planned,),
                bound.dtype.name,
            )
        wire = wire if wire != recv.dtype.name else ""
        return (packed.around(call) if packed is not None else call), planned, wire

    def _bind_halves(self, halves: Rounded) -> tuple[Bound, Bound]:
        """Bind both; each by what is best for it."""
        bound = []
        for kind, send, recv, form in halves.calls:
            nbytes = form.longest(kind, self.size) * recv.dtype.itemsize
            name = choose(kind, self.layout, nbytes, mpi=False)
            bound.append(self._bind(kind, send, recv, ReduceOp.SUM, name, 0, form))
        return bound[0], bound[1]

    def _bind(
        self,
        kind: Kind,
        send: Buffer,
        recv: Buffer,
        op: ReduceOp,
        algorithm: str,
        root: int,
        form: Form | None = None,
    ) -> Bound:
        if form is None:
            form = Form(recv.count if kind is Kind.REDUCE_SCATTER else send.count)
        key = (kind, send.address, recv.address, send.count, recv.dtype, op, algorithm, root, form)
        bound = self._bound.get(key)
        if bound is not None:
            self._bound.move_to_end(key)
            return bound
        writes = moved(kind, self.rank, root)["writes"]
        framed = frame(kind, algorithm, self.layout, send, recv, op, writes=writes)
        send, recv, itemsize = framed.send, framed.recv, framed.recv.dtype.itemsize
        window = self.window.nbytes if self.window is not None else self._config.window_bytes
        call = form.call(kind, self.layout, limits_for(itemsize, window), root)
        steps = program(algorithm, call, self.rank)
        room = self.channel.messages if self.channel is not None else MESSAGES
        if steps.tags > room:
            raise UnsupportedError(
                f"{algorithm} of {call.longest} elements needs {steps.tags} message tags, "
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
            f"{self.label}{kind.value}/{algorithm} {format_size(recv.nbytes or send.nbytes)}",
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

    def _on_host(
        self,
        kind: Kind,
        send: Buffer,
        recv: Buffer,
        op: ReduceOp,
        root: int,
        form: Form | None = None,
    ) -> None:
        nbytes = max(send.nbytes, recv.nbytes)
        if form is not None:
            nbytes = form.longest(kind, self.size) * recv.dtype.itemsize
        name = self._algorithm(kind, nbytes, recv, op, "auto")
        if name == "mpi":
            self._mpi_call(kind, send, recv, op, root, (), form)()
        else:
            scratch = self._state.scratch
            self._host_call(kind, send, recv, op, name, root, (), scratch, form)[0]()

    def _framed(self, kind: Kind, send: Buffer, recv: Buffer, op: ReduceOp, root: int) -> Frame:
        writes = moved(kind, self.rank, root)["writes"]
        return frame(kind, "mpi", self.layout, send, recv, op, writes=writes)

    def _mpi_call(
        self,
        kind: Kind,
        send: Buffer,
        recv: Buffer,
        op: ReduceOp,
        root: int,
        keep: object,
        form: Form | None = None,
    ) -> Callable[[], object]:
        framed = self._framed(kind, send, recv, op, root)
        call, failed = mpi_call(
            self._mpi, kind, framed.send, framed.recv, framed.op, root, self.rank, form
        )
        call = framed.around(call)
        name = f"{self.label}{kind.value}/mpi {format_size(recv.nbytes or send.nbytes)}"
        enter, restore, timeout = current.enter, current.restore, self._waiter.timeout
        family, channel, threaded = self._state, self.channel, self._engine.threaded

        def run(keep: object = keep) -> None:
            if family.works or family.taken or family.failure:
                self._take_turn()
            if not threaded:  # on no rank: nobody moves other things while MPI blocks
                start = self._start_mpi(kind, send, recv, op, root, form)
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
        form: Form | None = None,
    ) -> list[Callable[[], Run | None]]:
        """Return what a checked call on host arrays does at its turn, one after the other."""
        packed: HostPacked | None = None
        if send.strided is not None or recv.strided is not None:
            packed = HostPacked(send, recv, scratch, **moved(kind, self.rank, root))
            send, recv, keep = packed.send, packed.recv, (*keep, *packed.keep)
        begins: list[Callable[[], Run | None]]
        if name == "mpi":
            begins = [self._start_mpi(kind, send, recv, op, root, form)]
        elif rounds_between(kind, name, self.layout, recv, op):
            halves = Rounded.of(self.layout, self.rank, send, recv, op, scratch)
            halves_bound, keep = self._bind_halves(halves), (*keep, halves.keep)
            first, second = (partial(_started, half, self._next_tag, keep) for half in halves_bound)
            begins = halves.begins(first, second)
        else:
            whole = self._bind(kind, send, recv, op, name, root, form)
            begins = [partial(_started, whole, self._next_tag, keep)]
        return begins if packed is None else [packed.gather, *begins, packed.scatter]

    def _start_mpi(
        self,
        kind: Kind,
        send: Buffer,
        recv: Buffer,
        op: ReduceOp,
        root: int,
        form: Form | None = None,
    ) -> Callable[[], Run]:
        framed = self._framed(kind, send, recv, op, root)
        call, failed = mpi_start(
            self._mpi, kind, framed.send, framed.recv, framed.op, root, self.rank, form
        )
        label = f"{self.label}{kind.value}/mpi {format_size(recv.nbytes or send.nbytes)}"

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


def _started(bound: Bound, next_tag: Callable[[], int], keep: tuple[object, ...]) -> Run:
    return bound.start(next_tag(), keep)
