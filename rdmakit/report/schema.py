"""What a benchmark writes: schema ``rdmakit.bench/1``. README documents the fields."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["SCHEMA", "Result", "Row", "Times"]

SCHEMA = "rdmakit.bench/1"


class Times(msgspec.Struct, frozen=True):
    """Microseconds of one call; each sample is the slowest rank's."""

    min: float
    median: float
    p95: float
    p99: float
    max: float


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One case at one size. Rates are GB/s with GB = 1e9 bytes."""

    layer: str
    case: str
    algorithm: str
    transport: str = ""
    """As read back from what carried the bytes: ``shm``, ``tcp/eth0``, ``rc_mlx5/mlx5_0:1``,
    ``cuda_ipc/NVLink``, ``host-staged``; several joined by ``+``."""
    path: str = ""
    """Layer inter: the verdict on the path between nodes (see ``rdmakit.proof``): ``tcp``,
    ``rdma-host``, ``gdr-dmabuf``, ..., ``unproven``; empty where it was not looked at."""
    nbytes: int
    """Bytes of the whole vector, or of one message."""
    count: int
    dtype: str
    wire_dtype: str
    """Type of the elements between nodes."""
    op: str = ""
    ranks: int
    nodes: int
    ranks_per_node: str
    iterations: int = 0
    """Timed calls."""
    first_use_us: float | None = None
    time_us: Times | None = None
    algbw_GBps: float | None = None
    busbw_GBps: float | None = None
    wire_GBps: float | None = None
    """Bytes that the busiest rank sends to other nodes, over the time."""
    gpu: str = ""
    """Model of the GPUs that hold the arrays; empty for host arrays."""
    sharing: int | None = None
    """Most ranks of the job on one GPU; None for host arrays."""
    mps: bool | None = None
    """Whether all of them are shared through MPS; None for host arrays."""
    wrong: int | None = None
    """Elements with a wrong value, over all ranks; None where not checked."""
    skipped: str = ""
    """Why the case was not run; empty if it was."""
    note: str = ""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run."""

    schema: str = SCHEMA
    environment: dict[str, Any]
    rows: list[Row]
    summary: list[str] = []
    interrupted: bool = False
