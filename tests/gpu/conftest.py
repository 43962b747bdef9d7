"""A GPU, CuPy, Open MPI and MPS for the tests here; each that is missing skips with the reason."""

from __future__ import annotations

import os
import shutil
import subprocess
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


@pytest.fixture(scope="session")
def mps(gpu: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Return the environment of ranks that share the GPU through MPS; ours, ended afterwards."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        pytest.skip("nvidia-cuda-mps-control is not installed")
    place = tmp_path_factory.mktemp("mps")
    env = {"CUDA_MPS_PIPE_DIRECTORY": str(place), "CUDA_MPS_LOG_DIRECTORY": str(place)}
    started = subprocess.run(
        [control, "-d"], env=os.environ | env, capture_output=True, text=True, check=False
    )
    if started.returncode:
        pytest.skip(f"MPS does not start: {started.stderr.strip() or started.stdout.strip()}")
    yield env
    subprocess.run(
        [control], env=os.environ | env, input="quit\n", text=True, check=False, timeout=30
    )
