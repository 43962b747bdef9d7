"""The communicator: finds nodes, makes window and channel, offers the collectives.

Teardown, on every rank: barrier, in which messages still move (nobody uses anything any more);
unmap the window; close the channel (endpoints, worker, context); free MPI communicators. An
exit handler does the same before MPI_Finalize for communicators left open.
"""

from __future__ import annotations

import atexit
import os
import socket
import weakref
from collections.abc import Callable
from typing import Any

import msgspec

from rdmakit.bootstrap import MpiBootstrap, load_mpi
from rdmakit.collectives import Collectives
from rdmakit.config import Config
from rdmakit.device import DeviceGroup, DeviceSide, Gpu
from rdmakit.errors import SetupError
from rdmakit.group import State
from rdmakit.intra.posix_shm import PosixWindow
from rdmakit.layout import RankLayout
from rdmakit.nodes import Nodes, find_nodes
from rdmakit.plan.blocks import partners
from rdmakit.plan.pieces import FLAGS
from rdmakit.process.phase import current
from rdmakit.process.watchdog import install, register_exit_guard
from rdmakit.protocols import Bootstrap, Channel, Window
from rdmakit.staging import HostCall
from rdmakit.startup import compare_setup, make_channel, raise_together
from rdmakit.waiting import Waiter, spins_for

__all__ = ["Communicator"]

_open: weakref.WeakSet[Communicator] = weakref.WeakSet()
_unfinished: dict[int, MpiBootstrap] = {}
"""Control planes of communicators that were not closed together, by identity: left open, or
closed after an error. Their ranks wait for each other at exit, since MPI_Finalize would too."""
_exit_handled = False


