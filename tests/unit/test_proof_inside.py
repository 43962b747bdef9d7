"""Two ranks of a node and GPU memory that both map, on GPUs made of host memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rdmakit.buffer import bytes_at
from rdmakit.errors import SetupError
from rdmakit.memory import MemoryBootstrap
from rdmakit.proof.measure import pattern
from rdmakit.proof.prove import Doors
from tests.conformance.fake_gpu import Door
from tests.unit.test_proof_prove import run

SIZE = 1 << 16


class Cuda(Door):
    def copy_now(self, dst: int, src: int, nbytes: int) -> None:
        bytes_at(dst, nbytes)[:] = bytes_at(src, nbytes)


class Peers:
    """Memory of two threads, which both address."""

    nbytes = SIZE
    closed = 0

    def __init__(self, pair: MemoryBootstrap, *, apart: bool) -> None:
        self._own = np.zeros(SIZE, np.uint8)
        addresses = pair.share((pair.rank, self._own))
        every = sorted(addresses, key=lambda entry: entry[0])
        # A mapping that is not the peer's memory: the reader sees its own.
        self.addresses = tuple((self._own if apart else array).ctypes.data for _, array in every)
        self._every = every

    def close(self, bootstrap: Any) -> None:
        bootstrap.barrier()
        Peers.closed += 1


@pytest.mark.parametrize("sizes", [[2], [3], [2, 2]], ids=str)
def test_cuda_ipc(tmp_path: Path, sizes: list[int]) -> None:
    Peers.closed = 0
    doors = Doors(cuda=Cuda(), window=lambda pair, door: Peers(pair, apart=False))
    pairs = [(0, 1), (2, 3)][: len(sizes)]
    reports = run(
        tmp_path, sizes, "tcp", "eth0", memory="gpu", pairs=pairs, inside=True, doors=doors
    )
    assert all(report == reports[0] for report in reports)
    for proof in reports[0].pairs:
        assert proof.verdict.path == "cuda-ipc", proof.verdict
        assert proof.evidence.wrong == 0
        assert proof.evidence.sent == proof.evidence.messages * SIZE
    assert Peers.closed == 2 * len(pairs)


def test_a_mapping_of_other_memory(tmp_path: Path) -> None:
    doors = Doors(cuda=Cuda(), window=lambda pair, door: Peers(pair, apart=True))
    (proof,) = run(tmp_path, [2], "tcp", "eth0", memory="gpu", inside=True, doors=doors)[0].pairs
    assert proof.verdict.path == "unproven"
    zeros = sum(int((pattern(SIZE, piece) == 0).sum()) for piece in range(4))  # right by chance
    assert proof.evidence.wrong == proof.evidence.sent - zeros
    assert "did not arrive as they were sent" in " ".join(
        (*proof.verdict.disagreements, *proof.verdict.missing)
    )


def test_memory_that_cannot_be_mapped(tmp_path: Path) -> None:
    def refuse(pair: Any, door: Any) -> Any:
        pair.barrier()
        raise SetupError("rank 0 cannot map the memory of rank 1: another container")

    doors = Doors(cuda=Cuda(), window=refuse)
    (proof,) = run(tmp_path, [2], "tcp", "eth0", memory="gpu", inside=True, doors=doors)[0].pairs
    assert proof.verdict.path == "unproven"
    assert "another container" in " ".join(proof.evidence.problems)
