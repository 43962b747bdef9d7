"""Copies between the GPUs of each pair of a node's ranks: by peer mapping, and through the host.

The driver copies over CUDA IPC mappings; ``a->b`` is data of local rank a's GPU that goes to local
rank b's. All nodes do it at once; the other ranks of a node are idle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations, permutations
from typing import Any

import numpy as np

from rdmakit.bench import gpu_values, values
from rdmakit.bench.session import Case, Session, nothing
from rdmakit.bench.staged import PIECE, SLOTS, In, Out, SharedSlots
from rdmakit.communicator import Communicator
from rdmakit.errors import CudaError, SetupError
from rdmakit.report.schema import Row

__all__ = ["DEFAULT", "p2p_cases"]

DEFAULT = 64 << 20
"""Bytes of the bandwidth rows, where the run has such a size and no largest was asked for."""
_SMALL = 8
"""Bytes of the latency rows."""
_TAIL = 1 << 20
"""Bytes behind the copied ones that the window is tried out in when it is made."""
_BYTE = np.dtype(np.uint8)
STAGED = "host-staged"


def p2p_cases(session: Session) -> Iterator[Case]:
    """Yield them: all links first, then what is known from the first few."""
    ranks = max(session.comm.layout.ranks_per_node)
    size = session.options.one_size(DEFAULT)
    pairs = list(permutations(range(ranks), 2))

    def case(first: int, second: int, way: str, nbytes: int) -> Case:
        arrow = "<->" if way == "both ways" else "->"
        run = partial(_run, first=first, second=second, largest=size)
        return Case("intra", f"p2p {first}{arrow}{second}", way, nbytes, run, 0.0, 2.0)

    reason = session.why_not_mapped()
    if reason:
        yield nothing("intra", "p2p", reason, "read")
    else:
        yield from (case(a, b, "read", size) for a, b in pairs)
        yield from (case(a, b, "both ways", size) for a, b in combinations(range(ranks), 2))
        yield from (case(a, b, "write", size) for a, b in pairs)
        yield from (case(a, b, "read", _SMALL) for a, b in pairs)
    yield from (case(a, b, STAGED, size) for a, b in pairs)


class _Peers:
    """Two areas on each GPU that all ranks of the node address: one to copy from, one to copy to.

    Where the memory cannot be mapped ``reason`` says why, on all ranks, and each rank has its own.
    """

    def __init__(self, session: Session, largest: int) -> None:
        """Make them. Collective in the job, blocking."""
        doors, self._node = session.gpu.doors, session.comm.node
        ranks = session.comm.layout.nodes[session.comm.layout.node_of(session.comm.rank)]
        facts = [session.gpu.ranks[rank] for rank in ranks]
        self._shared: Any = None
        self._own: Any = None
        self._offset = -(-largest // 256) * 256
        problem = ""
        if self._node.size > 1:
            try:
                self._shared = doors.share_window(
                    self._node.bootstrap, facts, 2 * self._offset + _TAIL
                )
            except SetupError as exc:
                problem = str(exc)
        self.reason = session.agreed(problem)
        problem = ""
        if self._shared is None:
            try:
                self._own = doors.cuda.DeviceMemory(2 * self._offset)
            except CudaError as exc:
                problem = f"no room: {exc}"
        self.lacking = session.agreed(problem)

    def source(self, rank: int) -> int:
        """Return where local rank ``rank``'s bytes are, in this process."""
        if self._shared is None:
            return int(self._own.address)
        return int(self._shared.addresses[rank])

    def target(self, rank: int) -> int:
        """Return where they come to."""
        return self.source(rank) + self._offset

    def close(self) -> None:
        """Release them. Collective in the node, blocking."""
        if self._shared is not None:
            self._shared.close(self._node.bootstrap)
        if self._own is not None:
            self._own.close()


class _Pinned:
    """Host memory that the node's ranks address, pinned by each: the best way without mappings."""

    def __init__(self, session: Session) -> None:
        """Make it. Collective in the job, blocking; ``reason`` says why not, on all ranks."""
        doors, node = session.gpu.doors, session.comm.node
        self._doors, self._pinned = doors, list[int]()
        self._window: Any = None
        self._lines: dict[tuple[type, int], Any] = {}
        problem = ""
        try:
            self._window = _host_window(doors.host_window, node)
            areas = [self._window.area(rank) for rank in range(node.size)]
            self._addresses = [int(area.ctypes.data) for area in areas]
            for address in self._addresses:
                doors.tools.pin(address, PIECE * SLOTS)
                self._pinned.append(address)
        except (SetupError, CudaError) as exc:
            problem = f"no pinned memory that the node shares: {exc}"
        self.reason = session.agreed(problem)

    def line(self, kind: type[Out] | type[In], peer: int) -> Any:
        """Return this rank's line to or from local rank ``peer``, one for the whole run."""
        if (kind, peer) not in self._lines:
            slots = SharedSlots(self._window, self._addresses, peer)
            stream = self._doors.tools.new_stream()
            made = kind(self._doors.cuda, slots, stream.ptr)
            self._lines[kind, peer] = made, stream
        return self._lines[kind, peer][0]

    def close(self) -> None:
        """Release it. Local; nothing is under way."""
        for line, _ in self._lines.values():
            line.close()
        for address in self._pinned:
            self._doors.tools.unpin(address)
        if self._window is not None:
            self._window.close()


