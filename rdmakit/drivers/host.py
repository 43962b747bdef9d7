"""The machine's files, commands and ELF headers; the only module that reads or starts them.

Everything here is local and never raises for what the machine lacks: an absent file is None,
an absent command is a result with ``error`` set.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSegment
from elftools.elf.elffile import ELFFile

__all__ = [
    "CommandResult",
    "ElfLinks",
    "HostTree",
    "Runner",
    "elf_links",
    "elf_needed",
    "elf_search",
    "mapped_files",
    "run",
]

_MAX_LINKS = 40


class HostTree:
    """Files of a machine below ``root``; a fake tree in a test stands for a machine.

    Paths given and returned are those of the machine described (``/sys/class/net``), whatever
    the root is.
    """

    def __init__(self, root: str | os.PathLike[str] = "/") -> None:
        self.root = os.fspath(root)

    def locate(self, path: str) -> Path:
        """Return where ``path`` lies on the machine this runs on."""
        # A fake tree's absolute links must not lead out of it.
        inside = path if self.root == "/" else self.resolve(path)
        return self._join(inside)

    def read_text(self, path: str) -> str | None:
        """Return the text of a file, or None when it cannot be read (absent, EINVAL, EACCES)."""
        try:
            return self.locate(path).read_text(encoding="utf-8", errors="replace")
        except (OSError, ValueError):
            return None

    def read_bytes(self, path: str, most: int) -> bytes | None:
        """Return the first ``most`` bytes of a file, or None when it cannot be read."""
        try:
            with self.locate(path).open("rb") as stream:
                return stream.read(most)
        except (OSError, ValueError):
            return None

    def listdir(self, path: str) -> tuple[str, ...]:
        """Return the sorted names in a directory; empty when it cannot be read."""
        try:
            return tuple(sorted(entry.name for entry in self.locate(path).iterdir()))
        except (OSError, ValueError):
            return ()

    def exists(self, path: str) -> bool:
        """Return whether ``path`` exists once links are followed inside the tree."""
        try:
            return self.locate(path).exists()
        except (OSError, ValueError):
            return False

    def resolve(self, path: str) -> str:
        """Return ``path`` with links followed inside the tree; unresolvable parts stay as given.

        An absolute link target is taken from the tree's root, as it would be on that machine.
        """
        todo = [part for part in path.split("/") if part][::-1]
        done: list[str] = []
        links = 0
        while todo:
            part = todo.pop()
            if part == ".":
                continue
            if part == "..":
                if done:
                    done.pop()
                continue
            try:
                target = os.fspath(self._join("/".join([*done, part])).readlink())
            except (OSError, ValueError):
                done.append(part)
                continue
            links += 1
            if links > _MAX_LINKS:
                return path
            if target.startswith("/"):
                done = []
            todo.extend(piece for piece in target.split("/")[::-1] if piece)
        return "/" + "/".join(done)

    def space(self, path: str) -> tuple[int, int] | None:
        """Return (all, free) bytes of the file system at ``path``; None where it is not there.

        Of this machine: a directory of another machine's files has no file systems of its own.
        """
        try:
            told = os.statvfs(self.locate(path))
        except OSError:
            return None
        return told.f_frsize * told.f_blocks, told.f_frsize * told.f_bavail

    def why_closed(self, path: str) -> str | None:
        """Return why a device file cannot be opened for reading and writing; None: it can."""
        try:
            os.close(os.open(self.locate(path), os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
        except OSError as exc:
            return exc.strerror or str(exc)
        return None

    def _join(self, path: str) -> Path:
        return Path(self.root) / path.lstrip("/")


_NOT_FOUND = "command not found"
"""What an error ends with where a command is not installed."""


@dataclass(frozen=True)
class CommandResult:
    """What a command did. ``rc`` is None when it did not start or was ended at the limit."""

    argv: tuple[str, ...]
    rc: int | None
    stdout: str
    stderr: str
    error: str = ""
    """Why there is no exit status; empty when there is one."""

    @property
    def ok(self) -> bool:
        """Whether the command ran to its end with status 0."""
        return self.rc == 0

    @property
    def absent(self) -> bool:
        """Whether there is no such command here."""
        return self.error.endswith(_NOT_FOUND)


Runner = Callable[[Sequence[str], float], CommandResult]
"""What starts commands: ``run``, or a stand-in that has the outputs of another machine."""


def run(argv: Sequence[str], timeout: float, env: Mapping[str, str] | None = None) -> CommandResult:
    """Run a command with an empty standard input and return what it did. Local, blocking.

    The child is made by posix_spawn, not fork: MPI, UCX and CUDA may be live in this process.
    It is killed, with its own children, when ``timeout`` seconds pass or the wait is
    interrupted. Never raises for a missing command.
    """
    command = tuple(argv)
    program = shutil.which(command[0]) if command else None
    if program is None:
        return CommandResult(command, None, "", "", f"{' '.join(command[:1])}: {_NOT_FOUND}")
    try:
        # close_fds=False and a full path are what lets subprocess use posix_spawn.
        process = subprocess.Popen(
            [os.path.abspath(program), *command[1:]],  # noqa: PTH100 - keeps links: busybox
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=None if env is None else dict(env),
            close_fds=False,
            text=True,
            errors="replace",
        )
    except (OSError, ValueError) as exc:
        return CommandResult(command, None, "", "", f"{command[0]}: {exc}")
    try:
        stdout, stderr = process.communicate(timeout=timeout)
        return CommandResult(command, process.returncode, stdout, stderr)
    except subprocess.TimeoutExpired:
        stdout, stderr = _kill(process)
        text = f"{command[0]}: no end after {timeout:g} s, killed"
        return CommandResult(command, None, stdout, stderr, text)
    except BaseException:
        _kill(process)
        raise


def _kill(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Kill a child and what it started; return what they had written."""
    for pid in (*_descendants(process.pid), process.pid):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    try:
        return process.communicate(timeout=1.0)
    except subprocess.TimeoutExpired:
        # Something that left the family still holds the pipes; the child itself is dead.
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        process.wait()
        return "", ""


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    todo = [pid]
    while todo:
        with contextlib.suppress(OSError, ValueError):
            for task in Path(f"/proc/{todo.pop()}/task").iterdir():
                children = [int(word) for word in (task / "children").read_text().split()]
                found += children
                todo += children
    return found


