"""One round of a path proof: pairs of ranks that are measured at once, step by step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rdmakit.communicator import Communicator
from rdmakit.drivers import cuda, ucx_loading
from rdmakit.drivers.host import HostTree
from rdmakit.errors import CudaError, SetupError, TransportError, UnsupportedError
from rdmakit.inter.staged import StagedChannel
from rdmakit.proof import measure
from rdmakit.proof.children import Child, End, Setting, run_variant
from rdmakit.proof.counters import moved
from rdmakit.proof.evidence import (
    Evidence,
    Lane,
    Moved,
    Order,
    PairProof,
    Registration,
    Variant,
)
from rdmakit.proof.inside import (
    PIECES,
    DeviceWindowEnd,
    SharedMemory,
    WindowEnd,
    device_window,
)
from rdmakit.proof.judge import judge, kind_of
from rdmakit.proof.measure import PairEnd, messages_for
from rdmakit.proof.readings import read_ports
from rdmakit.proof.registration import try_registration
from rdmakit.protocols import Bootstrap

__all__ = ["START_SECONDS", "Doors", "Round", "child_seconds"]

_CHILD_SECONDS = 20.0
"""Time for the messages of a pair of children, and at least for one wait's limit."""
START_SECONDS = 60.0
"""What starting and ending children may add."""
_CHILD_MESSAGES = 8
_SIDES = ("sender", "receiver")


def child_seconds(timeout: float) -> float:
    """Return how long the messages of a pair of children may take, by the limit of a wait."""
    return max(_CHILD_SECONDS, timeout)


@dataclass(frozen=True)
class Doors:
    """What stands between the proof and the machine; fakes in tests."""

    tree: HostTree = field(default_factory=HostTree)
    child: Callable[[Order, Setting], End] = Child
    register: Callable[..., Registration] = try_registration
    cuda: Any = cuda
    window: Callable[[Bootstrap, Any], SharedMemory] = device_window
    sleep: Callable[[float], None] = time.sleep


class _Part(msgspec.Struct):
    """What one rank of a pair found."""

    problem: str = ""
    lost: bool = False
    """Whether the problem is one of the channel, which cannot be used any more."""
    lanes: tuple[Lane, ...] = ()
    seconds: float = 0.0
    messages: int = 0
    nbytes: int = 0
    counters: tuple[Moved, ...] = ()
    registration: Registration | None = None
    variants: list[Variant] = []
    mapping: str = ""
    kind: str = ""
    wrong: int | None = None
    staged: str = ""


