"""Emulated hosts that are up, and jobs over them in both MPI families."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from rdmakit.process.launcher import LAUNCHER_VARIABLES
from tests.mpi import compiled, python_of

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "scripts" / "cluster"
CANNOT = 3
MTU = 9000
JOB_SECONDS = 110.0
NOBODY = "02:00:00:00:00:99"
"""No host has it: what is sent there vanishes, as behind a packet filter."""


class Hosts:
    """A cluster that is up; hosts are numbers from 0."""

    def __init__(self, name: str, agent: Path) -> None:
        """Say how to reach the cluster; ``agent`` is written, and stands in for ssh."""
        self.name = name
        env = {k: v for k, v in os.environ.items() if not k.startswith(("UCX_", "RDMAKIT_"))}
        self.env = {k: v for k, v in env.items() if not LAUNCHER_VARIABLES.match(k)}
        self.env |= {"RDMAKIT_CLUSTER": name, "PYTHONPATH": str(ROOT)}
        self.env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        # Like ssh it brings no variables, so it names the cluster itself.
        self.agent = agent
        agent.write_text(f"#!/bin/sh\nRDMAKIT_CLUSTER={name} exec '{TOOL}-agent' \"$@\"\n")
        agent.chmod(0o755)

    def tool(self, *words: str, timeout: float = 30) -> subprocess.CompletedProcess[str]:
        """Run scripts/cluster."""
        return subprocess.run(
            [str(TOOL), *words], env=self.env, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=timeout, check=False,
        )  # fmt: skip

    def host(self, number: int) -> str:
        """Return a host's name."""
        return f"{self.name}{number}"

    def on(self, host: int, line: str) -> str:
        """Run a line of shell commands on a host, which must succeed; return its output."""
        done = self.tool("run", str(host), "sh", "-c", line)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def address(self, host: int) -> str:
        return self.on(host, "ip -4 -o addr show dev link0").split()[3].partition("/")[0]

    def at_switch(self, *words: str) -> None:
        """Run ip on the switch that joins the hosts."""
        subprocess.run(["ip", "-n", f"{self.name}-switch", *words], check=True, timeout=10)

    def words(
        self,
        family: str,
        slots: Sequence[int],
        args: Sequence[str],
        environ: Mapping[str, str] | None = None,
    ) -> list[str]:
        """Return what ``tool`` is given for a job of ``slots[i]`` ranks of Python on host i."""
        python = python_of(family)
        where = ",".join(f"{self.host(host)}:{count}" for host, count in enumerate(slots))
        compiled(python)
        variables = dict(environ or {})
        if family == "openmpi":
            # Ranks by slot, in the order of hosts; variables of this process do not travel.
            options = ["--host", where, "--map-by", "slot", "--bind-to", "none",
                       "--prtemca", "plm_ssh_agent", str(self.agent),
                       "--mca", "mpi_yield_when_idle", "1", "--mca", "btl", "^ofi",
                       "-x", "PYTHONPATH"]  # fmt: skip
            for name, value in variables.items():
                options += ["-x", f"{name}={value}"]
        else:
            options = ["-hosts", where, "-launcher", "ssh", "-launcher-exec", str(self.agent)]
            for name, value in variables.items():
                options += ["-genv", name, value]
        mpirun = str(Path(python).parent / "mpirun")
        return ["run", "0", mpirun, *options, "-n", str(sum(slots)), python, *args]

    def job(
        self,
        family: str,
        slots: Sequence[int],
        args: Sequence[str],
        environ: Mapping[str, str] | None = None,
        timeout: float = JOB_SECONDS,
    ) -> subprocess.CompletedProcess[str]:
        """Run a job and return what became of mpirun."""
        return self.tool(*self.words(family, slots, args, environ), timeout=timeout)

    @contextmanager
    def cut(self, host: int, other: int) -> Iterator[None]:
        """Let packets from ``host`` to ``other`` vanish."""
        there = self.address(other)
        self.on(host, f"ip neigh replace {there} lladdr {NOBODY} dev link0 nud permanent")
        try:
            yield
        finally:
            self.on(host, f"ip neigh del {there} dev link0")

    @contextmanager
    def mtu(self, host: int, nbytes: int) -> Iterator[None]:
        """Give a host's link another MTU."""
        self.on(host, f"ip link set link0 mtu {nbytes}")
        try:
            yield
        finally:
            self.on(host, f"ip link set link0 mtu {MTU}")

    @contextmanager
    def renamed(self, host: int, name: str) -> Iterator[None]:
        """Let a host call itself ``name``."""
        self.on(host, f"echo {name} >/proc/sys/kernel/hostname")
        try:
            yield
        finally:
            self.on(host, f"echo {self.host(host)} >/proc/sys/kernel/hostname")

    @contextmanager
    def bridges(self, hosts: int) -> Iterator[None]:
        """Give the first ``hosts`` hosts a docker0 each, which has the same address everywhere."""
        for host in range(hosts):
            self.on(host, _BRIDGE)
        for host in range(hosts):  # the kernel tells of a link's state up to a second later
            self.on(host, _BRIDGE_IS_UP)
        try:
            yield
        finally:
            for host in range(hosts):
                self.on(host, "ip link del docker0; ip link del veth1")


# As a container has one: without something that is up in it the bridge is down.
_BRIDGE = """set -e
ip link add docker0 type bridge; ip addr add 172.17.0.1/16 dev docker0
ip link add veth1 type veth peer name veth2; ip link set veth1 master docker0 up
ip link set veth2 up; ip link set docker0 up"""
_BRIDGE_IS_UP = (
    "for i in $(seq 100); do ip -o link show docker0 | grep -q 'state UP' && exit 0; sleep 0.05; "
    "done; exit 1"
)


@contextmanager
def cluster(count: int, folder: Path) -> Iterator[Hosts]:
    """Have ``count`` hosts up, or skip the test saying why they cannot be had."""
    # Of this process alone: another run of the tests may be going on.
    tail = "".join(chr(ord("a") + int(digit)) for digit in str(os.getpid()))
    hosts = Hosts(f"h{tail}", folder / "agent")
    done = hosts.tool("up", str(count), "--mtu", str(MTU))
    if done.returncode == CANNOT:
        pytest.skip(f"no emulated hosts here: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    try:
        yield hosts
    finally:
        done = hosts.tool("down")
        assert done.returncode == 0, done.stderr
