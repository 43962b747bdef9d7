"""A channel over plain MPI messages: fallback where UCX cannot be had, and baseline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rdmakit.bootstrap import MpiBootstrap, load_mpi
from rdmakit.errors import TransportError, UnsupportedError
from rdmakit.inter.tags import MESSAGES, unpack
from rdmakit.protocols import Bytes, Request

__all__ = ["MpiChannel"]

_QUARANTINE: list[object] = []
_SEQUENCE_BITS = 2
_LEAST_MESSAGE_BITS = 16


class _MpiRequest:
    __slots__ = ("_complete", "_test", "_what")

    def __init__(self, request: Any, what: str) -> None:
        self._test, self._complete, self._what = request.Test, False, what

    def done(self) -> bool:
        # A completed MPI request is null, whose Test is true as well, but costs a call.
        if not self._complete:
            try:
                self._complete = bool(self._test())
            except load_mpi().Exception as exc:
                raise TransportError(f"{self._what}: MPI says {exc}") from exc
        return self._complete


class MpiChannel:
    """See :class:`rdmakit.protocols.Channel`. Make it with :meth:`create`."""

    name = "mpi"
    holds = False

    def __init__(self, comm: Any, bits: int) -> None:
        self._comm, self._bits = comm, bits
        self.messages = 1 << bits
        self._broken = False
        self._probe, self._silent = comm.Iprobe, 1 << (bits + _SEQUENCE_BITS)
        self.rank: int = comm.Get_rank()
        self._byte = load_mpi().BYTE

    @classmethod
    def create(cls, bootstrap: MpiBootstrap) -> MpiChannel:
        """Make the channel of all ranks, on an MPI communicator of its own. Collective.

        Raises:
            UnsupportedError: this MPI's tags are too short.
        """
        mpi = load_mpi()
        comm = bootstrap.comm.Dup()
        upper = comm.Get_attr(mpi.TAG_UB) or 32767
        bits = int(math.log2(upper + 1)) - _SEQUENCE_BITS - 1  # one for a tag beyond all others
        if bits < _LEAST_MESSAGE_BITS:
            raise UnsupportedError(f"this MPI's tags end at {upper}; rdmakit needs 2^19")
        return cls(comm, min(bits, MESSAGES.bit_length() - 1))

    def _short(self, tag: int) -> int:
        _, _, _, sequence, message = unpack(tag)
        if message >> self._bits:
            raise UnsupportedError(
                f"message number {message} does not fit this MPI's tags ({self._bits} bits)"
            )
        return (sequence % (1 << _SEQUENCE_BITS)) << self._bits | message

    def wrap(self, data: Bytes) -> Any:
        """Return MPI's buffer specification of the memory."""
        return [data, data.nbytes, self._byte]

    def send(self, peer: int, handle: Any, tag: int) -> Request:
        """Start sending."""
        request = self._comm.Isend(handle, peer, self._short(tag))
        return _MpiRequest(request, f"send to rank {peer}")

    def recv(self, peer: int, handle: Any, tag: int) -> Request:
        """Start receiving."""
        request = self._comm.Irecv(handle, peer, self._short(tag))
        return _MpiRequest(request, f"receive from rank {peer}")

    def progress(self) -> None:
        """Move messages along, also where this rank has no request to test.

        A rank that waits for its window only would leave messages in the queues that it shares
        with others, and these stuck behind them (seen with MPICH 5.0). The probe is for a tag
        that nobody uses: MPICH does not look any further where a probe has found a message.
        """
        self._probe(tag=self._silent)

    def flush(self) -> bool:
        """Nothing is held back that later MPI calls would not move."""
        return True

    def check_peers(self) -> None:
        """MPI tells nothing; its launcher ends the job."""

    def transports(self, peer: int) -> Sequence[tuple[str, str]]:
        """Return the one thing known: MPI carries it."""
        return (("mpi", load_mpi().get_vendor()[0].lower().replace(" ", "")),)

    def abandon(self, requests: Sequence[Request], keep: Sequence[object]) -> None:
        """Keep requests and memory until the process ends."""
        self._broken = True
        _QUARANTINE.extend((requests, keep))

    def free(self) -> None:
        """Free the MPI communicator. Collective in MPI's sense; before ``close``, if at all."""
        if self._comm is not None and not self._broken:
            self._comm.Free()
        self._comm = None

    def close(self) -> None:
        """Let go; idempotent. MPI_Finalize frees the MPI communicator if ``free`` did not."""
        self._comm = None
