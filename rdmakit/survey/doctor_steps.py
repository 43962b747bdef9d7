"""The steps of ``rdmakit doctor`` that look at more than one node: compare, clocks, reach, path."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from rdmakit.config import Config
from rdmakit.devices import choose_device
from rdmakit.doctor.compare import JOB_CHECKS, NodeFacts, compare_nodes
from rdmakit.doctor.ipc_trial import CUDA_IPC, try_ipc
from rdmakit.doctor.link_trial import PCIE_LOAD, try_link
from rdmakit.doctor.messages import NodeReport
from rdmakit.doctor.model import Finding, Status
from rdmakit.doctor.path_findings import PATH, path_findings
from rdmakit.doctor.rank_view import node_key
from rdmakit.doctor.reach import endpoints_of, measure_clocks, port_range, reach
from rdmakit.doctor.reach_findings import REACH
from rdmakit.drivers import cuda
from rdmakit.drivers.host import HostTree
from rdmakit.errors import CudaError, RdmaKitError
from rdmakit.nics import has_active_port
from rdmakit.proof import PathReport
from rdmakit.protocols import Bootstrap
from rdmakit.survey.run import JobStep

if TYPE_CHECKING:
    from rdmakit.communicator import Communicator

__all__ = ["JOB_STEPS", "path_step"]

_CLOCK = "job.clock"
_PATH_SECONDS = 600.0
"""Of all pairs of nodes of a small job, each with children that start UCX anew."""


def _facts(report: NodeReport) -> NodeFacts:
    if not report.facts:
        return NodeFacts(host=report.host)
    return msgspec.convert(report.facts, NodeFacts)


def _compare(nodes: Sequence[NodeReport]) -> list[Finding]:
    """Compare the nodes that told of themselves; their clocks are another step's."""
    told = [_facts(node) for node in nodes if node.facts]
    return [one for one in compare_nodes(told) if one.check != _CLOCK]


def _clocks(bootstrap: Bootstrap, own: NodeReport) -> list[Finding]:
    hosts = [text.decode() for text in bootstrap.allgather(own.host.encode())]
    offsets = measure_clocks(bootstrap)
    nodes = [NodeFacts(host=h, clock=offset) for h, offset in zip(hosts, offsets, strict=True)]
    return [one for one in compare_nodes(nodes) if one.check == _CLOCK]


def _reach(bootstrap: Bootstrap, own: NodeReport) -> list[Finding]:
    facts = _facts(own)
    return reach(
        bootstrap,
        own.host,
        endpoints_of(facts),
        boot_id=facts.boot_id,
        ports=port_range(own.environ),
    )


JOB_STEPS = (
    JobStep([check for check in JOB_CHECKS if check.id != _CLOCK], compare=_compare),
    JobStep([check for check in JOB_CHECKS if check.id == _CLOCK], nodes=_clocks),
    JobStep([REACH], nodes=_reach),
)
"""Checks of a job as a whole, in order."""


def path_step(config: Config, reports: list[PathReport]) -> JobStep:
    """Return the step of ``--path``.

    Args:
        config: of the communicator whose messages are looked at.
        reports: the evidence is put here, on every rank.
    """

    def prove(bootstrap: Bootstrap) -> list[Finding]:
        # Here, since the other steps do without them and are to begin soon.
        from rdmakit.communicator import Communicator
        from rdmakit.proof.prove import prove_path

        active = has_active_port(HostTree())
        told = bootstrap.allgather(socket.gethostname().encode() if active else b"")
        rdma = {host.decode() for host in told if host}
        choice = choose_device(bootstrap, "auto", (), node_key(config.node_id))
        found: list[Finding] = []
        try:
            with Communicator(config=config) as comm:
                if choice.device == "gpu":
                    found += [*_links(bootstrap, choice.ordinal), *_tried(comm)]
                for memory in ("host", *(("gpu",) if choice.device == "gpu" else ())):
                    reports.append(prove_path(comm, memory=memory, inside=True))
                    found += path_findings(reports[-1], rdma)
        except RdmaKitError as exc:  # the same on all ranks
            text = f"no proof: {type(exc).__name__}: {exc}"
            return [*found, PATH.finding(Status.UNKNOWN, text)]
        if choice.device != "gpu":
            text = f"GPU memory: not looked at ({choice.reason or 'no GPU'}); nothing of GPUDirect"
            found.append(PATH.finding(Status.SKIPPED, f"{text} is proven here"))
        return found

    return JobStep([PATH, CUDA_IPC, PCIE_LOAD], ranks=prove, seconds=_PATH_SECONDS)


def _links(bootstrap: Bootstrap, device: int) -> list[Finding]:
    """Look at each GPU's link under load, ranks of one host together as in a job. Collective."""
    host = socket.gethostname()
    try:
        mine = try_link(cuda, device, host)
    except CudaError as exc:  # on this rank alone, perhaps: the others wait for its word
        mine = PCIE_LOAD.finding(Status.UNKNOWN, str(exc), subject=f"{host} device {device}")
    told = bootstrap.allgather(msgspec.json.encode(mine))
    every = [msgspec.json.decode(text, type=Finding) for text in told]
    return list({one.subject: one for one in every}.values())


def _tried(comm: Communicator) -> list[Finding]:
    """Try GPU memory of peers inside the nodes. Collective, blocking; with a GPU on all ranks."""

    def read(array: Any) -> Any:
        comm.synchronize()
        return array.get()

    def make(count: int, value: float) -> Any:
        array = comm.node.empty(count, "float32")
        array.fill(value)
        return array

    return try_ipc(comm, make, read, socket.gethostname())