class Round:
    """The pairs that are measured at once. Every rank makes the same calls in the same order."""

    def __init__(
        self,
        comm: Communicator,
        doors: Doors,
        pairs: Sequence[tuple[int, int]],
        stacks: Sequence[str],
        nbytes: int,
        memory: str,
        broken: str,
    ) -> None:
        self.comm, self.doors, self.pairs = comm, doors, pairs
        self.stacks, self.nbytes, self.memory = stacks, nbytes, memory
        self.pair = next((pair for pair in pairs if comm.rank in pair), None)
        self.role = self.pair.index(comm.rank) if self.pair else -1
        self.mine = _Part(problem=f"not tried after: {broken}" if broken and self.pair else "")
        self.end: PairEnd | None = None
        self.window: WindowEnd | DeviceWindowEnd | None = None
        self._staged: StagedChannel | None = None
        self.lost = ""
        """Why the channel cannot be used any more; equal on all ranks after :meth:`run`."""

    # -- what is shared -----------------------------------------------------------------------

    def _inside(self, pair: tuple[int, int]) -> bool:
        layout = self.comm.layout
        return layout.node_of(pair[0]) == layout.node_of(pair[1])

    def _share(self, mine: bytes) -> tuple[bytes, bytes] | None:
        told = self.comm.bootstrap.allgather(mine)
        return (told[self.pair[0]], told[self.pair[1]]) if self.pair else None

    def _both(self) -> list[_Part]:
        told = self._share(msgspec.json.encode(self.mine))
        return [msgspec.json.decode(text, type=_Part) for text in told or ()]

    def _try(self, step: Callable[[], None]) -> None:
        """Do a step of this rank's pair; a failure is evidence, and the others go on."""
        if self.pair is None or self.mine.problem:
            return
        try:
            step()
        except (TransportError, SetupError, CudaError, UnsupportedError, MemoryError) as exc:
            self.mine.problem = f"rank {self.comm.rank}: {type(exc).__name__}: {exc}"
            self.mine.lost = isinstance(exc, TransportError)

    # -- the steps ----------------------------------------------------------------------------

    def run(self, settings: Sequence[Setting]) -> list[PairProof]:
        """Measure. Collective, blocking."""
        try:
            self._try(self._open)
            self._agree()
            self._try(self._warm)
            parts = self._agree()
            if parts:
                self.mine.messages = min(part.messages for part in parts)
            looks = self._traffic()
            parts = self._agree()
            self._try(lambda: self._rest(looks, parts))
            self._agree()
            self._try(self._register)
            for setting in settings:
                self._variant(setting)
            told = self.comm.bootstrap.allgather(msgspec.json.encode(self.mine))
        finally:
            if self.end is not None and not self.mine.problem:
                self.end.close()
            if self._staged is not None and not self.mine.problem:
                self._staged.close()
            if self.window is not None and not self.mine.problem:
                self.window.close()
        found = [msgspec.json.decode(text, type=_Part) for text in told]
        self.lost = next((part.problem for part in found if part.lost), "")
        return [self._proof(pair, found[pair[0]], found[pair[1]]) for pair in self.pairs]

    def _agree(self) -> list[_Part]:
        """Tell the pair; if one of them has a problem the other has it too. Collective."""
        parts = self._both()
        for part in parts:
            self.mine.problem = self.mine.problem or part.problem
        return parts

    def _open(self) -> None:
        assert self.pair is not None
        comm, layout = self.comm, self.comm.layout
        if self._inside(self.pair):
            if self.memory == "gpu":
                pair = comm.bootstrap.subset(self.pair)
                self.window = DeviceWindowEnd(pair, self.doors.cuda, self.doors.window)
            elif comm.window is not None:
                owner = layout.local_rank(self.pair[0])
                self.window = WindowEnd(comm.window, self.doors.tree, owner, writes=not self.role)
            if self.window is not None:
                self.mine.kind, self.mine.mapping = self.window.kind, self.window.mapping
                self.mine.nbytes = self.window.nbytes
            return
        assert comm.channel is not None
        channel: Any = comm.channel
        if self.memory == "gpu":
            self.mine.staged = comm.why_staged
            self.doors.cuda.activate(self.doors.cuda.current_device())
            if comm.why_staged:
                channel = self._staged = StagedChannel(self.doors.cuda, comm.channel)
        self.mine.nbytes = self.nbytes
        peer = comm.channel_ranks[self.pair[1 - self.role]]
        self.end = PairEnd(
            comm.channel, channel, comm.waiter, self.role, peer, self.memory, self.nbytes,
            self.doors.cuda,
        )  # fmt: skip

    def _warm(self) -> None:
        if self.end is None:
            return
        self.end.move(1)
        start = time.monotonic()
        self.end.move(1)
        self.mine.messages = messages_for(self.nbytes, time.monotonic() - start)
        self.mine.lanes = self.end.lanes()
        if self.role == 0:
            self.end.memory.put(self.comm.rank)

    def _traffic(self) -> measure.Looks:
        """Let the bytes go, and look. Collective, blocking."""
        looks: measure.Looks = ()

        def messages() -> None:
            nonlocal looks
            if self.end is None:
                return
            end, count = self.end, self.mine.messages
            names = {device for _, device in self.mine.lanes}
            looks, self.mine.seconds = measure.watch(
                self.doors.tree,
                before,
                lambda: end.move(count),
                names,
                count * self.nbytes,
                self.role,
            )
            if self.role:
                assert self.pair is not None
                self.mine.wrong = end.memory.wrong(self.pair[0])

        before = read_ports(self.doors.tree)
        self.comm.bootstrap.barrier()  # nothing comes before the receiver has looked
        self._try(messages)
        start, before = time.monotonic(), read_ports(self.doors.tree)
        some = any(map(self._inside, self.pairs))
        for piece in range(PIECES if some else 0):
            if self.window is not None:
                self.window.write(piece)
            self.comm.bootstrap.barrier()
            if self.window is not None:
                self.window.read(piece)
            self.comm.bootstrap.barrier()
        if self.window is not None:
            looks = before, read_ports(self.doors.tree)
            self.mine.seconds = time.monotonic() - start
            self.mine.messages = PIECES
            self.mine.wrong = self.window.wrong if self.role else None
        return looks

    def _rest(self, looks: measure.Looks, parts: Sequence[_Part]) -> None:
        """Look at the ports while nothing goes, and compare."""
        if not looks:
            return
        seconds = max(part.seconds for part in parts)
        quiet, pause = measure.pause(self.doors.tree, seconds, self.doors.sleep)
        sent = self.mine.messages * self.mine.nbytes
        self.mine.counters = moved(
            (*looks, *quiet), self.mine.seconds, pause, sent, self.mine.messages, self.comm.rank,
            _SIDES[self.role],
        )  # fmt: skip

    def _register(self) -> None:
        if self.end is None:
            return
        ports = tuple(device for name, device in self.mine.lanes if kind_of(name) == "rdma")
        memory = self.end.memory
        kind = "host" if self.mine.staged else self.memory
        if kind == "host" and self.memory == "gpu":
            return  # the pinned pieces are of no interest
        self.mine.registration = self.doors.register(
            self.comm.rank, _SIDES[self.role], ports, kind, memory.address, memory.nbytes
        )

    def _variant(self, setting: Setting) -> None:
        order = None
        library = ""
        if self.end is not None and not self.mine.problem and self._ucx():
            order = self._order(setting)
            library = ucx_loading.loaded().libraries.get("libucp", "")
        found = run_variant(setting, order, self._share, library, self.doors.child)
        if found is not None:
            self.mine.variants.append(found)

    def _ucx(self) -> bool:
        return self.comm.channel is not None and self.comm.channel.name == "ucx"

    def _order(self, setting: Setting) -> Order:
        comm = self.comm
        devices = getattr(comm.channel, "net_devices", ())
        rank = comm.channel_ranks[comm.rank]
        gpu = setting.memory == "gpu"
        return Order(
            role=self.role,
            policy=comm.config.ucx,
            virtual=comm.virtual,
            devices=devices[rank] if devices else "",
            memory=setting.memory,
            ordinal=int(self.doors.cuda.current_device()) if gpu else -1,
            nbytes=self.nbytes,
            messages=_CHILD_MESSAGES,
            seconds=child_seconds(comm.config.timeout),
        )

    # -- the result ---------------------------------------------------------------------------

    def _proof(self, pair: tuple[int, int], sender: _Part, receiver: _Part) -> PairProof:
        comm, inside = self.comm, self._inside(pair)
        problems = dict.fromkeys(p.problem for p in (sender, receiver) if p.problem)
        registrations = [part.registration for part in (sender, receiver)]
        window = None
        if inside and sender.kind:
            window = WindowEnd.check(sender.kind, sender.mapping, receiver.mapping)
        evidence = Evidence(
            memory=self.memory,
            nbytes=self.nbytes,
            sent=sender.messages * sender.nbytes,
            messages=sender.messages,
            seconds=round(sender.seconds, 6),
            inside=inside,
            one_stack=self.stacks[pair[0]] == self.stacks[pair[1]],
            virtual=comm.virtual,
            channel=comm.channel.name if comm.channel is not None and not inside else "",
            staged=sender.staged,
            sender_lanes=sender.lanes,
            receiver_lanes=receiver.lanes,
            counters=(*sender.counters, *receiver.counters),
            variants=tuple(sender.variants),
            registrations=tuple(one for one in registrations if one is not None),
            window=window,
            wrong=receiver.wrong,
            problems=tuple(problems),
        )
        hosts = (comm.hosts[pair[0]], comm.hosts[pair[1]])
        return PairProof(
            first=pair[0], second=pair[1], hosts=hosts, verdict=judge(evidence), evidence=evidence
        )
