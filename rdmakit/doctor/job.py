"""What checks ask of a context again and again. Pure."""

from __future__ import annotations

from rdmakit.doctor.context import Context

__all__ = ["spread", "usable_ports"]


def spread(context: Context) -> bool | None:
    """Return whether the job has ranks on other nodes; None where there is no job."""
    if context.job_size <= 1:
        return None
    return context.job_size > len(context.ranks)


def usable_ports(context: Context) -> list[str]:
    """Return the RDMA ports of the compute fabric that are known to be up, as ``mlx5_0:1``."""
    return [port.title for port in context.fabric.usable if port.health.healthy]
