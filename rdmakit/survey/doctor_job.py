"""``rdmakit doctor`` under a launcher: all nodes of the job, of which some may hang or die."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence

import msgspec

from rdmakit.bootstrap import Letters
from rdmakit.config import Config
from rdmakit.doctor.messages import NodeReport
from rdmakit.doctor.model import Finding, Status
from rdmakit.doctor.nodes import Collector, Hello, Member, Said
from rdmakit.doctor.rank_view import node_key, own_view, process_place
from rdmakit.doctor.star import StarBootstrap
from rdmakit.errors import RdmaKitError, TransferTimeout
from rdmakit.process.launcher import Launcher
from rdmakit.process.phase import current
from rdmakit.process.watchdog import abort_on_exception, end_job, install
from rdmakit.report.terminal import on_terminal
from rdmakit.survey.companion import (
    Begin,
    Companion,
    Initialized,
    Job,
    Nodes,
    NodeSaid,
    limited_init,
)
from rdmakit.survey.doctor_options import show
from rdmakit.survey.run import Run

__all__ = ["run_job"]


def run_job(run: Run, config: Config, launcher: Launcher) -> int:
    """Run and return the exit status; rank 0 prints. Blocking, each wait with a deadline.

    Ends the job with status 1 where ranks are lost: MPI_Finalize would wait for them.

    Raises:
        SetupError: MPI does not come up.
    """
    companion = None
    if launcher.local_rank == 0 or launcher.rank == 0:
        begin = Begin(
            options=run.options,
            limits=run.limits,
            checks=run.selected,
            seconds=run.seconds,
            command=list(run.command),
            whys=run.whys,
            rank=launcher.rank,
            size=launcher.size,
            watched=on_terminal(),
        )
        companion = Companion(begin)
    try:
        with limited_init(run.limits):
            letters = Letters()
        if companion is not None:
            companion.tell(Initialized())
    except BaseException:
        if companion is not None:
            companion.done()
        raise
    host = socket.gethostname()
    install(letters.rank, letters.size, host, letters.abort, config)
    abort_on_exception(letters.rank, host, letters.abort)
    with current.during("doctor"):
        view = own_view(letters.rank, launcher.local_rank, config.ucx)
        view = msgspec.structs.replace(view, facts={**view.facts, "processes": process_place()})
        hello = Hello(node_key(config.node_id), view)
        if letters.rank:
            return _member(run, letters, hello, companion)
        assert companion is not None
        return _first(run, letters, hello, companion)


def _member(run: Run, letters: Letters, hello: Hello, companion: Companion | None) -> int:
    if companion is not None:
        companion.done()
    try:
        member = Member(letters, run.limits)
        end = member.run(hello, run.seconds, run.command)
    except TransferTimeout as exc:
        print(f"rdmakit: {exc}; ending the job", file=sys.stderr, flush=True)
        time.sleep(1.0)  # for the report of rank 0's companion
        end_job(letters.abort, 1)
    if not end.together:
        time.sleep(run.limits.silence)  # rank 0 prints and ends the job
        os._exit(1)
    _together(run, letters, end.firsts, member.report)
    return 0


def _first(run: Run, letters: Letters, hello: Hello, companion: Companion) -> int:
    def on_word(node: int, said: Said) -> None:
        companion.tell(NodeSaid(node, said))
        if said.word.doing:
            current.restore(("doctor: " + said.word.doing, (), 0, time.monotonic(), None))

    collector = Collector(
        letters,
        run.limits,
        on_nodes=lambda nodes: companion.tell(Nodes(nodes)),
        on_word=on_word,
        on_tick=companion.ping,
    )
    together = collector.run(hello, run.order, run.seconds, run.command)
    job = [*collector.missing, *run.compared(collector.nodes)]
    companion.tell(Job(job))
    if together:
        job += _together(run, letters, collector.firsts, collector.nodes[0])
    companion.done()
    about = f"{letters.size} ranks on {len(collector.nodes)} node(s)"
    try:
        status = show(run.options, collector.nodes, job, run.whys, about, paths=run.paths)
    except RdmaKitError as exc:
        if together:
            raise
        print(f"rdmakit: {exc}", file=sys.stderr, flush=True)
        end_job(letters.abort, 2)
    if not together:
        end_job(letters.abort, 1)
    return status


def _together(
    run: Run, letters: Letters, firsts: Sequence[int], own: NodeReport | None
) -> list[Finding]:
    """Run the steps in which ranks take part. Collective; ``own``: on the first of a node.

    What is collective here goes over the first rank: two nodes that do not reach each other are
    what is to be found, and MPI's own collectives would hang between them.
    """
    star = StarBootstrap(letters.comm)
    nodes = star.subset(firsts) if own is not None else None
    found: list[Finding] = []
    for step in run.steps:
        if step.nodes is None or len(firsts) < 2:
            continue
        with current.during(f"doctor: {step.checks[0].id}", timeout=step.seconds):
            if nodes is not None and own is not None:
                found += step.nodes(nodes, own)
            star.barrier()
    cut = any(one.status is Status.FAIL for one in found)
    apart = b"1" in star.allgather(b"1" if cut else b"0")
    for step in run.steps:
        if step.ranks is None:
            continue
        with current.during(f"doctor: {step.checks[0].id}", timeout=step.seconds):
            if apart:
                text = "not tried, since there are nodes that do not reach each other"
                found += [
                    Finding(check=check.id, status=Status.UNKNOWN, found=text)
                    for check in step.checks
                ]
            else:
                found += step.ranks(star)
    return run.asked(found)
