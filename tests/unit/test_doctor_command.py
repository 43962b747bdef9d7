"""The command line of ``rdmakit doctor``, and what a collected directory keeps of settings."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from rdmakit.cli import main
from rdmakit.config import Config
from rdmakit.discovery.collect import collect, read_machines
from rdmakit.discovery.settings import PREFIXES, settings
from rdmakit.doctor.catalog import CHECKS
from rdmakit.doctor.worker import FACTS
from rdmakit.drivers.host import CommandResult, HostTree
from rdmakit.errors import InvalidArgument
from rdmakit.process.launcher import LAUNCHER_VARIABLES, launcher_of
from rdmakit.survey.doctor_options import DoctorOptions
from rdmakit.survey.doctor_steps import JOB_STEPS, path_step
from rdmakit.survey.run import Run


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if LAUNCHER_VARIABLES.match(name):
            monkeypatch.delenv(name)


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["doctor", *args])
    return int(caught.value.code or 0)


def machine(folder: Path, limit: str) -> Path:
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/limits").write_text(f"Max locked memory  {limit}  {limit}  bytes\n")
    return folder


def test_files_of_one_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = machine(tmp_path / "n7", "unlimited")
    assert run("--only", "host.memlock", "--strict", "--from", str(source)) == 0
    out = capsys.readouterr().out
    assert "ok      host: memlock" in out
    assert "checks: 1 ok" in out


def test_files_of_several(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, limit in (("a", "65536"), ("b", "unlimited"), ("c", "65536")):
        machine(tmp_path / name, limit)
    args = ["--only", "host.memlock", "--json", "--from", str(tmp_path)]
    assert run(*args) == 0
    found = json.loads(capsys.readouterr().out)
    assert [node["name"] for node in found["nodes"]] == ["a", "b", "c"]
    assert found["findings"][0]["nodes"] == ["a", "c"]
    assert found["cures"][0]["checks"] == ["host.memlock"]
    assert run(*args, "--strict") == 3


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--list", "--only", "host.memlock") == 0
    out = capsys.readouterr().out
    assert out.startswith("host.memlock: Locked memory\n    RDMA registers memory")
    assert run("--list", "--json", "--only", "host.memlock") == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry["id"] == "host.memlock"
    assert entry["why"].endswith(".")
    assert run("--list", "--json") == 0
    ids = {one["id"] for one in json.loads(capsys.readouterr().out)}
    assert {"doctor.node", "doctor.facts", "path.proof", "net.reach", "job.hosts"} <= ids
    assert {check.id for check in CHECKS} < ids
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    table = readme[readme.index("| group | |") :].partition("\n\n")[0]
    assert {name.partition(".")[0] for name in ids} == set(re.findall(r"`(\w+)`", table))


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--only", "none.such"], "no check 'none.such'"),
        (["--skip", "none.such"], "no check 'none.such'"),
        (["--junit", "/no/such/file.xml"], "there is no directory /no/such"),
        (["--from", "/no/such"], "no such directory or file"),
        (["--profile", "/no/such.toml"], "/no/such.toml"),
        (["--path"], "mpirun -n 2"),
        (["--path", "--from", "/tmp"], "--path needs ranks"),
    ],
)
def test_bad_usage(args: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*args) == 2
    assert text in capsys.readouterr().err


def test_a_node_tells_of_itself_only_where_that_is_used() -> None:
    """It starts processes of UCX, MPI and Python for that; the path needs none of it."""
    (reach,) = (step for step in JOB_STEPS if step.nodes and step.checks[0].id == "net.reach")
    path = path_step(Config(), [])
    for steps, told in (((), []), ((path,), []), ((reach, path), [FACTS]), (JOB_STEPS, [FACTS])):
        run = Run(DoctorOptions(), CHECKS, ["host.memlock"], steps)
        assert run.order.checks == ["host.memlock", *told]


# -- settings --------------------------------------------------------------------------------------


@hypothesis_settings(deadline=None)
@given(st.dictionaries(st.text("ABCDEFGHIJKLMNOPQRSTUVWXYZ_", min_size=1), st.text()))
def test_only_settings_by_prefix(environ: dict[str, str]) -> None:
    kept = settings(environ)
    assert all(name.startswith(PREFIXES) for name in kept)
    assert settings({f"UCX_NET_{name}": "" for name in ("DEVICES", "TLS")}) == {
        "UCX_NET_DEVICES": "",
        "UCX_NET_TLS": "",
    }


@pytest.mark.parametrize(
    "name", ["SLURM_JWT", "UCX_TOKEN", "OMPI_MCA_sec_PASSWORD", "AWS_SECRET", "HOME", "PATH"]
)
def test_no_secrets(name: str) -> None:
    assert settings({name: "x"}) == {}


def test_collected_settings_are_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("SLURM_JWT", "secret")
    monkeypatch.setenv("MY_PASSWORD", "secret")
    tree = machine(tmp_path / "root", "unlimited")
    (tree / "sys").mkdir()

    def runner(argv: object, timeout: float) -> CommandResult:
        return CommandResult(("x",), 0, "Linux\n", "")

    collect(tmp_path / "out", HostTree(tree), runner)
    text = (tmp_path / "out/environ.json").read_text()
    assert json.loads(text)["UCX_TLS"] == "tcp"
    assert "secret" not in text
    (found,) = read_machines(tmp_path / "out")
    assert found.environ["UCX_TLS"] == "tcp"
    assert found.outputs["ibstat.txt"] == "Linux\n"
    assert found.path == str(tmp_path / "out")
    forged = json.dumps({"UCX_TLS": "tcp", "HOME": "/x"})
    (tmp_path / "out/environ.json").write_text(forged)
    (found,) = read_machines(tmp_path / "out")
    assert found.environ == {"UCX_TLS": "tcp"}


def test_a_choice_of_nothing_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    for args in (["--only", "host", "--skip", "host"], ["--only", "job"], ["--only", "path"]):
        assert run(*args) == 2
        assert "--only names" in capsys.readouterr().err


def test_a_report_outlives_a_file_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = machine(tmp_path / "n7", "unlimited")
    (tmp_path / "taken").mkdir()
    args = ["--only", "host.memlock", "--from", str(source)]
    metrics = tmp_path / "x.prom"
    assert run(*args, "--junit", str(tmp_path / "taken"), "--prometheus", str(metrics)) == 2
    shown = capsys.readouterr()
    assert "host: memlock" in shown.out
    assert "cannot be written" in shown.err
    assert "host.memlock" in metrics.read_text()
    twice = f"{tmp_path}/taken/../x.prom"
    assert run(*args, "--junit", twice, "--prometheus", str(metrics)) == 2
    assert "the same file" in capsys.readouterr().err


def test_what_is_not_understood_or_readable_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for content in (b"bring milk\n", bytes(range(256))):
        (tmp_path / "garbage").write_bytes(content)
        assert run("--from", str(tmp_path / "garbage")) == 2
        assert "nothing in it is understood" in capsys.readouterr().err

    (tmp_path / "n\udcff/proc").mkdir(parents=True)
    assert run("--from", str(tmp_path)) == 2
    assert "is no UTF-8; rename it" in capsys.readouterr().err

    def locked(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", locked)
    assert run("--from", str(tmp_path)) == 2
    assert f"{tmp_path}: cannot be read: Permission denied" in capsys.readouterr().err


def test_a_launcher_is_seen_in_what_is_kept() -> None:
    hydra = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    assert launcher_of(settings({**hydra, "HOME": "/"})) == launcher_of(hydra)
    assert launcher_of(hydra).kind == "hydra"


def test_settings_that_are_no_utf8_can_be_told() -> None:
    found = settings({"UCX_TLS": b"rc\xff".decode("utf-8", "surrogateescape")})
    assert found == {"UCX_TLS": "rc\\udcff"}
    with pytest.raises(InvalidArgument, match="RDMAKIT_NODE_ID"):
        Config.from_env({"RDMAKIT_NODE_ID": "\udcff"})


def test_a_closed_standard_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = machine(tmp_path / "n7", "65536")
    args = ["--only", "host.memlock", "--strict", "--from", str(source)]
    monkeypatch.setattr(sys, "stdout", None)
    try:
        assert run(*args) == 3
    finally:
        sys.stdout.close()
