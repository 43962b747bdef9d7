"""Emulated hosts for the tests here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.hosts import Hosts, cluster
from tests.mpi import FAMILIES

HOSTS = 4


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Four hosts; a job may use the first ones only. Of each module its own: some break them."""
    with cluster(HOSTS, tmp_path_factory.mktemp("hosts")) as up:
        yield up


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)
