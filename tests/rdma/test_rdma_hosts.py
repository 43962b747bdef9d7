"""scripts/rdma-hosts: what it refuses, and that nothing stays behind however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.rdma.conftest import CANNOT, TOOL, Machines, prepared

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(1500)]

BAD_USAGE = 2


def tool(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(TOOL), *words], env={**os.environ, **env}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("boot",),
        ("prepare", "now"),
        ("run",),
        ("run", "--mtu", "big", "true"),
        ("run", "--limit", "0", "true"),
        ("run", "--before", "2", "true", "true"),
        ("run", "--share", "/no/such/folder", "true"),
        ("run", "--env", "A=1", "true"),
        ("run", "--quick", "true"),
    ],
    ids=" ".join,
)
def test_bad_usage(words: tuple[str, ...]) -> None:
    done = tool(*words)
    assert done.returncode == BAD_USAGE
    assert "usage: rdma-hosts" in done.stderr


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    """With a PATH of a few tools only, no QEMU is found."""
    for name in ("bash", "dirname", "readlink", "ldconfig", "grep", "sed", "id"):
        found = next(p for d in ("/usr/bin", "/bin", "/sbin") if (p := Path(d, name)).exists())
        (tmp_path / name).symlink_to(found)
    # The tool adds the folders of system programs itself, where QEMU is not.
    done = tool("run", "true", PATH=str(tmp_path))
    assert done.returncode == CANNOT, done.stderr
    assert "cannot: not here: qemu-system-x86" in done.stderr
    assert "rdma-hosts prepare --install" in done.stderr


def emulators(parent: int) -> list[int]:
    """Return the QEMU processes that are children of ``parent``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                head, _, tail = (entry / "stat").read_text().rpartition(")")
            except OSError:
                continue
            if "(qemu" in head and int(tail.split()[1]) == parent:
                found.append(int(entry.name))
    return found


def until_gone(pids: list[int]) -> None:
    end = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end, f"still there: {pids}"
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_ended_while_the_machines_start(tmp_path: Path, number: signal.Signals) -> None:
    prepared()
    # What ignores SIGINT, as tests do that run behind a shell's &, would hand that on.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    tool_process = subprocess.Popen(
        [str(TOOL), "run", "--limit", "20", "--", "true"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    signal.signal(signal.SIGINT, before)
    try:
        end = time.monotonic() + 60
        while len(pids := emulators(tool_process.pid)) < 2:
            assert time.monotonic() < end, "no emulators"
            assert tool_process.poll() is None, "ended early"
            time.sleep(0.02)
        tool_process.send_signal(number)
        status = tool_process.wait(timeout=60)
    finally:
        tool_process.kill()
        tool_process.wait()
    until_gone(pids)
    if number == signal.SIGKILL:  # then nobody is left to remove its folder
        assert status == -signal.SIGKILL
    else:
        assert status == 128 + number
        assert list(tmp_path.iterdir()) == []


def test_nothing_is_left(machines: Machines) -> None:
    assert machines.done.returncode == 0, machines.done.stdout + machines.done.stderr
    assert "both machines are up after" in machines.done.stderr
    assert machines.left == []
