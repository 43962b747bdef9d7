"""``rdmakit hostfile``: reads, checks, converts, and says what mpirun would do."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rdmakit.errors import InvalidArgument
from rdmakit.hostfile.convert import convert
from rdmakit.hostfile.launch import plan_launch
from rdmakit.hostfile.model import Hostfile
from rdmakit.hostfile.parse import parse_hostfile, read_slurm
from rdmakit.report.hostfile_text import encode_hostfile, print_hostfile

__all__ = ["HostfileOptions", "run_hostfile"]

_MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class HostfileOptions:
    """What was asked for."""

    file: str | None = None
    """Path, ``-`` for standard input; None: the Slurm job that this runs in."""
    dialect: str | None = None
    ranks: int | None = None
    launcher: str | None = None
    map_by: str = "slot"
    cores: int | None = None
    to: str | None = None
    slots: int | None = None
    json: bool = False

    def __post_init__(self) -> None:
        for name, value in (("--cores", self.cores), ("--slots", self.slots)):
            if value is not None and value < 1:
                raise InvalidArgument(f"{name} {value}: at least 1")


def run_hostfile(options: HostfileOptions, environ: Mapping[str, str] | None = None) -> int:
    """Run and return the exit status: 1 where the file has errors. Local.

    Raises:
        InvalidArgument: the file cannot be read, or an option makes no sense.
    """
    env = os.environ if environ is None else environ
    own = _own_names()
    if options.file is None:
        title, hostfile = _of_slurm(env)
    else:
        title = options.file
        hostfile = parse_hostfile(_read(options.file), options.dialect, own)
    if options.to is not None:
        sys.stdout.write(convert(hostfile, options.to, options.slots))
        for problem in hostfile.problems:
            print(f"{title}: {problem}", file=sys.stderr)
        return 0
    launch = None
    if options.ranks is not None:
        launch = plan_launch(
            hostfile,
            options.ranks,
            launcher=options.launcher,
            map_by=options.map_by,
            cores=options.cores,
            own_names=own,
        )
    if options.json:
        sys.stdout.write(encode_hostfile(title, hostfile, launch))
    else:
        print_hostfile(title, hostfile, launch)
    return 1 if hostfile.errors or (launch is not None and launch.refused) else 0


def _read(file: str) -> str:
    try:
        if file == "-":
            data = sys.stdin.buffer.read(_MOST_BYTES)
        else:
            with Path(file).open("rb") as stream:
                data = stream.read(_MOST_BYTES)
    except OSError as exc:
        raise InvalidArgument(f"{file}: cannot be read: {exc.strerror or exc}") from exc
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return data.decode("utf-16", errors="replace")
    return data.decode("utf-8", errors="replace")


def _of_slurm(environ: Mapping[str, str]) -> tuple[str, Hostfile]:
    nodelist = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not nodelist:
        raise InvalidArgument(
            "no file is given and this is no Slurm job (SLURM_JOB_NODELIST is not set)"
        )
    tasks = environ.get("SLURM_TASKS_PER_NODE", "")
    return f"Slurm job {environ.get('SLURM_JOB_ID', '?')}", read_slurm(nodelist, tasks)


def _own_names() -> tuple[str, ...]:
    name = socket.gethostname()
    return tuple(dict.fromkeys((name, name.partition(".")[0])))
