"""MPI-style multi-node RDMA communication for Python.

``import rdmakit`` loads no MPI, UCX or CUDA; that happens when a :class:`Communicator` is made.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rdmakit.errors import (
    CollectiveMismatch,
    CommunicatorClosed,
    ConnectError,
    CudaError,
    InvalidArgument,
    MessageTruncated,
    PeerLost,
    RdmaKitError,
    SetupError,
    TransferTimeout,
    TransportError,
    UcxUnavailable,
    UnsupportedError,
)
from rdmakit.process import origin as _origin  # noqa: F401  (it sees forks from here on)

if TYPE_CHECKING:
    from rdmakit.arguments import IN_PLACE
    from rdmakit.bucketer import GradientBucketer
    from rdmakit.communicator import Communicator, init
    from rdmakit.config import Config
    from rdmakit.datatypes import (
        AVG,
        BAND,
        BOR,
        BXOR,
        EXACT_SUM,
        LAND,
        LOR,
        LXOR,
        MAX,
        MIN,
        PROD,
        SUM,
        ReduceOp,
    )
    from rdmakit.operation import Operation
    from rdmakit.plan.shape import Kind
    from rdmakit.point_to_point import TAG_UB
    from rdmakit.request import Request
    from rdmakit.status import ANY_SOURCE, ANY_TAG, PROC_NULL, UNDEFINED, Status

__version__ = "0.1.0"

_HOMES = {
    "ANY_SOURCE": "rdmakit.status",
    "ANY_TAG": "rdmakit.status",
    "PROC_NULL": "rdmakit.status",
    "TAG_UB": "rdmakit.point_to_point",
    "UNDEFINED": "rdmakit.status",
    "Request": "rdmakit.request",
    "Status": "rdmakit.status",
    "init": "rdmakit.communicator",
    "GradientBucketer": "rdmakit.bucketer",
    "IN_PLACE": "rdmakit.arguments",
    "Operation": "rdmakit.operation",
    "Communicator": "rdmakit.communicator",
    "Config": "rdmakit.config",
    **dict.fromkeys(
        (
            "SUM",
            "PROD",
            "MIN",
            "MAX",
            "AVG",
            "LAND",
            "LOR",
            "LXOR",
            "BAND",
            "BOR",
            "BXOR",
            "EXACT_SUM",
            "ReduceOp",
        ),
        "rdmakit.datatypes",
    ),
    "Kind": "rdmakit.plan.shape",
}

__all__ = [
    "ANY_SOURCE",
    "ANY_TAG",
    "AVG",
    "BAND",
    "BOR",
    "BXOR",
    "EXACT_SUM",
    "IN_PLACE",
    "LAND",
    "LOR",
    "LXOR",
    "MAX",
    "MIN",
    "PROC_NULL",
    "PROD",
    "SUM",
    "TAG_UB",
    "UNDEFINED",
    "CollectiveMismatch",
    "Communicator",
    "CommunicatorClosed",
    "Config",
    "ConnectError",
    "CudaError",
    "GradientBucketer",
    "InvalidArgument",
    "Kind",
    "MessageTruncated",
    "Operation",
    "PeerLost",
    "RdmaKitError",
    "ReduceOp",
    "Request",
    "SetupError",
    "Status",
    "TransferTimeout",
    "TransportError",
    "UcxUnavailable",
    "UnsupportedError",
    "__version__",
    "init",
]


def __getattr__(name: str) -> Any:
    """Load public names at first use."""
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'rdmakit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
