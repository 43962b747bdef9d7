"""Runs ``rdmakit bench`` on GPUs made of host memory that no peer can map, two for each host."""

from __future__ import annotations

from functools import partial

from rdmakit import device_side
from rdmakit.bench import command
from rdmakit.cli import main
from rdmakit.devices import choose_device
from rdmakit.intra.posix_shm import PosixWindow
from tests.unit.fake_bench import make

UUIDS = ("GPU-even", "GPU-odd")


class Tools:
    """What is asked before a GPU is chosen."""

    def device_uuids(self) -> tuple[str, ...]:
        return UUIDS


def activate(ordinal: int) -> None:
    gpu.door.uuid = UUIDS[ordinal]
    gpu.door.current_device = lambda: ordinal


gpu, doors = make("GPU-none-yet", denied=True, nccl="NCCL is not installed")
gpu.door.activate = activate
object.__setattr__(doors, "host_window", PosixWindow.create)
device_side.Gpu = lambda: gpu  # type: ignore[misc,assignment]
command.Doors = lambda: doors  # type: ignore[misc,assignment]
command.choose_device = partial(choose_device, door=gpu.door, tools=Tools())  # type: ignore[assignment]
main()
