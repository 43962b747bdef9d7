"""Launchers and MPI libraries told apart without loading MPI."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rdmakit.drivers import mpi_library
from rdmakit.errors import SetupError
from rdmakit.process import launcher
from rdmakit.process.launcher import Launcher, check_before_mpi, check_world, launcher_of

OPENMPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "9",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Launcher()),
        (OPENMPI, Launcher("openmpi", 3, 4, 1, 2)),
        (HYDRA, Launcher("hydra", 3, 4, 1, 2)),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, Launcher("hydra", 0, 2, 0, 1)),
        (SRUN, Launcher("slurm", 3, 5, 0, 1)),
        (SRUN | {"PMIX_RANK": "3"}, Launcher("slurm", 3, 5, 0, 1)),
        (SRUN | {"PMI_RANK": "3", "PMI_SIZE": "5"}, Launcher("slurm", 3, 5, 0, 1)),
        # mpirun inside a Slurm job: Slurm's numbers are those of the batch script or proxy.
        (SRUN | OPENMPI, Launcher("openmpi", 3, 4, 1, 2)),
        (SRUN | HYDRA | {"PMIX_RANK": "0"}, Launcher("hydra", 3, 4, 1, 2)),
        # A batch script that calls python itself is one rank alone.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "9"}, Launcher()),
        ({"PMI_RANK": "0", "PMI_SIZE": "2", "FLUX_JOB_ID": "f"}, Launcher()),
        ({"PMIX_RANK": "0"}, Launcher()),
        ({"PMI_RANK": "x", "PMI_SIZE": "2"}, Launcher()),
    ],
)
def test_launcher_of(environ: dict[str, str], expected: Launcher) -> None:
    assert launcher_of(environ) == expected


def test_launcher_variables() -> None:
    for name in (*OPENMPI, *HYDRA, "PMIX_SERVER_URI41", "PRTE_LAUNCHED"):
        assert launcher.LAUNCHER_VARIABLES.match(name)
    for name in ("OMPI_MCA_btl", "OMPI_ALLOW_RUN_AS_ROOT", "PRTE_MCA_x", "MPI4PY_LIBMPI"):
        assert not launcher.LAUNCHER_VARIABLES.match(name)


SYMBOLS = {
    "openmpi": b"\0ompi_mpi_comm_self\0",
    "mpich": b"\0MPIR_Init\0",
    "intel": b"\0MPIR_Init\0I_MPI_Check_image_status\0",
    "other": b"\0nothing\0",
}


def fake_library(path: Path, family: str) -> Path:
    """Write a file that looks like a library of this machine with symbols of ``family``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with Path("/proc/self/exe").open("rb") as own:
        path.write_bytes(own.read(64) + SYMBOLS[family])
    return path


def fake_mpirun(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A virtual environment with mpi4py's wheel and nothing else to find an MPI in."""
    package = tmp_path / "mpi4py"
    package.mkdir()
    monkeypatch.setattr(mpi_library, "_mpi4py_directory", lambda: package)
    monkeypatch.setattr(mpi_library, "_LD_CACHE", tmp_path / "ld.so.cache")
    monkeypatch.setattr(mpi_library, "_SYSTEM_DIRECTORIES", ())
    monkeypatch.setattr("site.ENABLE_USER_SITE", False)
    monkeypatch.setattr("site.PREFIXES", [])
    monkeypatch.setattr(sys, "exec_prefix", str(tmp_path / "venv"))
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "family"),
    [("libmpi.so.40", "openmpi"), ("libmpi.so.12", "mpich"), ("libmpi.so.12", "intel")],
)
def test_library_beside_mpi4py(wheels: Path, name: str, family: str) -> None:
    library = fake_library(wheels / "venv/lib" / name, family)
    (wheels / "venv/lib/libmpi.so").write_text(f"INPUT({name})\n")
    assert launcher.mpi_family_to_load({}) == (family, library)


def test_unknown_library_is_not_judged(wheels: Path) -> None:
    library = fake_library(wheels / "venv/lib/libmpi.so.12", "other")
    assert launcher.mpi_family_to_load({}) == (None, library)
    assert check_before_mpi(OPENMPI).size == 4


