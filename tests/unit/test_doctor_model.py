"""Checks run on fake machines, and what selects them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rdmakit.doctor.catalog import CHECKS, select
from rdmakit.doctor.context import Context
from rdmakit.doctor.model import Check, Status, worst
from rdmakit.doctor.run import run_check
from rdmakit.drivers.host import HostTree
from rdmakit.errors import InvalidArgument
from rdmakit.topology.model import Machine, Nic
from rdmakit.topology.texts import Texts


def context(root: Path, **more: object) -> Context:
    """Return a node whose files lie below ``root``."""
    values: dict[str, object] = {"machine": Machine(), "texts": Texts(), "environ": {}}
    return Context(HostTree(root), live=False, **{**values, **more})  # type: ignore[arg-type]


def write(root: Path, path: str, text: str) -> None:
    target = root / path.lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


def test_identifiers() -> None:
    names = [check.id for check in CHECKS]
    assert len(set(names)) == len(names)
    for check in CHECKS:
        assert re.fullmatch(r"[a-z]+\.[a-z0-9_]+", check.id), check.id
        assert check.title
        assert check.why.endswith(".")


def test_a_check_that_raises_is_unknown(tmp_path: Path) -> None:
    def fails(_: Context) -> list[object]:
        raise ZeroDivisionError("made to fail")

    check = Check("host.bad", "Bad", "It fails.", fails)  # type: ignore[arg-type]
    (finding,) = run_check(check, context(tmp_path))
    assert finding.status is Status.UNKNOWN
    assert "ZeroDivisionError: made to fail" in finding.found


def test_needs(tmp_path: Path) -> None:
    check = Check("gpu.x", "X", "X.", lambda _: [], needs=("gpu",))
    (finding,) = run_check(check, context(tmp_path))
    assert finding.status is Status.SKIPPED
    assert "GPU" in finding.found


def test_select() -> None:
    assert "host.memlock" in select(["host"])
    assert select(["host.*"], ["host.memlock"]).count("host.memlock") == 0
    with pytest.raises(InvalidArgument, match="no check 'nothing'"):
        select(["nothing"])


@pytest.mark.parametrize(
    ("limit", "nics", "status"),
    [
        ("unlimited", 1, Status.OK),
        ("65536", 1, Status.FAIL),
        ("65536", 0, Status.WARN),
        (str(1 << 37), 1, Status.OK),
    ],
)
def test_memlock(tmp_path: Path, limit: str, nics: int, status: Status) -> None:
    write(tmp_path, "/proc/self/limits", f"Max locked memory         {limit:<20} {limit} bytes\n")
    machine = Machine(nics=(Nic("mlx5_0"),) * nics)
    (check,) = [check for check in CHECKS if check.id == "host.memlock"]
    findings = run_check(check, context(tmp_path, machine=machine))
    assert worst(findings) is status
    assert all(f.cure for f in findings if f.status in (Status.WARN, Status.FAIL))
