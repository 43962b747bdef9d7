"""Every exception rdmakit raises on purpose, ordered by what the caller can do about it.

::

    RdmaKitError
    ├── InvalidArgument (ValueError)   the call is wrong: fix the arguments
    ├── UnsupportedError               right call, not possible here; the text says why
    ├── SetupError                     launcher, MPI, UCX or machine; the text says the cure
    │   └── UcxUnavailable             no usable UCX in this process; the MPI channel can serve
    ├── OutputError                    standard output or a result file cannot be written
    ├── CudaError                      a call of CUDA's driver failed; the text has its words
    ├── CollectiveMismatch             ranks called different things; raised on every rank
    ├── MessageTruncated               a message was longer than the receiver's array
    ├── CommunicatorClosed             used after close() or after an earlier error
    └── TransportError                 data may have moved: the communicator is unusable afterwards
        ├── ConnectError
        ├── TransferTimeout            a wait passed its deadline
        └── PeerLost                   the transport reported a dead peer
"""

from __future__ import annotations

__all__ = [
    "CollectiveMismatch",
    "CommunicatorClosed",
    "ConnectError",
    "CudaError",
    "InvalidArgument",
    "MessageTruncated",
    "OutputError",
    "PeerLost",
    "RdmaKitError",
    "SetupError",
    "TransferTimeout",
    "TransportError",
    "UcxUnavailable",
    "UnsupportedError",
]


class RdmaKitError(Exception):
    """Base of all rdmakit exceptions."""


class InvalidArgument(RdmaKitError, ValueError):
    """An argument is wrong; nothing was started."""


class UnsupportedError(RdmaKitError):
    """The call is valid but cannot be served here; the text names what is missing."""


class SetupError(RdmaKitError):
    """The launcher, MPI, UCX or the machine is not set up; the text names the cure."""


class UcxUnavailable(SetupError):
    """No usable UCX in this process."""


class OutputError(RdmaKitError):
    """What there is to print or to keep cannot be written: a full disk, a reader that left."""

    def __init__(self, text: str, *, reader_left: bool = False) -> None:
        self.reader_left = reader_left
        super().__init__(text)


class CudaError(RdmaKitError):
    """A CUDA call failed. ``code`` is CUresult, ``name`` its name."""

    def __init__(self, what: str, code: int, name: str = "", text: str = "") -> None:
        self.code, self.name = code, name or "unknown error"
        super().__init__(f"{what}: {self.name} ({code}): {text or 'unknown error'}")


class CollectiveMismatch(RdmaKitError):
    """Ranks of one communicator made different calls; raised on every rank."""


class MessageTruncated(RdmaKitError):
    """A message was longer than the receiver's array and is lost; the communicator is usable."""


class CommunicatorClosed(RdmaKitError):
    """The communicator was closed, or an earlier error made it unusable."""


class TransportError(RdmaKitError):
    """Communication failed after it began; the communicator is unusable from here on."""


class ConnectError(TransportError):
    """A peer could not be reached when connections were made."""


class TransferTimeout(TransportError):
    """A wait passed its deadline."""


class PeerLost(TransportError):
    """A transport reported that a peer is gone."""
