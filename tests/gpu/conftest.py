"""A GPU, CuPy, Open MPI and MPS for the tests here; each that is missing skips with the reason."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rdmakit.drivers import cuda


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def gpu() -> None:
    """Skip where there is no usable GPU."""
    reason = cuda.why_not()
    if reason:
        pytest.skip(reason)


class Mps:
    """An MPS daemon of our own, whose pipes are in a folder of our own."""

    def __init__(self, control: str, place: Path) -> None:
        self.control, self.place = control, place
        self.env = {"CUDA_MPS_PIPE_DIRECTORY": str(place), "CUDA_MPS_LOG_DIRECTORY": str(place)}
        # The daemon's own choice of GPUs would renumber those of its clients.
        self._own = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"} | self.env

    def start(self) -> str:
        """Start it; return why it cannot be, or nothing."""
        done = subprocess.run(
            [self.control, "-d"],
            env=self._own,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stderr.strip() or done.stdout.strip() if done.returncode else ""

    def stop(self) -> None:
        """End it and see it gone; by force if it does not answer, as after a client's death."""
        file = self.place / "nvidia-cuda-mps-control.pid"
        pids = [int(word) for word in file.read_text().split()] if file.exists() else []
        try:
            self._tell("quit", 20)
        except subprocess.TimeoutExpired:
            for pid in (*self.servers(), *pids):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        end = time.monotonic() + 10
        while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < end:
            time.sleep(0.05)

    def servers(self) -> list[int]:
        """Return the pids of its servers."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return [int(word) for word in self._tell("get_server_list", 5).split()]
        return []

    def _tell(self, words: str, timeout: float) -> str:
        done = subprocess.run(
            [self.control], env=self._own, input=f"{words}\n", text=True,
            capture_output=True, check=False, timeout=timeout,
        )  # fmt: skip
        return done.stdout


@pytest.fixture(scope="session")
def daemon(gpu: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mps]:
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        pytest.skip("nvidia-cuda-mps-control is not installed")
    made = Mps(control, tmp_path_factory.mktemp("mps"))
    reason = made.start()
    if reason:
        pytest.skip(f"MPS does not start: {reason}")
    yield made
    made.stop()


@pytest.fixture(scope="session")
def mps(daemon: Mps) -> dict[str, str]:
    """Return the environment of ranks that share the GPU through MPS; ours, ended afterwards."""
    return daemon.env


@pytest.fixture
def fragile_mps(daemon: Mps) -> Iterator[dict[str, str]]:
    """The same for ranks that are killed: CUDA promises nothing to its other clients then."""
    yield daemon.env
    daemon.stop()
    reason = daemon.start()
    assert not reason, f"MPS does not start again: {reason}"


@pytest.fixture
def no_mps(gpu: None, tmp_path: Path) -> dict[str, str]:
    """Return the environment of ranks that find no MPS daemon, whatever the machine has."""
    if cuda.device_facts(0).exclusive:
        pytest.skip("the GPU's compute mode lets one process in: ranks share it through MPS only")
    return {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
