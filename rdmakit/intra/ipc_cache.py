"""Which peers' allocations this process has mapped, each opened once and counted.

CUDA allows one open of an allocation in a process, as many closes as opens, and leaves it
undefined when an exporter frees what importers still have open. So there is one cache for each
process, shared by all communicators; a mapping is closed when its last user releases it; and the
order is for the caller to keep: all importers release, barrier, then the exporter frees. Nothing
idle is kept, since it would hold the exporter's memory.

Pure logic over an injected driver: a fake one serves the tests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from rdmakit.errors import RdmaKitError, UnsupportedError

__all__ = ["HandleCache", "IpcDriver", "Mapping", "Remote"]


class IpcDriver(Protocol):
    """What maps and unmaps; :mod:`rdmakit.drivers.cuda` is one."""

    def open_handle(self, handle: bytes) -> int:
        """Map an allocation; return its base here."""
        ...

    def close_handle(self, base: int) -> None:
        """Unmap it."""
        ...


class Remote(Protocol):
    """A piece of a peer's allocation; :class:`rdmakit.drivers.cuda.IpcHandle` is one."""

    @property
    def handle(self) -> bytes:
        """Names the whole allocation."""
        ...

    @property
    def offset(self) -> int:
        """Bytes from the allocation's base to the piece."""
        ...

    @property
    def buffer_id(self) -> int:
        """Identity of the allocation in its process; an address can come again, this cannot."""
        ...

    @property
    def base(self) -> int:
        """Address of the allocation in its process."""
        ...


@dataclass
class _Entry:
    buffer_id: int
    base: int
    users: int = 0


@dataclass
class Mapping:
    """One use of a mapped allocation. Give it back with :meth:`HandleCache.release`."""

    address: int
    """Where the piece is in this process."""
    _key: tuple[str, int]
    _held: bool = field(default=True, repr=False)


class HandleCache:
    """Mapped allocations of one process. Local; not for use by several threads at once.

    Attributes:
        limit: how many allocations may be mapped at once.
    """

    def __init__(self, driver: IpcDriver, own: str, limit: int = 4096) -> None:
        """Make it.

        Args:
            driver: opens and closes.
            own: identity of this process; its memory is never opened.
            limit: bound on open mappings. Each costs address space and page tables only.
        """
        self._driver, self._own, self.limit = driver, own, limit
        self._entries: dict[tuple[str, int], _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def acquire(self, peer: str, remote: Remote) -> Mapping:
        """Return a mapping of ``remote`` of process ``peer``, opened if nobody has it open yet.

        Raises:
            UnsupportedError: too many are open.
            RdmaKitError: an older allocation at the same address of the peer is still in use
                here, so the peer has freed it too early; or the memory is this process's own.
        """
        if peer == self._own:
            raise RdmaKitError("memory of this process is not opened by an IPC handle")
        key = (peer, remote.base)
        entry = self._entries.get(key)
        if entry is not None and entry.buffer_id != remote.buffer_id:
            raise RdmaKitError(
                f"process {peer} has freed the allocation at {remote.base:#x} while it was "
                f"mapped here by {entry.users} user(s)"
            )
        if entry is None:
            if len(self._entries) >= self.limit:
                raise UnsupportedError(
                    f"{self.limit} allocations of peers are mapped; close registrations"
                )
            entry = _Entry(remote.buffer_id, self._driver.open_handle(remote.handle))
            self._entries[key] = entry
        entry.users += 1
        return Mapping(entry.base + remote.offset, key)

    def release(self, mapping: Mapping) -> None:
        """Give ``mapping`` back; the last user's release unmaps. Idempotent for one mapping."""
        if not mapping._held:
            return
        mapping._held = False
        entry = self._entries[mapping._key]
        entry.users -= 1
        if not entry.users:
            del self._entries[mapping._key]
            self._driver.close_handle(entry.base)
