"""What holds for all tests."""

from __future__ import annotations

import sys

import pytest

from tests.mpi import compiled


def pytest_configure(config: pytest.Config) -> None:
    """Compile once, before the tests and xdist's processes start hundreds of interpreters."""
    if not hasattr(config, "workerinput"):
        compiled(sys.executable)
