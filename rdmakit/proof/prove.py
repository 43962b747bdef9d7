"""``prove_path``: collects the evidence about pairs of ranks, collectively, and judges it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rdmakit.communicator import Communicator
from rdmakit.errors import CollectiveMismatch, InvalidArgument, UnsupportedError
from rdmakit.process.phase import current
from rdmakit.proof.children import variants_for
from rdmakit.proof.evidence import PairProof, PathReport
from rdmakit.proof.pairs import MOST_PAIRS, choose_pairs, rounds
from rdmakit.proof.readings import network_stack
from rdmakit.proof.round import START_SECONDS, Doors, Round, child_seconds
from rdmakit.request import integer
from rdmakit.startup import raise_together

__all__ = ["DEFAULT_BYTES", "LEAST_BYTES", "Doors", "prove_path"]

DEFAULT_BYTES = 4 << 20
LEAST_BYTES = 4 << 10
"""Smaller messages are mostly headers, which no counter tells from others' traffic."""


def prove_path(
    comm: Communicator,
    pairs: Sequence[tuple[int, int]] | None = None,
    *,
    nbytes: int = DEFAULT_BYTES,
    memory: str = "host",
    thorough: bool = True,
    inside: bool = False,
    most: int = MOST_PAIRS,
    doors: Doors | None = None,
) -> PathReport:
    """Prove which way bytes take between pairs of ranks. Collective over ``comm``, blocking.

    Uses the communicator's own channel, and for UCX's tables and for other settings short-lived
    children that have the same UCX, settings and network devices. Nothing may be under way on
    ``comm``. Takes about two seconds a round, and some for each variant; a host is in one pair at
    a time. The first rank of a pair sends.

    Args:
        comm: whose ranks they are.
        pairs: of ranks; None: chosen so that every node is in one (see ``choose_pairs``).
        nbytes: of a message, at least 4 KiB.
        memory: ``host``, or ``gpu``: on each rank's current device.
        thorough: with children; without them, memory of the host needs lanes of one kind.
        inside: where pairs are chosen: one of each node too.
        most: where pairs are chosen: pairs of nodes, where fewer would do.
        doors: to the machine.

    Returns:
        Verdicts and evidence, equal on all ranks. A transfer that fails is evidence too: then
        the pairs after it are not tried, and the communicator cannot be used any more.

    Raises:
        InvalidArgument: an argument cannot be, on one rank or more; CollectiveMismatch: they differ
            between ranks; both on all ranks.
        UnsupportedError: GPU memory, and a rank has no GPU that can be used; on all ranks.
        CommunicatorClosed: it was closed, or failed before.
    """
    doors = doors or Doors()
    comm.Barrier()  # what was called before becomes complete
    wanted, problem = _wanted(comm, pairs, nbytes, memory)
    raise_together(comm.bootstrap, problem, InvalidArgument)
    same = msgspec.json.encode([wanted, nbytes, memory, thorough, inside, most])
    odd = [r for r, told in enumerate(comm.bootstrap.allgather(same)) if told != same]
    if odd:  # the same on all ranks
        raise CollectiveMismatch(
            f"prove_path was called with other arguments on rank(s) {odd[:8]} than on rank 0"
        )
    if memory == "gpu":
        raise_together(comm.bootstrap, doors.cuda.why_not(), UnsupportedError)
    sample = ""
    if pairs is None:
        pairs, sample = choose_pairs(comm.layout.nodes, most=most, inside=inside)
    told = comm.bootstrap.allgather(network_stack(doors.tree).encode())
    stacks = [text.decode() for text in told]
    proofs: list[PairProof] = []
    broken = ""
    for these in rounds([(a, b) for a, b in pairs], stacks):
        settings = variants_for(memory, bool(comm.why_staged)) if thorough and not broken else ()
        limit = 4 * comm.config.timeout + len(settings) * (
            2 * child_seconds(comm.config.timeout) + START_SECONDS
        )
        with current.during("proof of path", nbytes=nbytes, timeout=limit):
            work = Round(comm, doors, these, stacks, nbytes, memory, broken)
            found = work.run(settings)
        proofs += found
        broken = broken or work.lost
    place = {tuple(pair): index for index, pair in enumerate(pairs)}
    if broken:
        comm.forbid(f"proof of path: {broken}")
    proofs.sort(key=lambda proof: place[proof.first, proof.second])
    return PathReport(memory=memory, nbytes=nbytes, pairs=tuple(proofs), sample=sample)


def _wanted(
    comm: Communicator, pairs: Sequence[tuple[int, int]] | None, nbytes: int, memory: str
) -> tuple[list[list[int]] | None, str]:
    """Return the pairs, and what is wrong with the arguments; nothing is raised: others wait."""
    try:
        wanted = None if pairs is None else [list(pair) for pair in pairs]
        _check(comm, wanted, nbytes, memory)
    except InvalidArgument as exc:
        return None, str(exc)
    except TypeError as exc:
        return None, f"pairs={pairs!r}: expected pairs of ranks: {exc}"
    return wanted, ""


def _check(comm: Communicator, pairs: list[list[int]] | None, nbytes: int, memory: str) -> None:
    if memory not in ("host", "gpu"):
        raise InvalidArgument(f"memory {memory!r}: host or gpu")
    if integer("nbytes", nbytes) < LEAST_BYTES:
        raise InvalidArgument(f"{nbytes} bytes: a proof takes messages of {LEAST_BYTES} or more")
    for pair in pairs or ():
        if len(set(pair)) != 2 or not all(0 <= rank < comm.size for rank in pair):
            raise InvalidArgument(f"pair {tuple(pair)}: two ranks of 0 to {comm.size - 1}")
    if pairs is not None and len(set(map(tuple, pairs))) < len(pairs):
        raise InvalidArgument("a pair is there twice")
