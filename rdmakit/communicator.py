"""The communicator: finds nodes, makes window and channel, offers the collectives and messages.

Teardown, on every rank: what is under way becomes complete; barrier, in which messages still move
(nobody uses anything any more); unmap the window; close the channel (endpoints, worker, context);
free MPI communicators. An exit handler does the same before MPI_Finalize for communicators left
open. A communicator split from another uses the other's channel and is closed with it.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from rdmakit import exits
from rdmakit.assembly import (
    Parts,
    channel_of,
    controls_of,
    node_of,
    rail_of,
    routes,
    waiter_of,
    window_of,
)
from rdmakit.bootstrap import MpiBootstrap, may_be_threaded
from rdmakit.collectives import Collectives
from rdmakit.config import Config
from rdmakit.device import DeviceGroup
from rdmakit.device_side import DeviceSide, Gpu
from rdmakit.engine import Engine, process_engine
from rdmakit.errors import InvalidArgument, TransferTimeout
from rdmakit.family import Family
from rdmakit.inter.mpi import MpiChannel
from rdmakit.intra.posix_shm import PosixWindow
from rdmakit.job import Job
from rdmakit.layout import RankLayout
from rdmakit.mailbox import Mailbox
from rdmakit.memory import MemoryBootstrap, MemoryChannel
from rdmakit.nodes import find_nodes
from rdmakit.plan.blocks import partners
from rdmakit.plan.pieces import FLAGS
from rdmakit.point_to_point import PointToPoint
from rdmakit.process.phase import current
from rdmakit.process.watchdog import install
from rdmakit.protocols import Bootstrap, Channel, Window
from rdmakit.quiet import Quiet
from rdmakit.splits import Splits
from rdmakit.staging import HostCall
from rdmakit.startup import agree_on_direct, compare_setup, one_node_notes
from rdmakit.waiting import Waiter, rest, spins_for

__all__ = ["Communicator", "init"]


class Communicator(Collectives, PointToPoint, Splits):
    """Ranks of an MPI communicator, with windows inside nodes and messages between them.

    ``with Communicator() as comm: comm.Allreduce(x, y)``. Making one is collective and blocking.

    Attributes:
        mpi: the mpi4py communicator it was made over; for the user's own messages.
        node: collectives of this rank's node alone.
        rail: collectives of the ranks with this one's local rank, one on each node.
        hosts: host name of each rank.
        virtual: whether nodes are parts of one host.
        notes: what a person should know, such as why the MPI channel serves, or that GPUs are
            shared; those of the GPU come with the first call on GPU arrays.
    """

    node: Collectives
    rail: Collectives

    def __init__(self, mpi_comm: Any = None, *, config: Config | None = None) -> None:
        """Make it over ``mpi_comm`` (default: COMM_WORLD). Collective, blocking.

        Raises:
            SetupError: launcher, MPI, UCX or machine are not set up; on every rank.
            InvalidArgument: an RDMAKIT_* variable is not understood.
        """
        config = config or Config.from_env()
        users = MpiBootstrap(mpi_comm, duplicate=False)
        install(users.rank, users.size, users.host, users.abort, config)
        with current.during("start", timeout=config.timeout):
            bootstrap = MpiBootstrap(mpi_comm)  # waits for the others
            first = msgspec.json.decode(
                bootstrap.allgather(msgspec.json.encode(config.shared()))[0]
            )
            config = config.following(first)
            compare_setup(bootstrap, config)
            self._assemble(bootstrap, config)
        self.mpi = users.comm
        exits.opened(self, bootstrap, config.timeout)

    def _assemble(self, bootstrap: MpiBootstrap, config: Config) -> None:
        nodes = find_nodes(bootstrap, config)
        layout, rank = nodes.layout, bootstrap.rank
        controls = controls_of(bootstrap, layout)
        make_window = partial(
            PosixWindow.create, nbytes=config.window_bytes, flags=FLAGS, named=nodes.named
        )
        window = window_of(make_window, controls)
        hosts = tuple(h.decode() for h in bootstrap.allgather(bootstrap.host.encode()))
        waiter = waiter_of(rank, bootstrap.host, config, controls[1].size, hosts)
        channel: Channel | None = None
        notes, why_staged = list(nodes.notes), ""
        if len(layout.nodes) > 1:
            others = partners(layout, rank)
            channel, more = channel_of(bootstrap, config, nodes, others, waiter)
            notes += more
            why_staged = agree_on_direct(bootstrap, config, channel, others)
        else:
            notes += one_node_notes(config)
        engine = process_engine()
        if b"0" in bootstrap.allgather(b"%d" % may_be_threaded()):
            engine.threaded = False
            notes.append(
                "MPI was started without MPI_THREAD_MULTIPLE: calls that do not block move on "
                "inside of calls only (mpi4py.rc.thread_level = 'multiple')"
            )
        job = Job(engine, channel, make_window, hosts, nodes.virtual, tuple(notes), why_staged)
        every = tuple(range(bootstrap.size))
        parts = Parts(controls, layout, window, channel, every, 0, hosts)
        self._setup(parts, job, config, waiter, None)

    @classmethod
    def from_parts(
        cls,
        bootstrap: Bootstrap,
        layout: RankLayout,
        window: Window | None,
        channel: Channel | None,
        config: Config | None = None,
        gpu: Gpu | None = None,
    ) -> Communicator:
        """Make one of given parts, without MPI. Collective over ``bootstrap``."""
        self = cls.__new__(cls)
        config = config or Config()
        host = socket.gethostname()
        hosts = (host,) * bootstrap.size
        if channel is None and isinstance(bootstrap, MemoryBootstrap):
            carries: Channel | None = MemoryChannel.create(bootstrap)
        else:
            carries = channel
        make_window = partial(
            PosixWindow.create, nbytes=config.window_bytes, flags=FLAGS, named=False
        )
        job = Job(Engine(), carries, make_window, hosts, gpu=gpu)
        every = tuple(range(bootstrap.size))
        parts = Parts(controls_of(bootstrap, layout), layout, window, channel, every, 0, hosts)
        waiter = Waiter(bootstrap.rank, host, config.timeout, spins_for(bootstrap.size))
        self.mpi = None
        self._setup(parts, job, config, waiter, None)
        return self

    def _setup(
        self,
        parts: Parts,
        job: Job,
        config: Config,
        waiter: Waiter,
        parent: Communicator | None,
    ) -> None:
        bootstrap, layout, channel = parts.bootstraps[0], parts.layout, parts.channel
        self.host, self.config, self.hosts = waiter.host, config, parts.hosts
        self.virtual = job.virtual
        self.closed = self._met = False
        self._job, self._parts, self._parent = job, parts, parent
        self._children: list[Communicator] = []
        _join(parts, waiter, job.engine)
        family = Family(job.engine, channel, job.families)
        super().__init__(
            layout,
            bootstrap,
            parts.window,
            channel,
            waiter,
            config,
            identity=parts.number,
            job_ranks=parts.channel_ranks,
            mpi=getattr(bootstrap, "comm", None),
            family=family,
        )
        self.local_rank = layout.local_rank(self.rank)
        self.node = node_of(parts, waiter, config, family)
        self.rail = rail_of(parts, waiter, config, family)
        self._setup_gpus()
        ways = routes(parts, self.rank, job.channel)
        family.mailbox = self._mailbox = Mailbox(self.rank, *ways, self._gpus.borrower.piece)

    def _setup_gpus(self) -> None:
        """Give the three groups their side on GPUs, which finds its GPU at the first call."""
        job, parts = self._job, self._parts
        controls = parts.bootstraps
        self._gpus = DeviceSide(controls[0], controls[1], self._waiter, job.engine, job.gpu)
        here = enumerate(parts.layout.nodes[parts.layout.node_of(self.rank)])
        self._gpus.neighbours = {rank: index for index, rank in here if rank != self.rank}
        if job.virtual:
            self._gpus.crowd = max(map(self.hosts.count, self.hosts))
        self._gpus.channel, self._gpus.why_staged = parts.channel, job.why_staged
        rail: DeviceGroup | None = None
        for group, spans in ((self.node, "node"), (self.rail, "rail"), (self, "job")):
            group._on_device = DeviceGroup(
                self._gpus,
                group.layout,
                group.rank,
                group._places,
                spans=spans,
                counters=group.window,
                next_tag=group._next_tag,
                label=group.label,
                rail=rail,
            )
            rail = group._on_device if spans == "rail" else None

    @property
    def notes(self) -> tuple[str, ...]:  # noqa: D102
        return (*self._job.notes, *self._gpus.notes)

    @property
    def why_staged(self) -> str:
        """Why messages of GPU memory go through pinned host memory; empty: UCX takes them."""
        return self._job.why_staged

    @property
    def channel_ranks(self) -> tuple[int, ...]:
        """Number on the channel of each rank."""
        return self._parts.channel_ranks

    def _host_calls(self) -> tuple[HostCall, HostCall | None]:
        return self._on_host, self.rail._on_host

    # -- parts of it --------------------------------------------------------------------------

    def _derive(self, members: Sequence[int]) -> Communicator:
        child = Communicator.__new__(Communicator)
        with current.during("split", timeout=self._waiter.timeout):
            part = self._bootstrap.subset(members)
            bootstrap: Bootstrap = part
            child.mpi = None
            if isinstance(part, MpiBootstrap):
                child.mpi, bootstrap = part.comm, MpiBootstrap(part.comm)
                bootstrap.meanwhile = self._job.engine.poke
            layout = self.layout.part(members)
            hosts = tuple(self.hosts[rank] for rank in members)
            controls = controls_of(bootstrap, layout)
            window = window_of(self._job.make_window, controls)
            number = self._job.numbers.agree(bootstrap)
            places = tuple(self._parts.channel_ranks[rank] for rank in members)
            channel = self.channel if len(layout.nodes) > 1 else None
            if isinstance(channel, MpiChannel) and isinstance(bootstrap, MpiBootstrap):
                channel, places = MpiChannel.create(bootstrap), tuple(range(layout.size))
            waiter = waiter_of(bootstrap.rank, self.host, self.config, controls[1].size, hosts)
            waiter.who = f"rank {bootstrap.rank} of a part ({self._waiter.who})"
            parts = Parts(controls, layout, window, channel, places, number, hosts)
            child._setup(parts, self._job, self.config, waiter, self)
        self._children.append(child)
        return child

    # -- its end ------------------------------------------------------------------------------

    def Free(self) -> None:
        """Do :meth:`close`, by MPI's name."""
        self.close()

    def close(self) -> None:
        """Release everything. Collective, blocking, idempotent.

        What was split from it is closed first, the latest first. Requests become complete before.
        After an error it is local: the others may never come.

        Raises:
            TransferTimeout: another rank did not close, and this one has released its part; or a
                receive to which nobody sent, here or of what was split from it, and all ranks have
                closed together.
        """
        late = self._close()
        if late:
            for other in late[1:]:
                late[0].add_note(str(other))
            raise late[0]

    def _close(self) -> list[TransferTimeout]:
        """Close; return what receives without a message end with, by communicator."""
        if self.closed:
            return []
        if self._state.failure:
            self._free(collective=False)
            return []
        late: list[TransferTimeout] = []
        try:
            for child in reversed(self._children.copy()):
                late += child._close()
            with current.during("close", timeout=2 * self._waiter.timeout):
                late += self._settle()
                self._gpus.close()
        except BaseException as exc:
            self._fail(exc)
            self._free(collective=False)
            raise
        self._free(collective=True)
        return late

    def _settle(self) -> list[TransferTimeout]:
        """Wait until nothing is under way on any rank; see :meth:`_close`."""
        # Without a look at the peers: one that saw the barrier first may be gone by now.
        waiter = Waiter(self.rank, self.host, self._waiter.timeout, self._waiter.spins)
        waiter.who = self._waiter.who
        waiter.rest = self._engine.rest
        quiet = Quiet(self._engine, self._state, self._mailbox, waiter)
        quiet.send_all()
        self._check_usable()
        quiet.meet(self._bootstrap)
        self._met = True  # no rank needs this one any more, whatever goes wrong here
        late = quiet.receive_late()
        self._check_usable()
        return late

    def _free(self, *, collective: bool) -> None:
        if self.closed:
            return
        self.closed = True
        exits.closed(self, self._parts.bootstraps[0], together=collective or self._met)
        for child in reversed(self._children.copy()):
            child._free(collective=False)
        parts, parent = self._parts, self._parent
        if self._state.failure:
            self._gpus.abandon()
        for group in (self, self.node, self.rail):
            group._release()
        self._state.leave()
        # Whoever holds a method of the channel keeps its worker alive beyond close.
        self._waiter.check_peers = self._waiter.progress = _nothing
        self._waiter.rest = rest
        for control in parts.bootstraps:
            if isinstance(control, MpiBootstrap):
                control.meanwhile = None
        if parts.window is not None:
            parts.window.close()
        shared = parent is not None and parts.channel is self._job.channel
        if collective:
            for part in (None if shared else parts.channel, *reversed(parts.bootstraps)):
                free = getattr(part, "free", None)
                if free is not None:
                    free()
            if parent is not None and self.mpi is not None:
                self.mpi.Free()
        if parent is None:
            self._job.close()
        else:
            parent._children.remove(self)
            self._job.numbers.give_back(parts.number)
            if parts.channel is not None and not shared:
                parts.channel.close()

    def release(self) -> None:
        """Let go of everything without the other ranks. Local; for the end of the process."""
        self._free(collective=False)

    def forbid(self, reason: str) -> None:
        """Make this and what was split from it unusable. Local."""
        self._state.forbid(reason)
        for child in self._children:
            child.forbid(reason)

    def __enter__(self) -> Communicator:
        self._check_usable()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif self._state.failure:
            self.close()  # local: it is of no use to any rank
        # Else the other ranks are not here. If the program ends, the exit guard ends the job and
        # says so; dropping the connections now would make the others name the wrong cause.


_world: list[Communicator] = []


def init(**settings: Any) -> Communicator:
    """Return the communicator over COMM_WORLD that all of a program shares.

    Collective and blocking at the first call, and after that one was closed; else local. It is
    closed at exit.

    Args:
        **settings: of :class:`rdmakit.Config`; at the call that makes it.

    Raises:
        InvalidArgument: settings that differ from those it was made with.
        SetupError: as :class:`Communicator`.
    """
    if not _world or _world[0].closed:
        _world[:] = [Communicator(config=Config.from_env().chosen(**settings))]
    odd = {n: v for n, v in settings.items() if getattr(_world[0].config, n) != v}
    if odd:
        raise InvalidArgument(f"init was called before with other settings than {odd}")
    return _world[0]


def _join(parts: Parts, waiter: Waiter, engine: Engine) -> None:
    """Let whoever waits for this communicator move all that is under way in the process."""
    waiter.rest, waiter.progress = engine.rest, engine.poke
    if parts.channel is not None:
        waiter.check_peers = parts.channel.check_peers
    for control in parts.bootstraps:
        if isinstance(control, MpiBootstrap) and not (parts.channel is None and engine.threaded):
            control.meanwhile = engine.poke


def _nothing() -> None:
    pass
