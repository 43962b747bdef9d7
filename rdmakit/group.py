"""A group of ranks: what they agree on before a call, its failures, and its GPU memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rdmakit.agreement import Agreement
from rdmakit.buffer import as_buffer
from rdmakit.config import Config
from rdmakit.datatypes import MemoryKind
from rdmakit.device import DeviceGroup
from rdmakit.errors import (
    CommunicatorClosed,
    InvalidArgument,
    UnsupportedError,
)
from rdmakit.intra.device_calls import Registration
from rdmakit.protocols import Bootstrap
from rdmakit.waiting import Waiter

__all__ = ["Group", "State"]


@dataclass
class State:
    """What groups with a common window and channel share."""

    failure: str = ""
    """Why they are unusable; empty while they are not."""


class Group:
    """What every group has; see :class:`rdmakit.collectives.Collectives`.

    Attributes:
        rank: this rank in the group.
        size: ranks in the group.
        label: names the group in messages.
    """

    def __init__(
        self, bootstrap: Bootstrap, waiter: Waiter, config: Config, label: str, state: State | None
    ) -> None:
        self.rank, self.size, self.label = bootstrap.rank, bootstrap.size, label
        self._bootstrap, self._waiter, self._config = bootstrap, waiter, config
        self._state = state if state is not None else State()
        self._on_device: DeviceGroup | None = None
        self._agreement = Agreement(bootstrap, waiter, label, self._fail, on=config.check)

    @property
    def waiter(self) -> Waiter:
        """The waits of this communicator, for code that drives its channel."""
        return self._waiter

    @property
    def bootstrap(self) -> Bootstrap:
        """The control plane of this group."""
        return self._bootstrap

    # -- GPU memory ---------------------------------------------------------------------------

    def empty(self, shape: int | tuple[int, ...], dtype: object = "float32") -> Any:
        """Return a new CuPy array that this node's ranks address without a copy.

        Collective in the node, blocking; equal sizes on all ranks. It is registered until close.
        Raises as :meth:`register`.
        """
        self._check_usable()
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
        self._check_usable()
        buffer = as_buffer(array, "array")
        if buffer.kind is not MemoryKind.DEVICE:
            raise InvalidArgument("array is host memory; only GPU arrays are registered")
        self._gpu().check(buffer, buffer)
        self._agreement.agree(f"register {buffer.nbytes} bytes")
        return self._gpu().register(buffer.address, buffer.nbytes, array)

    def unregister(self, registration: Registration | None) -> None:
        """Undo :meth:`register`. Collective in the node, blocking: waits for this rank's calls."""
        self._check_usable()
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
        try:
            self._gpu().synchronize(stream)
        except BaseException as exc:
            self._fail(exc)
            raise

    def _gpu(self) -> DeviceGroup:
        if self._on_device is None:
            raise UnsupportedError("these collectives were made for host arrays only")
        return self._on_device

    # -- failures and agreement ---------------------------------------------------------------

    def _check_usable(self) -> None:
        if self._state.failure:
            raise CommunicatorClosed(f"this communicator is unusable: {self._state.failure}")

    def _fail(self, exc: BaseException) -> None:
        """Make this group, and those that share its window and channel, unusable."""
        self._state.failure = f"{type(exc).__name__}: {exc}"

    def _checked_once(
        self, call: Callable[[], object], what: tuple[Any, ...]
    ) -> Callable[[], object]:
        compared = False

        def run() -> None:
            nonlocal compared
            self._check_usable()
            if not compared:
                self._compare(what)
                compared = True
            call()

        return run

    def _compare(self, what: tuple[Any, ...]) -> None:
        if not self._config.check:
            return
        kind, send, recv, op, name, root = what
        self._agreement.agree(
            f"{kind.value} count={send.count} dtype={recv.dtype} op={op.value} "
            f"algorithm={name} root={root}"
        )
