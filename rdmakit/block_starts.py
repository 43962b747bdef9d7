"""The collectives of :mod:`rdmakit.block_collectives` as calls that return at once."""

from __future__ import annotations

from rdmakit.datatypes import SUM, Op
from rdmakit.form_calls import FormCalls
from rdmakit.request import Request

__all__ = ["BlockStarts"]


class BlockStarts(FormCalls):
    """Each begins the call of its name, with its arguments; the request says when it is done."""

    def Ireduce(
        self,
        sendbuf: object,
        recvbuf: object,
        op: Op = SUM,
        root: int = 0,
        *,
        algorithm: str = "auto",
        stream: object = None,
    ) -> Request:
        """Begin ``Reduce``. Collective, does not block."""
        return self._form_later(
            "Reduce", sendbuf, recvbuf, op, root, algorithm=algorithm, stream=stream
        )

    def Igather(
        self,
        sendbuf: object,
        recvbuf: object,
        root: int = 0,
        *,
        algorithm: str = "auto",
        stream: object = None,
    ) -> Request:
        """Begin ``Gather``. Collective, does not block."""
        return self._form_later(
            "Gather", sendbuf, recvbuf, root=root, algorithm=algorithm, stream=stream
        )

    def Igatherv(
        self,
        sendbuf: object,
        recvbuf: object,
        root: int = 0,
        *,
        algorithm: str = "auto",
        stream: object = None,
    ) -> Request:
        """Begin ``Gatherv``. Collective, does not block."""
        return self._form_later(
            "Gatherv", sendbuf, recvbuf, root=root, algorithm=algorithm, stream=stream
        )

    def Iscatter(
        self,
        sendbuf: object,
        recvbuf: object,
        root: int = 0,
        *,
        algorithm: str = "auto",
        stream: object = None,
    ) -> Request:
        """Begin ``Scatter``. Collective, does not block."""
        return self._form_later(
            "Scatter", sendbuf, recvbuf, root=root, algorithm=algorithm, stream=stream
        )

    def Iscatterv(
        self,
        sendbuf: object,
        recvbuf: object,
        root: int = 0,
        *,
        algorithm: str = "auto",
        stream: object = None,
    ) -> Request:
        """Begin ``Scatterv``. Collective, does not block."""
        return self._form_later(
            "Scatterv", sendbuf, recvbuf, root=root, algorithm=algorithm, stream=stream
        )

    def Iallgatherv(
        self,
        sendbuf: object,
        recvbuf: object,
        *,
        algorithm: str = "auto",
        stream: object = None,
    ) -> Request:
        """Begin ``Allgatherv``. Collective, does not block."""
        return self._form_later("Allgatherv", sendbuf, recvbuf, algorithm=algorithm, stream=stream)

    def Ireduce_scatter(
        self,
        sendbuf: object,
        recvbuf: object,
        recvcounts: object = None,
        op: Op = SUM,
        *,
        algorithm: str = "auto",
        stream: object = None,
    ) -> Request:
        """Begin ``Reduce_scatter``. Collective, does not block."""
        return self._form_later(
            "Reduce_scatter",
            sendbuf,
            recvbuf,
            op,
            counts=recvcounts,
            algorithm=algorithm,
            stream=stream,
        )

    def Ialltoall(
        self,
        sendbuf: object,
        recvbuf: object,
        *,
        algorithm: str = "auto",
        stream: object = None,
    ) -> Request:
        """Begin ``Alltoall``. Collective, does not block."""
        return self._form_later("Alltoall", sendbuf, recvbuf, algorithm=algorithm, stream=stream)

    def Ialltoallv(
        self,
        sendbuf: object,
        recvbuf: object,
        *,
        algorithm: str = "auto",
        stream: object = None,
    ) -> Request:
        """Begin ``Alltoallv``. Collective, does not block."""
        return self._form_later("Alltoallv", sendbuf, recvbuf, algorithm=algorithm, stream=stream)

    def Iscan(
        self,
        sendbuf: object,
        recvbuf: object,
        op: Op = SUM,
        *,
        algorithm: str = "auto",
        stream: object = None,
    ) -> Request:
        """Begin ``Scan``. Collective, does not block."""
        return self._form_later("Scan", sendbuf, recvbuf, op, algorithm=algorithm, stream=stream)

    def Iexscan(
        self,
        sendbuf: object,
        recvbuf: object,
        op: Op = SUM,
        *,
        algorithm: str = "auto",
        stream: object = None,
    ) -> Request:
        """Begin ``Exscan``. Collective, does not block."""
        return self._form_later("Exscan", sendbuf, recvbuf, op, algorithm=algorithm, stream=stream)
