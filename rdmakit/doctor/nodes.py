"""The checks of all nodes of a job, of which some may hang: their reports come to rank 0.

Nothing here is collective. Every rank says hello to rank 0, which makes nodes of them and asks
the first rank of each to have its checks run (see ``supervise``). What these find is sent as it
is found, and a sign of life with it. Who says nothing for a while is given up, and the others
are reported all the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from rdmakit.doctor.context import RankView
from rdmakit.doctor.messages import NodeReport, Order, Word
from rdmakit.doctor.model import Finding, Status
from rdmakit.doctor.supervise import NODE_CHECK, NODE_CURE, Limits, supervise
from rdmakit.doctor.worker import WORKER
from rdmakit.errors import TransferTimeout

__all__ = ["Collector", "End", "Hello", "Mail", "Member", "Said", "form_nodes"]

_FIRST = 4
"""Times the limit of silence that the first word of rank 0 may take."""
_PAUSE = 0.01
"""Seconds between looks into the letter box: other ranks of the node have work to do."""
INTERFACES = (
    "name the interface that joins the nodes: export OMPI_MCA_btl_tcp_if_include=IFACE "
    "(Open MPI), FI_TCP_IFACE=IFACE with mpirun -iface IFACE (MPICH), "
    "UCX_NET_DEVICES=IFACE (UCX)"
)


class Mail(Protocol):
    """What carries messages; see :class:`rdmakit.bootstrap.Letters`."""

    rank: int
    size: int

    def send(self, rank: int, data: bytes) -> None:
        """Start to send. Local."""
        ...

    def receive(self) -> tuple[int, bytes] | None:
        """Return (sender, message) or None. Local."""
        ...

    @property
    def unsent(self) -> set[int]:
        """Ranks to whom something is under way from here."""
        ...


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A rank's first words to rank 0."""

    node: str
    """Equal for ranks of one node."""
    view: RankView


class _Task(msgspec.Struct, frozen=True, tag="task"):
    """What a rank is to run; nothing for those that are not first on their node."""

    order: Order | None = None


class Said(msgspec.Struct, frozen=True, tag="said"):
    """What came of a check of the sender's node."""

    word: Word
    complete: bool = False


class _Alive(msgspec.Struct, frozen=True, tag="alive"):
    """Nothing new."""


class _Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Who is still there?"""


class _Bye(msgspec.Struct, frozen=True, tag="bye"):
    """The sender's last letter."""


class End(msgspec.Struct, frozen=True, tag="end"):
    """All is told: rank 0's last letter."""

    together: bool
    """Whether every rank of the job is there, so that they can go on together."""
    firsts: list[int] = []
    """First rank of each node."""


_Message = Hello | _Task | Said | _Alive | _Ask | _Bye | End


def form_nodes(hellos: dict[int, Hello]) -> list[NodeReport]:
    """Return a report without findings for each node, in the order of their first ranks. Pure."""
    nodes: dict[str, NodeReport] = {}
    for rank in sorted(hellos):
        view = hellos[rank].view
        node = nodes.setdefault(hellos[rank].node, NodeReport(host=view.host))
        node.ranks.append(rank)
        node.views.append(view)
    return list(nodes.values())


class _Clock:
    """Who was heard when."""

    def __init__(self, mail: Mail, limits: Limits) -> None:
        self.mail, self.limits = mail, limits
        self.heard = dict.fromkeys(range(mail.size), time.monotonic())
        self.told = time.monotonic()

    def messages(self) -> Sequence[tuple[int, _Message]]:
        found = []
        while (letter := self.mail.receive()) is not None:
            sender, data = letter
            self.heard[sender] = time.monotonic()
            found.append((sender, msgspec.json.decode(data, type=_Message)))
        return found

    def quiet(self, rank: int) -> float:
        """Return for how many seconds nothing has come from a rank."""
        return time.monotonic() - self.heard[rank]

    def silent(self, rank: int) -> bool:
        return self.quiet(rank) > self.limits.silence

    def due(self) -> bool:
        """Return whether it is time for a sign of life."""
        now = time.monotonic()
        if now - self.told < self.limits.silence / 8:
            return False
        self.told = now
        return True

    def send(self, rank: int, message: _Message) -> None:
        self.mail.send(rank, msgspec.json.encode(message))


