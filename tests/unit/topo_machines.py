"""Looks at machines that are trees of files, with other tools' outputs given as text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from rdmakit.discovery.machine import find_out
from rdmakit.drivers import nvml
from rdmakit.drivers.host import CommandResult, HostTree
from rdmakit.topology.model import Machine
from rdmakit.topology.survey import Survey, make_survey
from tests.unit import fake_machines as fakes


class Commands:
    """A runner that has the outputs of another machine."""

    def __init__(self, **outputs: str) -> None:
        self.outputs = outputs
        self.asked: list[tuple[str, ...]] = []

    def __call__(self, argv: Sequence[str], timeout: float) -> CommandResult:
        self.asked.append(tuple(argv))
        assert timeout <= 30
        name = "nvml" if tuple(argv) == nvml.COMMAND else Path(argv[0]).name
        name = {"nvidia-smi": "_".join(["smi", *argv[1:]])}.get(name, name)
        if name in self.outputs:
            return CommandResult(tuple(argv), 0, self.outputs[name], "")
        return CommandResult(tuple(argv), None, "", "", f"{argv[0]}: command not found")


def found(root: Path, **outputs: str) -> Machine:
    return find_out(HostTree(root), Commands(**outputs), {}).machine


def survey(*machines: Machine) -> Survey:
    return make_survey(machines)


@pytest.fixture(params=list(fakes.MACHINES))
def any_machine(request: pytest.FixtureRequest, tmp_path: Path) -> Machine:
    fakes.MACHINES[request.param](tmp_path)
    return found(tmp_path)
