"""Whether messages take GPU memory: what each machine can tell, and what is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from rdmakit.config import Config
from rdmakit.drivers.host import HostTree
from rdmakit.errors import InvalidArgument, SetupError
from rdmakit.memory import MemoryBootstrap, MemoryChannel, run_threads
from rdmakit.startup import agree_on_direct, one_node_notes, why_not_rdma

MLX5 = [("rc_mlx5", "mlx5_0:1"), ("ud_mlx5", "mlx5_0:1")]


def machine(root: Path, files: dict[str, str]) -> HostTree:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return HostTree(root)


@pytest.mark.parametrize(
    ("lanes", "files", "why"),
    [
        ([("tcp", "eth0")], {}, "no RDMA transport between the nodes, only tcp/eth0"),
        ([], {}, "only none"),
        (MLX5, {}, "modprobe nvidia-peermem"),
        (MLX5, {"sys/module/nvidia_peermem/refcnt": "0"}, ""),
        (MLX5, {"sys/module/nv_peer_mem/refcnt": "0"}, ""),
        (
            MLX5,
            {
                "proc/sys/kernel/osrelease": "6.8.0-45-generic",
                "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module",
            },
            "",
        ),
        (
            MLX5,
            {
                "proc/sys/kernel/osrelease": "5.10.0",
                "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module",
            },
            "dma-buf",
        ),
        (
            MLX5,
            {
                "proc/sys/kernel/osrelease": "6.8.0",
                "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module",
            },
            "open kernel module",
        ),
    ],
)
def test_a_nic_that_could_read_the_gpu(
    tmp_path: Path, lanes: list[tuple[str, str]], files: dict[str, str], why: str
) -> None:
    told = why_not_rdma(lanes, machine(tmp_path, files))
    assert (why in told) if why else not told


def test_asked_for_by_name_where_it_cannot_be() -> None:
    def main(boot: MemoryBootstrap) -> None:
        channel = MemoryChannel.create(boot)
        why = agree_on_direct(boot, Config(), channel, [1 - boot.rank])
        assert why == "rank 0: memory channel"
        assert agree_on_direct(boot, Config(gpu_direct="off"), channel, []) == "gpu_direct=off"
        with pytest.raises(SetupError, match="RDMAKIT_GPU_DIRECT=on, rank 0: memory channel"):
            agree_on_direct(boot, Config(gpu_direct="on"), channel, [])

    run_threads(2, main)


def test_the_setting() -> None:
    assert Config.from_env({"RDMAKIT_GPU_DIRECT": "ON"}).gpu_direct == "on"
    with pytest.raises(InvalidArgument, match=r"RDMAKIT_GPU_DIRECT.*'maybe'.*auto, on, off"):
        Config.from_env({"RDMAKIT_GPU_DIRECT": "maybe"})


def test_one_node_has_nothing_to_prove_and_says_so() -> None:
    (note,) = one_node_notes(Config(gpu_direct="on"))
    assert note.startswith("gpu_direct=on: all ranks are on one node")
    assert one_node_notes(Config(gpu_direct="auto")) == one_node_notes(Config()) == []