class Member:
    """A rank other than the first of the job."""

    def __init__(self, mail: Mail, limits: Limits) -> None:
        self._clock = _Clock(mail, limits)
        self._end: End | None = None
        self._task: _Task | None = None
        self._heard = False
        self.report: NodeReport | None = None

    def run(
        self, hello: Hello, seconds: Mapping[str, float], command: Sequence[str] = WORKER
    ) -> End:
        """Do what rank 0 asks, until it says that all is told. Blocking.

        Returns:
            Whether all ranks are there; where not, MPI must not be finalized: it would wait.
            The report of this rank's node is in ``report`` where it is the first of it.

        Raises:
            TransferTimeout: rank 0 gives no sign of life.
        """
        self._clock.send(0, hello)
        while self._task is None and self._end is None:
            self._look()
            time.sleep(_PAUSE)
        if self._task is not None and self._task.order is not None:
            order = self._task.order
            self.report = report = NodeReport(host=hello.view.host)
            supervise(
                order,
                seconds,
                report,
                limits=self._clock.limits,
                command=command,
                heard=lambda word: self._clock.send(0, Said(word, report.complete)),
                meanwhile=self._look,
            )
            self._clock.send(0, Said(Word(), complete=True))
        while self._end is None:
            self._look()
            time.sleep(_PAUSE)
        # MPICH takes it for an error of MPI_Finalize where a letter was never read.
        self._clock.send(0, _Bye())
        end = time.monotonic() + self._clock.limits.silence
        while self._clock.mail.unsent and time.monotonic() < end:
            self._clock.messages()
            time.sleep(_PAUSE)
        return self._end

    def _look(self) -> None:
        for sender, message in self._clock.messages():
            self._heard = True
            if isinstance(message, _Task):
                self._task = message
            elif isinstance(message, _Ask):
                self._clock.send(sender, _Alive())
            elif isinstance(message, End):
                self._end = message
        if self._end is not None:
            return
        if self._clock.due():
            self._clock.send(0, _Alive())
        # Where no word of it ever comes, it misses this rank too, and is to say so first: it
        # waits for its word, checks its own node and asks for those that are left.
        limit = self._clock.limits.silence * (1 if self._heard else _FIRST)
        if self._clock.quiet(0) > limit:
            raise TransferTimeout(
                f"rank {self._clock.mail.rank}: rank 0 gave no sign of life for {limit:g} s"
            )


