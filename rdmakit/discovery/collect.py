"""A directory that describes a machine: written here, read anywhere without GPU or root.

Below it lie ``sys`` and ``proc`` as far as discovery reads them, ``nvml.json``,
``software.json``, ``environ.json`` (settings, no secrets) and one text file for each command.
When read, texts are told apart by their content, so that files collected by hand serve as well.
A directory of such directories is several nodes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from rdmakit.discovery.machine import COMMANDS, Found, find_out, run_commands
from rdmakit.discovery.settings import settings
from rdmakit.discovery.sysfs import read_sysfs
from rdmakit.drivers.host import HostTree, Runner, run
from rdmakit.drivers.nvml import decode_nvml
from rdmakit.errors import InvalidArgument
from rdmakit.pretty import pretty_json
from rdmakit.topology.assemble import assemble
from rdmakit.topology.facts import NvmlFacts
from rdmakit.topology.texts import kinds_of, read_texts

__all__ = ["Look", "collect", "read_machines"]

_NVML, _SOFTWARE, _ENVIRON = "nvml.json", "software.json", "environ.json"
_ROOTS = ("sys", "proc", "dev", "run", "etc")
_MOST_BYTES = 64 << 20


Look = Callable[[Found, HostTree, Mapping[str, str]], None]
"""Reads of a machine what somebody else will need of its directory."""


class _RecordingTree(HostTree):
    """Remembers every path it was asked for."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.asked: dict[str, None] = {}
        self.listed: dict[str, None] = {}

    def locate(self, path: str) -> Path:
        self.asked[path] = None
        return super().locate(path)

    def listdir(self, path: str) -> tuple[str, ...]:
        self.listed[path] = None
        return super().listdir(path)

    def resolve(self, path: str) -> str:
        self.asked[path] = None
        return super().resolve(path)


def collect(
    directory: Path,
    tree: HostTree | None = None,
    runner: Runner = run,
    software: Mapping[str, str] | None = None,
    nvml: NvmlFacts | None = None,
    look: Look | None = None,
) -> Found:
    """Write what there is to know of this machine into ``directory``, and return it.

    Local, blocking: runs every command of :data:`COMMANDS`, each for 20 s at most.

    Args:
        directory: made where it is not there.
        tree: the machine's files; None: this machine's.
        runner: starts the commands.
        software: versions to keep beside those that are found.
        nvml: what NVML said already; None: it is asked.
        look: called with what was found, the tree and the outputs by file; what it reads of the
            tree is kept too.

    Raises:
        InvalidArgument: the directory cannot be written.
    """
    recording = _RecordingTree((tree or HostTree()).root)
    found = find_out(recording, runner, nvml=nvml)
    texts = run_commands(runner, list(COMMANDS))
    found = replace(found, outputs=texts, environ=settings())
    if look is not None:
        look(found, recording, texts)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (directory / name).write_text(text, encoding="utf-8")
        if found.nvml.gpus:
            (directory / _NVML).write_text(pretty_json(found.nvml), encoding="utf-8")
        told = {"host": found.machine.host, **found.machine.software, **(software or {})}
        (directory / _SOFTWARE).write_text(pretty_json(told), encoding="utf-8")
        (directory / _ENVIRON).write_text(pretty_json(dict(found.environ)), encoding="utf-8")
        _copy(recording, directory)
    except OSError as exc:
        raise InvalidArgument(f"{directory}: cannot be written: {exc}") from exc
    return found


def _copy(tree: _RecordingTree, directory: Path) -> None:
    """Copy the files that were read, with the links on the way to them."""
    plain = HostTree(tree.root)
    made: dict[str, str] = {}
    for path in [*tree.asked, *tree.listed]:
        _copy_way(plain, path, directory, made)
        where = plain.resolve(path)
        source, target = plain.locate(where), directory / where.lstrip("/")
        with contextlib.suppress(OSError):
            if source.is_file() and not target.exists():
                data = source.read_bytes()
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data)
    for path in tree.listed:
        where = plain.resolve(path)
        for name in plain.listdir(where):
            _copy_way(plain, f"{where}/{name}", directory, made, whole=True)


def _copy_way(
    tree: HostTree, path: str, directory: Path, made: dict[str, str], *, whole: bool = False
) -> None:
    """Make the directories and links that lead to ``path``; with ``whole`` the last part too.

    ``made``: what is made already, and where it leads; thousands of paths share their ways.
    """
    parts = [part for part in path.split("/") if part]
    here = ""
    for place, part in enumerate(parts):
        full = f"{made[here] if here else ''}/{part}".replace("//", "/")
        last = place == len(parts) - 1
        if full in made and not (last and whole):
            here = full
            continue
        made[full] = tree.resolve(full)
        source, target = Path(tree.root) / full.lstrip("/"), directory / full.lstrip("/")
        if target.is_symlink() or target.is_dir():
            pass
        elif source.is_symlink():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(source.readlink())
        elif source.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        elif last and whole and source.exists() and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch()
        here = full


