"""Collectives of one node's ranks on device memory: kernels over CUDA IPC mappings.

All calls are stream-ordered: they return when the kernel is enqueued, inputs may be written and
outputs read by later work on the same stream, and no call waits for the device. Small all-reduces
go through the window in one shot; large ones work in place on registered memory, and go tile by
tile through the window on any other. Ranks must agree in what they call and in which arrays are
registered; a kernel that meets another kind of call on a peer ends with CollectiveMismatch before
it has written to any output.

One collective of a node runs at a time: a call on another stream is ordered after the last. In a
CUDA graph, which may hold any of these calls once their kernels are compiled, the user orders it.
Two nodes that share a GPU and are used from two streams at once need ``crowd``.

Errors are found by the kernels and reported by the next call, :meth:`DeviceNode.check` or
:meth:`DeviceNode.wait`; after one the node is unusable and its memory stays until exit, since a
late peer may still write to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rdmakit.datatypes import SUM, ReduceOp
from rdmakit.drivers import cuda, cuda_compile, cuda_driver
from rdmakit.errors import (
    CommunicatorClosed,
    RdmaKitError,
    SetupError,
    TransferTimeout,
    UnsupportedError,
)
from rdmakit.intra.cuda_ipc import Shared, exchange_facts, share, share_window
from rdmakit.intra.device_calls import (
    DeviceArray,
    Place,
    Prepared,
    plan_barrier,
    plan_call,
)
from rdmakit.intra.device_kernels import (
    MAX_RANKS,
    PUSH_TILE,
    TEAMS,
    THREADS,
    TILE,
    WindowLayout,
    Word,
)
from rdmakit.intra.device_plan import Grid, grid_for
from rdmakit.intra.device_registry import Registration, Registry
from rdmakit.intra.device_words import check_memory, explain, notes_on
from rdmakit.plan.shape import Kind
from rdmakit.protocols import Bootstrap
from rdmakit.waiting import Waiter

__all__ = ["DeviceArray", "DeviceNode", "Registration"]

_GRACE = 2.0
"""Seconds the host waits longer than a kernel."""
_READY_KEPT = 1024
"""Prepared launches kept; a program calls with far fewer different arrays."""


class DeviceNode:
    """See the module. Make it with :meth:`create`.

    Attributes:
        rank: this rank in the node.
        size: ranks of the node.
        facts: each rank's device.
        grid: how many blocks a kernel may have, and whether all ranks' kernels run at once.
        notes: what a person should know, such as that ranks share a GPU.
        registry: memory that the ranks have registered together.
    """

    def __init__(
        self,
        bootstrap: Bootstrap,
        waiter: Waiter,
        facts: Sequence[cuda.DeviceFacts],
        ranks: Sequence[int],
        window: Shared | None,
        layout: WindowLayout,
        grid: Grid,
        unroll: int,
    ) -> None:
        self.rank, self.size, self.facts = bootstrap.rank, bootstrap.size, tuple(facts)
        self.device = facts[bootstrap.rank].ordinal
        self.grid, self.layout, self._ranks = grid, layout, tuple(ranks)
        self.notes: tuple[str, ...] = notes_on(self.facts, self.grid)
        self._bootstrap, self._waiter, self._window = bootstrap, waiter, window
        self._unroll = unroll
        self._pinned = cuda.PinnedMemory(4 * Word.COUNT)
        self._words = self._pinned.bytes.data.cast("I")
        self._ready: dict[tuple[Any, ...], Callable[[int], None]] = {}
        self.registry = Registry()
        self._limit = waiter.timeout
        self._last: Any = None
        self._event = cuda.Event()
        self._failure, self._calls = "", dict[int, str]()

    @classmethod
    def create(
        cls,
        bootstrap: Bootstrap,
        waiter: Waiter,
        *,
        device: int | None = None,
        crowd: int = 0,
        tile: int = 0,
        unroll: int = 0,
        push: bool | None = None,
    ) -> DeviceNode:
        """Make it for the ranks of ``bootstrap``, which must be one node's. Collective, blocking.

        Args:
            bootstrap: control plane of the node.
            waiter: deadline of waits; its timeout is also the kernels', its rank the job's.
            device: ordinal; default CuPy's current device.
            crowd: ranks of the whole job on the busiest GPU, if more than this node's (virtual
                nodes on one GPU): all their kernels must be resident at once. Equal on all ranks.
            tile: bytes a block passes through its window at a time; default the layout's.
            unroll: packs a thread has under way; default by the number of ranks.
            push: whether reductions write into the peers' windows (see WindowLayout); default
                where each rank has a GPU of its own.

        Raises:
            SetupError: on every rank: no GPU, or memory cannot be mapped; names rank and cure.
        """
        problem = cuda.why_not()
        if not problem:
            try:
                device = cuda.current_device() if device is None else device
                cuda.activate(device)
            except (RdmaKitError, RuntimeError) as exc:
                problem = f"the GPU cannot be used: {exc}"
        if not problem and bootstrap.size > MAX_RANKS:
            problem = f"{bootstrap.size} ranks on one node; the kernels serve {MAX_RANKS}"
        problems = [text.decode() for text in bootstrap.allgather(problem.encode())]
        for rank, text in enumerate(problems):
            if text:
                raise SetupError(f"local rank {rank}: {text}")
        assert device is not None
        facts = exchange_facts(bootstrap, device)
        ranks = [int(text) for text in bootstrap.allgather(str(waiter.rank).encode())]
        grid = grid_for(facts, crowd)
        push = grid.sharing == 1 if push is None else push
        layout = WindowLayout(grid.blocks * TEAMS, tile or (PUSH_TILE if push else TILE), push)
        window = share_window(bootstrap, facts, layout.nbytes) if bootstrap.size > 1 else None
        return cls(bootstrap, waiter, facts, ranks, window, layout, grid, unroll)

    # -- memory -------------------------------------------------------------------------------

    def register(self, address: int, nbytes: int, owner: object) -> Registration:
        """Make ``nbytes`` at ``address`` of every rank zero-copy. Collective, blocking.

        All ranks give equal ``nbytes``; later calls must use the same place in it on all ranks.
        ``owner`` is held until :meth:`unregister` or :meth:`close`.

        Raises:
            SetupError: on every rank, when any rank's memory has no IPC handle or sizes differ.
        """
        self._check_usable()
        shared = (
            share(self._bootstrap, self.facts, address, nbytes, owner)
            if self.size > 1
            else Shared((address,), nbytes, owner)
        )
        entry = self.registry.add(address, shared)
        self._ready.clear()
        return entry

    def unregister(self, entry: Registration) -> None:
        """Undo :meth:`register`. Collective, blocking: waits for this rank's kernels."""
        if self._last is not None:
            self.wait(self._last)
        self.registry.remove(entry)
        self._ready.clear()
        entry.shared.close(self._bootstrap)

    def registration(self, address: int, nbytes: int) -> Registration | None:
        """Return the registration that holds the whole range, or None. Local."""
        return self.registry.find(address, nbytes)

    # -- the calls ----------------------------------------------------------------------------

    def allreduce(
        self, send: DeviceArray, recv: DeviceArray, op: ReduceOp = SUM, stream: Any = 0
    ) -> None:
        """Reduce ``send`` of all ranks into every ``recv``. Collective, stream-ordered.

        Bitwise equal on all ranks; float16 and bfloat16 are summed in float32 and rounded once.
        In place where both are the same memory.

        Args:
            send: this rank's input.
            recv: output of the same count and type.
            op: the reduction.
            stream: a CUstream number or an object with ``ptr``; kept until the next call.

        Raises:
            UnsupportedError: memory or type cannot be served; nothing was started.
            TransportError: an earlier call failed; the node is unusable.
        """
        self.run(Kind.ALLREDUCE, send, recv, op, 0, stream)

    def reduce_scatter(
        self, send: DeviceArray, recv: DeviceArray, op: ReduceOp = SUM, stream: Any = 0
    ) -> None:
        """Reduce ``send`` of all ranks; block r of the result goes to ``recv`` of rank r.

        Collective, stream-ordered. ``send`` has size * count elements. Zero-copy needs only
        ``send`` registered. Raises as :meth:`allreduce`.
        """
        self.run(Kind.REDUCE_SCATTER, send, recv, op, 0, stream)

    def allgather(self, send: DeviceArray, recv: DeviceArray, stream: Any = 0) -> None:
        """Put ``send`` of rank r into block r of every ``recv``. Collective, stream-ordered.

        Zero-copy needs only ``recv`` registered. Raises as :meth:`allreduce`.
        """
        self.run(Kind.ALLGATHER, send, recv, SUM, 0, stream)

    def alltoall(self, send: DeviceArray, recv: DeviceArray, stream: Any = 0) -> None:
        """Put block p of ``send`` of rank r into block r of ``recv`` of rank p.

        Collective, stream-ordered. Both have size blocks of equal count, one behind the other, and
        share no memory. Zero-copy needs only ``recv`` registered. Raises as :meth:`allreduce`, and
        InvalidArgument for arrays that are no such blocks.
        """
        self.run(Kind.ALLTOALL, send, recv, SUM, 0, stream)

    def broadcast(self, buf: DeviceArray, root: int = 0, stream: Any = 0) -> None:
        """Copy ``buf`` of rank ``root`` to all. Collective, stream-ordered. Raises as allreduce."""
        self.run(Kind.BROADCAST, buf, buf, SUM, root, stream)

    def barrier(self, stream: Any = 0) -> None:
        """Let later work of ``stream`` wait until all ranks' streams are here. Collective."""
        key = ("barrier",)
        launch = self._ready.get(key)
        if launch is None:
            if self.size == 1:
                return
            prepared = plan_barrier(self.rank, self.size, self.layout)
            launch = self._ready[key] = self._launch(prepared, stream)
        self._start(launch, stream)

    def run(
        self, kind: Kind, send: DeviceArray, recv: DeviceArray, op: ReduceOp, root: int, stream: Any
    ) -> None:
        """Do any of them. Collective, stream-ordered. Raises as :meth:`allreduce`."""
        key = (kind, send.address, recv.address, send.count, send.dtype, op, root)
        launch = self._ready.get(key)
        if launch is None:
            self._check_usable()
            if len(self._ready) >= _READY_KEPT:
                self._ready.clear()
            launch = self._ready[key] = self._prepare(kind, send, recv, op, root, stream)
        self._start(launch, stream)

    def _start(self, launch: Callable[[int], None], stream: Any) -> None:
        if self._failure or self._words[Word.STATE]:
            self.check()
        if self._limit != self._waiter.timeout:
            self._set_limit()
        number = stream if type(stream) is int else stream.ptr
        if stream is not self._last:
            self._follow(number)
            self._last = stream
        launch(number)

    def _set_limit(self) -> None:
        """Let kernels wait as long as the waiter does from now on."""
        self._limit = self._waiter.timeout
        for launch in self._ready.values():
            if isinstance(launch, cuda_driver.Launch):
                launch.args.limit = int(self._limit * 1e9)

    def _follow(self, stream: int) -> None:
        """Order this call after the last one, which was on another stream."""
        last = self._last
        if last is None:
            return
        number: int = last if type(last) is int else last.ptr
        if number == stream:
            return
        # Inside a capture nothing outside may be waited for; the user orders the replay.
        if not cuda_driver.is_capturing(stream) and not cuda_driver.is_capturing(number):
            self._event.record(number)
            cuda.wait_event(stream, self._event)

    # -- preparing ----------------------------------------------------------------------------

    def _prepare(
        self, kind: Kind, send: DeviceArray, recv: DeviceArray, op: ReduceOp, root: int, stream: Any
    ) -> Callable[[int], None]:
        check_memory("sendbuf", send, self.device)
        check_memory("recvbuf", recv, self.device)
        nbytes = min(send.count, recv.count) * send.dtype.itemsize
        if not nbytes:
            return lambda stream: None
        if self.size == 1:
            to, of = recv.address, send.address
            return lambda stream: cuda.copy_async(to, of, 0 if to == of else nbytes, stream)
        place = Place(
            self.rank,
            self.size,
            self.grid.blocks,
            self.layout,
            self.registration,
            self._unroll,
        )
        return self._launch(plan_call(place, kind, send, recv, op, root), stream)

    def _launch(self, prepared: Prepared, stream: Any) -> cuda_driver.Launch:
        assert self._window is not None
        args, name = prepared.args, prepared.kernel
        args.window[: self.size] = self._window.addresses
        args.limit = int(self._waiter.timeout * 1e9)
        args.words = self._pinned.address
        self._calls[args.signature] = prepared.text
        variant = prepared.variant.only(name)
        number = stream if type(stream) is int else stream.ptr
        compiled = cuda_compile.is_compiled(self.device, variant.source, variant.options, name)
        if not compiled and cuda_driver.is_capturing(number):
            raise UnsupportedError(
                f"{name} is not compiled yet and cannot be while a CUDA graph is captured: make "
                "the same call once before the capture"
            )
        function = cuda_compile.get_kernel(self.device, variant.source, variant.options, name)
        return cuda_driver.Launch(function, prepared.blocks, THREADS, args)

    # -- errors and ends ----------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self._failure:
            raise CommunicatorClosed(f"these device collectives are unusable: {self._failure}")

    def check(self) -> None:
        """Raise what a kernel of this rank has reported. Local, does not block.

        Raises:
            TransferTimeout: a peer did not come within the limit.
            CollectiveMismatch: a peer made another call.
            PeerLost: a peer's kernel failed first.
            TransportError: :meth:`abort` ended it.
            CommunicatorClosed: an error was reported before, or the node is closed.
        """
        self._check_usable()
        state = self._words[Word.STATE]
        if not state:
            return
        error = explain(self._words, self._calls, self.rank, self._ranks, self._limit)
        self._failure = str(error)
        raise error

    def abort(self) -> None:
        """End this rank's waiting kernels, within a millisecond. Local, does not block."""
        if self._pinned.address:
            self._words[Word.ABORT] = 1

    def wait(self, stream: Any = 0, polls: Sequence[Callable[[], None]] = ()) -> None:
        """Wait until ``stream`` is done, polling. Local, blocking.

        Args:
            stream: a CUstream number or an object with ``ptr``.
            polls: called between looks, such as a channel's ``progress``.

        Raises:
            TransferTimeout: the deadline has passed; and as :meth:`check`.
        """
        event, waiter = self._event, self._waiter
        event.record(stream if type(stream) is int else stream.ptr)
        # A kernel's own limit is the same: let it be the one that says whom it waits for.
        try:
            waiter.until(event.done, polls, _describe, waiter.timeout + _GRACE)
        except TransferTimeout:
            self.abort()
            waiter.until(lambda: event.done() or bool(self._words[Word.STATE]), (), _describe, 2.0)
            self.check()
            raise
        self.check()

    def close(self) -> None:
        """Release everything. Collective, blocking, idempotent; after an error local.

        Waits for this rank's kernels, then for the other ranks, in the order that CUDA IPC needs.
        """
        if self._failure:
            return  # peers may still write to this memory: it goes with the process
        try:
            if self._last is not None:
                self.wait(self._last)
        except RdmaKitError as exc:
            self._failure = self._failure or str(exc)
            raise
        self._ready.clear()
        for entry in reversed(tuple(self.registry)):
            entry.shared.close(self._bootstrap)
        self.registry.clear()
        if self._window is not None:
            self._window.close(self._bootstrap)
        self._words.release()
        self._event.close()
        self._pinned.close()
        self._failure = "they are closed"


def _describe() -> str:
    return "waiting for the GPU"