class Collector:
    """Rank 0: hears all others, and has the checks of its own node run."""

    def __init__(
        self,
        mail: Mail,
        limits: Limits,
        on_nodes: Callable[[list[NodeReport]], None] = lambda nodes: None,
        on_word: Callable[[int, Said], None] = lambda node, said: None,
        on_tick: Callable[[], None] = lambda: None,
    ) -> None:
        """Make it; the functions are told of what is known, as it comes."""
        self._clock = _Clock(mail, limits)
        self._on_nodes, self._on_word, self._on_tick = on_nodes, on_word, on_tick
        self._hellos: dict[int, Hello] = {}
        self._node_of: dict[int, int] = {}
        self._ended = False
        self._left: set[int] = set()
        self.nodes: list[NodeReport] = []
        self.missing: list[Finding] = []
        """Ranks that never said a word, or none any more."""

    def run(
        self,
        hello: Hello,
        order: Order,
        seconds: Mapping[str, float],
        command: Sequence[str] = WORKER,
    ) -> bool:
        """Collect. Blocking, with deadlines; returns whether all ranks of the job are there."""
        self._hellos[0] = hello
        size, silence = self._clock.mail.size, self._clock.limits.silence
        # Some ranks may be started seconds after others.
        self._wait(lambda: len(self._hellos) == size, silence)
        self._begin(order)
        supervise(
            self._order(order, 0),
            seconds,
            self.nodes[0],
            limits=self._clock.limits,
            command=command,
            heard=lambda word: self._on_word(0, Said(word, self.nodes[0].complete)),
            meanwhile=self._look,
        )
        self._on_word(0, Said(Word(), complete=True))
        self._wait(
            lambda: all(node.complete or self._silent(node) for node in self.nodes),
            self._clock.limits.node + silence,
        )
        self._give_up()
        together = self._roll_call()
        there = {rank for rank in self._hellos if rank and not self._clock.silent(rank)}
        for rank in there:
            self._clock.send(rank, End(together, self.firsts))
        self._ended = True
        self._wait(lambda: there <= self._left and not self._clock.mail.unsent & there, silence)
        return together and there <= self._left

    @property
    def firsts(self) -> list[int]:
        """First rank of each node."""
        return [node.ranks[0] for node in self.nodes]

    def _begin(self, order: Order) -> None:
        mail, silence = self._clock.mail, self._clock.limits.silence
        for rank in range(mail.size):
            if rank not in self._hellos:
                self.missing.append(
                    _fail(
                        f"rank {rank}",
                        f"rank {rank}: no word within {silence:g} s after MPI_Init of the others; "
                        "its node is not known",
                        "see what it does (mpirun --display map says where it is; ps, py-spy "
                        f"dump); or {INTERFACES}",
                    )
                )
        self.nodes = form_nodes(self._hellos)
        self._on_nodes(self.nodes)
        for index, node in enumerate(self.nodes):
            self._node_of[node.ranks[0]] = index
            for rank in node.ranks:
                if rank:
                    first = rank == node.ranks[0]
                    self._clock.heard[rank] = time.monotonic()
                    self._clock.send(rank, _Task(self._order(order, index) if first else None))

    def _order(self, order: Order, node: int) -> Order:
        size = self._clock.mail.size
        return msgspec.structs.replace(order, ranks=self.nodes[node].views, job_size=size)

    def _look(self) -> None:
        for sender, message in self._clock.messages():
            if isinstance(message, Hello) and not self.nodes:
                self._hellos[sender] = message
            elif isinstance(message, _Bye):
                self._left.add(sender)
            elif isinstance(message, Said):
                index = self._node_of[sender]
                node = self.nodes[index]
                node.hear(message.word)
                node.complete = node.complete or message.complete
                self._on_word(index, message)
        if self._clock.due() and not self._ended:
            for rank in range(1, self._clock.mail.size):
                self._clock.send(rank, _Alive())
        self._on_tick()

    def _wait(self, done: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while True:
            self._look()
            if done() or time.monotonic() > end:
                return
            time.sleep(_PAUSE)

    def _silent(self, node: NodeReport) -> bool:
        return node.ranks[0] != 0 and self._clock.silent(node.ranks[0])

    def _give_up(self) -> None:
        silence = self._clock.limits.silence
        for node in self.nodes:
            if not node.complete:
                doing = f"; last heard in {node.doing}" if node.doing else ""
                text = f"node {node.host}: no report within {silence:g} s"
                text += f" (rank {node.ranks[0]} gives no sign of life){doing}"
                node.findings.append(_fail(f"rank {node.ranks[0]}", text, NODE_CURE))

    def _roll_call(self) -> bool:
        """Ask every rank whether it is there, and note who is not."""
        asked = time.monotonic()
        waited = []
        for rank in self._hellos:
            if rank and not self._clock.silent(rank):
                self._clock.send(rank, _Ask())
                waited.append(rank)
        heard = self._clock.heard
        self._wait(lambda: all(heard[rank] > asked for rank in waited), self._clock.limits.silence)
        given_up = {node.ranks[0] for node in self.nodes if not node.complete}
        gone = [r for r in self._hellos if r and heard[r] <= asked and r not in given_up]
        for rank in gone:
            host = self._hellos[rank].view.host
            text = f"rank {rank} (host {host}): no sign of life any more"
            self.missing.append(_fail(f"rank {rank}", text, NODE_CURE))
        return not (gone or given_up) and len(self._hellos) == self._clock.mail.size


def _fail(subject: str, text: str, cure: str) -> Finding:
    return Finding(
        check=NODE_CHECK,
        status=Status.FAIL,
        found=text,
        subject=subject,
        why="A job on all of these nodes would hang as well.",
        cure=cure,
        urgency=1,
    )
