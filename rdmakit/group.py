"""A group of ranks: what they agree on before a call, its failures, and its GPU memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rdmakit.agreement import Agreement
from rdmakit.arguments import fortran
from rdmakit.buffer import as_buffer
from rdmakit.config import Config
from rdmakit.datatypes import MemoryKind
from rdmakit.device import DeviceGroup
from rdmakit.errors import (
    CommunicatorClosed,
    InvalidArgument,
    TransportError,
    UnsupportedError,
)
from rdmakit.family import Family, Poll
from rdmakit.intra.device_registry import Registration
from rdmakit.process.phase import current
from rdmakit.protocols import Bootstrap
from rdmakit.waiting import Waiter

__all__ = ["Group"]


class Group:
    """What every group has; see :class:`rdmakit.collectives.Collectives`.

    Attributes:
        rank: this rank in the group.
        size: ranks in the group.
        label: names the group in messages.
    """

    def __init__(
        self,
        bootstrap: Bootstrap,
        waiter: Waiter,
        config: Config,
        label: str,
        family: Family | None,
    ) -> None:
        self.rank, self.size, self.label = bootstrap.rank, bootstrap.size, label
        self._bootstrap, self._waiter, self._config = bootstrap, waiter, config
        self._state = family if family is not None else Family()
        self._engine = self._state.engine
        self._on_device: DeviceGroup | None = None
        self._agreement = Agreement(bootstrap, waiter, label, self._fail, on=config.check)

    def Get_rank(self) -> int:
        """Return :attr:`rank`. Local."""
        return self.rank

    def Get_size(self) -> int:
        """Return :attr:`size`. Local."""
        return self.size

    @property
    def waiter(self) -> Waiter:
        """The waits of this communicator, for code that drives its channel."""
        return self._waiter

    @property
    def bootstrap(self) -> Bootstrap:
        """The control plane of this group."""
        return self._bootstrap

    # -- GPU memory ---------------------------------------------------------------------------

    @property
    def device_way(self) -> str:
        """What carries all-reduces of GPU arrays here; see :class:`rdmakit.device.DeviceGroup`."""
        return self._on_device.transport if self._on_device is not None else ""

    def empty(self, shape: int | tuple[int, ...], dtype: object = "float32") -> Any:
        """Return a new CuPy array that this node's ranks address without a copy.

        Collective in the node, blocking; equal sizes on all ranks. It is registered until close.
        Raises as :meth:`register`.
        """
        self._take_turn()
        self._agreement.agree(f"empty {shape} {dtype}")
        return self._gpu().empty(shape, dtype)[0]

    def register(self, array: object) -> Registration | None:
        """Let this node's ranks address ``array`` without a copy, until close or unregister.

        Collective in the node, blocking; equal sizes on all ranks. It is kept alive. Calls are
        zero-copy when all ranks use the same part of what they have registered together.

        Returns:
            What :meth:`unregister` takes; None where no GPU memory can be mapped (see ``notes``).

        Raises:
            SetupError: on every rank: memory of any rank cannot be mapped (managed memory, CuPy's
                asynchronous pool), or sizes differ; the communicator stays usable.
            InvalidArgument: not GPU memory.
        """
        self._take_turn()
        buffer = as_buffer(array, "array")
        if buffer.kind is not MemoryKind.DEVICE:
            raise InvalidArgument("array is host memory; only GPU arrays are registered")
        if buffer.order == "strided":
            raise UnsupportedError(
                "array has gaps between its elements; register the array it is a view of"
            )
        self._gpu().check(buffer, buffer)
        self._agreement.agree(f"register {buffer.nbytes} bytes")
        return self._gpu().register(buffer.address, buffer.nbytes, array)

    def unregister(self, registration: Registration | None) -> None:
        """Undo :meth:`register`. Collective in the node, blocking: waits for this rank's calls.

        Messages of the array have been received before: inside the node they are read from it.
        """
        self._take_turn()
        self._agreement.agree("unregister")
        self._gpu().unregister(registration)

    def synchronize(self, stream: object = None) -> None:
        """Wait until ``stream`` (default CuPy's current one) is done, and raise what went wrong.

        Local, blocking, by polling: messages move meanwhile.

        Raises:
            TransferTimeout: a rank did not come, or the deadline has passed.
            CollectiveMismatch: a rank made another call.
            PeerLost: a rank has failed.
        """
        self._check_usable()
        before = current.enter(f"{self.label}synchronize")
        try:
            self._gpu().synchronize(stream)
        except (InvalidArgument, UnsupportedError):
            raise  # nothing was waited for
        except BaseException as exc:
            self._fail(exc)
            raise
        finally:
            current.restore(before)

    def _gpu(self) -> DeviceGroup:
        if self._on_device is None:
            raise UnsupportedError("these collectives were made for host arrays only")
        return self._on_device

    # -- failures and agreement ---------------------------------------------------------------

    def _check_usable(self) -> None:
        if self._state.failure:
            raise CommunicatorClosed(f"this communicator is unusable: {self._state.failure}")

    def _take_turn(self) -> None:
        """Let collectives that were called before, and do not block, become complete."""
        if self._state.failure:
            self._check_usable()
        family = self._state
        if not family.works and not family.taken:
            return
        last = family.works[-1].pending if family.works else None

        def free() -> bool:
            return not family.taken and (last is None or last.done)

        def moves() -> object:
            return len(family.works), sum(work.pending.moves for work in family.works)

        try:
            self._engine.wait(free, self._waiter, family.waits_for, moves)
        except TransportError as exc:
            self._fail(exc)
            raise
        self._check_usable()

    def _fail(self, exc: BaseException) -> None:
        """Make this group, and those that share its window and channel, unusable."""
        self._state.fail(exc)

    def _refuse(self, kind: str, error: Exception) -> None:
        """With checking on, let the others know that this rank refuses its call.

        Collective with the others' call, blocking. Raises ``error`` where they do not refuse.
        """
        if self._config.check and not self._state.failure:
            self._take_turn()
            self._agreement.refuse(kind, error)

    def _checked_once(
        self, call: Callable[[], object], what: tuple[Any, ...] | str
    ) -> tuple[Callable[[], object], Callable[[], Poll | None]]:
        """Return ``call`` and what begins it in its turn, where only the first compares ranks."""
        compared = False

        def run() -> None:
            nonlocal compared
            self._take_turn()
            if not compared:
                self._compare(what)
                compared = True
            call()

        def start() -> Poll | None:
            nonlocal compared
            before, compared = compared, True
            return None if before else self._start_compare(what)

        return run, start

    def _compare(self, what: tuple[Any, ...] | str, later: str = "") -> None:
        if self._config.check:
            self._agreement.agree(_described(what) + later)

    def _start_compare(self, what: tuple[Any, ...] | str) -> Poll | None:
        return self._agreement.start(_described(what)) if self._config.check else None


def _described(what: tuple[Any, ...] | str) -> str:
    if isinstance(what, str):
        return what
    kind, send, recv, op, name, root = what
    return (
        f"{kind.value} count={send.count} dtype={recv.dtype} op={op.value} "
        f"algorithm={name} root={root}{' order=F' if fortran(send, recv) else ''}"
    )
