"""scripts/cluster: hosts that are apart, links that count, and nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "scripts" / "cluster"
CANNOT = 3

pytestmark = pytest.mark.cluster

Tool = Callable[..., "subprocess.CompletedProcess[str]"]


def named(name: str) -> Tool:
    def tool(*words: str, status: int | None = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(TOOL), *words],
            env={**os.environ, "RDMAKIT_CLUSTER": name},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        if status is not None:
            assert done.returncode == status, done.stdout + done.stderr
        return done

    return tool


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in listed.stdout.splitlines()}


def up(tool: Tool, *words: str) -> None:
    done = tool("up", *words, status=None)
    if done.returncode == CANNOT:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr


@pytest.fixture
def names() -> tuple[str, str]:
    # Of this process alone: another run of the tests may be going on.
    tail = "".join(chr(ord("a") + int(digit)) for digit in str(os.getpid()))
    return f"t{tail}x", f"t{tail}y"


@pytest.fixture
def tool(names: tuple[str, str]) -> Iterator[Tool]:
    tool = named(names[0])
    yield tool
    if tool("down", status=None).returncode != CANNOT:
        assert not any(space.startswith(names[0]) for space in namespaces())


RECEIVE = """
import socket
server = socket.create_server(("", 5000))
print("ready", flush=True)
peer = server.accept()[0]
print(sum(iter(lambda: len(peer.recv(1 << 16)), 0)))
"""
SEND = """
import socket, sys
peer = socket.create_connection((sys.argv[1], 5000), timeout=10)
peer.sendall(bytes(int(sys.argv[2])))
"""


def transfer(name: str, tool: Tool, nbytes: int) -> None:
    with subprocess.Popen(
        [str(TOOL), "run", "1", sys.executable, "-c", RECEIVE],
        env={**os.environ, "RDMAKIT_CLUSTER": name},
        stdout=subprocess.PIPE,
        text=True,
    ) as receiver:
        assert receiver.stdout is not None
        try:
            assert receiver.stdout.readline() == "ready\n"
            tool("run", "0", sys.executable, "-c", SEND, f"{name}1", str(nbytes))
            assert receiver.stdout.readline() == f"{nbytes}\n"
        finally:
            receiver.kill()


def test_hosts_are_apart_and_know_each_other(tool: Tool, names: tuple[str, str]) -> None:
    up(tool, "2")
    facts = "hostname; cat /proc/sys/kernel/random/boot_id; readlink /proc/self/ns/{ipc,net}"
    first, second = (
        tool("run", node, "bash", "-c", facts).stdout.split() for node in ("0", f"{names[0]}1")
    )
    assert (first[0], second[0]) == (f"{names[0]}0", f"{names[0]}1")
    assert not set(first) & set(second)
    # One host is one host, however often it is entered; the other has another /dev/shm.
    tool("run", "0", "touch", "/dev/shm/mine")
    assert tool("run", "0", "ls", "/dev/shm").stdout == "mine\n"
    assert tool("run", "1", "ls", "/dev/shm").stdout == ""
    assert not Path("/dev/shm/mine").exists()


def test_the_link_counts_what_crosses_it(tool: Tool, names: tuple[str, str]) -> None:
    up(tool, "2", "--mtu", "9000")
    nbytes = 16 << 20
    before = [int(word) for word in tool("bytes", "0").stdout.split()]
    transfer(names[0], tool, nbytes)
    sent, received = (
        int(word) - old for word, old in zip(tool("bytes", "0").stdout.split(), before, strict=True)
    )
    assert nbytes < sent < 1.02 * nbytes
    assert received < 0.02 * nbytes


def test_a_limited_link_is_as_slow_as_it_says(tool: Tool, names: tuple[str, str]) -> None:
    up(tool, "2", "--rate", "100mbit")
    nbytes = 4 << 20
    timed = f"""
