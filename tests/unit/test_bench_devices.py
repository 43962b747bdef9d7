"""Which GPU a rank takes, and what the options mean once that is known."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmakit.bench.options import Options
from rdmakit.bench.p2p import DEFAULT
from rdmakit.devices import Choice, assign, choose_device, parse_map
from rdmakit.errors import CudaError, InvalidArgument
from rdmakit.memory import MemoryBootstrap, run_threads
from tests.unit.test_bench_parts import GIVEN

FOUR = ["GPU-a0", "GPU-a1", "GPU-b0", "GPU-b1"]


def test_ranks_of_a_host_take_the_visible_gpus_in_turn() -> None:
    hosts = ["n0", "n1"] * 3
    ordinals, problems = assign(hosts, [["GPU-a", "GPU-b"], ["GPU-c", "GPU-d"]] * 3)
    assert ordinals == [0, 0, 1, 1, 0, 0]
    assert not any(problems)


def test_each_sees_one_gpu() -> None:
    ordinals, _ = assign(["n0"] * 4, [[uuid] for uuid in FOUR])
    assert ordinals == [0, 0, 0, 0]


def test_ranks_that_see_the_gpus_in_another_order_do_not_meet_on_one() -> None:
    ordinals, _ = assign(["n0"] * 2, [["GPU-a", "GPU-b"], ["GPU-b", "GPU-a"]])
    assert ordinals == [0, 0], "the second sees another one first"


@given(
    ranks=st.integers(1, 12),
    order=st.permutations(FOUR),
    hosts=st.integers(1, 3),
    data=st.data(),
)
def test_no_gpu_has_two_ranks_more_than_another(ranks, order, hosts, data) -> None:
    visible = [
        [f"{uuid}-{rank % hosts}" for uuid in data.draw(st.permutations(order))]
        for rank in range(ranks)
    ]
    ordinals, problems = assign([f"n{rank % hosts}" for rank in range(ranks)], visible)
    assert not any(problems)
    for host in range(hosts):
        mine = range(host, ranks, hosts)
        users = Counter(visible[rank][ordinals[rank]] for rank in mine)
        if users:
            most = max(users.values())
            assert most == -(-len(mine) // len(FOUR))


def test_a_map_by_local_rank() -> None:
    visible = [FOUR] * 6
    assert assign(["n0"] * 6, visible, parse_map("3, 1"))[0] == [3, 1, 3, 1, 3, 1]
    assert assign(["n0", "n1"] * 3, visible, parse_map("3,1"))[0] == [3, 3, 1, 1, 3, 3]
    assert assign(["n0"] * 2, visible[:2], parse_map("gpu-B1,GPU-a0"))[0] == [3, 0]


@pytest.mark.parametrize(
    ("text", "says"),
    [("4", "'4' of local rank 0 is none of the visible GPUs 0 (GPU-a0), 1 (GPU-a1)"),
     ("GPU-c", "is none"), ("GPU-a", "is more than one"), ("MIG-1", "is none")],
)  # fmt: skip
def test_a_map_that_leads_nowhere(text: str, says: str) -> None:
    _, problems = assign(["n0"], [FOUR], parse_map(text))
    assert says in problems[0]


@pytest.mark.parametrize("text", ["", "0,", "x", "-1", "0;1", "1.0", "gpu0", "٣"])
def test_not_a_map(text: str) -> None:
    with pytest.raises(InvalidArgument, match="--gpu-map"):
        parse_map(text)


class Door:
    """One rank's GPUs."""

    def __init__(
        self, reason: str = "", uuids: Any = ("GPU-a", "GPU-b"), refuses: str = ""
    ) -> None:
        self.reason, self.uuids, self.refuses = reason, uuids, refuses
        self.active = -1

    def why_not(self) -> str:
        return self.reason

    def device_uuids(self) -> Any:
        if not self.uuids:
            raise CudaError("cuDeviceGetCount", 3, "CUDA_ERROR_NOT_INITIALIZED")
        return self.uuids

    def activate(self, ordinal: int) -> None:
        if self.refuses:
            raise CudaError("cuDevicePrimaryCtxRetain", 2, self.refuses)
        self.active = ordinal


