"""Plain MPI messages: a channel where UCX cannot be had, and mail inside a node.

Python's MPI takes counts of 31 bits unless it is of version 4; longer messages are sent as one
element of a type that is made for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rdmakit.bootstrap import MpiBootstrap, load_mpi
from rdmakit.errors import TransportError, UnsupportedError
from rdmakit.inter.tags import MESSAGES, NUMBERED, USER_TAGS, form_of, formed, unpack
from rdmakit.protocols import Arrived, Bytes, Form, Request

__all__ = ["MpiChannel", "MpiMail"]

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


_UNIT = 1 << 20
_LARGEST = (1 << 31) - 1
"""Bytes of a message that MPI counts one by one."""


def _whole(data: Bytes, mpi: Any) -> tuple[list[Any], Any]:
    """Return MPI's specification of the memory, and a type to be freed once it was given."""
    if data.nbytes <= _LARGEST:
        return [data, data.nbytes, mpi.BYTE], None
    units, rest = divmod(data.nbytes, _UNIT)
    unit = mpi.BYTE.Create_contiguous(_UNIT)
    whole = mpi.Datatype.Create_struct([units, rest], [0, units * _UNIT], [unit, mpi.BYTE])
    unit.Free()
    whole.Commit()
    return [data, 1, whole], whole


class MpiMail:
    """See :class:`rdmakit.protocols.Mail`: on an MPI communicator that has no other messages."""

    direct = False

    def __init__(self, comm: Any) -> None:
        """Describe it. Local; ``comm`` has the ranks of the communicator that is served."""
        self._mpi, self._comm = load_mpi(), comm
        self._status = self._mpi.Status()
        self._probe = comm.Improbe
        room: int = (comm.Get_attr(self._mpi.TAG_UB) or 32767) + 1
        self.numbers = min(1 << 16, room // 16)
        self.tags = min(USER_TAGS, room - 1 - NUMBERED * self.numbers)

    def send(self, peer: int, data: Bytes, tag: int, form: Form = Form.WHOLE) -> Request:
        """Start sending."""
        if form:
            tag = formed(tag, form, self.tags, self.numbers)
        what, made = _whole(data, self._mpi)
        request = self._comm.Isend(what, peer, tag)
        if made is not None:
            made.Free()
        return _MpiRequest(request, f"send to rank {peer}")

    def arrived(self) -> Arrived | None:
        """Take the next message that has come."""
        status, mpi = self._status, self._mpi
        message = self._probe(mpi.ANY_SOURCE, mpi.ANY_TAG, status)
        if message is None:
            return None
        source: int = status.Get_source()

        def receive(data: Bytes) -> Request:
            what, made = _whole(data, mpi)
            request = message.Irecv(what)
            if made is not None:
                made.Free()
            return _MpiRequest(request, f"receive from rank {source}")

        tag, form = form_of(status.Get_tag(), self.tags, self.numbers)
        return Arrived(source, tag, status.Get_elements(mpi.BYTE), receive, form)

    def abandon(self, requests: Sequence[Request], keep: Sequence[object]) -> None:
        """Keep requests and memory until the process ends."""
        _QUARANTINE.extend((requests, keep))


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
