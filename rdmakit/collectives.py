"""Collectives of one group of ranks: a node over its window, a rail over messages, or all.

The three are the same class, so that each layer is measured alone by the loop that measures
the whole.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

from rdmakit.arguments import IN_PLACE, resolve
from rdmakit.baseline import mpi_call, why_not_mpi
from rdmakit.buffer import Buffer
from rdmakit.config import Config, format_size
from rdmakit.datatypes import SUM, MemoryKind, Op, ReduceOp, check_reduction, op_of
from rdmakit.errors import InvalidArgument, TransportError, UnsupportedError
from rdmakit.executor import Bound, Places
from rdmakit.group import Group, State
from rdmakit.inter.tags import MESSAGES, SEQUENCES, TagKind, pack
from rdmakit.layout import RankLayout
from rdmakit.operation import Operation
from rdmakit.plan.planner import ALGORITHMS, algorithms, program, why_not
from rdmakit.plan.select import choose, limits_for
from rdmakit.plan.shape import Call, Kind
from rdmakit.plan.steps import Program, Space
from rdmakit.process.phase import current
from rdmakit.protocols import Bootstrap, Channel, Window
from rdmakit.reduction import frame, on_the_way
from rdmakit.staging import HostCall
from rdmakit.waiting import Waiter

__all__ = ["IN_PLACE", "Collectives", "Operation"]

_BOUND_KEPT = 32
_HELD_KEPT = 1 << 20
"""Bytes of memory of its own that a plan which is kept for later calls may have."""
_REDUCES = (Kind.ALLREDUCE, Kind.REDUCE_SCATTER)


class Collectives(Group):
    """Collectives of one group. Made by :class:`rdmakit.Communicator`, not by users.

    Attributes:
        rank: this rank in the group.
        size: ranks in the group.
        layout: where they are.
    """

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
        state: State | None = None,
    ) -> None:
        super().__init__(bootstrap, waiter, config, label, state)
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

    # -- the calls ----------------------------------------------------------------------------

    def Allreduce(
        self,
        sendbuf: object,
        recvbuf: object,
        op: Op = SUM,
        *,
        algorithm: str = "auto",
        timeout: float | None = None,
        stream: object = None,
    ) -> None:
        """Reduce ``sendbuf`` of all ranks, element by element, into every ``recvbuf``.

        Collective, blocking: ``recvbuf`` is ready on return. Bitwise equal on all ranks, and
        from call to call for planned algorithms; ``mpi`` (taken by ``auto`` for small arrays)
        is as reproducible as the MPI library.

        On GPU arrays it is ordered on ``stream`` and ``recvbuf`` is ready there. Inside a node the
        host does not wait, and an error of the GPU is raised by the next call or
        :meth:`synchronize`; between nodes the host waits for the messages. The first call on GPU
        arrays makes windows, blocking.

        Args:
            sendbuf: contiguous array, or ``IN_PLACE``, or the same array as ``recvbuf``.
            recvbuf: contiguous array of the same count and type.
            op: a ReduceOp, its name, or mpi4py's; :data:`rdmakit.datatypes.TABLE` says which type
                has which. Half precision is added in float32, and rounded for each node's partial
                result and each message; by EXACT_SUM and AVG once.
            algorithm: auto, or one of ``algorithms(Kind.ALLREDUCE)``.
            timeout: seconds one wait may take; default: the configuration's.
            stream: for GPU arrays: a stream of CuPy, PyTorch or Numba, or a CUstream number;
                default CuPy's current stream.

        Raises:
            InvalidArgument: arrays that do not fit each other; nothing was sent.
            UnsupportedError: memory, type or algorithm cannot be served; nothing was sent.
            CollectiveMismatch: with checking on, ranks called different things.
            TransferTimeout: a wait passed its deadline; the communicator is unusable.
            PeerLost: a rank has ended; the communicator is unusable.
            CommunicatorClosed: closed, or an earlier error.
        """
        self._now(Kind.ALLREDUCE, sendbuf, recvbuf, op, algorithm, 0, timeout, stream)

    def Reduce_scatter_block(
        self,
        sendbuf: object,
        recvbuf: object,
        op: Op = SUM,
        *,
        algorithm: str = "auto",
        timeout: float | None = None,
        stream: object = None,
    ) -> None:
        """Reduce ``sendbuf`` of all ranks; block r of the result goes to rank r.

        Collective, blocking. ``sendbuf`` has size * count elements, ``recvbuf`` count. In place
        is ``recvbuf`` being block r of ``sendbuf`` (NCCL's rule). Raises as :meth:`Allreduce`.
        """
        self._now(Kind.REDUCE_SCATTER, sendbuf, recvbuf, op, algorithm, 0, timeout, stream)

    def Allgather(
        self,
        sendbuf: object,
        recvbuf: object,
        *,
        algorithm: str = "auto",
        timeout: float | None = None,
        stream: object = None,
    ) -> None:
        """Put ``sendbuf`` of rank r into block r of every ``recvbuf``.

        Collective, blocking. ``sendbuf`` has count elements, ``recvbuf`` size * count. With
        ``IN_PLACE`` block r of ``recvbuf`` is rank r's input. Raises as :meth:`Allreduce`.
        """
        self._now(Kind.ALLGATHER, sendbuf, recvbuf, SUM, algorithm, 0, timeout, stream)

    def Bcast(
        self,
        buf: object,
        root: int = 0,
        *,
        algorithm: str = "auto",
        timeout: float | None = None,
        stream: object = None,
    ) -> None:
        """Copy ``buf`` of rank ``root`` to all. Collective, blocking. Raises as Allreduce."""
        self._now(Kind.BROADCAST, buf, buf, SUM, algorithm, root, timeout, stream)

    def Barrier(self) -> None:
        """Return when all ranks have called. Collective, blocking."""
        self._check_usable()
        self._agreement.agree("barrier")
        before = current.enter(f"{self.label}barrier", timeout=self._waiter.timeout)
        try:
            self._bootstrap.barrier()
        finally:
            current.restore(before)

    def bind(
        self,
        kind: Kind,
        sendbuf: object,
        recvbuf: object,
        op: Op = SUM,
        *,
        algorithm: str = "auto",
        root: int = 0,
        stream: object = None,
    ) -> Operation:
        """Return the operation on these arrays, checked and planned once. Local.

        On GPU arrays each call is ordered on ``stream``, or on the stream current at the call.
        With checking on, the first call compares the ranks' operations. Raises as Allreduce.
        """
        send, recv, op, name = self._resolve(kind, sendbuf, recvbuf, op, algorithm, root)
        keep = (sendbuf, recvbuf)
        steps: Program | None = None
        dtype = recv.dtype
        call: Callable[[], object]
        if name == "device":
            # With ``keep``, so that the operation holds the arrays.
            call = partial(self._run_device, kind, send, recv, op, root, stream, keep)
        elif name == "mpi":
            call = self._mpi_call(kind, send, recv, op, root, keep)
            dtype = on_the_way(dtype, op)[0]
        else:
            bound = self._bind(kind, send, recv, op, name, root)
            steps, dtype = bound.program, bound.dtype
            call = partial(self._run, bound, keep)

        if self._config.check:
            call = self._checked_once(call, (kind, send, recv, op, name, root))
        wire = dtype.name if dtype != recv.dtype else ""
        return Operation(name, steps, dtype.itemsize, call, wire_dtype=wire)

    def algorithms(self, kind: Kind) -> tuple[str, ...]:
        """Return the algorithms that can serve ``kind`` in this group. Local."""
        planned = algorithms(kind, self.layout)
        return (*planned, "mpi") if self._mpi is not None else planned

    # -- how they are done --------------------------------------------------------------------

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
            if not timeout > 0:
                raise InvalidArgument(f"timeout {timeout}: seconds, more than 0")
            self._waiter.timeout = timeout
        try:
            self._compare((kind, send, recv, op, name, root))
            if name == "device":
                self._run_device(kind, send, recv, op, root, stream)
            elif name == "mpi":
                self._mpi_call(kind, send, recv, op, root, ())()
            else:
                self._run(self._bind(kind, send, recv, op, name, root), (sendbuf, recvbuf))
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
        return send, recv, op, name

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
        self._check_usable()
        tag = self._first_tag + self._sequence % SEQUENCES * MESSAGES
        self._sequence += 1
        before = current.enter(bound.label)
        try:
            bound.run(tag, keep)
        except BaseException as exc:
            self._fail(exc)
            raise
        finally:
            current.restore(before)

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
        if self._state.failure:
            self._check_usable()
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
        state, channel = self._state, self.channel

        def run(keep: object = keep) -> None:
            if state.failure:
                self._check_usable()
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

    def _release(self) -> None:
        self._bound.clear()
        self._state.failure = self._state.failure or "it was closed"
