"""The collectives in blocks, the reduce to one rank and the scans, with mpi4py's manners.

An array is given alone or as mpi4py's list: ``[array, count, type]``, and in the calls ending in
v ``[array, counts]``, ``[array, counts, displs]`` or ``[array, (counts, displs)]``, a type behind
them if wanted. Counts and displacements are in elements; types are mpi4py's basic ones or their
letters. What lies between blocks is not touched. Blocks may lie in any order.

An array that MPI ignores on a rank (``recvbuf`` of a Gather beside its root) may be None. Arrays
with gaps are gathered and scattered as everywhere, but not in the calls with counts in a list.

Where MPI gives counts to the root or to each rank alone (Gatherv, Scatterv, Alltoallv, and
Reduce_scatter without recvcounts) the ranks tell them each other first, by one small all-gather;
counts that do not fit raise CollectiveMismatch on all ranks, with checking on or off.
"""

from __future__ import annotations

from rdmakit.block_starts import BlockStarts
from rdmakit.datatypes import SUM, Op

__all__ = ["BlockCollectives"]


class BlockCollectives(BlockStarts):
    """See the module. Errors, ``algorithm``, ``timeout`` and ``stream`` are those of Allreduce.

    On GPU arrays the host takes part in all of them, and a CUDA graph cannot hold them. In a
    group whose GPU memory cannot be mapped only the blocking calls are served.
    """

    def Reduce(
        self,
        sendbuf: object,
        recvbuf: object,
        op: Op = SUM,
        root: int = 0,
        *,
        algorithm: str = "auto",
        timeout: float | None = None,
        stream: object = None,
    ) -> None:
        """Reduce ``sendbuf`` of all ranks, element by element, into ``recvbuf`` of ``root``.

        Collective, blocking. In place is ``IN_PLACE`` as ``sendbuf`` at the root. Half precision is
        rounded as by Allreduce; AVG and EXACT_SUM are finished at the root.
        """
        self._form_now(
            "Reduce",
            sendbuf,
            recvbuf,
            op,
            root,
            algorithm=algorithm,
            timeout=timeout,
            stream=stream,
        )

    def Gather(
        self,
        sendbuf: object,
        recvbuf: object,
        root: int = 0,
        *,
        algorithm: str = "auto",
        timeout: float | None = None,
        stream: object = None,
    ) -> None:
        """Put ``sendbuf`` of rank r into block r of ``recvbuf`` of ``root``.

        Collective, blocking. ``sendbuf`` has count elements, ``recvbuf`` size * count (a count in
        a list is that of one block). ``IN_PLACE`` as ``sendbuf`` at the root: its block is there.
        """
        self._form_now(
            "Gather",
            sendbuf,
            recvbuf,
            root=root,
            algorithm=algorithm,
            timeout=timeout,
            stream=stream,
        )

    def Gatherv(
        self,
        sendbuf: object,
        recvbuf: object,
        root: int = 0,
        *,
        algorithm: str = "auto",
        timeout: float | None = None,
        stream: object = None,
    ) -> None:
        """Gather blocks whose counts differ. Collective, blocking; counts are the root's."""
        self._form_now(
            "Gatherv",
            sendbuf,
            recvbuf,
            root=root,
            algorithm=algorithm,
            timeout=timeout,
            stream=stream,
        )

    def Scatter(
        self,
        sendbuf: object,
        recvbuf: object,
        root: int = 0,
        *,
        algorithm: str = "auto",
        timeout: float | None = None,
        stream: object = None,
    ) -> None:
        """Copy block r of ``sendbuf`` of ``root`` into ``recvbuf`` of rank r.

        Collective, blocking. ``sendbuf`` has size * count elements, ``recvbuf`` count. ``IN_PLACE``
        as ``recvbuf`` at the root: its block stays where it is.
        """
        self._form_now(
            "Scatter",
            sendbuf,
            recvbuf,
            root=root,
            algorithm=algorithm,
            timeout=timeout,
            stream=stream,
        )

    def Scatterv(
        self,
        sendbuf: object,
        recvbuf: object,
        root: int = 0,
        *,
        algorithm: str = "auto",
        timeout: float | None = None,
        stream: object = None,
    ) -> None:
        """Scatter blocks whose counts differ. Collective, blocking; counts are the root's."""
        self._form_now(
            "Scatterv",
            sendbuf,
            recvbuf,
            root=root,
            algorithm=algorithm,
            timeout=timeout,
            stream=stream,
        )

    def Allgatherv(
        self,
        sendbuf: object,
        recvbuf: object,
        *,
        algorithm: str = "auto",
        timeout: float | None = None,
        stream: object = None,
    ) -> None:
        """Put ``sendbuf`` of rank r into block r of every ``recvbuf``, with counts that differ.

        Collective, blocking; all ranks give equal counts. ``IN_PLACE`` as Allgather's.
        """
        self._form_now(
            "Allgatherv", sendbuf, recvbuf, algorithm=algorithm, timeout=timeout, stream=stream
        )

    def Reduce_scatter(
        self,
        sendbuf: object,
        recvbuf: object,
        recvcounts: object = None,
        op: Op = SUM,
        *,
        algorithm: str = "auto",
        timeout: float | None = None,
        stream: object = None,
    ) -> None:
        """Reduce ``sendbuf`` of all ranks; block r of the result goes to rank r.

        Collective, blocking. Block r has ``recvcounts[r]`` elements; all ranks give the same
        counts, or none: then the length of ``recvbuf`` is told to the others. ``IN_PLACE`` as
        ``sendbuf``: ``recvbuf`` holds the whole input, and the result comes to its front.
        ``recvbuf`` may also be the own block in ``sendbuf``.
        """
        self._form_now(
            "Reduce_scatter",
            sendbuf,
            recvbuf,
            op,
            counts=recvcounts,
            algorithm=algorithm,
            timeout=timeout,
            stream=stream,
        )

    def Alltoall(
        self,
        sendbuf: object,
        recvbuf: object,
        *,
        algorithm: str = "auto",
        timeout: float | None = None,
        stream: object = None,
    ) -> None:
        """Copy block r of ``sendbuf`` into block s of ``recvbuf`` of rank r, s being this rank.

        Collective, blocking. Both have size * count elements. ``IN_PLACE`` as ``sendbuf``, on all
        ranks: blocks of ``recvbuf`` are exchanged.
        """
        self._form_now(
            "Alltoall", sendbuf, recvbuf, algorithm=algorithm, timeout=timeout, stream=stream
        )

    def Alltoallv(
        self,
        sendbuf: object,
        recvbuf: object,
        *,
        algorithm: str = "auto",
        timeout: float | None = None,
        stream: object = None,
    ) -> None:
        """Exchange blocks whose counts differ. Collective, blocking.

        ``sendbuf`` has the counts of what goes to each rank, ``recvbuf`` of what comes from each.
        In place each pair of ranks exchanges equal counts.
        """
        self._form_now(
            "Alltoallv", sendbuf, recvbuf, algorithm=algorithm, timeout=timeout, stream=stream
        )

    def Scan(
        self,
        sendbuf: object,
        recvbuf: object,
        op: Op = SUM,
        *,
        algorithm: str = "auto",
        timeout: float | None = None,
        stream: object = None,
    ) -> None:
        """Reduce ``sendbuf`` of ranks 0 to r into ``recvbuf`` of rank r, in the order of ranks.

        Collective, blocking. In place is ``IN_PLACE`` as ``sendbuf``. There is no AVG.
        """
        self._form_now(
            "Scan", sendbuf, recvbuf, op, algorithm=algorithm, timeout=timeout, stream=stream
        )

    def Exscan(
        self,
        sendbuf: object,
        recvbuf: object,
        op: Op = SUM,
        *,
        algorithm: str = "auto",
        timeout: float | None = None,
        stream: object = None,
    ) -> None:
        """Reduce ``sendbuf`` of the ranks before r into ``recvbuf`` of rank r.

        Collective, blocking. ``recvbuf`` of rank 0 is not touched. Otherwise as :meth:`Scan`.
        """
        self._form_now(
            "Exscan", sendbuf, recvbuf, op, algorithm=algorithm, timeout=timeout, stream=stream
        )
