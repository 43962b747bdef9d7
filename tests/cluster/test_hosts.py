"""Jobs over emulated hosts: real UCX tcp on links that count, in both MPI families."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rdmakit.process.launcher import LAUNCHER_VARIABLES
from tests.mpi import FAMILIES, python_of

pytestmark = [pytest.mark.cluster, pytest.mark.parallel, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "scripts" / "cluster"
PROGRAM = ROOT / "tests" / "parallel" / "programs" / "hosts.py"
CANNOT = 3
SIZE = 16 << 20
MTU = 9000


class Hosts:
    """A cluster that is up."""

    def __init__(self, name: str) -> None:
        self.env = {k: v for k, v in os.environ.items() if not LAUNCHER_VARIABLES.match(k)}
        self.env |= {"RDMAKIT_CLUSTER": name, "PYTHONPATH": str(ROOT)}
        self.env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        self.name = name

    def tool(self, *words: str, timeout: float = 30) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(TOOL), *words], env=self.env, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=timeout, check=False,
        )  # fmt: skip

    def mpirun(self, family: str, slots: list[int], agent: Path, args: list[str]) -> str:
        """Run the program with ``slots[i]`` ranks on host i and return its output."""
        python = python_of(family)
        mpirun = str(Path(python).parent / "mpirun")
        where = ",".join(f"{self.name}{host}:{count}" for host, count in enumerate(slots))
        if family == "openmpi":
            # Ranks by slot, in the order of hosts; variables of this process do not travel.
            options = ["--host", where, "--map-by", "slot", "--bind-to", "none",
                       "--prtemca", "plm_ssh_agent", str(agent),
                       "--mca", "mpi_yield_when_idle", "1", "-x", "PYTHONPATH"]  # fmt: skip
        else:
            options = ["-hosts", where, "-launcher", "ssh", "-launcher-exec", str(agent)]
        done = self.tool(
            "run",
            "0",
            mpirun,
            *options,
            "-n",
            str(sum(slots)),
            python,
            str(PROGRAM),
            *args,
            timeout=60,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Four hosts, of which a job may use the first two only."""
    tail = "".join(chr(ord("a") + int(digit)) for digit in str(os.getpid()))
    hosts = Hosts(f"h{tail}")
    done = hosts.tool("up", "4", "--mtu", str(MTU))
    if done.returncode == CANNOT:
        pytest.skip(f"no emulated hosts here: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    yield hosts
    done = hosts.tool("down")
    assert done.returncode == 0, done.stderr


@pytest.fixture
def agent(hosts: Hosts, tmp_path: Path) -> Path:
    """The stand-in for ssh; like ssh it brings no variables, so it names the cluster itself."""
    path = tmp_path / "agent"
    path.write_text(f"#!/bin/sh\nRDMAKIT_CLUSTER={hosts.name} exec '{TOOL}-agent' \"$@\"\n")
    path.chmod(0o755)
    return path


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize(
    ("slots", "shape"), [([2, 2], "2x2"), ([3, 1], "3+1"), ([2, 2, 2, 2], "4x2")]
)
def test_results(hosts: Hosts, agent: Path, family: str, slots: list[int], shape: str) -> None:
    out = hosts.mpirun(family, slots, agent, ["results"])
    places = dict(re.findall(r"^rank (\d+) host (\S+) nodes", out, re.MULTILINE))
    want = [f"{hosts.name}{host}" for host, count in enumerate(slots) for _ in range(count)]
    assert [places[str(rank)] for rank in range(sum(slots))] == want
    assert set(re.findall(r" nodes (\S+)", out)) == {shape}
    lanes = re.findall(r"^rank \d+ channel (\S+) lanes (.*)$", out, re.MULTILINE)
    assert len(lanes) == sum(slots)
    for channel, used in lanes:
        assert channel == "ucx"
        # A rank that exchanges with nobody abroad has made no endpoint.
        assert used in ("tcp/link0", ""), out
    assert any(used for _, used in lanes)


@pytest.mark.parametrize("slots", [[2, 2], [2, 2, 2, 2]], ids=str)
def test_bytes_on_the_link(hosts: Hosts, agent: Path, family: str, slots: list[int]) -> None:
    """2(N-1)/N of the vector leave each host, and 2(n-1)/n for the ring, within 2 %."""
    start = time.monotonic()
    out = hosts.mpirun(family, slots, agent, ["bytes", "hierarchical", "ring"])
    nodes, ranks = len(slots), sum(slots)
    for algorithm, n in (("hierarchical", nodes), ("ring", ranks)):
        sent = dict(re.findall(rf"^bytes {algorithm} (\S+) (\S+)$", out, re.MULTILINE))
        assert len(sent) == nodes, out
        want = 2 * (n - 1) / n * SIZE
        for host, nbytes in sent.items():
            assert 1 <= float(nbytes) / want < 1.02, (algorithm, host, float(nbytes) / want)
    assert time.monotonic() - start < 60
