"""A reference for one node: UCX between the GPUs of its first two ranks, and UCX's own tool.

The channel of the job does not serve here: between virtual nodes it has no local transports. So
the two ranks of the first node make one of their own, with all that UCX has.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec

from rdmakit.bench.measure import Samples
from rdmakit.bench.pair import PairEnd, Shape, measure_pair
from rdmakit.bench.pair_memory import DirectMemory, why_not_direct
from rdmakit.bench.session import Case, Session
from rdmakit.drivers import host
from rdmakit.errors import SetupError, TransportError
from rdmakit.inter.ucx import UcxChannel
from rdmakit.process.launcher import LAUNCHER_VARIABLES
from rdmakit.report.schema import Row

__all__ = ["parse_perftest", "ucx_pair_cases"]

SIZES = (16 << 20, 256 << 20)
WINDOW = 8
"""Messages under way at once, on both sides of the comparison."""
_TOOL = "ucx_perftest"
_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?")
_TOOL_SECONDS = 15.0
_BYTES = 4 << 30
"""Bytes that the tool moves, after some to warm up, and that one call of ours moves."""
_MOST_SECONDS = 1.0
"""Seconds that one call may take, by the rate of the size before: UCX may have no fast way here."""
_STARTING = 0.5
"""Seconds that the tool's server gets before its client calls, which does so once."""


