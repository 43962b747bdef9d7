"""Calls in blocks, reduces and scans: prepared by each rank, agreed on, then run as all others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from rdmakit.agreement import refusal
from rdmakit.calls import Calls
from rdmakit.config import format_size
from rdmakit.datatypes import SUM, MemoryKind, Op, ReduceOp, check_reduction, op_of
from rdmakit.errors import CollectiveMismatch, InvalidArgument, UnsupportedError
from rdmakit.family import Run
from rdmakit.forms import CALLS, Calling, Prepared, described
from rdmakit.packing import HostScratch
from rdmakit.plan.shape import Form
from rdmakit.prepare import prepare
from rdmakit.reduction import REDUCES
from rdmakit.request import Request, check_timeout, integer

__all__ = ["FormCalls"]

_TOLD = ("Gatherv", "Scatterv", "Alltoallv")
"""Calls whose counts MPI gives to the root, or to each rank alone."""


class FormCalls(Calls):
    """How a call of :data:`rdmakit.forms.CALLS` is done."""

    def _form_now(
        self,
        name: str,
        sendbuf: object,
        recvbuf: object,
        op: Op = SUM,
        root: int = 0,
        counts: object = None,
        *,
        algorithm: str,
        timeout: float | None,
        stream: object,
    ) -> None:
        """Do it. Collective, blocking."""
        calling, keep = CALLS[name], (sendbuf, recvbuf)
        try:
            root = integer("root", root)
            ready, op = self._prepared(calling, sendbuf, recvbuf, op, root, counts, algorithm)
            check_timeout(timeout)
        except (InvalidArgument, UnsupportedError) as exc:
            if not self._state.failure:
                self._take_turn()
                self._refuse_form(calling, counts, exc)
            raise
        usual = self._waiter.timeout
        self._waiter.timeout = usual if timeout is None else timeout
        try:
            self._take_turn()
            form = self._agreed(ready, op, algorithm, root)
            chosen = self._chosen(ready, form, op, algorithm)
            kind, send, recv = calling.kind, ready.send, ready.recv
            if chosen == "device":
                self._run_device(kind, send, recv, op, root, stream, keep, form)
            else:
                scratch = self._state.scratch
                self._host_call(kind, send, recv, op, chosen, root, keep, scratch, form)[0]()
        finally:
            self._waiter.timeout = usual

    def _form_later(
        self,
        name: str,
        sendbuf: object,
        recvbuf: object,
        op: Op = SUM,
        root: int = 0,
        counts: object = None,
        *,
        algorithm: str,
        stream: object,
    ) -> Request:
        """Begin it. Collective, does not block; on GPU arrays the group's first call does."""
        calling, keep = CALLS[name], (sendbuf, recvbuf)
        forms: list[Form] = []
        begins: list[Callable[[], Run | None]] = []
        try:
            root = integer("root", root)
            ready, op = self._prepared(calling, sendbuf, recvbuf, op, root, counts, algorithm)
            if ready.form is not None:
                forms.append(ready.form)
            size = format_size(max(ready.send.nbytes, ready.recv.nbytes))
            label = f"{self.label}{calling.kind.value}/{algorithm} {size}"
            compare = partial(self._start_compared, ready, op, algorithm, root)
            kernel = self._is_kernel(ready, stream, label, compare)
            if ready.recv.kind is not MemoryKind.DEVICE:
                begins = self._begin_on_host(ready, op, root, algorithm, keep, forms)
            elif not kernel:
                begins = [self._begin_on_device(ready, op, root, stream, forms)]
        except (InvalidArgument, UnsupportedError) as exc:
            self._refuse_form_later(calling, counts, exc)
            raise
        if kernel:
            return self._kernel_later(ready, op, root, stream, keep, label)
        agree = partial(self._start_agreed, ready, op, algorithm, root, forms)
        return self._submit(label, keep, agree, *begins)

    def _begin_on_host(
        self,
        ready: Prepared,
        op: ReduceOp,
        root: int,
        algorithm: str,
        keep: tuple[object, ...],
        forms: list[Form],
    ) -> list[Callable[[], Run | None]]:
        """Return what a call does after the agreement; planned now, where its form is known."""
        late: list[Callable[[], Run | None]] = []

        def plan() -> None:
            chosen = self._chosen(ready, forms[0], op, algorithm)
            late.extend(
                self._host_steps(
                    ready.calling.kind, ready.send, ready.recv, op, chosen, root, keep,
                    HostScratch(), forms[0],
                )
            )  # fmt: skip

        def following() -> Run | None:
            return late.pop(0)() if late else None

        if forms:
            plan()
            return late
        return [plan, following, following, following]  # gather, run, scatter

    def _begin_on_device(
        self, ready: Prepared, op: ReduceOp, root: int, stream: object, forms: list[Form]
    ) -> Callable[[], Run]:
        gpu = self._gpu()
        if not gpu.has_programs:
            self._take_turn()
        kind, send, recv = ready.calling.kind, ready.send, ready.recv
        with self._failing():
            return gpu.start_form(kind, send, recv, op, root, stream, lambda: forms[0])

    def _is_kernel(
        self, ready: Prepared, stream: object, label: str, compare: Callable[[], Run | None]
    ) -> bool:
        """Return whether a call that does not block is one kernel. Collective.

        With checking on the ranks compare before, blocking, what cannot be taken back: a kernel
        that is enqueued, and the windows that the first calls make together.
        """
        if ready.recv.kind is not MemoryKind.DEVICE:
            return False
        gpu, checks = self._gpu(), self._config.check
        first = not gpu.has_programs
        if first and checks:
            self._submit(label, None, compare, background=False).Wait()
        elif not gpu.way:
            self._take_turn()
        with self._failing():
            kernel = gpu.one_kernel(ready.calling.kind, ready.form, stream)
        if kernel and checks and not first:
            self._submit(label, None, compare, background=False).Wait()
        return kernel

    def _kernel_later(
        self,
        ready: Prepared,
        op: ReduceOp,
        root: int,
        stream: object,
        keep: tuple[object, ...],
        label: str,
    ) -> Request:
        """Enqueue the kernel now; the request is complete when the stream has passed it."""
        kind, send, recv = ready.calling.kind, ready.send, ready.recv
        with self._failing():
            begin = self._gpu().start(kind, send, recv, op, root, stream)
        return self._submit(label, keep, begin)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Make the communicator unusable by what is raised here, but where nothing was started."""
        try:
            yield
        except (InvalidArgument, UnsupportedError):
            raise
        except BaseException as exc:
            self._fail(exc)
            raise

    # -- what is checked and agreed on ------------------------------------------------------------

    def _prepared(
        self,
        calling: Calling,
        sendbuf: object,
        recvbuf: object,
        op: Op,
        root: int,
        counts: object,
        algorithm: str,
    ) -> tuple[Prepared, ReduceOp]:
        """Check everything that one rank can check alone."""
        self._check_usable()
        op = op_of(op)
        ready = prepare(
            calling, sendbuf, recvbuf, op, rank=self.rank, size=self.size, root=root, counts=counts
        )
        if calling.kind in REDUCES:
            check_reduction(ready.recv.dtype, op)
        if self._algorithm(calling.kind, 0, ready.recv, op, algorithm) == "device":
            self._gpu().check(ready.send, ready.recv)
        if algorithm == "tree" and calling.vector:
            raise UnsupportedError(
                f"tree {calling.name}: it needs equal blocks one behind the other"
            )
        return ready, op

    def _chosen(self, ready: Prepared, form: Form, op: ReduceOp, algorithm: str) -> str:
        nbytes = form.longest(ready.calling.kind, self.size) * ready.recv.dtype.itemsize
        return self._algorithm(ready.calling.kind, nbytes, ready.recv, op, algorithm)

    def _text(self, ready: Prepared, op: ReduceOp, algorithm: str, root: int) -> str:
        where = "device" if ready.recv.kind is MemoryKind.DEVICE else algorithm
        return described(ready, op, where, root)

    def _agreed(self, ready: Prepared, op: ReduceOp, algorithm: str, root: int) -> Form:
        """Compare the call with the others', and return its form. Collective, blocking."""
        if ready.form is not None:
            if self._config.check:
                self._agreement.agree(self._text(ready, op, algorithm, root))
            return ready.form
        text = self._text(ready, op, algorithm, root)
        return self._settled(ready, self._agreement.exchange(text, ready.facts))

    def _start_compared(
        self, ready: Prepared, op: ReduceOp, algorithm: str, root: int
    ) -> Run | None:
        """Begin to compare the call with the others', without the facts. Does not block."""
        return self._agreement.start(self._text(ready, op, algorithm, root))

    def _start_agreed(
        self, ready: Prepared, op: ReduceOp, algorithm: str, root: int, forms: list[Form]
    ) -> Run | None:
        """Begin the same; the form is put into ``forms`` where it was not known."""
        if ready.form is not None and not self._config.check:
            return None
        text = self._text(ready, op, algorithm, root)
        if ready.form is not None:
            return self._agreement.start(text)

        def take(facts: list[bytes]) -> None:
            forms.append(self._settled(ready, facts))

        return self._agreement.start_exchange(text, ready.facts, take)

    def _settled(self, ready: Prepared, facts: list[bytes]) -> Form:
        try:
            return ready.settled(facts)
        except ValueError as exc:
            raise self._agreement.differ(str(exc)) from None

    # -- refusals: the others learn of them where they would wait for this rank -------------------

    def _refuse_form(self, calling: Calling, counts: object, exc: Exception) -> None:
        if not _tells(calling, counts):
            self._agreement.refuse(calling.name, exc)
            return
        try:
            self._agreement.exchange(refusal(calling.name, exc), b"")
        except CollectiveMismatch as mismatch:
            raise exc from mismatch

    def _refuse_form_later(self, calling: Calling, counts: object, exc: Exception) -> None:
        if self._state.failure:
            return
        told, label = refusal(calling.name, exc), f"{self.label}{calling.name} refused"
        if _tells(calling, counts):
            start = partial(self._agreement.start_exchange, told, b"", len)
            self._submit(label, None, start)
        elif self._config.check:
            self._submit(label, None, partial(self._agreement.start, told))


def _tells(calling: Calling, counts: object) -> bool:
    """Return whether the ranks tell each other counts."""
    return calling.name in _TOLD or (calling.name == "Reduce_scatter" and counts is None)
