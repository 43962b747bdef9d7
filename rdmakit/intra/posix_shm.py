"""A window over POSIX shared memory: the ranks of one node address each other's areas.

Each rank makes one segment, so that its pages are on its own NUMA node: a page of counters,
then the area. Segments are made without a name (O_TMPFILE) and opened by peers through
/proc/PID/fd, so that no crash leaves one behind; where that is not permitted they get a name in
/dev/shm for the moment between creation and the last peer's open. Space is reserved at once:
a /dev/shm that is too small is an error here and not a SIGBUS later.

Counters and data are plain stores. On x86-64 stores are seen in order (Intel SDM vol. 3A,
section 8.2), so a counter seen by a peer means the data before it is seen as well. On other
machines a fence is called before each post and after each successful test.

Teardown: all ranks stop using the window, barrier, each unmaps.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import resource
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from rdmakit.drivers.mapping import map_shared
from rdmakit.errors import InvalidArgument, SetupError
from rdmakit.protocols import Bootstrap, Bytes

__all__ = ["SHM", "PosixWindow", "Segment", "probe_reach"]

SHM = Path("/dev/shm")
_HEADER = 4096
_LINE = 64  # bytes: counters of different ranks never share a cache line
_NONCE = 16


def _fence() -> Callable[[], None] | None:
    if platform.machine() in ("x86_64", "AMD64"):
        return None
    for name in ("libatomic.so.1", "libatomic.so"):
        with contextlib.suppress(OSError, AttributeError):
            call = ctypes.CDLL(name).atomic_thread_fence
            call.argtypes, call.restype = [ctypes.c_int], None
            return lambda: call(5)  # memory_order_seq_cst
    raise SetupError(
        f"shared memory on {platform.machine()} needs a memory fence: install libatomic1 "
        "(Debian, Ubuntu) or libatomic (Fedora)"
    )


def _no_descriptors(exc: OSError) -> str:
    """Return what to do where an open failed for want of descriptors; empty for another cause."""
    if exc.errno not in (errno.EMFILE, errno.ENFILE):
        return ""
    return (
        f"cannot open shared memory: {exc.strerror}; raise the limit (ulimit -n, which is "
        f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]}) or close communicators that are not used"
    )


class Segment:
    """Shared memory that this process made or opened; begins with a nonce."""

    def __init__(self, fd: int, nbytes: int, name: Path | None = None) -> None:
        self.fd, self.name, self.nbytes = fd, name, nbytes
        self.map = map_shared(fd, nbytes)  # keeps no descriptor

    @classmethod
    def create(cls, nbytes: int, nonce: bytes, *, named: bool) -> Segment:
        """Make ``nbytes`` of zeroed shared memory, mode 0600. Local.

        Raises:
            SetupError: no room, or /dev/shm cannot be used; nothing is left behind.
        """
        name = SHM / f"rdmakit-{os.getuid()}-{os.getpid()}-{secrets.token_hex(8)}"
        try:
            if named:
                fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            else:
                fd = os.open(SHM, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise SetupError(
                _no_descriptors(exc) or f"cannot make shared memory in {SHM}: {exc.strerror}"
            ) from exc
        try:
            os.posix_fallocate(fd, 0, nbytes)
            segment = cls(fd, nbytes, name if named else None)
        except OSError as exc:
            os.close(fd)
            if named:
                name.unlink(missing_ok=True)
            if exc.errno != errno.ENOSPC:
                raise SetupError(f"cannot reserve shared memory in {SHM}: {exc}") from exc
            room = os.statvfs(SHM)
            raise SetupError(
                f"{SHM} has {room.f_bavail * room.f_frsize} bytes free and this rank needs "
                f"{nbytes}; make it larger (docker: --shm-size; mount -o remount,size=) or the "
                "window smaller (RDMAKIT_WINDOW)"
            ) from exc
        segment.map[:_NONCE] = nonce
        return segment

    @classmethod
    def open(cls, path: str, nbytes: int, nonce: bytes) -> Segment | None:
        """Open a peer's segment; None when it cannot be opened or is another. Local.

        Raises:
            SetupError: this process has too many open files: that says nothing of the peer.
        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as exc:
            if full := _no_descriptors(exc):
                raise SetupError(full) from exc
            return None
        try:
            if os.fstat(fd).st_size == nbytes:
                segment = cls(fd, nbytes)
                if segment.map[:_NONCE] == nonce:
                    segment.settle()  # the mapping needs no descriptor
                    return segment
                segment.map.close()
        except (OSError, ValueError):
            pass
        os.close(fd)
        return None

    @property
    def address(self) -> str:
        """The path by which a peer opens it."""
        return str(self.name) if self.name else f"/proc/{os.getpid()}/fd/{self.fd}"

    def unlink(self) -> None:
        """Take the name away; the memory stays while it is mapped. Idempotent."""
        if self.name is not None:
            self.name.unlink(missing_ok=True)
            self.name = None

    def settle(self) -> None:
        """Close the descriptor: no further peer will open it. Idempotent."""
        self.unlink()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def close(self) -> None:
        """Unmap as far as no array still points into it; the rest goes with the process."""
        self.settle()
        with contextlib.suppress(BufferError):
            self.map.close()