class Communicator(Collectives):
    """Ranks of an MPI communicator, with windows inside nodes and messages between them.

    ``with Communicator() as comm: comm.Allreduce(x, y)``. Making one is collective and blocking.

    Attributes:
        node: collectives of this rank's node alone.
        rail: collectives of the ranks with this one's local rank, one on each node.
        hosts: host name of each rank.
        virtual: whether nodes are parts of one host.
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
            nodes = find_nodes(bootstrap, config)
            node_boot = bootstrap.split(nodes.layout.node_of(bootstrap.rank), bootstrap.rank)
            rail_boot = bootstrap.split(nodes.layout.local_rank(bootstrap.rank), bootstrap.rank)
            self._assemble(bootstrap, node_boot, rail_boot, nodes, config)
        _handle_exit(self, bootstrap)

    def _assemble(
        self,
        bootstrap: MpiBootstrap,
        node_boot: MpiBootstrap,
        rail_boot: MpiBootstrap,
        nodes: Nodes,
        config: Config,
    ) -> None:
        notes = list(nodes.notes)
        window: Window | None = None
        problem = ""
        if node_boot.size > 1:
            try:
                window = PosixWindow.create(
                    node_boot, config.window_bytes, FLAGS, named=nodes.named
                )
            except SetupError as exc:
                problem = str(exc)
        raise_together(bootstrap, problem, SetupError)
        self.hosts = tuple(h.decode() for h in bootstrap.allgather(bootstrap.host.encode()))
        spins = spins_for(max(node_boot.size, self.hosts.count(bootstrap.host)))
        waiter = Waiter(bootstrap.rank, bootstrap.host, config.timeout, spins)
        channel: Channel | None = None
        if len(nodes.layout.nodes) > 1:
            others = partners(nodes.layout, bootstrap.rank)
            channel, note = make_channel(bootstrap, config, others, waiter, virtual=nodes.virtual)
            notes += [note] if note else []
            waiter.check_peers, waiter.progress = channel.check_peers, channel.progress
            for control in (bootstrap, node_boot, rail_boot):
                control.meanwhile = channel.progress
        self._setup(
            bootstrap,
            node_boot,
            rail_boot,
            nodes.layout,
            window,
            channel,
            config,
            waiter,
            mpi=(bootstrap.comm, node_boot.comm, rail_boot.comm),
        )
        self.virtual = nodes.virtual
        self._notes = tuple(notes)
        if nodes.virtual:
            self._gpus.crowd = max(map(self.hosts.count, self.hosts))

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
        node_boot = bootstrap.split(layout.node_of(bootstrap.rank), bootstrap.rank)
        rail_boot = bootstrap.split(layout.local_rank(bootstrap.rank), bootstrap.rank)
        config = config or Config()
        waiter = Waiter(
            bootstrap.rank, socket.gethostname(), config.timeout, spins_for(bootstrap.size)
        )
        if channel is not None:
            waiter.check_peers, waiter.progress = channel.check_peers, channel.progress
        self._setup(
            bootstrap,
            node_boot,
            rail_boot,
            layout,
            window,
            channel,
            config,
            waiter,
            mpi=(None, None, None),
            gpu=gpu,
        )
        self.virtual, self.hosts = False, (self.host,) * bootstrap.size
        self._notes = ()
        return self

    def _setup(
        self,
        bootstrap: Bootstrap,
        node_boot: Bootstrap,
        rail_boot: Bootstrap,
        layout: RankLayout,
        window: Window | None,
        channel: Channel | None,
        config: Config,
        waiter: Waiter,
        mpi: tuple[Any, Any, Any],
        gpu: Gpu | None = None,
    ) -> None:
        self.host = socket.gethostname()
        self.config = config
        state = State()
        super().__init__(
            layout, bootstrap, window, channel, waiter, config, identity=0, mpi=mpi[0], state=state
        )
        rank = bootstrap.rank
        local = layout.local_rank(rank)
        self.local_rank = local
        self.node = Collectives(
            RankLayout.of_sizes([node_boot.size]),
            node_boot,
            window,
            None,
            waiter,
            config,
            job_ranks=layout.nodes[layout.node_of(rank)],
            mpi=mpi[1],
            label="node ",
            state=state,
        )
        self.rail = Collectives(
            RankLayout.of_sizes([1] * rail_boot.size),
            rail_boot,
            None,
            channel,
            waiter,
            config,
            identity=1,
            job_ranks=layout.rails[local],
            mpi=mpi[2],
            label="rail ",
            state=state,
        )
        self._gpus = DeviceSide(bootstrap, node_boot, waiter, gpu)
        for group, spans in ((self, "job"), (self.node, "node"), (self.rail, "rail")):
            group._on_device = DeviceGroup(self._gpus, group.layout, rank=group.rank, spans=spans)
        self._parts = (bootstrap, node_boot, rail_boot)
        self.closed = False

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know, such as why the MPI channel serves, or that GPUs are shared.

        Those of the GPU come with the first call on GPU arrays.
        """
        return (*self._notes, *self._gpus.notes)

    def _host_calls(self) -> tuple[HostCall, HostCall | None]:
        return self._on_host, self.rail._on_host

    def close(self) -> None:
        """Release everything. Collective, blocking, idempotent.

        After an error it is local: the others may never come.

        Raises:
            TransferTimeout: another rank did not close; this one has released its part.
        """
        if self.closed:
            return
        if self._state.failure:
            self._free(collective=False)
            return
        with current.during("close", timeout=2 * self._waiter.timeout):
            try:
                done = self._bootstrap.start_barrier()
                polls = (self.channel.progress,) if self.channel is not None else ()
                # Without a look at the peers: one that saw the barrier first may be gone by now.
                waiter = Waiter(self.rank, self.host, self._waiter.timeout, self._waiter.spins)
                waiter.until(done, polls, lambda: "close: waiting for the other ranks")
                self._gpus.close()
            except BaseException as exc:
                self._fail(exc)
                self._free(collective=False)
                raise
            self._free(collective=True)

    def _free(self, *, collective: bool) -> None:
        self.closed = True
        _open.discard(self)
        if self._state.failure:
            self._gpus.abandon()
        for group in (self, self.node, self.rail):
            group._release()
        # Whoever holds a method of the channel keeps its worker alive beyond close.
        self._waiter.check_peers = self._waiter.progress = _nothing
        for control in self._parts:
            if isinstance(control, MpiBootstrap):
                control.meanwhile = None
        if self.window is not None:
            self.window.close()
        if collective:
            _unfinished.pop(id(self), None)
            for part in (self.channel, *reversed(self._parts)):
                free = getattr(part, "free", None)
                if free is not None:
                    free()
        if self.channel is not None:
            self.channel.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif self._state.failure:
            self.close()  # local: it is of no use to any rank
        # Else the other ranks are not here. If the program ends, the exit guard ends the job and
        # says so; dropping the connections now would make the others name the wrong cause.


def _nothing() -> None:
    pass


def _handle_exit(comm: Communicator, bootstrap: MpiBootstrap) -> None:
    global _exit_handled
    _open.add(comm)
    _unfinished[id(comm)] = bootstrap
    if _exit_handled:
        return
    _exit_handled = True
    owner = os.getpid()

    def release() -> None:
        if os.getpid() == owner:
            for left in list(_open):
                left._free(collective=False)

    def forbid() -> None:
        for left in list(_open):
            left._state.failure = (
                "this process was forked from a rank and is none; start processes with "
                "multiprocessing's spawn"
            )

    os.register_at_fork(after_in_child=forbid)
    # Run in reverse order: the guard first, then the release, then mpi4py's MPI_Finalize.
    atexit.register(release)

    def start_barrier() -> Callable[[], bool]:
        tests = [left.start_barrier() for left in _unfinished.values()]
        channels = [left.channel for left in _open if left.channel is not None]

        def test() -> bool:
            for channel in channels:
                channel.progress()
            return all([done() for done in tests])

        return test

    register_exit_guard(
        bootstrap.rank,
        bootstrap.host,
        lambda: bool(_unfinished),
        start_barrier,
        load_mpi().COMM_WORLD.Abort,  # a communicator's own may be freed by then
        comm.config.timeout,
    )
