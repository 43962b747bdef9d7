"""What ``rdmakit doctor`` was asked for, and showing what came of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import rdmakit
from rdmakit.doctor.messages import NodeReport
from rdmakit.doctor.model import Finding
from rdmakit.errors import InvalidArgument
from rdmakit.pretty import pretty_json
from rdmakit.proof import PathReport
from rdmakit.report.doctor_files import junit, prometheus, write_whole
from rdmakit.report.doctor_schema import Outcome, doctor_result
from rdmakit.report.doctor_text import print_doctor

__all__ = ["DoctorOptions", "show"]


@dataclass(frozen=True)
class DoctorOptions:
    """Options of the command; plain values, since they travel between processes."""

    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    list: bool = False
    json: bool = False
    junit: str = ""
    prometheus: str = ""
    strict: bool = False
    profile: str = ""
    source: str = ""
    """Directory or file of other machines; nothing: this machine, or the job's."""
    path: bool = False
    """Prove the path between nodes as well."""
    verbose: bool = False

    def __post_init__(self) -> None:
        for option, file in (("--junit", self.junit), ("--prometheus", self.prometheus)):
            folder = Path(file).absolute().parent
            if file and not folder.is_dir():
                raise InvalidArgument(f"{option} {file}: there is no directory {folder}")
        if not self.profile.isprintable():
            raise InvalidArgument(f"--profile {self.profile!r}: the name is no plain text; rename")
        files = [Path(file).resolve() for file in (self.junit, self.prometheus) if file]
        if len(files) > len(set(files)):
            raise InvalidArgument(f"--junit and --prometheus name the same file, {files[0]}")
        if self.source and self.path:
            raise InvalidArgument("--path needs ranks, not files: give it without --from")


def show(
    options: DoctorOptions,
    nodes: Sequence[NodeReport],
    job: Sequence[Finding],
    whys: dict[str, str],
    about: str,
    watched: bool | None = None,
    paths: Sequence[PathReport] = (),
) -> int:
    """Print, write the files, and return the exit status. Used by one process only.

    ``watched``: see :func:`rdmakit.report.doctor_text.print_doctor`.

    Raises:
        InvalidArgument: a file cannot be written; the report is printed and the other file written.
    """
    outcome = Outcome(nodes, tuple(job), whys, strict=options.strict, paths=paths)
    failed = _write(options, outcome)
    if options.json:
        sys.stdout.write(pretty_json(doctor_result(outcome)))
    else:
        title = f"rdmakit {rdmakit.__version__} doctor: {about}"
        print_doctor(outcome, title=title, verbose=options.verbose, watched=watched)
    sys.stdout.flush()
    if failed:
        raise InvalidArgument("; ".join(failed))
    return outcome.exit


def _write(options: DoctorOptions, outcome: Outcome) -> list[str]:
    """Write the files, and return what went wrong: the report is worth more than they."""
    failed = []
    for file, encode in ((options.junit, junit), (options.prometheus, prometheus)):
        if file:
            try:
                write_whole(Path(file), encode(outcome))
            except InvalidArgument as exc:
                failed.append(str(exc))
    return failed