def probe_reach(
    bootstrap: Bootstrap, key: str, *, named: bool
) -> tuple[list[list[bool]], list[str]]:
    """Find which ranks can really map each other's memory. Collective, blocking.

    Ranks of equal ``key`` (one host's boot id) try each other's segment, found by its nonce:
    containers with their own /dev/shm or PID namespace look like one host and are not.

    Returns:
        ``reach[i][j]``, equal on all ranks, and each rank's key.

    Raises:
        SetupError: on every rank when one has too many open files to look.
    """
    nonce = secrets.token_bytes(_NONCE)
    segment: Segment | None = None
    problem = ""
    try:
        segment = Segment.create(_HEADER, nonce, named=named)
    except SetupError as exc:
        if isinstance(exc.__cause__, OSError):
            problem = _no_descriptors(exc.__cause__)  # any other cause: nobody reaches it
    address = segment.address if segment else ""
    mine = b"\0".join((key.encode(), address.encode(), nonce.hex().encode()))
    ranks = [entry.split(b"\0") for entry in bootstrap.allgather(mine)]
    row = bytearray(bootstrap.size)
    for peer, (theirs, path, hexed) in enumerate(ranks):
        if peer == bootstrap.rank:
            row[peer] = 1
        elif theirs.decode() == key and path:
            try:
                seen = Segment.open(path.decode(), _HEADER, bytes.fromhex(hexed.decode()))
            except SetupError as exc:
                problem = str(exc)
                break
            if seen is not None:
                row[peer] = 1
                seen.close()
    told = bootstrap.allgather(bytes(row) + problem.encode())
    if segment is not None:
        segment.close()
    rows = [text[: bootstrap.size] for text in told]
    for rank, text in enumerate(told):
        if len(text) > bootstrap.size:
            raise SetupError(f"rank {rank}: {text[bootstrap.size :].decode()}")
    return [[bool(x) for x in row] for row in rows], [entry[0].decode() for entry in ranks]


class PosixWindow:
    """See :class:`rdmakit.protocols.Window`. Make it with :meth:`create`."""

    kind = "shm"

    def __init__(self, rank: int, segments: Sequence[Segment], nbytes: int, flags: int) -> None:
        self.rank, self.size, self.nbytes, self.flags = rank, len(segments), nbytes, flags
        self.base = 0
        self._segments = list(segments)
        self._areas: list[Bytes] = [
            np.frombuffer(s.map, np.uint8, nbytes, _HEADER) for s in segments
        ]
        self._counters = [memoryview(s.map)[_LINE:_HEADER].cast("q") for s in segments]
        self._mine = self._counters[rank]
        self._fence = _fence()
        self.closed = False
        if self._fence is None:
            self.post = self._mine.__setitem__  # type: ignore[method-assign,assignment]

    @classmethod
    def create(
        cls, bootstrap: Bootstrap, nbytes: int, flags: int, *, named: bool = False
    ) -> PosixWindow:
        """Make the window of the ranks of ``bootstrap``. Collective, blocking.

        Args:
            bootstrap: control plane of the ranks of one node.
            nbytes: size of each rank's area, in bytes.
            flags: counters of each rank.
            named: give segments a name; needed where /proc/PID/fd cannot be opened.

        Raises:
            SetupError: on every rank when any could not make or open a segment.
        """
        if flags > (_HEADER - _LINE) // 8:
            raise InvalidArgument(f"{flags} counters do not fit {_HEADER} bytes")
        total = _HEADER + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        nonce = secrets.token_bytes(_NONCE)
        own: Segment | None = None
        problem = ""
        try:
            own = Segment.create(total, nonce, named=named)
        except SetupError as exc:
            problem = str(exc)
        told = bootstrap.allgather(
            b"\0".join(
                (problem.encode(), own.address.encode() if own else b"", nonce.hex().encode())
            )
        )
        problems = {r: text for r, e in enumerate(told) if (text := e.split(b"\0")[0].decode())}
        segments: list[Segment] = []
        if not problems:
            for peer, entry in enumerate(told):
                _, path, hexed = entry.split(b"\0")
                try:
                    seen = (
                        own
                        if peer == bootstrap.rank
                        else Segment.open(path.decode(), total, bytes.fromhex(hexed.decode()))
                    )
                except SetupError as exc:
                    problem = str(exc)
                    break
                if seen is None:
                    problem = (
                        f"cannot open the shared memory of local rank {peer} at {path.decode()}"
                    )
                    break
                segments.append(seen)
            opened = bootstrap.allgather(problem.encode())
            problems = {r: text.decode() for r, text in enumerate(opened) if text}
        if own is not None:
            own.settle()
        if problems:
            for segment in segments:
                segment.close()
            rank, text = next(iter(problems.items()))
            raise SetupError(f"no window on this node: local rank {rank}: {text}")
        return cls(bootstrap.rank, segments, nbytes, flags)

    def area(self, owner: int) -> Bytes:
        """Return the area of rank ``owner``."""
        return self._areas[owner]

    def post(self, flag: int, value: int) -> None:
        """Set this rank's counter."""
        if self._fence is not None:
            self._fence()
        self._mine[flag] = value

    def reached(self, owner: int, flag: int, value: int) -> bool:
        """Return whether a peer's counter is at ``value`` or above."""
        if self._counters[owner][flag] < value:
            return False
        if self._fence is not None:
            self._fence()
        return True

    def close(self) -> None:
        """Unmap; idempotent."""
        if self.closed:
            return
        self.closed = True
        self.__dict__.pop("post", None)  # a bound method of the counters
        del self._mine
        for counters in self._counters:
            counters.release()
        self._areas.clear()
        for segment in self._segments:
            segment.close()
