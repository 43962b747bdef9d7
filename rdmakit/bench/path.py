"""The path proof of a benchmark run: what is demanded of it, and what its rows say of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rdmakit.bench.options import Options
from rdmakit.communicator import Communicator
from rdmakit.proof import PathReport, describe, fulfils, paths, prove_path
from rdmakit.proof.pairs import MOST_PAIRS
from rdmakit.proof.prove import Doors

__all__ = ["RunPath", "demand_of", "prove_run"]


@dataclass(frozen=True)
class RunPath:
    """What was proven before the first row; equal on all ranks."""

    report: PathReport | None
    """None: there is one node, or nobody asked."""
    way: str
    """The algorithm of GPU rows that the proof is about; empty with host arrays."""
    problem: str
    """Why a demand is not met, or nothing."""

    def of(self, layer: str, algorithm: str) -> str:
        """Return the verdict for a row; empty where its path was not looked at."""
        if layer != "inter" or self.report is None or algorithm in ("mpi", "nccl"):
            return ""
        other = {"gpu-direct": "host-staged", "host-staged": "gpu-direct"}.get(self.way)
        return "" if other and algorithm == other else paths(self.report)

    def lines(self, *, always: bool) -> list[str]:
        """Return what a person is told: the evidence with a demand, else the verdicts alone."""
        if self.report is None:
            return [self.problem] if self.problem else []
        told = describe(self.report, evidence=always or bool(self.problem))
        return [*told, *([self.problem] if self.problem else [])]


def demand_of(options: Options, comm: Communicator) -> str:
    """Return what must be proven: ``gdr``, ``rdma`` or nothing. Equal on all ranks."""
    direct = comm.config.gpu_direct == "on" and options.device == "gpu" and comm.channel is not None
    return "gdr" if direct else options.require


def prove_run(
    comm: Communicator,
    options: Options,
    cuda: Any = None,
    prove: Callable[..., PathReport] = prove_path,
) -> RunPath:
    """Prove the path between nodes, as far as it is demanded or cheap. Collective, blocking.

    Without a demand: some pairs, every node in one, and no children where they are not needed.

    Args:
        comm: the run's.
        options: placed on a device.
        cuda: the door to CUDA, with GPU arrays.
        prove: :func:`rdmakit.proof.prove_path`.
    """
    demand = demand_of(options, comm)
    memory = "gpu" if options.device == "gpu" else "host"
    way = ("host-staged" if comm.why_staged else "gpu-direct") if memory == "gpu" else ""
    if comm.channel is None:
        one = f"{demand} is required, but there is one node: no bytes go between nodes"
        return RunPath(None, way, one if demand else "")
    if not demand and "inter" not in options.layers:
        return RunPath(None, way, "")
    thorough = bool(demand) or (memory == "gpu" and not comm.why_staged)
    more = {} if cuda is None else {"doors": Doors(cuda=cuda)}
    report = prove(comm, memory=memory, thorough=thorough, most=MOST_PAIRS if demand else 1, **more)
    return RunPath(report, way, fulfils(report, demand) if demand else "")
