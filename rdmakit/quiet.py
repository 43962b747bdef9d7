"""How a communicator comes to rest before it is closed: nothing of it is under way on any rank."""

from __future__ import annotations

from rdmakit.engine import Engine
from rdmakit.errors import TransferTimeout
from rdmakit.family import Family
from rdmakit.mailbox import Mailbox
from rdmakit.protocols import Bootstrap
from rdmakit.waiting import Waiter

__all__ = ["Quiet"]

_LATE_SECONDS = 1.0
"""Seconds after all ranks have closed in which a message that was sent before may still come."""


class Quiet:
    """The waits of one close, in the order of the methods; each moves messages of the process."""

    def __init__(self, engine: Engine, family: Family, mailbox: Mailbox, waiter: Waiter) -> None:
        self._engine, self._family = engine, family
        self._mailbox, self._waiter = mailbox, waiter

    def send_all(self) -> None:
        """Wait until this rank's calls are complete, but for receives. Blocking.

        Raises:
            TransferTimeout: something is not complete; the text names it.
        """
        self._engine.wait(self._sent, self._waiter, self._named, self._moves)

    def meet(self, bootstrap: Bootstrap) -> None:
        """Wait for the other ranks. Collective, blocking.

        Raises:
            TransferTimeout: another rank does not close.
        """
        done = bootstrap.start_barrier()
        self._engine.wait(done, self._waiter, lambda: "close: waiting for the other ranks")

    def receive_late(self) -> list[TransferTimeout]:
        """Wait shortly for messages that were sent before; refuse receives to which none comes.

        Local, blocking.

        Returns:
            What such a receive ends with: no more than this rank's own mistake, the others close.

        Raises:
            TransferTimeout: something is to be sent again.
        """
        if self._received():
            return []
        seconds = min(_LATE_SECONDS, self._waiter.timeout)
        try:
            self._engine.wait(self._received, self._waiter, self._named, self._moves, seconds)
        except TransferTimeout as exc:
            if not self._sent():
                raise
            with self._engine.held():
                self._mailbox.refuse(exc)
            return [exc]
        return []

    def _sent(self) -> bool:
        return not self._family.works and not self._mailbox.moving

    def _received(self) -> bool:
        return self._sent() and not self._mailbox.busy

    def _named(self) -> str:
        labels = "; ".join(one.label for one in self._family.pending())
        return f"close: not complete: {labels}"

    def _moves(self) -> object:
        pending = self._family.pending()
        return len(pending), sum(one.moves for one in pending)