def _messages(nbytes: int) -> int:
    return max(WINDOW, min(100, _BYTES // nbytes))


def ucx_pair_cases(session: Session) -> Iterator[Case]:
    """Yield them, of sizes within the run's."""
    options = session.options
    sizes = [size for size in SIZES if options.begin <= size <= options.end]
    for name, run in (("ucxx", _ucxx), (_TOOL, _perftest)):
        for size in sizes:
            yield Case("intra", "ucx pair", name, size, run, 0.0, 2.0)


class _Pair:
    """The channel of the first two ranks of the first node; ``reason`` says why there is none.

    ``ranks`` are those two; ``channel`` is None on all others, and on all where there is a reason.
    The samples are equal on all ranks, so ``rate`` is as well.
    """

    def __init__(self, session: Session) -> None:
        """Open it. Collective in the job, blocking."""
        comm = session.comm
        self.ranks = comm.layout.nodes[0][:2]
        self.rate = 0.0
        """GB/s of the last row; 0: none yet."""
        self.channel: UcxChannel | None = None
        inside = comm.rank in self.ranks
        boot = comm.bootstrap.split(int(not inside), comm.rank)
        offer = {"problem": "", "address": ""}
        if inside:
            try:
                # Whatever the nodes are: this is one node, and all of its transports are wanted.
                self.channel = UcxChannel.open(
                    boot.rank, comm.config.ucx, virtual=False, local=True
                )
                offer["address"] = self.channel.address.hex()
                offer["problem"] = why_not_direct(self.channel)
            except (SetupError, TransportError) as exc:
                offer["problem"] = str(exc)
        told = [msgspec.json.decode(x) for x in boot.allgather(msgspec.json.encode(offer))]
        self.reason = session.agreed(offer["problem"])
        problem = ""
        if self.channel is not None and not self.reason:
            try:
                self.channel.connect([bytes.fromhex(entry["address"]) for entry in told])
                self.channel.greet([1 - boot.rank], comm.waiter)
            except TransportError as exc:
                problem = str(exc)
        self.reason = self.reason or session.agreed(problem)
        if self.reason:
            self.close()
        free = getattr(boot, "free", None)
        if free is not None:
            free()

    def close(self) -> None:
        """Close it. Local; nothing is under way."""
        channel, self.channel = self.channel, None
        if channel is not None:
            channel.close()


def _ucxx(session: Session, case: Case) -> Row:
    if session.comm.config.ucx == "none":
        return session.row(case, skipped="RDMAKIT_UCX=none", ranks=2)
    pair: _Pair = session.once("ucx pair", lambda: _Pair(session))
    reason, many = pair.reason, _messages(case.nbytes)

    def slow(messages: int) -> bool:
        return bool(pair.rate) and case.nbytes * messages / pair.rate / 1e9 > _MOST_SECONDS

    if slow(WINDOW):
        reason = f"too slow for this size: {pair.rate:.2f} GB/s at the one before"
    if reason:
        return session.row(case, skipped=reason, ranks=2)

    def make() -> PairEnd | None:
        channel, rank = pair.channel, session.comm.rank
        if channel is None:
            return None
        me = pair.ranks.index(rank)
        memory = DirectMemory(session, channel, 1 - me, case.nbytes, rank)
        theirs = pair.ranks[1 - me]
        return PairEnd(channel, session.comm.waiter, memory, 1 - me, me, WINDOW, theirs)

    def measured(shape: Shape) -> Row:
        row = measure_pair(session, case, make, shape, pair.ranks[0])
        pair.rate = row.algbw_GBps or 0.0
        return row

    row = measured(lambda end: (end.one_way, WINDOW, 1))  # the rate says how many more may follow
    if not row.skipped and not slow(many):
        row = measured(lambda end: (partial(end.stream, many), many, 1))
    return row


# -- UCX's own tool ---------------------------------------------------------------------------


def parse_perftest(text: str) -> tuple[int, float]:
    """Return iterations and seconds for one message from the tool's final line. Pure.

    The line ends in: microseconds a message (average, overall), MB/s (average, overall), messages
    a second (average, overall), after the iterations and a percentile. It begins with ``Final:``,
    or, where only it was asked for (-f), with nothing.

    Raises:
        SetupError: there is no such line.
    """
    for line in reversed(text.splitlines()):
        numbers = line.strip().removeprefix("Final:").split()
        if len(numbers) >= 7 and all(map(_NUMBER.fullmatch, numbers)):
            return int(float(numbers[0])), float(numbers[-5]) * 1e-6
    raise SetupError(f"{_TOOL} printed no result: {text.strip()[-200:]!r}")


def _perftest(session: Session, case: Case) -> Row:
    """Run the tool as two child processes of the two ranks."""
    comm = session.comm
    ranks = comm.layout.nodes[0][:2]
    where = next((i for i, rank in enumerate(ranks) if rank == comm.rank), None)
    problem = ""
    if where is not None and not _installed():
        problem = f"no {_TOOL} on PATH (optional)"
    problem = session.agreed(problem)
    if problem:
        return session.row(case, skipped=problem.removeprefix(f"rank {ranks[0]}: "), ranks=2)
    port = int(session.group.share(_free_port() if where == 0 else 0)[ranks[0]])
    uuids = list(dict.fromkeys(session.gpu.ranks[rank].uuid for rank in ranks))
    result: dict[str, Any] = {"problem": "", "calls": 0, "seconds": 0.0, "text": ""}
    if where is not None:
        result = _run_tool(where, port, case.nbytes, uuids)
    told = session.group.share(result)
    bad = [told[rank]["problem"] for rank in reversed(ranks) if told[rank]["problem"]]
    if bad:
        return session.row(case, skipped=str(bad[0]), ranks=2)
    client = told[ranks[1]]
    samples = Samples([float(client["seconds"])], int(client["calls"]), 0.0)
    row = session.row(
        case,
        samples=samples,
        ranks=2,
        transport="ucx",
        note=f"average of one way, {WINDOW} outstanding; its own UCX; values not checked",
    )
    return msgspec.structs.replace(row, first_use_us=None)


def _installed() -> bool:
    return "command not found" not in host.run([_TOOL, "-h"], 5.0).error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _run_tool(where: int, port: int, nbytes: int, uuids: list[str]) -> dict[str, Any]:
    """Run the server (0) or the client (1), and return what it said. Local, blocking."""
    env = {k: v for k, v in os.environ.items() if not LAUNCHER_VARIABLES.match(k)}
    # The tool gives the server the first visible GPU and the client the next.
    env["CUDA_VISIBLE_DEVICES"] = ",".join(uuids)
    calls = _messages(nbytes)
    command = [
        _TOOL, *(["127.0.0.1"] if where else []), "-p", str(port), "-t", "tag_bw", "-m", "cuda",
        "-s", str(nbytes), "-n", str(calls), "-w", "4", "-O", str(WINDOW), "-f",
    ]  # fmt: skip
    shell = ["sh", "-c", f'sleep {_STARTING * where}; exec "$@"', "sh"]
    done = host.run([*shell, *command], _TOOL_SECONDS, env)
    answer: dict[str, Any] = {"problem": "", "calls": 0, "seconds": 0.0}
    who = "client" if where else "server"
    if not done.ok:
        text = done.error or f"status {done.rc}: {(done.stderr or done.stdout).strip()[-200:]}"
        answer["problem"] = f"{_TOOL} {who}: {text}"
    elif where:
        try:
            answer["calls"], answer["seconds"] = parse_perftest(done.stdout)
        except SetupError as exc:
            answer["problem"] = str(exc)
    return answer
