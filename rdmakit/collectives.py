"""Collectives of one group of ranks: a node over its window, a rail over messages, or all.

The three are the same class, so that each layer is measured alone by the loop that measures
the whole. How a call is done is in :mod:`rdmakit.calls`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rdmakit.arguments import IN_PLACE, is_in_place
from rdmakit.block_collectives import BlockCollectives
from rdmakit.datatypes import SUM, Op
from rdmakit.errors import InvalidArgument, UnsupportedError
from rdmakit.family import Poll, Run
from rdmakit.forms import CALLS
from rdmakit.many import Many
from rdmakit.operation import Operation
from rdmakit.packing import HostScratch
from rdmakit.plan.planner import algorithms
from rdmakit.plan.shape import Form, Kind
from rdmakit.plan.steps import Planned
from rdmakit.refused import Refused
from rdmakit.request import Request, integer

__all__ = ["IN_PLACE", "Collectives", "Operation"]

_BOUND_BY_FORM: dict[Kind, str] = {
    row.kind: row.name
    for row in CALLS.values()
    if not row.vector and row.kind is not Kind.REDUCE_SCATTER
}
"""Kinds that :meth:`Collectives.bind` prepares as the calls of their table."""


class Collectives(BlockCollectives, Many, Refused):
    """Collectives of one group. Made by :class:`rdmakit.Communicator`, not by users.

    Attributes:
        rank: this rank in the group.
        size: ranks in the group.
        layout: where they are.
    """

    # -- calls that return when it is done ----------------------------------------------------

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
            sendbuf: array, or ``IN_PLACE``, or the same array as ``recvbuf``. Elements are
                counted in C order; if both arrays are in Fortran order, as they lie in memory.
                Views with gaps (any strides) are gathered into scratch memory first.
            recvbuf: array of the same count and type, each element in its own place.
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
        is ``recvbuf`` being block r of ``sendbuf`` (NCCL's rule), or ``IN_PLACE`` as ``sendbuf``
        (MPI's): then ``recvbuf`` holds the whole input and the result comes to its front. Raises
        as :meth:`Allreduce`.
        """
        if is_in_place(sendbuf):
            self._form_now(
                "Reduce_scatter_block", sendbuf, recvbuf, op,
                algorithm=algorithm, timeout=timeout, stream=stream,
            )  # fmt: skip
            return
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
        self._take_turn()
        self._agreement.agree("barrier")
        label = f"{self.label}barrier"
        self._submit(label, None, self._start_barrier, background=False).Wait()

    def barrier(self) -> None:
        """Do :meth:`Barrier`, by the name of mpi4py's calls on objects."""
        self.Barrier()

    # -- calls that return at once ------------------------------------------------------------
    #
    # Collective; each begins when those called before on this communicator, its node and its rail
    # are complete, moves on while the program does other things, and is complete when its
    # request's Wait or Test says so: the arrays belong to it until then. Results, arguments and
    # errors are those of the call that blocks; an error that other ranks see too (also that calls
    # differ, with checking on) is raised by Wait and Test.

    def Iallreduce(
        self,
        sendbuf: object,
        recvbuf: object,
        op: Op = SUM,
        *,
        algorithm: str = "auto",
        stream: object = None,
    ) -> Request:
        """Begin :meth:`Allreduce`. Collective, does not block."""
        return self._later(Kind.ALLREDUCE, sendbuf, recvbuf, op, algorithm, 0, stream)

    def Ireduce_scatter_block(
        self,
        sendbuf: object,
        recvbuf: object,
        op: Op = SUM,
        *,
        algorithm: str = "auto",
        stream: object = None,
    ) -> Request:
        """Begin :meth:`Reduce_scatter_block`. Collective, does not block."""
        if is_in_place(sendbuf):
            return self._form_later(
                "Reduce_scatter_block", sendbuf, recvbuf, op, algorithm=algorithm, stream=stream
            )
        return self._later(Kind.REDUCE_SCATTER, sendbuf, recvbuf, op, algorithm, 0, stream)

    def Iallgather(
        self, sendbuf: object, recvbuf: object, *, algorithm: str = "auto", stream: object = None
    ) -> Request:
        """Begin :meth:`Allgather`. Collective, does not block."""
        return self._later(Kind.ALLGATHER, sendbuf, recvbuf, SUM, algorithm, 0, stream)

    def Ibcast(
        self, buf: object, root: int = 0, *, algorithm: str = "auto", stream: object = None
    ) -> Request:
        """Begin :meth:`Bcast`. Collective, does not block."""
        return self._later(Kind.BROADCAST, buf, buf, SUM, algorithm, root, stream)

    def Ibarrier(self) -> Request:
        """Begin :meth:`Barrier`: complete when all ranks have called. Collective, does not block.

        It does not wait for the collectives called before to be complete on the other ranks.
        """
        label = f"{self.label}barrier"
        return self._submit(
            label, None, partial(self._agreement.start, "barrier"), self._start_barrier
        )

    def _start_barrier(self) -> Run:
        return Poll(self._bootstrap.start_barrier(), f"{self.label}barrier")

    # -- bound to arrays ----------------------------------------------------------------------

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
        Arrays with gaps are gathered and scattered in each call (``packed`` says so).
        With checking on, the first call compares the ranks' operations, and a rank that refuses
        here waits until it has told the others there. Blocks are equal: calls with counts cannot
        be bound. Raises as Allreduce.
        """
        try:
            root = integer("root", root)
            return self._operation(kind, sendbuf, recvbuf, op, algorithm, root, stream)
        except (InvalidArgument, UnsupportedError) as exc:
            self._refuse(kind.value, exc)
            raise

    def _operation(
        self,
        kind: Kind,
        sendbuf: object,
        recvbuf: object,
        op: Op,
        algorithm: str,
        root: int,
        stream: object,
    ) -> Operation:
        keep = (sendbuf, recvbuf)
        form: Form | None = None
        told: tuple[Any, ...] | str
        if kind in _BOUND_BY_FORM or (kind is Kind.REDUCE_SCATTER and is_in_place(sendbuf)):
            calling = CALLS[_BOUND_BY_FORM.get(kind, "Reduce_scatter_block")]
            ready, op = self._prepared(calling, sendbuf, recvbuf, op, root, None, algorithm)
            assert ready.form is not None
            send, recv, form = ready.send, ready.recv, ready.form
            name = self._chosen(ready, form, op, algorithm)
            told = self._text(ready, op, name, root)
        else:
            send, recv, op, name = self._resolve(kind, sendbuf, recvbuf, op, algorithm, root)
            told = (kind, send, recv, op, name, root)
        what = (kind, send, recv, op, name, root, keep)
        planned: Sequence[Planned] = ()
        wire = ""
        call: Callable[[], object]
        begins: list[Callable[[], Run | None]] = []
        if name == "device":
            # With ``keep``, so that the operation holds the arrays.
            call = partial(self._run_device, kind, send, recv, op, root, stream, keep, form)
        else:
            scratch = HostScratch()
            call, planned, wire = self._host_call(*what, scratch, form)
            begins = self._host_steps(*what, scratch, form)
        checked, compare = self._checked_once(call, told)
        if self._config.check:
            call = checked

        def begin() -> Request:
            label = f"{self.label}{kind.value}/{name}"
            if name != "device":
                return self._submit(label, keep, compare, *begins)
            if form is None:
                return self._later_on_device(kind, send, recv, op, root, stream, keep)
            if self._is_kernel(ready, stream, label, compare):
                return self._kernel_later(ready, op, root, stream, keep, label)
            started = self._begin_on_device(ready, op, root, stream, [form])
            return self._submit(label, keep, compare, started)

        gaps = send.strided is not None or recv.strided is not None
        return Operation(name, planned, call, begin, packed=gaps, wire_dtype=wire)

    def algorithms(self, kind: Kind) -> tuple[str, ...]:
        """Return the algorithms that can serve ``kind`` in this group. Local."""
        planned = algorithms(kind, self.layout)
        return (*planned, "mpi") if self._mpi is not None else planned