import time, socket
start = time.monotonic()
peer = socket.create_connection(("{names[0]}1", 5000), timeout=10)
peer.sendall(bytes({nbytes})); peer.shutdown(socket.SHUT_WR); peer.recv(1)
print(time.monotonic() - start)
"""
    with subprocess.Popen(
        [str(TOOL), "run", "1", sys.executable, "-c", RECEIVE],
        env={**os.environ, "RDMAKIT_CLUSTER": names[0]},
        stdout=subprocess.PIPE,
        text=True,
    ) as receiver:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "ready\n"
        seconds = float(tool("run", "0", sys.executable, "-c", timed).stdout)
        receiver.kill()
    # The first 256 KiB may pass at once.
    assert seconds > 0.9 * (nbytes - (256 << 10)) * 8 / 100e6


def test_the_agent_stands_in_for_ssh(
    tool: Tool, names: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    up(tool, "2")
    # As with ssh, a variable of the caller does not come along by itself.
    monkeypatch.setenv("A_VARIABLE_OF_MINE", "1")
    assert "A_VARIABLE_OF_MINE" in tool("run", "1", "env").stdout
    assert "A_VARIABLE_OF_MINE" not in tool("agent", f"{names[0]}1", "env").stdout
    done = tool("agent", "-x", "-p", "22", f"{names[0]}1", "A=1;", "echo", "$A", "$(hostname)")
    assert done.stdout == f"1 {names[0]}1\n"
    # From host to host too: it is mpirun, on a host, that calls it.
    agent = f"{TOOL}-agent"
    done = tool("run", "0", agent, f"{names[0]}1", "hostname;", "exit", "7", status=7)
    assert done.stdout == f"{names[0]}1\n"


def test_two_clusters_do_not_meet(tool: Tool, names: tuple[str, str]) -> None:
    other = named(names[1])
    up(tool, "1")
    try:
        up(other, "1")
        assert tool("run", "0", "hostname").stdout == f"{names[0]}0\n"
        other("down")
        assert tool("run", "0", "hostname").stdout == f"{names[0]}0\n"
    finally:
        other("down")


def test_down_ends_what_runs_there_and_leaves_nothing(tool: Tool, names: tuple[str, str]) -> None:
    up(tool, "2")
    with subprocess.Popen(
        [str(TOOL), "run", "0", "sh", "-c", "echo up; exec sleep 600"],
        env={**os.environ, "RDMAKIT_CLUSTER": names[0]},
        stdout=subprocess.PIPE,
        text=True,
    ) as sleeper:
        assert sleeper.stdout is not None
        assert sleeper.stdout.readline() == "up\n"
        tool("down")
        assert sleeper.wait(timeout=10) == -9
    assert not any(space.startswith(names[0]) for space in namespaces())
    assert names[0] not in Path("/proc/mounts").read_text()
    assert not (Path("/run/rdmakit-cluster") / names[0]).exists()
    tool("down")


def test_a_failed_up_leaves_nothing(tool: Tool, names: tuple[str, str]) -> None:
    up(tool, "1")
    tool("down")
    done = tool("up", "2", "--rate", "1furlong", status=None)
    assert done.returncode not in (0, CANNOT)
    assert "removing what it made" in done.stderr
    assert not any(space.startswith(names[0]) for space in namespaces())
    up(tool, "1")
    assert "up already" in tool("up", "1", status=1).stderr


@pytest.mark.parametrize(
    "words",
    [(), ("sideways",), ("up",), ("up", "0"), ("up", "x"), ("up", "2", "--speed", "1"),
     ("up", "2", "--mtu", "big"), ("run", "0"), ("hosts",)],
)  # fmt: skip
def test_bad_usage_is_status_2(words: tuple[str, ...]) -> None:
    done = named("nosuch")(*words, status=None)
    assert done.returncode in (2, CANNOT)
    assert done.stderr


def test_a_name_that_would_blur_hosts_is_refused() -> None:
    assert "RDMAKIT_CLUSTER" in named("a1")("hosts", status=2).stderr