def test_chosen_library_wins(wheels: Path) -> None:
    fake_library(wheels / "venv/lib/libmpi.so.40", "openmpi")
    chosen = fake_library(wheels / "opt/libmpi.so", "mpich")
    for value in (str(chosen), str(chosen.parent), f"/nowhere/libmpi.so:{chosen}"):
        assert launcher.mpi_family_to_load({"MPI4PY_LIBMPI": value}) == ("mpich", chosen)


def test_library_of_the_linker(wheels: Path) -> None:
    cached = fake_library(wheels / "usr/libmpi.so.40", "openmpi")
    (wheels / "ld.so.cache").write_bytes(b"head\0libmpi.so.40\0" + bytes(cached) + b"\0rest")
    assert launcher.mpi_family_to_load({}) == ("openmpi", cached)
    first = fake_library(wheels / "module/libmpi.so.12", "mpich")
    environ = {"LD_LIBRARY_PATH": f":{first.parent}"}
    # mpi4py tries the name libmpi.so.12 everywhere before it tries libmpi.so.40.
    assert launcher.mpi_family_to_load(environ) == ("mpich", first)


def test_no_library(wheels: Path) -> None:
    with pytest.raises(SetupError, match=r"rdmakit\[openmpi\]"):
        check_before_mpi({})
    with pytest.raises(SetupError, match="MPI4PY_LIBMPI=/nowhere leads to none"):
        check_before_mpi({"MPI4PY_LIBMPI": "/nowhere"})


def test_no_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(SetupError, match="pip install mpi4py"):
        check_before_mpi({})


@pytest.mark.parametrize(
    ("environ", "family", "effect"),
    [
        (HYDRA, "openmpi", "alone in a world of 1"),
        (OPENMPI, "mpich", "killed inside MPI_Init"),
        (OPENMPI, "intel", "killed inside MPI_Init"),
    ],
)
def test_wrong_mpirun(wheels: Path, environ: dict[str, str], family: str, effect: str) -> None:
    library = fake_library(wheels / "venv/lib/libmpi.so.12", family)
    with pytest.raises(SetupError) as caught:
        check_before_mpi(environ)
    text = str(caught.value)
    assert effect in text
    assert str(library) in text
    assert "Start with the mpirun of " in text
    mpirun = fake_mpirun(wheels / "venv/bin/mpirun")
    with pytest.raises(SetupError, match=f"Start with {mpirun}"):
        check_before_mpi(environ)


@pytest.mark.parametrize(
    ("environ", "family"),
    [(HYDRA, "mpich"), (HYDRA, "intel"), (OPENMPI, "openmpi"), (SRUN, "mpich"), ({}, "mpich")],
)
def test_right_mpirun(wheels: Path, environ: dict[str, str], family: str) -> None:
    fake_library(wheels / "venv/lib/libmpi.so.12", family)
    assert check_before_mpi(environ) == launcher_of(environ)


def test_mpirun_of_a_distribution(tmp_path: Path) -> None:
    library = tmp_path / "usr/lib/x86_64-linux-gnu/openmpi/lib/libmpi.so.40"
    fake_mpirun(tmp_path / "usr/bin/mpirun")
    mpirun = fake_mpirun(tmp_path / "usr/bin/mpirun.openmpi")
    assert mpi_library.mpirun_beside(library, "openmpi") == mpirun


def test_check_world() -> None:
    check_world(Launcher(), 1)
    check_world(Launcher("hydra", 0, 4), 4)
    with pytest.raises(SetupError, match="4 ranks were started"):
        check_world(Launcher("hydra", 0, 4), 1)
    with pytest.raises(SetupError, match="srun --mpi=pmix"):
        check_world(Launcher("slurm", 0, 4), 1)


def test_report_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[float] = []
    monkeypatch.setattr("time.sleep", held.append)
    for rank in range(3):
        with pytest.raises(SystemExit) as caught:
            launcher.report_once(Launcher("openmpi", rank, 3), "no good")
        assert caught.value.code == 2
    assert capsys.readouterr().err == "rdmakit: no good\n"
    assert held[0] < held[1] == held[2]
