"""The children that tell of this machine's software, and faults made on it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rdmakit.doctor.context import Context
from rdmakit.doctor.model import Status, worst
from rdmakit.drivers.host import HostTree, run
from rdmakit.drivers.python_report import ask_python
from rdmakit.drivers.ucx_report import ask_ucx
from rdmakit.process.mpi_report import ask_mpi
from rdmakit.topology.model import Machine
from rdmakit.topology.texts import Texts
from tests.unit.doctor_parts import check

pytestmark = pytest.mark.slow


def here(**environ: str) -> Context:
    """Return this machine with these settings, as a job of one rank would have them."""
    return Context(HostTree(), Machine(), Texts(), environ, live=True)


@pytest.fixture(autouse=True)
def need_ucx() -> None:
    problem = ask_ucx(run, {}).problem
    if problem:
        pytest.skip(f"no UCX here: {problem}")


def test_ucx() -> None:
    told = ask_ucx(run, {"UCX_TLS": "self,tpc", "UCX_FOO_BAR": "1", "UCX_NET_DEVICES": "eht0"})
    assert told.used == (("self", "memory"),)
    assert ("tcp", "lo") in told.every
    assert {"UCX_TLS", "UCX_NET_DEVICES", "UCX_RNDV_THRESH"} <= set(told.names)
    assert told.unused == ("UCX_FOO_BAR",)
    assert any("'tpc'" in line for line in told.said)
    assert told.registers is not None
    assert told.libraries["libucp"]


def test_a_context_that_cannot_be_made() -> None:
    told = ask_ucx(run, {"UCX_TLS": "nothing"})
    assert told.refused
    assert told.every, "everything allowed still works"


def test_mpi_and_python() -> None:
    mpi, python = ask_mpi(run, {}), ask_python(run)
    assert mpi.family in ("openmpi", "mpich", "intel")
    assert Path(mpi.path).is_file()
    assert mpi.library
    assert python.packages["mpi4py"]
    assert not python.problem
    gone = ask_mpi(run, {"MPI4PY_LIBMPI": "/nothing/libmpi.so"})
    assert gone.problem == "mpi4py would find no MPI library"


@pytest.mark.parametrize(
    ("name", "environ", "words"),
    [
        ("ucx.tls", {"UCX_TLS": "self,sm"}, "no transport between nodes"),
        ("ucx.net_devices", {"UCX_NET_DEVICES": "nothing0"}, "is no device of this node"),
        ("ucx.names", {"UCX_NET_DEVICE": "eth0"}, "perhaps UCX_NET_DEVICES"),
        ("mpi.library", {"MPI4PY_LIBMPI": "/nothing/libmpi.so"}, "no MPI library"),
        ("nccl.settings", {"NCCL_SOCKET_IFNAME": "nothing0"}, "no interface"),
    ],
)
def test_faults(name: str, environ: dict[str, str], words: str) -> None:
    found = check(name, here(**environ))
    assert worst(found) in (Status.FAIL, Status.WARN)
    assert any(words in finding.found for finding in found)


@pytest.mark.parametrize("name", ["ucx.tls", "ucx.net_devices", "ucx.names", "mpi.ucx"])
def test_no_fault(name: str) -> None:
    environ = {"UCX_LOG_LEVEL": "warn", "PATH": os.environ.get("PATH", "")}
    assert worst(check(name, here(**environ))) is Status.OK