def chosen(doors: list[Door], wanted: str, gpu_map: str = "") -> list[Choice]:
    def main(boot: MemoryBootstrap) -> Choice:
        door = doors[boot.rank]
        entries = parse_map(gpu_map) if gpu_map else ()
        return choose_device(boot, wanted, entries, "n0", door, door)

    return run_threads(len(doors), main)


def test_all_ranks_choose_alike() -> None:
    doors = [Door(), Door(), Door()]
    choices = chosen(doors, "auto")
    assert [choice.ordinal for choice in choices] == [0, 1, 0] == [door.active for door in doors]
    assert {choice.device for choice in choices} == {"gpu"}
    untouched = Door(reason="asked although the CPU is wanted")
    assert chosen([untouched], "cpu") == [Choice("cpu")]


@pytest.mark.parametrize(
    ("bad", "says"),
    [(Door(reason="no NVIDIA driver"), "rank 1: no NVIDIA driver"),
     (Door(uuids=()), "rank 1: the GPUs cannot be asked"),
     (Door(refuses="CUDA_ERROR_OUT_OF_MEMORY"), "rank 1: GPU 1 (GPU-b) cannot be used")],
)  # fmt: skip
def test_one_rank_without_a_gpu(bad: Door, says: str) -> None:
    choices = chosen([Door(), bad], "auto")
    assert choices[0] == choices[1], "a choice is everybody's"
    assert choices[0].device == "cpu"
    assert choices[0].reason.startswith(says)
    for wanted, gpu_map, start in (("gpu", "", "--device gpu: "), ("auto", "0,1", "--gpu-map: ")):
        told = []

        def main(boot: MemoryBootstrap, told: Any = told, how: Any = (wanted, gpu_map)) -> None:
            door = [Door(), bad][boot.rank]
            entries = parse_map(how[1]) if how[1] else ()
            with pytest.raises(InvalidArgument) as error:
                choose_device(boot, how[0], entries, "n0", door, door)
            told.append(str(error.value))

        run_threads(2, main)
        assert len(set(told)) == 1, "one error, on all ranks"
        assert told[0].startswith(start + says)


def options(**change: Any) -> Options:
    return Options.of(**{**GIVEN, "end": None, "device": "auto", **change})


def test_the_largest_size_depends_on_the_device() -> None:
    assert options().placed("cpu").sizes()[-1] == 64 << 20
    assert options().placed("gpu").sizes()[-1] == 1 << 30
    assert options(end="1M").placed("gpu").sizes()[-1] == 1 << 20
    assert options(begin="128M").placed("gpu").sizes() == [128 << 20, 256 << 20, 512 << 20, 1 << 30]
    with pytest.raises(InvalidArgument, match="-b 128M is above -e 64M"):
        options(begin="128M").placed("cpu")


def test_algorithms_of_the_other_device_are_refused_by_name() -> None:
    assert options(algorithms=("mpi", "nccl")).placed("gpu").algorithms == ("mpi", "nccl")
    for device, name in (("cpu", "nccl"), ("cpu", "registered"), ("gpu", "ring"), ("gpu", "auto")):
        with pytest.raises(InvalidArgument, match=f"--algorithm '{name}'"):
            options(algorithms=(name,)).placed(device)


def test_a_map_and_no_gpus() -> None:
    with pytest.raises(InvalidArgument, match="--gpu-map names GPUs"):
        options(device="cpu", gpu_map="0")
    assert options(gpu_map="0,1").gpu_map == ("0", "1")


def test_size_of_the_copies_between_gpus() -> None:
    assert options().placed("gpu").one_size(DEFAULT) == 64 << 20
    assert options(end="256M").placed("gpu").one_size(DEFAULT) == 256 << 20
    assert options(end="1M").placed("gpu").one_size(DEFAULT) == 1 << 20
    assert options(begin="128M").placed("gpu").one_size(DEFAULT) == 128 << 20