def _host_window(make: Callable[..., Any], node: Any) -> Any:
    """Return shared memory of the node. Collective in it, blocking; raises SetupError on all."""
    flags = 2 * node.size
    try:
        return make(node.bootstrap, PIECE * SLOTS, flags, named=False)
    except SetupError:  # where peers' descriptors cannot be opened a name is needed
        return make(node.bootstrap, PIECE * SLOTS, flags, named=True)


def _run(session: Session, case: Case, first: int, second: int, largest: int) -> Row:
    peers: _Peers = session.once("peers", lambda: _Peers(session, largest))
    staged = case.algorithm == STAGED
    reason = peers.lacking or ("" if staged else peers.reason)
    pinned: _Pinned | None = None
    if staged and not reason:
        pinned = session.once("pinned", lambda: _Pinned(session))
        reason = pinned.reason
    if reason:
        return session.row(case, skipped=reason, ranks=2)
    call, mine = _call_of(session, case, peers, pinned, first, second)
    if mine and not staged:
        call = session.waited(call)
    samples = session.timed(call)
    wrong: int | None = None
    if session.options.check:
        wrong = _checked(session, case, peers, call, first, second)
    label = STAGED if staged else _link(session.comm, session, first, second)
    return session.row(case, samples=samples, ranks=2, wrong=wrong, transport=label)


def _call_of(
    session: Session,
    case: Case,
    peers: _Peers,
    pinned: _Pinned | None,
    first: int,
    second: int,
) -> tuple[Callable[[], object], bool]:
    """Return what this rank does in one call, and whether it does anything."""
    node, door, nbytes = session.comm.node, session.gpu.doors.cuda, case.nbytes
    rank, size = node.rank, node.size
    if max(first, second) >= size or rank not in (first, second):
        return _idle, False
    if pinned is not None:
        return _through_host(session, peers, pinned, first, second, nbytes), True
    sources = {
        "read": {second: (peers.target(second), peers.source(first))},
        "write": {first: (peers.target(second), peers.source(first))},
        "both ways": {
            first: (peers.target(first), peers.source(second)),
            second: (peers.target(second), peers.source(first)),
        },
    }[case.algorithm]
    if rank not in sources:
        return _idle, False
    to, of = sources[rank]

    def copy() -> None:
        door.copy_async(to, of, nbytes, door.current_stream().ptr)

    return copy, True


def _through_host(
    session: Session, peers: _Peers, pinned: _Pinned, first: int, second: int, nbytes: int
) -> Callable[[], object]:
    rank, waiter = session.comm.node.rank, session.comm.waiter
    line = pinned.line(Out, second) if rank == first else pinned.line(In, first)
    address = peers.source(rank) if rank == first else peers.target(rank)

    def move() -> None:
        part = line.add(address, nbytes, 0)
        waiter.until(part.done, (), lambda: f"bench: p2p {first}->{second} through the host")

    return move


def _checked(
    session: Session, case: Case, peers: _Peers, call: Callable[[], object], first: int, second: int
) -> int:
    """Do it once more on values of this pair alone; return the wrong bytes of all ranks."""
    node, door = session.comm.node, session.gpu.doors.cuda
    ways = [(first, second)] + [(second, first)] * (case.algorithm == "both ways")

    def pattern(a: int, b: int) -> np.ndarray[Any, Any]:
        return values.block(a * node.size + b, _BYTE)

    for a, b in ways if max(first, second) < node.size else ():
        if node.rank == a:
            gpu_values.fill(door, peers.source(a), case.nbytes, pattern(a, b))
        if node.rank == b:
            nothing_sent = np.zeros(1, np.uint8)  # no value of a pattern
            gpu_values.fill(door, peers.target(b), case.nbytes, nothing_sent)
    session.group.barrier()
    call()
    session.group.barrier()
    wrong = 0
    for a, b in ways if max(first, second) < node.size else ():
        if node.rank == b:
            wrong += gpu_values.count_wrong(door, peers.target(b), case.nbytes, pattern(a, b))
    return session.wrong(wrong)


def _link(comm: Communicator, session: Session, first: int, second: int) -> str:
    """Return what the bytes took, as the first node that has both ranks knows. Collective."""
    told, node = "", comm.node
    if max(first, second) < node.size:
        ranks = comm.layout.nodes[comm.layout.node_of(comm.rank)]
        uuids = [session.gpu.ranks[ranks[local]].uuid for local in (first, second)]
        told = "/".join(filter(None, ("cuda_ipc", session.gpu.doors.tools.link_between(*uuids))))
    return next((str(text) for text in session.group.share(told) if text), "cuda_ipc")


def _idle() -> None:
    """What ranks do that are not in the pair."""