def mapped_files(tree: HostTree) -> tuple[str, ...]:
    """Return each file mapped into this process once, in address order (/proc/self/maps)."""
    seen: dict[str, None] = {}
    for line in (tree.read_text("/proc/self/maps") or "").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith("/"):
            seen[fields[5].removesuffix(" (deleted)")] = None
    return tuple(seen)


@dataclass(frozen=True)
class ElfLinks:
    """What the dynamic section of a file asks the loader for."""

    needed: tuple[str, ...] = ()
    soname: str = ""
    rpath: tuple[str, ...] = ()
    runpath: tuple[str, ...] = ()
    error: str = ""
    """Why nothing could be read; empty when the file was read."""


def elf_links(path: str | os.PathLike[str]) -> ElfLinks:
    """Read DT_NEEDED, DT_SONAME, DT_RPATH and DT_RUNPATH of ``path`` without loading it."""
    needed: list[str] = []
    soname, rpath, runpath = "", "", ""
    try:
        with Path(path).open("rb") as stream:
            for segment in ELFFile(stream).iter_segments(type="PT_DYNAMIC"):
                if not isinstance(segment, DynamicSegment):
                    continue
                tag: Any  # its text attribute is named by its kind
                for tag in segment.iter_tags():
                    kind = tag.entry.d_tag
                    if kind == "DT_NEEDED":
                        needed.append(str(tag.needed))
                    elif kind == "DT_SONAME":
                        soname = str(tag.soname)
                    elif kind == "DT_RPATH":
                        rpath = str(tag.rpath)
                    elif kind == "DT_RUNPATH":
                        runpath = str(tag.runpath)
    # A damaged file makes pyelftools raise whatever its parser trips over.
    except (OSError, ELFError, ValueError, KeyError, AttributeError, TypeError) as exc:
        return ElfLinks(error=f"{path}: {exc or type(exc).__name__}")
    return ElfLinks(tuple(needed), soname, _split(rpath), _split(runpath))


def elf_search(path: str, tree: HostTree | None = None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (RPATH, RUNPATH) of a file: before and after LD_LIBRARY_PATH."""
    # RPATH counts where there is no RUNPATH: ld.so(8).
    links = elf_links(tree.locate(path) if tree else path)
    origin = str(PurePosixPath(path).parent)

    def expand(entries: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(e.replace("${ORIGIN}", origin).replace("$ORIGIN", origin) for e in entries)

    return (() if links.runpath else expand(links.rpath)), expand(links.runpath)


def elf_needed(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Return the DT_NEEDED names of ``path``; empty when it is not a readable ELF file."""
    return elf_links(path).needed


def _split(search: str) -> tuple[str, ...]:
    return tuple(entry for entry in search.split(":") if entry)
