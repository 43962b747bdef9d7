"""How a collective call is done: checked, planned, bound to memory, and run now or in its turn."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rdmakit.agreement import LATER, refusal
from rdmakit.arguments import resolve
from rdmakit.buffer import Buffer, gpu_key
from rdmakit.config import format_size
from rdmakit.datatypes import Op, ReduceOp, check_reduction, op_of
from rdmakit.errors import InvalidArgument, UnsupportedError
from rdmakit.family import Run, quarantine
from rdmakit.host_calls import HostCalls
from rdmakit.packing import HostScratch
from rdmakit.plan.shape import Form, Kind
from rdmakit.reduction import REDUCES
from rdmakit.request import Request, check_timeout, integer
from rdmakit.staging import HostCall

__all__ = ["Calls"]


_KNOWN_KEPT = 1024
"""Calls on CuPy arrays whose check is remembered."""


class Calls(HostCalls):
    """What the collectives of a group have in common; see :mod:`rdmakit.collectives`."""

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
            root = integer("root", root)
            send, recv, op, name = self._resolve(kind, sendbuf, recvbuf, op, algorithm, root)
            check_timeout(timeout)
        except (InvalidArgument, UnsupportedError) as exc:
            self._refuse(kind.value, exc)
            raise
        usual = self._waiter.timeout
        self._waiter.timeout = usual if timeout is None else timeout
        try:
            self._take_turn()
            self._compare((kind, send, recv, op, name, root))
            keep = (sendbuf, recvbuf)
            if name == "device":
                self._run_device(kind, send, recv, op, root, stream, keep)
            else:
                scratch = self._state.scratch
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
        if kind in REDUCES:
            check_reduction(recv.dtype, op)
        name = self._algorithm(kind, max(send.nbytes, recv.nbytes), recv, op, algorithm)
        if name == "device":
            self._gpu().check(send, recv)
        if key is not None:
            if len(self._known) >= _KNOWN_KEPT:
                self._known.clear()
            self._known[key] = send, recv, op, name
        return send, recv, op, name

    def _run_device(
        self,
        kind: Kind,
        send: Buffer,
        recv: Buffer,
        op: ReduceOp,
        root: int,
        stream: object,
        keep: object,
        form: Form | None = None,
    ) -> None:
        """Do it; ``keep`` owns the arrays, which outlive messages that are given up."""
        if self._state.failure or self._state.works:
            self._take_turn()
        try:
            if form is None:
                self._gpu().run(kind, send, recv, op, root, stream, *self._host_calls())
            else:
                whole = partial(self._on_host, form=form)
                self._gpu().run_form(kind, send, recv, op, root, stream, whole, form)
        except (InvalidArgument, UnsupportedError):
            raise  # nothing was started
        except BaseException as exc:
            quarantine(keep)
            self._fail(exc)
            raise

    def _host_calls(self) -> tuple[HostCall, HostCall | None]:
        """Return how this group, and its rail, do a collective on host memory."""
        return self._on_host, None

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
            root = integer("root", root)
            send, recv, op, name = self._resolve(kind, sendbuf, recvbuf, op, algorithm, root)
            begins: list[Callable[[], Run | None]] = []
            if name == "device":
                self._gpu().refuse_gaps(send, recv)
            else:
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
        self._compare((kind, send, recv, op, "device", root), LATER)
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