@dataclass(frozen=True)
class _Folder:
    """What lies in one directory."""

    path: Path
    tree: bool
    texts: dict[str, str]

    @property
    def is_machine(self) -> bool:
        return self.tree or (self.path / _NVML).is_file() or any(map(kinds_of, self.texts.values()))


def read_machines(source: Path) -> list[Found]:
    """Return the machines that a directory, or one text file, describes. Local; starts nothing.

    Raises:
        InvalidArgument: there is nothing at ``source``, it cannot be read, or nothing in it is
            understood.
    """
    try:
        return _machines(source)
    except OSError as exc:
        raise InvalidArgument(f"{exc.filename or source}: cannot be read: {exc.strerror}") from exc
    except UnicodeEncodeError as exc:
        raise InvalidArgument(f"{exc.object!r}: the name is no UTF-8; rename it") from exc


def _machines(source: Path) -> list[Found]:
    if source.is_file():
        text = _decoded(source) or ""
        if not kinds_of(text):
            raise _nothing_in(source)
        return [_build(_Folder(source, False, {source.name: text}), source.stem)]
    if not source.is_dir():
        raise InvalidArgument(f"{source}: no such directory or file")
    top = _folder(source)
    if top.is_machine:
        more: dict[str, str] = {}
        for child in _children(source):
            inner = _folder(child)
            more |= {f"{child.name}/{name}": text for name, text in inner.texts.items()}
        return [_build(_Folder(source, top.tree, {**top.texts, **more}), source.name)]
    folders = [folder for child in _children(source) if (folder := _folder(child)).is_machine]
    if not folders:
        raise _nothing_in(source)
    return [_build(folder, folder.path.name) for folder in folders]


def _nothing_in(source: Path) -> InvalidArgument:
    known = ", ".join(sorted({" ".join(command[:2]) for command in COMMANDS.values()}))
    return InvalidArgument(
        f"{source}: nothing in it is understood; expected sys/ and proc/ of a machine, or "
        f"outputs of {known}"
    )


def _children(path: Path) -> list[Path]:
    return sorted(child for child in path.iterdir() if child.is_dir() and child.name not in _ROOTS)


def _folder(path: Path) -> _Folder:
    texts = {}
    for child in sorted(path.iterdir()):
        if child.is_file() and child.name not in (_NVML, _SOFTWARE, _ENVIRON):
            text = _text(child)
            if text is not None:
                texts[child.name] = text
    return _Folder(path, (path / "sys").is_dir() or (path / "proc").is_dir(), texts)


def _text(path: Path) -> str | None:
    """Return a text file's content, None for another file and one that cannot be read."""
    try:
        return _decoded(path)
    except OSError:
        return None


def _decoded(path: Path) -> str | None:
    with path.open("rb") as stream:
        data = stream.read(_MOST_BYTES)
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):  # a Windows shell's redirection
        return data.decode("utf-16", errors="replace")
    if b"\0" in data[:4096] or path.suffix in (".svg", ".json"):
        return None
    return data.decode("utf-8", errors="replace")


def _build(folder: _Folder, name: str) -> Found:
    str(folder.path).encode()  # goes to other processes and into reports
    sysfs = read_sysfs(HostTree(folder.path)) if folder.tree else None
    nvml = NvmlFacts()
    software: dict[str, str] = {}
    environ: dict[str, str] = {}
    base = folder.path if folder.path.is_dir() else folder.path.parent
    whole = folder.path.is_dir()
    if whole and (base / _NVML).is_file():
        nvml = decode_nvml((base / _NVML).read_text(encoding="utf-8", errors="replace"))
    if whole and (base / _SOFTWARE).is_file():
        with contextlib.suppress(msgspec.MsgspecError):
            software = msgspec.json.decode((base / _SOFTWARE).read_bytes(), type=dict[str, str])
    if whole and (base / _ENVIRON).is_file():
        with contextlib.suppress(msgspec.MsgspecError):
            environ = msgspec.json.decode((base / _ENVIRON).read_bytes(), type=dict[str, str])
    texts = read_texts(folder.texts)
    machine = assemble(sysfs, nvml, texts, software)
    if not machine.host:
        machine = replace(machine, host=name)
    notes = [f"{_NVML}: {nvml.problem}"] if nvml.problem and not nvml.gpus else []
    return Found(
        machine.noted(*notes),
        texts,
        nvml,
        {name.rpartition("/")[2]: text for name, text in folder.texts.items()},
        settings(environ),
        str(folder.path) if folder.tree else "",
        str(folder.path) if whole else str(base / next(iter(folder.texts))),
    )
