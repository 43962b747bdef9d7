"""rdmakit topo as a command, without ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from rdmakit.discovery.machine import COMMANDS
from tests.unit import fake_machines as fakes

ROOT = Path(__file__).resolve().parents[2]


def rdmakit(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rdmakit", *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), **env},
    )


def test_command_here_and_from_a_directory(tmp_path: Path) -> None:
    here = rdmakit("topo", "--collect", str(tmp_path / "here"))
    assert here.returncode == 0, here.stderr
    assert "proposed placement" in here.stdout
    fakes.hgx_h100(tmp_path / "h100")
    svg = tmp_path / "a.svg"
    other = rdmakit("topo", "--from", str(tmp_path / "h100"), "--json", "--graph", str(svg))
    assert other.returncode == 0, other.stderr
    result = json.loads(other.stdout)
    assert result["nodes"][0]["relations"]["GPU0"]["mlx5_0"] == "PIX"
    assert result["ranks"][7]["ucx_net_devices"] == "mlx5_9:1"
    ET.fromstring(svg.read_text())
    told = rdmakit("topo", "--from", str(tmp_path / "h100"), "--explain", "GPU0", "GPU5")
    assert "SYS" in told.stdout
    assert "GPUDirect RDMA" in told.stdout
    chosen = rdmakit("topo", "--from", str(tmp_path / "h100"), "--json", "--nics", "mlx5_4,mlx5_5")
    assert {r["ucx_net_devices"] for r in json.loads(chosen.stdout)["ranks"]} == {
        "mlx5_4:1",
        "mlx5_5:1",
    }


@pytest.mark.parametrize(
    "args",
    [
        ["--from", "/nonexistent"],
        ["--graph", "picture.png"],
        ["--graph", "/nonexistent/a.svg"],
        ["--explain", "GPU0", "GPU77"],
        ["--ranks-per-node", "0"],
        ["--from", ".", "--collect", "x"],
    ],
)
def test_bad_usage_is_status_2_in_one_line(args: list[str]) -> None:
    result = rdmakit("topo", *args)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("rdmakit: ")


def test_import_loads_nothing_heavy() -> None:
    code = (
        "import sys, rdmakit, rdmakit.topology.survey, rdmakit.hostfile.parse;"
        "print([m for m in ('numpy','rich','click','msgspec','mpi4py','pynvml','ucxx')"
        " if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert out.stdout.strip() == "[]", out.stderr


def test_every_command_is_known_to_the_collection() -> None:
    assert {command[0] for command in COMMANDS.values()} == {
        "nvidia-smi",
        "ibstat",
        "ibstatus",
        "ibv_devinfo",
        "rdma",
        "show_gids",
        "lspci",
        "ucx_info",
        "dmesg",
        "lsmod",
    }
