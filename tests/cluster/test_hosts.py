"""Jobs over emulated hosts: real UCX tcp on links that count, in both MPI families."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache

import pytest

from tests.cluster.hosts import ROOT, Hosts

pytestmark = [pytest.mark.cluster, pytest.mark.parallel, pytest.mark.slow]

PROGRAM = ROOT / "tests" / "parallel" / "programs" / "hosts.py"
SIZE = 16 << 20
ALGORITHMS = ("hierarchical", "ring")
Out = Callable[[str, Sequence[int]], str]


@pytest.fixture(scope="module")
def out(hosts: Hosts) -> Out:
    """Return a function that gives the output of the job of a family and of ranks on each host."""

    @cache
    def run(family: str, slots: tuple[int, ...]) -> str:
        done = hosts.job(family, slots, [str(PROGRAM), *ALGORITHMS], timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return lambda family, slots: run(family, tuple(slots))


@pytest.mark.parametrize(
    ("slots", "shape"), [([2, 2], "2x2"), ([3, 1], "3+1"), ([2, 2, 2, 2], "4x2")]
)
def test_results(hosts: Hosts, out: Out, family: str, slots: list[int], shape: str) -> None:
    said = out(family, slots)
    places = dict(re.findall(r"^rank (\d+) host (\S+) nodes", said, re.MULTILINE))
    want = [hosts.host(host) for host, count in enumerate(slots) for _ in range(count)]
    assert [places[str(rank)] for rank in range(sum(slots))] == want
    assert set(re.findall(r" nodes (\S+)", said)) == {shape}
    lanes = re.findall(r"^rank \d+ channel (\S+) lanes (.*)$", said, re.MULTILINE)
    assert len(lanes) == sum(slots)
    for channel, used in lanes:
        assert channel == "ucx"
        # A rank that exchanges with nobody abroad has made no endpoint.
        assert used in ("tcp/link0", ""), said
    assert any(used for _, used in lanes)


@pytest.mark.parametrize("slots", [[2, 2], [2, 2, 2, 2]], ids=str)
def test_bytes_on_the_link(out: Out, family: str, slots: list[int]) -> None:
    """2(N-1)/N of the vector leave each host, and 2(n-1)/n for the ring, within 2 %."""
    said = out(family, slots)
    nodes, ranks = len(slots), sum(slots)
    for algorithm, n in zip(ALGORITHMS, (nodes, ranks), strict=True):
        sent = dict(re.findall(rf"^bytes {algorithm} (\S+) (\S+)$", said, re.MULTILINE))
        assert len(sent) == nodes, said
        want = 2 * (n - 1) / n * SIZE
        for host, nbytes in sent.items():
            assert 1 <= float(nbytes) / want < 1.02, (algorithm, host, float(nbytes) / want)
