"""Standard output and result files that cannot be written: told in a line, with status 2."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rdmakit.bench.options import Options
from rdmakit.bench.shown import Shown
from rdmakit.errors import OutputError
from rdmakit.report.output import guarded_stdout
from rdmakit.report.schema import Row

_FULL = "rdmakit: standard output cannot be written: No space left on device\n"


def command(*arguments: str, output: str) -> subprocess.CompletedProcess[str]:
    with Path(output).open("w") as stream:
        return subprocess.run(
            [sys.executable, "-m", "rdmakit", *arguments],
            stdout=stream,
            stderr=subprocess.PIPE,
            text=True,
            timeout=100,
            check=False,
        )


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("--version",),
        ("doctor", "--list"),
        ("doctor", "--list", "--json"),
        ("doctor", "--only", "host.memlock"),
        ("doctor", "--only", "host.memlock", "--json"),
        ("topo",),
        ("topo", "--json"),
        ("hostfile", "FILE"),
        ("hostfile", "FILE", "--json"),
        ("hostfile", "FILE", "--to", "slurm"),
    ],
    ids=" ".join,
)
def test_full_disk_is_one_line(arguments: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("n0 slots=2\nn1 slots=2\n")
    done = command(*(str(file) if x == "FILE" else x for x in arguments), output="/dev/full")
    assert (done.returncode, done.stderr) == (2, _FULL)


def test_a_full_disk_does_not_keep_the_other_files_from_being_written(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    done = command("doctor", "--only", "host.memlock", "--junit", str(report), output="/dev/full")
    assert (done.returncode, done.stderr) == (2, _FULL)
    assert "host.memlock" in report.read_text()


def test_a_reader_that_left_is_not_told(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "rdmakit", "doctor", "--list", "--json"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=100,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (2, "")


class Full(io.StringIO):
    """A stream that takes ``room`` characters."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def write(self, text: str) -> int:
        if self.tell() + len(text) > self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(text)


def test_only_the_outputs_own_errors_are_turned(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Full(3)
    monkeypatch.setattr(sys, "stdout", stream)
    with pytest.raises(FileNotFoundError), guarded_stdout():
        Path("/nowhere/at/all").read_text()
    assert sys.stdout is stream
    with guarded_stdout():
        assert sys.stdout.write("abc") == 3
        with pytest.raises(OutputError, match=r"No space left") as caught:
            sys.stdout.write("d")
        with pytest.raises(OutputError, match=r"No space left"):  # once lost, always
            sys.stdout.write("")
        sys.stdout = stream
    assert not caught.value.reader_left
    assert sys.stdout is stream
    assert stream.getvalue() == "abc"


ROW = Row(
    layer="memory",
    case="copy",
    algorithm="",
    transport="",
    nbytes=8,
    count=2,
    dtype="float32",
    wire_dtype="float32",
    op="",
    ranks=1,
    nodes=1,
    ranks_per_node="1",
    skipped="only a test",
)


def options(output: Path) -> Options:
    return Options.of(
        begin="8",
        end="8",
        factor=2,
        iterations=1,
        warmup=0,
        check=1,
        op="sum",
        dtype="float32",
        layers=(),
        algorithms=(),
        device="cpu",
        gpu_map=None,
        require=None,
        time_budget=1.0,
        output=str(output),
        quiet=False,
    )


def test_a_result_file_that_cannot_be_written_leaves_the_rows_on_the_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "gone"
    shown = Shown(options(folder / "rows.json"), {"x": 1}, first=True, gpu=False)
    text = f"{folder}/rows.json: cannot be written: No such file or directory"
    with pytest.raises(OutputError) as caught:
        shown.row(ROW)
    assert str(caught.value) == text
    assert shown.rescue() == [text]
    printed = capsys.readouterr().out
    assert "only a test" in printed
    assert "summary of what was measured until the interrupt" in printed
    assert "written:" not in printed


def show_and_rescue(shown: Shown, lost: str) -> None:
    with pytest.raises(OutputError):
        shown.row(ROW)
    assert shown.rescue() == [lost, lost]  # the summary, and that the file is written


def test_a_lost_standard_output_leaves_the_rows_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows.jsonl"
    monkeypatch.setattr(sys, "stdout", Full(0))
    lost = "standard output cannot be written: No space left on device"
    with pytest.raises(OutputError, match=lost), guarded_stdout():
        show_and_rescue(Shown(options(file), {"x": 1}, first=True, gpu=False), lost)
    head, row = file.read_text().splitlines()
    assert '"interrupted":true' in head
    assert '"only a test"' in row


def test_ranks_that_are_not_the_first_only_gather(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.json"
    shown = Shown(options(file), {}, first=False, gpu=False)
    shown.lines(["a line"])
    shown.row(ROW)
    shown.close()
    assert shown.rescue() == []
    assert shown.rows == [ROW]
    assert capsys.readouterr().out == ""
    assert not file.exists()
